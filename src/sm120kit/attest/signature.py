"""Signed statements: DSSE envelopes, https://github.com/secure-systems-lab/dsse, with one ed25519 or ECDSA P-256 signature.

``keyid`` stays empty, as the protocol allows: verifiers then try their keys, and do not depend on how each of them names one.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sm120kit.errors import BadKey, NotAttested, ToolchainMissing
from sm120kit.workspace import record_json

PAYLOAD_TYPE = "application/vnd.in-toto+json"

_MAKE = "openssl genpkey -algorithm ed25519 -out key.pem && openssl pkey -in key.pem -pubout -out key.pub"


def signer(path: Path) -> Callable[[bytes], bytes]:
    """What puts a statement into an envelope signed with the private key in ``path``, PEM without a passphrase.

    Raises:
        BadKey: it is not such a key.
        ToolchainMissing: ``cryptography`` is not installed.
    """
    key = _load(path, private=True)

    def sign(payload: bytes) -> bytes:
        made = key.sign(_encoded(PAYLOAD_TYPE, payload), *_algorithm(key))
        signature = {"keyid": "", "sig": base64.b64encode(made).decode()}
        envelope = {"payloadType": PAYLOAD_TYPE, "payload": base64.b64encode(payload).decode(), "signatures": [signature]}
        return record_json(envelope).encode()

    return sign


def opened(envelope: bytes, trusted: Path, name: str) -> bytes:
    """The statement in an envelope, when one of its signatures is by the public key in ``trusted``, PEM.

    Raises:
        NotAttested: it is not, or the envelope is none.
        BadKey: ``trusted`` is not a public key.
        ToolchainMissing: ``cryptography`` is not installed.
    """
    key = _load(trusted, private=False)
    try:
        said: dict[str, Any] = json.loads(envelope)
        kind, payload = str(said["payloadType"]), base64.b64decode(said["payload"], validate=True)
        signatures = [base64.b64decode(one["sig"], validate=True) for one in said["signatures"]]
    except (ValueError, KeyError, TypeError) as error:
        raise NotAttested(f"the statement about {name} is not a signed envelope: {error}", "was the file mixed up?") from error
    if kind == PAYLOAD_TYPE and any(_signed(key, signature, _encoded(kind, payload)) for signature in signatures):
        return payload
    raise NotAttested(
        f"the statement about {name} is not signed with {trusted}, or was changed afterwards",
        "do not use the image; is it the right key?",
    )


def _load(path: Path, *, private: bool) -> Any:
    """A key from its file."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    except ModuleNotFoundError as error:
        raise ToolchainMissing("cryptography is not installed", "pip install 'sm120kit[docker]'") from error
    what = "private" if private else "public"
    try:
        content = path.read_bytes()
        key = serialization.load_pem_private_key(content, None) if private else serialization.load_pem_public_key(content)
    except OSError as error:
        raise BadKey(f"cannot read the {what} key {path}: {error.strerror}", f"make one: {_MAKE}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadKey(f"{path} is not a {what} key in PEM without a passphrase: {error}", f"make one: {_MAKE}") from error
    curve = getattr(key, "curve", None)
    if not isinstance(key, ed25519.Ed25519PrivateKey | ed25519.Ed25519PublicKey) and not isinstance(curve, ec.SECP256R1):
        raise BadKey(f"{path} is neither an ed25519 nor an ECDSA P-256 key", f"make one: {_MAKE}")
    return key


def _signed(key: Any, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(signature, message, *_algorithm(key))
    except InvalidSignature:
        return False
    return True


def _algorithm(key: Any) -> tuple[Any, ...]:
    """What an ECDSA key has to be told and an ed25519 key knows."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    return (ec.ECDSA(hashes.SHA256()),) if hasattr(key, "curve") else ()


def _encoded(kind: str, payload: bytes) -> bytes:
    """What is signed: type and payload with their lengths (DSSE's pre-authentication encoding)."""
    return b"DSSEv1 %d %b %d %b" % (len(kind.encode()), kind.encode(), len(payload), payload)
