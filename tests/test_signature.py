"""Signing and checking signatures with real sigstore, against an instance on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aotmm.errors import AotmmError, ArtifactError, SpecError
from aotmm.manifest import FILE_NAME, write
from aotmm.signature import check, sign
from tests.samples import kernel, manifest

pytest.importorskip("sigstore", reason='needs the sign extra: pip install "aotmm[sign]"')
from tests.sigstore_instance import ISSUER, running, token

ME = "somebody@example.org"


@pytest.fixture
def trust(tmp_path: Path) -> Iterator[Path]:
    """The configuration that trusts a running instance."""
    with running(tmp_path) as path:
        yield path


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    """A pack, as far as signatures go."""
    folder = tmp_path / "sm80"
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(write(manifest(kernel("one")))[FILE_NAME])
    return folder


@pytest.fixture
def bundle(trust: Path, pack: Path, tmp_path: Path) -> Path:
    """What signing the pack gives."""
    (tmp_path / "token").write_text(token(ME) + "\n")
    path = tmp_path / "sm80.sigstore.json"
    sign(pack, path, token=tmp_path / "token", trust=trust)
    return path


def test_signed(pack: Path, bundle: Path, trust: Path) -> None:
    """A signature is good for the pack, the person and the issuer that it was made for."""
    check(pack, bundle, identity=ME, issuer=ISSUER, trust=trust)


def test_a_file_is_signed_as_a_whole(trust: Path, tmp_path: Path, bundle: Path) -> None:
    """A wheel's signature is for all of its bytes."""
    wheel = tmp_path / "x.whl"
    wheel.write_bytes(b"a wheel")
    sign(wheel, bundle, token=tmp_path / "token", trust=trust)
    check(wheel, bundle, identity=ME, issuer=ISSUER, trust=trust)
    wheel.write_bytes(b"a wheel.")
    with pytest.raises(ArtifactError, match="does not prove"):
        check(wheel, bundle, identity=ME, issuer=ISSUER, trust=trust)


@pytest.mark.parametrize(("identity", "issuer"), [("else@example.org", ISSUER), (ME, "https://other.example")])
def test_of_somebody_else(pack: Path, bundle: Path, trust: Path, identity: str, issuer: str) -> None:
    """A good signature of another person, or of another issuer's person of that name, is none."""
    with pytest.raises(ArtifactError, match="does not prove"):
        check(pack, bundle, identity=identity, issuer=issuer, trust=trust)


def test_of_another_instance(pack: Path, bundle: Path, tmp_path: Path) -> None:
    """What another instance signed is not trusted."""
    (tmp_path / "other").mkdir()
    with running(tmp_path / "other") as other, pytest.raises(ArtifactError, match="does not prove"):
        check(pack, bundle, identity=ME, issuer=ISSUER, trust=other)


def test_of_another_pack(pack: Path, bundle: Path, trust: Path) -> None:
    """A signature is not good for other content."""
    (pack / FILE_NAME).write_bytes(write(manifest(kernel("two")))[FILE_NAME])
    with pytest.raises(ArtifactError, match="does not prove"):
        check(pack, bundle, identity=ME, issuer=ISSUER, trust=trust)


@pytest.mark.parametrize("text", ["", "{}", "null", '{"mediaType": "x"}'])
def test_no_bundle(pack: Path, bundle: Path, trust: Path, text: str) -> None:
    """A file that is no bundle proves nothing."""
    bundle.write_text(text)
    with pytest.raises(ArtifactError, match="does not prove"):
        check(pack, bundle, identity=ME, issuer=ISSUER, trust=trust)


def test_refused(pack: Path, trust: Path, tmp_path: Path) -> None:
    """What sigstore refuses, as a token that is none, is an error of ours with its words, and writes nothing."""
    (tmp_path / "token").write_text("no token")
    with pytest.raises(AotmmError, match="sigstore: IdentityError: "):
        sign(pack, tmp_path / "new", token=tmp_path / "token", trust=trust)
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_signed(tmp_path: Path) -> None:
    """Only a pack or a file is signed."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SpecError, match="neither one pack nor a wheel"):
            sign(path, tmp_path / "bundle", token=None, trust=None)
