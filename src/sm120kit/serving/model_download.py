"""Download a configuration's model from the Hugging Face Hub into the user's download cache, with ``huggingface_hub``.

The library downloads in threads and waits for them before it passes an interrupt on: it runs in a process that can be ended.
Headers are read in daemon threads, which nothing waits for.

The library reads ``HF_TOKEN``, ``HF_HOME`` and ``HF_ENDPOINT`` itself. A token is never an argument here, and no messages of
the library are shown, as they could quote it.
"""

import errno
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from sm120kit.core import errors, process, reporting
from sm120kit.core.disk import disk_errors, require_disk
from sm120kit.core.errors import BadInput, CommandFailed, FetchFailed, HubUnreachable, NotFound, OfflineMiss, Sm120kitError
from sm120kit.core.outside import MAX_FOUND_BYTES, file_problem, parse_json, read_found
from sm120kit.recipes.configurations import UNPINNED, Configuration
from sm120kit.serving import checkpoint
from sm120kit.serving.checkpoint import Checkpoint, LocalFiles, ModelFiles, Tensor

IGNORED = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.tflite", "original/*", "metal/*")
"""The same weights in other formats, which engines do not read beside safetensors files."""
DEFAULT_BRANCH = "main"
HEADERS_AT_ONCE = 8
"""Requests for headers of shards beside each other."""
HEADER_BYTES = 100_000
"""Size of the first request for a header; most are smaller (huggingface_hub ``parse_safetensors_file_metadata``)."""
WRITING_SECONDS = 600
"""A download that has written nothing for this long has ended: the library repeats a request for at most six minutes (xet-core,
``CLIENT_RETRY_MAX_DURATION_MS``)."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelDownload:
    """A model at a commit of its repository, and the size of its files that the download cache does not have yet.

    ``sizes`` are the bytes of all its files by name, empty if none is missing.
    """

    repository: str
    commit: str
    missing_bytes: int
    offline: bool
    sizes: Mapping[str, int] = field(default_factory=dict, repr=False)

    @cached_property
    def files(self) -> ModelFiles:
        """Its files: of their headers, no more than these is downloaded, and once."""
        return (
            _HubFiles(self.repository, self.commit, self.sizes)
            if self.sizes
            else LocalFiles(cached(self.repository, self.commit))
        )


def plan(configuration: Configuration, revision: str, *, offline: bool) -> ModelDownload:
    """What the download of a configuration's model needs. See :func:`plan_repository`.

    ``revision`` replaces that of the configuration, which is the default branch if the configuration pins none.
    """
    pinned = configuration.model.revision
    wanted = revision or (DEFAULT_BRANCH if pinned == UNPINNED else pinned)
    return plan_repository(configuration.model.repository, wanted, offline=offline)


def plan_repository(repository: str, revision: str, *, offline: bool) -> ModelDownload:
    """Resolve the revision of a model, and determine what its download needs. Downloads nothing.

    A commit that is complete in the download cache needs no network.

    Raises:
        BadInput, NotFound: the Hub has no such names, repository or revision, or no files that engines read.
        FetchFailed: the Hub refuses access or cannot be reached, or ``offline`` is set and the cache lacks files.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise BadInput(f"{repository[:200]!r} is no name of a repository", "write it as the Hub does: owner/name") from error
    offline = offline or constants.HF_HUB_OFFLINE
    if offline:
        return ModelDownload(repository, cached(repository, revision).name, 0, offline)
    if _COMMIT.fullmatch(revision) and _is_complete(repository, revision):
        return ModelDownload(repository, revision, 0, offline=True)
    import huggingface_hub

    with _hub_errors(repository, revision):
        hub = huggingface_hub.HfApi()
        commit = hub.resolve_revision(repository, revision=revision).resolved  # stores it, so that --offline finds it by name
        info = hub.model_info(repository, revision=commit, files_metadata=True)
        listed = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        sizes = {name: size for name, size in listed.items() if not any(fnmatch(name, pattern) for pattern in IGNORED)}
        absent = [name for name in sizes if not _cached_file(repository, name, commit)]
    if not sizes:
        found = ", ".join(sorted(listed))[:200] or "it is empty"
        raise BadInput(f"{repository} has no files that engines read: {found}", "name one with safetensors files")
    return ModelDownload(repository, commit, sum(map(sizes.__getitem__, absent)), offline, sizes if absent else {})


def preview(download: ModelDownload) -> Checkpoint:
    """Read a model before its shards are downloaded: the headers of these, and small files, which are.

    Raises:
        Sm120kitError: see :func:`sm120kit.serving.checkpoint.read_files` and :func:`plan`.
        SystemRefused: the download cache cannot be written.
    """
    with reporting.working(f"reading the headers of {download.repository}"):
        return checkpoint.read_files(download.files)


@dataclass(frozen=True)
class _HubFiles:
    """The files of a model on the Hub, at a commit, with their sizes. Headers are kept once they are read."""

    repository: str
    commit: str
    sizes: Mapping[str, int]
    known: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def source(self) -> str:
        return f"{self.repository} at {self.commit}"

    def names(self) -> frozenset[str]:
        return frozenset(name for name in self.sizes if "/" not in name)

    def content(self, name: str) -> bytes:
        if name not in self.sizes:
            raise FileNotFoundError(name)
        if self.sizes[name] > MAX_FOUND_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {MAX_FOUND_BYTES >> 20} MiB", name)
        import huggingface_hub

        with disk_errors(_cache()), _hub_errors(self.repository, self.commit):
            return read_found(Path(huggingface_hub.hf_hub_download(self.repository, name, revision=self.commit)))

    def headers(self, names: Iterable[str]) -> Iterable[tuple[str, dict[str, Tensor]]]:
        wanted = tuple(names)
        for name, header in self._requested(name for name in wanted if name not in self.known):
            self.known[name] = header
        return ((name, self.known[name]) for name in wanted)

    def _requested(self, names: Iterable[str]) -> Iterable[tuple[str, dict[str, Tensor]]]:
        headers: dict[str, Future[dict[str, Tensor]]] = {name: Future() for name in names}
        waiting: SimpleQueue[str] = SimpleQueue()
        for name in headers:
            waiting.put(name)

        def work() -> None:
            with suppress(Empty):
                while True:
                    name = waiting.get_nowait()
                    if headers[name].set_running_or_notify_cancel():
                        try:
                            headers[name].set_result(self._header(name))
                        except BaseException as error:
                            headers[name].set_exception(error)

        for _ in range(min(HEADERS_AT_ONCE, len(headers))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for name, header in headers.items():
                yield name, header.result()
        finally:
            for header in headers.values():
                header.cancel()

    def _header(self, name: str) -> dict[str, Tensor]:
        """The tensors of a shard, of which no more than the header is requested."""
        if cached := _cached_file(self.repository, name, self.commit):
            return checkpoint.header(cached)
        size, content, position = self.sizes[name], b"", 0

        def read(count: int) -> bytes:
            nonlocal content, position
            start, position = position, position + count
            missing = min(max(position, HEADER_BYTES), size) - len(content)
            if position > len(content) and missing > 0:
                content += self._part(name, len(content), missing)
            return content[start:position]

        with _hub_errors(self.repository, self.commit):
            return checkpoint.tensors(read, size, f"{self.source}: {name}")

    def _part(self, name: str, start: int, count: int) -> bytes:
        """``count`` bytes of a file. A server that ignores the range sends the file from its beginning."""
        import httpx2
        import huggingface_hub
        from huggingface_hub import constants
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff  # type: ignore[attr-defined]

        url = huggingface_hub.hf_hub_url(self.repository, name, revision=self.commit)
        headers = build_hf_headers() | {"Range": f"bytes={start}-{start + count - 1}"}
        content = bytearray()
        timeout, failure = constants.HF_HUB_DOWNLOAD_TIMEOUT, None
        with http_stream_backoff("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
            hf_raise_for_status(response)
            skipped = 0 if response.status_code == 206 else start
            try:
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) >= skipped + count:
                        break
            except httpx2.HTTPError as error:  # within the block, the library would repeat the request, and cannot
                failure = error
        if failure:
            raise failure
        return bytes(content[skipped : skipped + count])


def cached(repository: str, revision: str) -> Path:
    """The folder of a model in the download cache.

    Raises:
        OfflineMiss: the cache does not have the model, or lacks a file that its stored list has.
    """
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, local_files_only=True, ignore_patterns=list(IGNORED)
            )
        )
    except LocalEntryNotFoundError as error:
        raise OfflineMiss(
            f"the download cache {_cache()} does not have all files of {repository} at {revision}",
            "run it once without --offline, or name the folder of the model with --model",
        ) from error


def fetch(download: ModelDownload) -> Path:
    """Download the missing files and return the model's folder. Files that an interrupted download finished are kept.

    Those that it did not finish are removed: the library gives the file of each download another name and resumes none.

    Raises:
        NotFound, FetchFailed: see :func:`plan`.
        ResourceUnavailable, SystemRefused: the download cache has no space, or cannot be written.
    """
    from huggingface_hub import constants

    if download.offline:
        return cached(download.repository, download.commit)
    _remove_abandoned(download.repository)
    if download.missing_bytes:
        require_disk(_cache(), download.missing_bytes, f"{download.repository}: its download into HF_HOME")
    program = "from sm120kit.serving import model_download; model_download.fetch_here()"
    argv = (sys.executable, "-c", program, download.repository, download.commit)
    variables = {
        "PYTHONPATH": process.own_python_path(),
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HUB_CACHE": str(_cache().absolute()),
    }
    ended: dict[str, str] = {}
    size = download.missing_bytes or None
    with reporting.task(f"downloading {download.repository}", size, transfer=True) as advance:

        def on_line(line: str) -> None:
            try:
                event = parse_json(line)
            except ValueError:  # a message of the library
                return
            if isinstance(event, int):
                advance(event)
            elif isinstance(event, dict):
                ended.update(event)

        try:
            process.run_lines(argv, on_line, env=variables, tied=True)
        except CommandFailed as error:
            message = f"the download of {download.repository} failed: {error.message.splitlines()[0]}"
            raise FetchFailed(message, "run the command again: finished files are kept") from None
    if "error" in ended:
        raise getattr(errors, ended["error"])(ended["message"], ended["hint"])
    return Path(ended["folder"])


def _remove_abandoned(repository: str) -> None:
    """Remove unfinished files of a model that no download writes: killed downloads left them in the download cache.

    The library locks ``.locks/<model>/<etag>.lock`` while it writes ``<etag>.<8 digits>.incomplete`` (huggingface_hub 2.4,
    ``_hf_hub_download_to_cache_dir``). Where locks have no effect, as on some network file systems, the time of the last write
    decides.
    """
    from filelock import FileLock, Timeout
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=repository, repo_type="model")
    for path in (_cache() / name / "blobs").glob("*.incomplete"):
        etag = re.fullmatch(r"(.+)\.[0-9a-f]{8}\.incomplete", path.name)
        with suppress(OSError, Timeout, NotImplementedError):  # another's file; it is being written; there are no locks
            if etag and time.time() - path.stat().st_mtime > WRITING_SECONDS:
                with FileLock(_cache() / ".locks" / name / f"{etag[1]}.lock", timeout=0, mode=0o664):
                    path.unlink()


def fetch_here() -> None:
    """Download in this process, which has repository and commit as arguments, and print JSON lines.

    They are numbers of bytes that were written, and at the end an object with the ``folder``, or with ``error``, the name of a
    class of :mod:`sm120kit.core.errors`, its ``message`` and ``hint``.
    """
    import huggingface_hub

    def report(event: object) -> None:
        sys.stdout.write(f"{json.dumps(event)}\n")
        sys.stdout.flush()

    repository, commit = sys.argv[1:]
    try:
        with disk_errors(_cache()), _hub_errors(repository, commit):
            folder = huggingface_hub.snapshot_download(
                repository, revision=commit, ignore_patterns=list(IGNORED), tqdm_class=_bar(report)
            )
    except Sm120kitError as error:
        report({"error": type(error).__name__, "message": error.message, "hint": error.hint})
    else:
        report({"folder": folder})


def cache_folder(repository: str, revision: str) -> Path:
    """Where the download cache has a model at a commit, whether it is there or not."""
    from huggingface_hub.file_download import repo_folder_name

    return _cache() / repo_folder_name(repo_id=repository, repo_type="model") / "snapshots" / revision


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _is_complete(repository: str, commit: str) -> bool:
    """Whether the download cache has all files of the list that the last download stored."""
    from huggingface_hub import errors as hub_errors
    from huggingface_hub import get_cached_repo_tree

    try:
        get_cached_repo_tree(repository, revision=commit)
        cached(repository, commit)
    except (hub_errors.CachedRepoTreeNotFoundError, OfflineMiss):
        return False
    return True


def _cached_file(repository: str, name: str, commit: str) -> Path | None:
    """A file of a model in the download cache, None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(repository, name, revision=commit)
    return Path(path) if isinstance(path, str) else None


def _bar(advance: Callable[[int], None]) -> type[Any]:
    """A progress bar that shows nothing and passes bytes written to ``advance``."""
    from tqdm.auto import tqdm

    class BytesWritten(tqdm):  # type: ignore[misc]
        def __init__(self, *values: Any, **options: Any) -> None:
            self._counts = options.get("unit") == "B" and "Reconstructing" in str(options.get("desc"))
            super().__init__(*values, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if self._counts and n:
                advance(int(n))
            return None

    return BytesWritten


@contextmanager
def _hub_errors(repository: str, revision: str) -> Iterator[None]:
    """Turn errors of the library into errors with a remedy."""
    import httpx2
    from huggingface_hub import constants, errors, get_token
    from huggingface_hub.utils.logging import set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]
    if "regular" in file_problem(Path(constants.HF_TOKEN_PATH)):  # the library would wait for a FIFO
        constants.HF_TOKEN_PATH = os.devnull
    name = f"{repository} at {revision}"
    try:
        yield
    except (errors.RevisionNotFoundError, httpx2.InvalidURL, UnicodeEncodeError) as error:
        raise NotFound(
            f"{repository} has no revision {revision}", "name another with --revision, or correct model.revision"
        ) from error
    except (errors.GatedRepoError, errors.DisabledRepoError) as error:
        token = "with the account of the token in use" if get_token() else "and set HF_TOKEN to a token of your account"
        raise FetchFailed(f"the Hub refuses access to {name}", f"accept its terms on its page {token}") from error
    except errors.RepositoryNotFoundError as error:
        given = "the token in use may lack access to it" if get_token() else "if it is private, set HF_TOKEN"
        raise NotFound(f"the Hub has no model {repository}", f"correct model.repository; {given}") from error
    except errors.HfHubHTTPError as error:
        raise _refusal(name, error.response.status_code, with_token=bool(get_token())) from error
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        raise HubUnreachable(
            f"the Hub cannot be reached for {name}: {type(error.__cause__ or error).__name__}",
            "run the command again: finished files are kept; --offline uses downloaded files, --model DIR a folder",
        ) from error


def _refusal(name: str, status: int, *, with_token: bool) -> Sm120kitError:
    if status in (401, 403):
        known = "the token in use is refused: renew it, or unset HF_TOKEN (hf auth logout) for public models"
        hint = known if with_token else "no token is set: set HF_TOKEN to one of an account with access"
        return FetchFailed(f"the Hub refuses access to {name}: status {status}", hint)
    return HubUnreachable(
        f"the Hub answers {name} with status {status}", "run the command again later: finished files are kept"
    )
