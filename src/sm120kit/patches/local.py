"""Local patches: diffs of a user that a build applies above the series of whichever project has their files.

They need no trailers, and nothing is written to a series. Their commits depend on the diffs alone: the same diffs give the same
trees on every machine.
"""

import hashlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, FetchFailed, OfflineMiss
from sm120kit.core.outside import read_found
from sm120kit.core.urls import is_loopback, redacted
from sm120kit.patches._apply import REFS
from sm120kit.patches._export import slug_of
from sm120kit.patches.foreign import EXISTS, ImportTarget, Place, applied_tree, guessed_place, of_the_source
from sm120kit.patches.format import TRAILER
from sm120kit.patches.mails import ForeignPatch, read_diffs, split_diffs
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.origin import Origin

VARIABLE, FORGE = "SM120KIT_FORGE", "https://github.com"
"""The environment variable with the URL of another forge, and the default."""

MAX_BYTES = 16 * 2**20
MAX_SECONDS = 60.0
MAX_REDIRECTS = 5

MAX_FILES = 200
"""Limit for the patch files of one build."""

_FORM = re.compile(r"([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)#([1-9][0-9]{0,8})")


def pull_request(text: str, origin: Origin) -> tuple[ForeignPatch, ...]:
    """Fetch the commits of ``owner/project#123``, with its page as their origin; none for anything else.

    GitHub, and forges with its addresses, serve them. They have at most ``MAX_BYTES``, and take at most ``MAX_SECONDS``.

    Raises:
        BadInput: :data:`VARIABLE` is not the URL of a forge.
        OfflineMiss: ``origin`` is offline or has a mirror instead of the network.
        FetchFailed: the forge does not deliver it.
    """
    if not (match := _FORM.fullmatch(text)):
        return ()
    owner, project, number = match.groups()
    forge, file = os.environ.get(VARIABLE) or FORGE, Path(f"{owner}-{project}-{number}.patch")
    parts = urlsplit(forge)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
        raise BadInput(f"{VARIABLE} is {redacted(forge)!r}, not the URL of a forge", "write https://HOST")
    url = f"{forge.rstrip('/')}/{owner}/{project}/pull/{number}.patch"
    hint = f"save {redacted(url)} as {file} (curl -Lo {file} URL), then name that file instead of {text}"
    if origin.offline or origin.mirror:
        raise OfflineMiss(f"{text} is fetched from {redacted(url)}, which --offline or --mirror excludes", hint)
    import httpx2

    from sm120kit.sources import index_client

    try:
        with reporting.step(f"fetching {text}"):
            return tuple(
                _of_page(patch, redacted(url).removesuffix(".patch")) for patch in split_diffs(_received(url, origin), file)
            )
    except (httpx2.HTTPError, httpx2.InvalidURL, index_client.Exceeded, index_client.RefusedRedirect, _Refused) as error:
        reason = redacted(str(error) or type(error).__name__)
        raise FetchFailed(f"{text} could not be fetched from {redacted(url)}: {reason}", hint) from error


def _of_page(patch: ForeignPatch, page: str) -> ForeignPatch:
    """A patch whose message has the trailers that follow from the page of its pull request."""
    body = patch.message.body
    added = {"Upstream-Status": f"Submitted [{page}]", "Origin": page}
    lines = [f"{name}: {value}" for name, value in added.items() if f"\n{name}: " not in f"\n{body}"]
    below = "" if TRAILER.fullmatch(body.rpartition("\n")[2]) else "\n"
    return replace(patch, message=replace(patch.message, body="\n".join([body + below, *lines])))


class _Refused(Exception):
    """The forge does not deliver a pull request, or too much or too slowly."""


def _received(url: str, origin: Origin) -> bytes:
    from sm120kit.sources import index_client

    ends, received = time.monotonic() + MAX_SECONDS, bytearray()
    with index_client.connect(origin.settings()) as client:
        client.max_redirects = MAX_REDIRECTS
        with index_client.stream(client, url) as response:
            if response.status_code != 200:
                raise _Refused(f"HTTP status {response.status_code} {response.reason_phrase}")
            for chunk in response.iter_raw():
                received += chunk
                if len(received) > MAX_BYTES:
                    raise _Refused(f"it sends more than {MAX_BYTES / 2**20:g} MiB")
                if time.monotonic() > ends:
                    raise _Refused(f"it takes more than {MAX_SECONDS:g} s")
    return bytes(received)


def read_source(path: Path, origin: Origin) -> tuple[ForeignPatch, ...]:
    """Read the patches of a file, of ``-`` (standard input), or of a pull request ``owner/project#123`` if no file is so named.

    Raises:
        BadInput: see :func:`sm120kit.patches.mails.read_diffs`.
        FetchFailed, OfflineMiss: see :func:`pull_request`.
    """
    if str(path) == "-":
        path = Path("/dev/stdin")
    return (() if path.exists() else pull_request(str(path), origin)) or read_diffs(path)


def read_local(paths: Sequence[Path], origin: Origin) -> tuple[ForeignPatch, ...]:
    """Read the patches in files, directories and pull requests, the first to be applied first.

    Of a directory, these are the files of its ``series``, or else ``*.patch`` and ``*.diff`` by name.

    Raises:
        BadInput: a file cannot be read or has no diff, a directory has no patch, there are too many, or two are equal.
        FetchFailed, OfflineMiss: a pull request cannot be fetched.
    """
    files = [file for path in paths for file in (_listed(path) if path.is_dir() else (path,))]
    if len(files) > MAX_FILES:
        raise BadInput(f"{len(files)} patch files; at most {MAX_FILES} are taken", "name fewer")
    found: dict[bytes, ForeignPatch] = {}
    for patch in (patch for file in files for patch in read_source(file, origin)):
        if (first := found.setdefault(patch.diff, patch)) is not patch:
            raise BadInput(f"{patch.file} has the same diff as {first.file}", "name each patch once")
    return tuple(found.values())


def _listed(directory: Path) -> Iterator[Path]:
    series = directory / "series"
    if series.is_file():
        lines = (line.partition("#")[0].split() for line in _text(series).splitlines())
        named = [directory / words[0] for words in lines if words]
        files = [file if file.is_file() else file.with_name(f"{file.name}.patch") for file in named]
    else:
        files = sorted(path for path in directory.iterdir() if path.suffix in (".patch", ".diff"))
    if not files:
        raise BadInput(f"{directory} has no patch", "name a directory with *.patch or *.diff files, or a file")
    yield from files


def _text(series: Path) -> str:
    try:
        return read_found(series).decode(errors="replace")
    except OSError as error:
        raise BadInput(f"{series}: {error.strerror}", "name its files one by one") from error


def apply_local(patches: Sequence[ForeignPatch], trees: Sequence[PatchedTree]) -> tuple[PatchedTree, ...]:
    """The trees with each patch applied to the one that has its files. Either all patches are applied, or none is.

    Raises:
        BadInput: the files of a patch are those of no tree, or of several.
        PatchConflict: it does not apply.
    """
    above = list(trees)
    for patch in of_the_source(patches):
        number, place = owner(patch, above)
        above[number] = _applied(patch, above[number], place)
    for tree in (tree for tree in above if tree.local):
        Repository(tree.checkout.repository).set_ref(f"{REFS}/{tree.commit}", tree.commit)
    return tuple(above)


def owner(patch: ForeignPatch, trees: Sequence[PatchedTree]) -> tuple[int, Place]:
    """The number of the tree that has the files of a patch, and where they are there.

    Raises:
        BadInput: no tree has them, or several have.
    """
    places: dict[int, Place] = {}
    problems: dict[int, list[str]] = {}
    errors: list[BadInput] = []
    for number, tree in enumerate(trees):
        try:
            places[number] = guessed_place(patch, tree, tree.tree, ImportTarget())
        except BadInput as error:
            errors.append(error)
            lines = error.message.splitlines()
            problems[number] = [tree.checkout.pin.project + ":", *(lines[1:] or [f"  {lines[0]}"])]
    there = [lines for lines in problems.values() if any(EXISTS in line for line in lines)]
    usable = {number: place for number, place in places.items() if place.known} or ({} if there else places)
    if len(usable) == 1:
        return next(iter(usable.items()))
    if usable:
        names = " and ".join(place.project.project for place in usable.values())
        raise BadInput(f"{patch.file} has files of {names}", "give its paths from the root of the project's repository")
    if "\n" not in errors[0].message and len({error.message for error in errors}) == 1:
        raise errors[0]  # no source can take it
    fewest = min(map(len, there or problems.values()))
    nearest = (line for lines in there or problems.values() if len(lines) == fewest for line in lines)
    raise BadInput(
        "\n".join([f"{patch.file} is for no project of this recipe", *nearest]),
        "leave it out if it is applied already: `sm120kit patch list`"
        if there
        else "choose the recipe of the project that has its files, for `patch import` by --recipe; of an engine, "
        "Python files of its wheel can be patched; split a patch of several projects",
    )


def _applied(patch: ForeignPatch, tree: PatchedTree, place: Place) -> PatchedTree:
    repository = Repository(tree.checkout.repository)
    after = applied_tree(patch, tree, tree.tree, place)
    sha256 = hashlib.sha256(patch.diff).hexdigest()
    commit = repository.commit_tree(after, tree.commit, f"local patch {sha256}\n")
    name = slug_of(patch.message.subject) or slug_of(patch.file.stem) or sha256[:12]
    applied = AppliedPatch(place.project.project, name, sha256, commit)
    return replace(tree, commit=commit, tree=after, local=(*tree.local, applied))
