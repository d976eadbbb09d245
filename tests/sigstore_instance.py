"""A sigstore of our own, on this machine: a certificate authority and a log, with keys that live as long as a test."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

ISSUER = "https://issuer.example"
_ISSUER_EXTENSION = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")  # Source: Fulcio, "OID information"
_SCT_EXTENSION = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")  # Source: RFC 6962, 3.3
_PRECERTIFICATE, _SHA256_ECDSA = 1, b"\x04\x03"


class Instance:
    """Fulcio, its certificate log and Rekor in one: what they answer, and the configuration that trusts them."""

    def __init__(self) -> None:
        self.authority, self.leaf_log, self.log = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        self.now = dt.datetime.now(dt.timezone.utc).replace(microsecond=0)
        self.root = self._certificate(self.authority.public_key(), x509.NameAttribute(NameOID.COMMON_NAME, "ours"))

    def trust(self, url: str) -> str:
        """The client trust configuration of this instance, reached at `url`."""
        since = {"validFor": {"start": (self.now - dt.timedelta(days=1)).isoformat().replace("+00:00", "Z")}}
        service = {"url": url, "majorApiVersion": 1, "operator": "tests", **since}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            public = {"rawBytes": _text(_public(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", **since}
            identity = {"keyId": _text(_key_id(key))}
            return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": public, "logId": identity}

        chain = {"certificates": [{"rawBytes": _text(self.root.public_bytes(Encoding.DER))}]}
        authority = {
            "subject": {"organization": "tests", "commonName": "ours"},
            "uri": url,
            "certChain": chain,
            **since,
        }
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.log)],
            "ctlogs": [log(self.leaf_log)],
            "certificateAuthorities": [authority],
            "timestampAuthorities": [],
        }
        signing = {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [service],
            "oidcUrls": [service],
            "rekorTlogUrls": [service],
            "tsaUrls": [],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaConfig": {"selector": "ANY"},
        }
        kind = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
        return json.dumps({"mediaType": kind, "trustedRoot": root, "signingConfig": signing})

    def certify(self, request: bytes, identity: str) -> list[str]:
        """The certificate of a key for `identity`, as its log has it, and the authority's own."""
        key = x509.load_pem_x509_csr(request).public_key()
        issued = self._certificate(key, identity, proof=self._proof(self._certificate(key, identity)))
        return [certificate.public_bytes(Encoding.PEM).decode() for certificate in (issued, self.root)]

    def record(self, entry: object) -> dict[str, object]:
        """The log's answer to `entry`, which is the only one that it has."""
        body = json.dumps(entry).encode()
        leaf = hashlib.sha256(b"\0" + body).digest()
        note = f"ours - 1\n1\n{_text(leaf)}\n"
        signed = _text(_key_id(self.log)[:4] + _signature(self.log, note.encode()))
        stamp = {"body": _text(body), "integratedTime": int(time.time())}
        stamp |= {"logID": _key_id(self.log).hex(), "logIndex": 0}
        promise = _signature(self.log, json.dumps(stamp, sort_keys=True, separators=(",", ":")).encode())
        proof = {"checkpoint": f"{note}\n\u2014 ours {signed}\n", "hashes": [], "logIndex": 0, "treeSize": 1}
        verification = {"inclusionProof": proof | {"rootHash": leaf.hex()}, "signedEntryTimestamp": _text(promise)}
        return {"00": stamp | {"verification": verification}}

    def _certificate(
        self, key: Any, name: x509.NameAttribute[str] | str, proof: bytes | None = None
    ) -> x509.Certificate:
        """A certificate of this authority: its own for a name of one, a short-lived one for an identity."""
        ours = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ours")])
        leaf = isinstance(name, str)
        builder = (
            x509.CertificateBuilder(issuer_name=ours, subject_name=x509.Name([]) if leaf else ours)
            .public_key(key)
            .serial_number(2 if leaf else 1)
            .not_valid_before(self.now - dt.timedelta(minutes=1))
            .not_valid_after(self.now + dt.timedelta(minutes=10))
            .add_extension(x509.BasicConstraints(ca=not leaf, path_length=None), critical=True)
            .add_extension(
                x509.KeyUsage(leaf, False, False, False, False, not leaf, not leaf, False, False),  # noqa: FBT003
                critical=True,
            )
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )
        if isinstance(name, str):
            extensions = [
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()),
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]),
                x509.UnrecognizedExtension(_ISSUER_EXTENSION, ISSUER.encode()),
            ]
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.RFC822Name(name)]), critical=True)
            for extension in extensions:
                builder = builder.add_extension(extension, critical=False)
            if proof is not None:
                builder = builder.add_extension(x509.UnrecognizedExtension(_SCT_EXTENSION, proof), critical=False)
        return builder.sign(self.authority, hashes.SHA256())

    def _proof(self, issued: x509.Certificate) -> bytes:
        """The certificate log's promise to list `issued`. Source: RFC 6962, 3.2 and 3.3."""
        tbs, stamp = issued.tbs_certificate_bytes, int(time.time() * 1000)
        entry = _key_id(self.authority) + len(tbs).to_bytes(3, "big") + tbs
        signed = _signature(self.leaf_log, struct.pack("!BBQH", 0, 0, stamp, _PRECERTIFICATE) + entry + b"\0\0")
        sct = struct.pack("!B32sQH", 0, _key_id(self.leaf_log), stamp, 0) + _SHA256_ECDSA + _sized(signed)
        content = _sized(_sized(sct))
        return b"\x04" + bytes([len(content)]) + content  # an octet string, shorter than 128 bytes


@contextmanager
def running(folder: Path) -> Iterator[Path]:
    """An instance that answers while the block runs; the file with its trust configuration."""
    instance = Instance()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Fulcio's and Rekor's only request each."""
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.endswith("/signingCert"):
                claims = self.headers["Authorization"].split(".")[1]
                identity = json.loads(base64.urlsafe_b64decode(claims + "=="))["sub"]
                chain = instance.certify(base64.b64decode(body["certificateSigningRequest"]), identity)
                answer: dict[str, object] = {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}
            else:
                answer = instance.record(body)
            self.send_response(201)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    path = folder / "trust.json"
    path.write_text(instance.trust(f"http://127.0.0.1:{server.server_port}"))
    try:
        yield path
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def token(identity: str) -> str:
    """An identity token that says so; the instance believes everybody."""
    claims = {"iss": ISSUER, "sub": identity, "aud": "sigstore", "iat": int(time.time()), "exp": int(time.time()) + 600}
    parts = [{"alg": "HS256", "typ": "JWT"}, claims, {}]
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _sized(data: bytes) -> bytes:
    return struct.pack("!H", len(data)) + data


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


def _key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(_public(key)).digest()


def _signature(key: ec.EllipticCurvePrivateKey, data: bytes) -> bytes:
    return bytes(key.sign(data, ec.ECDSA(hashes.SHA256())))
