"""Signatures with a key: DSSE envelopes (https://github.com/secure-systems-lab/dsse), signed by ed25519 or ECDSA P-256.

``keyid`` stays empty, as the protocol allows: verifiers then try all their keys, whatever their scheme of key ids.
"""

import base64
import hashlib
from pathlib import Path
from typing import Any

from sm120kit.core.errors import BadInput, NotAttested, RequirementMissing
from sm120kit.core.outside import parse_json, read_input
from sm120kit.core.record_files import record_json

PAYLOAD_TYPE = "application/vnd.in-toto+json"

_CREATE = "openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub"


def require_private_key(path: Path) -> None:
    """Require a file that :func:`signed` can use, before work of minutes; see there for errors."""
    _load(path, private=True)


def signed(payload: bytes, path: Path) -> bytes:
    """A statement in an envelope that is signed with the private key in ``path``, PEM without a passphrase.

    Raises:
        BadInput: the file is not such a key.
        RequirementMissing: ``cryptography`` is not installed.
    """
    key = _load(path, private=True)
    raw = key.sign(_encoded(PAYLOAD_TYPE, payload), *_algorithm(key))
    signature = {"keyid": "", "sig": base64.b64encode(raw).decode()}
    envelope = {"payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(), "signatures": [signature]}
    return record_json(envelope).encode()


def verified_payload(envelope: bytes, trusted: Path, name: str) -> bytes:
    """The statement in an envelope, provided that a signature is by the public key in ``trusted``, PEM.

    Raises:
        NotAttested: no signature is by that key, or ``envelope`` is not a DSSE envelope.
        BadInput: ``trusted`` is not a public key.
        RequirementMissing: ``cryptography`` is not installed.
    """
    key = _load(trusted, private=False)
    try:
        content: dict[str, Any] = parse_json(envelope)
        kind, payload = str(content["payloadType"]), base64.b64decode(content["payload"], validate=True)
        signatures = [base64.b64decode(signature["sig"], validate=True) for signature in content["signatures"]]
    except (ValueError, KeyError, TypeError) as error:
        raise NotAttested(
            f"the statement about {name} is not a signed envelope: {error}", "it may be the wrong file"
        ) from error
    if kind == PAYLOAD_TYPE and any(_signed(key, signature, _encoded(kind, payload)) for signature in signatures):
        return payload
    raise NotAttested(
        f"the statement about {name} is not signed with {trusted}, or was changed afterwards",
        "check whether it is the right key; otherwise do not use the image",
    )


def fingerprint(trusted: Path) -> str:
    """sha256 of the public key in ``trusted``, independent of the file's formatting.

    Raises:
        BadInput: ``trusted`` is not a public key.
        RequirementMissing: ``cryptography`` is not installed.
    """
    key = _load(trusted, private=False)
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _load(path: Path, *, private: bool) -> Any:
    """Load a key from its file."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ModuleNotFoundError as error:
        raise RequirementMissing("cryptography is not installed", "pip install 'sm120kit[docker]'") from error
    kind = "private" if private else "public"
    try:
        content = read_input(path)
        key = serialization.load_pem_private_key(content, None) if private else serialization.load_pem_public_key(content)
    except OSError as error:
        raise BadInput(f"cannot read the {kind} key {path}: {error.strerror}", f"to create a key: {_CREATE}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        text = f"{path} is not a {kind} key in PEM, without a passphrase ({error})"  # redaction takes a value after a colon
        raise BadInput(text, f"to create a key: {_CREATE}") from error
    curve = getattr(key, "curve", None)
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey) and not isinstance(curve, ec.SECP256R1):
        raise BadInput(f"{path} is neither an ed25519 nor an ECDSA P-256 key", f"to create a key: {_CREATE}")
    return key


def _signed(key: Any, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, message, *_algorithm(key))
    except InvalidSignature:
        return False
    return True


def _algorithm(key: Any) -> tuple[Any, ...]:
    """The argument of an ECDSA key for its hash; an ed25519 key takes none."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return (ec.ECDSA(hashes.SHA256()),) if hasattr(key, "curve") else ()


def _encoded(kind: str, payload: bytes) -> bytes:
    """The signed bytes: type and payload with their lengths (DSSE's pre-authentication encoding)."""
    return b"DSSEv1 %d %b %d %b" % (len(kind.encode()), kind.encode(), len(payload), payload)
