"""Sigstore's services on loopback, the parts that signing uses: an issuer of identities, Fulcio, a CT log, and Rekor's API v1.

All keys and certificates are generated. sigstore-python uses the services through a trust configuration that contains them.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import http.server
import json
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jwt
import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

ISSUER = "https://issuer.invalid"
WORKFLOW = "https://forge.invalid/owner/repository/.github/workflows/images.yml@refs/tags/v1.0.0"
DER, PEM = serialization.Encoding.DER, serialization.Encoding.PEM
FULCIO_ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
SCT_LIST = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


class Key:
    """An ECDSA P-256 key of a service, with its id as in RFC 6962."""

    def __init__(self) -> None:
        self.private = ec.generate_private_key(ec.SECP256R1())
        self.public = self.private.public_key().public_bytes(DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        self.id = hashlib.sha256(self.public).digest()

    def sign(self, message: bytes) -> bytes:
        return self.private.sign(message, ec.ECDSA(hashes.SHA256()))

    def trusted_root_entry(self, url: str) -> dict[str, Any]:
        """The entry of the key in a trusted root."""
        since = {"start": "2020-01-01T00:00:00Z"}
        key = {"rawBytes": b64(self.public), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": since}
        return {"baseUrl": url, "hashAlgorithm": "SHA2_256", "publicKey": key, "logId": {"keyId": b64(self.id)}}


class Services:
    """The services and their state.

    ``subject`` is the identity in tokens, ``valid`` the lifetime of certificates, ``logged_after`` the delay of log entries.
    """

    def __init__(self) -> None:
        self.authority, self.ct_log, self.rekor = Key(), Key(), Key()
        self.subject, self.valid = WORKFLOW, datetime.timedelta(minutes=10)
        self.logged_after = datetime.timedelta(0)
        self.entries: list[dict[str, Any]] = []
        self.url = ""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self.root = (
            self._certificate(name, name, self.authority.private.public_key(), datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage(certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self.authority.private.public_key()), critical=False)
            .sign(self.authority.private, hashes.SHA256())
        )

    def _certificate(
        self, subject: x509.Name, issuer: x509.Name, key: Any, valid: datetime.timedelta
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
        start = now - datetime.timedelta(seconds=5)
        return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(now + valid)

    def token(self) -> str:
        """The token of a job. Only Fulcio verifies its signature, and this Fulcio does not."""
        now = int(time.time())
        claims = {"iss": ISSUER, "sub": self.subject, "aud": "sigstore", "iat": now, "exp": now + 600}
        return jwt.encode(claims, "0" * 32)

    def certify(self, request: dict[str, Any], token: str) -> dict[str, Any]:
        """Fulcio: a certificate for the subject of a token, with a signed certificate timestamp of the CT log."""
        claims = jwt.decode(token, options={"verify_signature": False})
        csr = x509.load_pem_x509_csr(base64.b64decode(request["certificateSigningRequest"]))
        assert csr.is_signature_valid
        builder = (
            self._certificate(x509.Name([]), self.root.subject, csr.public_key(), self.valid)
            .add_extension(usage(certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims["sub"])]), critical=True)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.private.public_key()), critical=False
            )
            .add_extension(x509.UnrecognizedExtension(FULCIO_ISSUER, claims["iss"].encode()), critical=False)
        )
        precertificate = builder.sign(self.authority.private, hashes.SHA256()).tbs_certificate_bytes
        timestamps = self._timestamps(precertificate)
        certificate = builder.add_extension(x509.UnrecognizedExtension(SCT_LIST, timestamps), critical=False).sign(
            self.authority.private, hashes.SHA256()
        )
        chain = [link.public_bytes(PEM).decode() for link in (certificate, self.root)]
        return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}

    def _timestamps(self, tbs: bytes) -> bytes:
        """A list of a single signed certificate timestamp of a precertificate (RFC 6962, 3.2 and 3.3), in an OCTET STRING."""
        stamp = int(time.time() * 1000)
        entry = self.authority.id + len(tbs).to_bytes(3, "big") + tbs
        signature = self.ct_log.sign(struct.pack("!BBQH", 0, 0, stamp, 1) + entry + b"\0\0")
        sct = b"\0" + self.ct_log.id + struct.pack("!QH", stamp, 0) + b"\4\3" + struct.pack("!H", len(signature)) + signature
        listed = struct.pack("!HH", len(sct) + 2, len(sct)) + sct
        assert len(listed) < 256
        return bytes([4, len(listed)]) + listed if len(listed) < 128 else bytes([4, 0x81, len(listed)]) + listed

    def log(self, proposed: dict[str, Any]) -> dict[str, Any]:
        """Rekor: an entry for an envelope, in a tree without other entries."""
        assert (proposed["kind"], proposed["apiVersion"]) == ("dsse", "0.0.1")
        envelope = json.loads(proposed["spec"]["proposedContent"]["envelope"])
        (verifier,) = proposed["spec"]["proposedContent"]["verifiers"]
        spec = {
            "envelopeHash": sha256(proposed["spec"]["proposedContent"]["envelope"].encode()),
            "payloadHash": sha256(base64.b64decode(envelope["payload"])),
            "signatures": [{"signature": signature["sig"], "verifier": verifier} for signature in envelope["signatures"]],
        }
        body = rfc8785.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        time_logged = int(time.time() + self.logged_after.total_seconds())
        entry = {"body": b64(body), "integratedTime": time_logged, "logID": self.rekor.id.hex(), "logIndex": 0}
        root = hashlib.sha256(b"\0" + body).digest()
        note = f"log of tests\n1\n{b64(root)}\n"
        checkpoint = f"{note}\n\N{EM DASH} tests {b64(self.rekor.id[:4] + self.rekor.sign(note.encode()))}\n"
        proof = {"checkpoint": checkpoint, "hashes": [], "logIndex": 0, "rootHash": root.hex(), "treeSize": 1}
        promise = b64(self.rekor.sign(rfc8785.dumps(entry)))
        self.entries.append(entry)
        return {"0" * 80: {**entry, "verification": {"inclusionProof": proof, "signedEntryTimestamp": promise}}}

    def trust_config(self) -> dict[str, Any]:
        """The trust configuration for clients."""
        since = {"start": "2020-01-01T00:00:00Z"}
        authority = {
            "subject": {"organization": "tests", "commonName": "test authority"},
            "uri": self.url,
            "certChain": {"certificates": [{"rawBytes": b64(self.root.public_bytes(DER))}]},
            "validFor": since,
        }
        service = [{"url": self.url, "majorApiVersion": 1, "validFor": since, "operator": "tests"}]
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [self.rekor.trusted_root_entry(self.url)],
                "ctlogs": [self.ct_log.trusted_root_entry(self.url)],
                "certificateAuthorities": [authority],
                "timestampAuthorities": [],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": service,
                "oidcUrls": service,
                "rekorTlogUrls": service,
                "rekorTlogConfig": {"selector": "ANY"},
                "tsaUrls": [],
                "tsaConfig": {"selector": "ANY"},
            },
        }

    def environment(self) -> dict[str, str]:
        """The environment of a job of GitHub Actions with the permission ``id-token: write``."""
        return {
            "GITHUB_ACTIONS": "true",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "for-this-job",
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{self.url}/token?job=1",
        }


def usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(not certificates, False, False, False, False, certificates, certificates, False, False)


def sha256(content: bytes) -> dict[str, str]:
    return {"algorithm": "sha256", "value": hashlib.sha256(content).hexdigest()}


@contextmanager
def running(directory: Path) -> Iterator[tuple[Services, Path]]:
    """Run the services. Yields them and the file of their trust configuration in ``directory``."""
    services = Services()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            valid = self.path.startswith("/token?job=1&audience=sigstore") and "for-this-job" in self.headers["Authorization"]
            self.respond(*(200, {"value": services.token()}) if valid else (403, {"secret": "must not be printed"}))

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/api/v2/signingCert":
                self.respond(201, services.certify(request, self.headers["Authorization"].removeprefix("Bearer ")))
            elif self.path.rstrip("/") == "/api/v1/log/entries":
                self.respond(201, services.log(request))
            else:
                self.send_error(404)

        def respond(self, code: int, body: dict[str, Any]) -> None:
            content = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        services.url = f"http://127.0.0.1:{server.server_port}"
        config = directory / "trust-config.json"
        config.write_text(json.dumps(services.trust_config()))
        yield services, config
        server.shutdown()
