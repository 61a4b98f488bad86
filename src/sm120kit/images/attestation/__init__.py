"""SBOM, provenance and signature of published images."""

from sm120kit.images.attestation._attest import Signer, publisher_digest, signer, verified_payload, verify, write

__all__ = ["Signer", "publisher_digest", "signer", "verified_payload", "verify", "write"]
