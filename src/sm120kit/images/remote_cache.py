"""Finished builds in a registry, so that a team compiles each once (``--cache``).

An entry is an OCI artifact with the tag ``<kind>-<digest of the inputs>``. Its files are verified by the sha256 in its
manifest. A signed statement binds names and sha256 of all files to the tag, so that no valid entry can stand in for another.
What is missing, damaged, or not signed as required is reported and counts as absent.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from sm120kit.core import reporting
from sm120kit.core.digests import file_sha256
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import BadInput, NotAttested, NotFound, NotTrusted, RegistryFailed
from sm120kit.core.outside import parse_json
from sm120kit.images import attestation
from sm120kit.images.distribution import RegistryClient, RemoteArtifact
from sm120kit.images.image_index import require_repository
from sm120kit.images.oci import MAX_DOCUMENT_BYTES, TITLE, Descriptor

T = TypeVar("T")

ARTIFACT = "application/vnd.sm120kit.cache.v1"
"""The type of the artifacts of entries."""

_FILE, _STATEMENT = "application/octet-stream", "application/vnd.sm120kit.statement.v1+json"
_PREDICATE = "sm120kit:cache/v1"
_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.+-]{1,200}(/(?!\.)[A-Za-z0-9_.+-]{1,200}){0,3}")
_UNUSABLE = (BadInput, NotTrusted, NotFound, NotAttested)


@dataclass(frozen=True)
class CacheAccess:
    """What a command may do with a cache.

    ``trusted`` is the file of the key or identity that must have signed an entry; without it whoever can write the repository
    decides what is used. With ``push``, missing entries are stored, signed by ``sign`` if that is set.
    """

    trusted: Path | None = None
    push: bool = False
    sign: Callable[[bytes], bytes] | None = None


class RegistryCache:
    """A cache in a repository of a registry, ``registry/name``; see :class:`sm120kit.sources.run_options.RemoteCache`."""

    def __init__(self, repository: str, access: CacheAccess) -> None:
        """Contact the registry at the first request.

        Raises:
            RegistryFailed: ``repository`` is malformed.
            BadInput: the file of the trusted key or identity cannot be used.
        """
        require_repository(repository)
        self.repository = repository
        self.pushes = access.push
        self.publisher = attestation.publisher_digest(access.trusted) if access.trusted else ""
        self._access = access
        self._usable = True
        self._warned = access.trusted is not None

    def fetch(self, key: str, directory: Path) -> bool:
        """Write the files of an entry into an empty directory; false if there is no entry that may be used.

        Raises:
            ResourceUnavailable, SystemRefused: the files cannot be written.
            BadInput, FetchFailed, RequirementMissing: no signature can be verified.
        """
        return self._attempt(f"looking up {key}", lambda client: self._fetch(client, key, directory)) or False

    def push(self, key: str, directory: Path) -> None:
        """Store the files of a directory as an entry; another is replaced. What the registry has is not sent.

        Raises:
            RequirementMissing: the entry cannot be signed.
        """
        if self._access.push:
            self._attempt(f"pushing {key}", lambda client: self._push(client, key, directory))

    def _attempt(self, activity: str, use: Callable[[RegistryClient], T]) -> T | None:
        """The result of ``use``, or None with a warning. A registry that fails is not used again by this command."""
        if not self._usable:
            return None
        try:
            with RegistryClient(self.repository) as client:
                return use(client)
        except RegistryFailed as error:
            self._usable = False
            reporting.warn(f"cache {self.repository} is not used: {error.message}")
        except _UNUSABLE as error:
            reporting.warn(f"cache {self.repository}, {activity}: not used: {error.message}")
        return None

    def _fetch(self, client: RegistryClient, key: str, directory: Path) -> bool:
        """Write the files of an entry; false if there is none."""
        entry = client.artifact(key)
        if entry is None:
            return False
        files = self._verified(client, entry, key)
        if not self._warned:
            self._warned = True
            reporting.warn(f"cache {self.repository}: signature not verified; pass `--trust KEY`")
        require_disk(directory, sum(blob.size for blob in files.values()), f"{key} of the cache")
        client.fetch_files([(blob, directory / name) for name, blob in files.items()])
        reporting.info(f"found {key[:-52]} in the cache {self.repository}")
        return True

    def _push(self, client: RegistryClient, key: str, directory: Path) -> None:
        paths = {str(path.relative_to(directory)): path for path in sorted(directory.rglob("*")) if path.is_file()}
        files = {name: _described(path, name) for name, path in paths.items()}
        sent = [(blob, paths[name]) for name, blob in files.items()]
        with tempfile.TemporaryDirectory() as scratch:
            if self._access.sign:
                statement = Path(scratch, "statement")
                statement.write_bytes(self._access.sign(_statement(key, files)))
                sent.append((_described(statement), statement))
            client.push_artifact(ARTIFACT, sent, key)
        reporting.info(f"pushed {key[:-52]} to the cache {self.repository}")

    def _verified(self, client: RegistryClient, entry: RemoteArtifact, key: str) -> dict[str, Descriptor]:
        """The files of an entry by name, provided that the trusted key or identity signed them, if there is one.

        Raises:
            BadInput: it is not an entry, or too large.
            NotAttested: it is not signed as required, or the statement is about another entry.
        """
        files = _named(entry, key)
        if self._access.trusted is None:
            return files
        statements = [blob for blob in entry.files if blob.media_type == _STATEMENT]
        if len(statements) != 1 or statements[0].size > MAX_DOCUMENT_BYTES:
            raise NotAttested(f"{key} is not signed", "push it with --key or --keyless")
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "statement")
            client.fetch_files([(statements[0], path)])
            payload = attestation.verified_payload(path.read_bytes(), self._access.trusted, key)
        try:
            matches = parse_json(payload) == parse_json(_statement(key, files))
        except ValueError:
            matches = False
        if not matches:
            raise NotAttested(f"the signed statement of {key} is about other files or another entry", "push it again")
        return files


def _named(entry: RemoteArtifact, key: str) -> dict[str, Descriptor]:
    """The files of an entry by name.

    Raises:
        BadInput: it is not an entry of a cache, a name is unsafe or not unique, or the files are too large.
    """
    from sm120kit.sources.index_client import MAX_FILE_BYTES

    files = [blob for blob in entry.files if blob.media_type != _STATEMENT]
    names = [str(blob.annotations.get(TITLE, "")) for blob in files]
    problem = ""
    if entry.artifact_type != ARTIFACT:
        problem = f"is an artifact of type {entry.artifact_type[:100]!r}"
    elif (
        not names
        or len({*names}) != len(names)
        or not all(map(_NAME.fullmatch, names))
        or {*names} & {str(parent) for name in names for parent in PurePosixPath(name).parents}
    ):
        problem = f"has files with the names {names[:5]}"
    elif sum(blob.size for blob in files) > MAX_FILE_BYTES:
        problem = f"has {sum(blob.size for blob in files)} bytes"
    if problem:
        raise BadInput(f"{key} {problem}", "remove it from the registry")
    return dict(zip(names, files, strict=True))


def _described(path: Path, name: str = "") -> Descriptor:
    """A file as a blob; without a name it is the statement of an entry."""
    digest, size = f"sha256:{file_sha256(path)}", path.stat().st_size
    return Descriptor(_FILE, digest, size, {TITLE: name}) if name else Descriptor(_STATEMENT, digest, size)


def _statement(key: str, files: Mapping[str, Descriptor]) -> bytes:
    """What is signed of an entry: in-toto v1, https://in-toto.io/Statement/v1."""
    subjects = [{"name": name, "digest": {"sha256": blob.digest[7:]}} for name, blob in sorted(files.items())]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": _PREDICATE,
        "predicate": {"key": key},
    }
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()
