"""Signs packs and wheels with sigstore, and checks who signed them; what needs the sign extra is only here.

A wheel is signed as a whole, a pack by its manifest.json, which has the digests of everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aotmm import folders, manifest
from aotmm.errors import AotmmError, ArtifactError, SpecError

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig


def sign(path: Path, bundle: Path, *, token: Path | None, trust: Path | None) -> None:
    """Signs the pack or wheel at `path`, and writes what sigstore made of it to `bundle`.

    Args:
        token: file with an OIDC identity token; without one that of the CI job, or what the browser is asked for.
        trust: file with sigstore's client trust configuration, of another instance than the public one.

    Raises:
        SpecError: the sign extra is not installed, or `path` is neither a pack nor a wheel.
        AotmmError: sigstore refused, or cannot be reached.
    """
    content = _signed(path)
    with _sigstore():
        from sigstore.oidc import IdentityToken, Issuer, detect_credential
        from sigstore.sign import SigningContext

        config = _config(trust)
        raw = detect_credential() if token is None else token.read_text(encoding="ascii").strip()
        asked = config.signing_config.get_oidc_url
        identity = Issuer(asked()).identity_token() if raw is None else IdentityToken(raw)
        with SigningContext.from_trust_config(config).signer(identity) as signer:
            bundle.write_text(signer.sign_artifact(content).to_json(), encoding="utf-8")


def check(path: Path, bundle: Path, *, identity: str, issuer: str, trust: Path | None) -> None:
    """Checks that `identity`, as `issuer` knows it, signed the pack or wheel at `path` and that `bundle` proves it.

    Raises:
        SpecError: the sign extra is not installed, or `path` is neither a pack nor a wheel.
        ArtifactError: the bundle is none, is for other content, or is of somebody else.
        AotmmError: sigstore's keys cannot be had; with `trust` they are in that file.
    """
    content = _signed(path)
    with _sigstore():
        from sigstore.errors import VerificationError
        from sigstore.models import Bundle, InvalidBundle
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity

        verifier = Verifier(trusted_root=_config(trust).trusted_root)
        try:
            proof = Bundle.from_json(bundle.read_bytes())
            verifier.verify_artifact(content, proof, Identity(identity=identity, issuer=issuer))
        except (VerificationError, InvalidBundle, ValueError) as error:
            raise ArtifactError(f"{bundle} does not prove that {identity} ({issuer}) signed {path}: {error}") from error


def _signed(path: Path) -> bytes:
    """The bytes that a signature of `path` is for. Raises SpecError."""
    try:
        if path.is_file():
            return path.read_bytes()
        return folders.read(path, manifest.FILE_NAME, manifest.MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise SpecError(f"{path} is neither one pack nor a wheel, which is what can be signed: {error}") from error


def _config(trust: Path | None) -> ClientTrustConfig:
    from sigstore.models import ClientTrustConfig

    return ClientTrustConfig.production() if trust is None else ClientTrustConfig.from_json(trust.read_text("utf-8"))


@contextmanager
def _sigstore() -> Iterator[None]:
    """Turns what sigstore raises, or that it is not there, into errors of ours."""
    try:
        yield
    except AotmmError:
        raise
    except ModuleNotFoundError as error:
        raise SpecError(f'signatures need {error.name}: pip install "aotmm[sign]"') from error
    except Exception as error:  # it and the libraries below it raise many kinds
        raise AotmmError(f"sigstore: {type(error).__name__}: {error}") from error
