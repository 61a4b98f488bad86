"""SBOM, provenance and signature of published images."""

from sm120kit.images.attestation._attest import verify, write
from sm120kit.images.attestation._signature import fingerprint, require_private_key

__all__ = ["fingerprint", "require_private_key", "verify", "write"]
