"""Signatures by an identity: Sigstore bundles (https://docs.sigstore.dev), without a long-lived key.

An OpenID Connect issuer, such as that of a CI service, confirms the identity; Fulcio certifies a key for a single use, and
Rekor adds the signature to an append-only log. A trust configuration contains the URLs and keys of these services.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sm120kit.core.errors import BadInput, FetchFailed, NotAttested, RequirementMissing
from sm120kit.core.outside import read_input_text, read_toml
from sm120kit.images.attestation._signature import PAYLOAD_TYPE

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig


@dataclass(frozen=True)
class Identity:
    """A trusted identity: ``name`` is a mail address or the URI of a workflow, confirmed by the issuer with URL ``issuer``.

    ``config`` is a trust configuration in Sigstore's JSON format; None selects the public services.
    """

    name: str
    issuer: str
    config: Path | None = None


def read(path: Path) -> Identity | None:
    """Read an identity from a TOML file with ``identity``, ``issuer`` and optionally ``config``.

    Returns None if the file is missing or not TOML, such as a key in PEM.

    Raises:
        BadInput: it is TOML with other content.
    """
    try:
        content = read_toml(path)
    except (OSError, ValueError):
        return None
    texts = all(isinstance(value, str) and value for value in content.values())
    if not texts or not {"identity", "issuer"} <= {*content} <= {"identity", "issuer", "config"}:
        raise BadInput(
            f"{path} is not an identity: its keys are {', '.join(map(repr, content)) or 'missing'}",
            "required are the strings identity and issuer, and optionally config, the path of a file beside it",
        )
    config = path.parent / content["config"] if "config" in content else None
    return Identity(content["identity"], content["issuer"], config)


def signer(config: Path | None) -> Callable[[bytes], bytes]:
    """A function that puts a statement into a bundle signed by the identity of the environment, such as that of a CI job.

    Raises:
        RequirementMissing: the environment provides no identity.
        BadInput: ``config`` is not a trust configuration.
        FetchFailed: the trust configuration of the public services cannot be fetched.
        RequirementMissing: ``sigstore`` is not installed.
    """
    services = _trust_config(config)
    from sigstore.oidc import IdentityError, IdentityToken, detect_credential

    try:
        credential = detect_credential()
        if credential is None:
            raise RequirementMissing(
                "the environment provides no identity", "give the CI job the permission id-token: write, or sign with --key"
            )
        token = IdentityToken(credential)
    except IdentityError as error:
        message = str(error).partition(" (")[0]  # the rest may contain the response, and with it the token
        raise RequirementMissing(
            f"the identity of the environment cannot be used: {message}", "--key signs without one"
        ) from None

    def sign(payload: bytes) -> bytes:
        from sigstore.dsse import Statement
        from sigstore.sign import SigningContext

        try:
            with SigningContext.from_trust_config(services).signer(token) as sigstore_signer:
                return sigstore_signer.sign_dsse(Statement(payload)).to_json().encode()
        except Exception as error:  # the exceptions of its clients have no common public class
            message = str(error) or type(error).__name__
            raise RequirementMissing(
                f"Sigstore did not sign: {message}", "run the same command again, or sign with --key, which needs no service"
            ) from error

    return sign


def verified_payload(bundle: bytes, trusted: Identity, name: str) -> bytes:
    """The statement in a bundle, provided that ``trusted`` signed it. Verifies certificate, log entry and signature.

    Raises:
        NotAttested: it is not signed by that identity, or ``bundle`` is not a Sigstore bundle.
        BadInput, FetchFailed, RequirementMissing: as for :func:`signer`.
    """
    config = _trust_config(trusted.config)
    from sigstore.errors import Error
    from sigstore.models import Bundle
    from sigstore.verify import Verifier
    from sigstore.verify.policy import Identity as Policy

    try:
        kind, payload = Verifier(trusted_root=config.trusted_root).verify_dsse(
            Bundle.from_json(bundle), Policy(identity=trusted.name, issuer=trusted.issuer)
        )
        if kind != PAYLOAD_TYPE:
            raise ValueError(f"a payload of type {kind}")
    except (Error, ValueError) as error:
        raise NotAttested(
            f"the statement about {name} is not signed by {trusted.name} of {trusted.issuer}: {error}",
            "check whether it is the right identity; otherwise do not use the image",
        ) from error
    return payload


def _trust_config(config: Path | None) -> ClientTrustConfig:
    """Read or fetch the trust configuration: the services and their keys."""
    try:
        from sigstore.errors import Error
        from sigstore.models import ClientTrustConfig
    except ModuleNotFoundError as error:
        raise RequirementMissing("sigstore is not installed", "pip install 'sm120kit[keyless]'") from error
    if config is None:
        try:
            return ClientTrustConfig.production()
        except Error as error:
            raise FetchFailed(
                f"the keys of Sigstore's public services cannot be fetched: {error}",
                "with a trust configuration in a file nothing is fetched",
            ) from error
    try:
        return ClientTrustConfig.from_json(read_input_text(config))
    except (Error, OSError, ValueError) as error:
        raise BadInput(
            f"{config} is not a trust configuration of Sigstore: {error}", "the operator of the services provides it"
        ) from error
