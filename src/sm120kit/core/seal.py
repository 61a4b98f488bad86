"""Seals: proof that a record in a directory of the user was written with this state directory, and not by somebody else.

A directory that a user edits in may come from an archive or another person. What its records order, such as files to write
elsewhere, is followed only if they have a seal, an HMAC (RFC 2104) with the key of the state directory.
"""

import hashlib
import hmac


def seal(key: bytes, purpose: str, text: str) -> str:
    """The seal of a text; ``purpose`` is the kind of record, so that the seal of one kind does not hold for another."""
    return hmac.new(key, f"{purpose}\0{text}".encode(), hashlib.sha256).hexdigest()


def is_sealed(key: bytes, purpose: str, text: str, found: str) -> bool:
    """Whether a seal that was found beside a text is that of the text."""
    return hmac.compare_digest(seal(key, purpose, text).encode(), found.encode(errors="replace"))
