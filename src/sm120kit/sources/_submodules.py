"""Fetch a git commit with its submodules as one tree."""

from __future__ import annotations

import os
import re
from urllib.parse import urljoin, urlsplit

from sm120kit.core import reporting
from sm120kit.core.errors import FetchFailed, NotTrusted
from sm120kit.core.process import Completed
from sm120kit.core.urls import redacted
from sm120kit.sources import _git_urls, git
from sm120kit.sources.git import Repository
from sm120kit.sources.index import local_directory, repository_name
from sm120kit.sources.source_records import GitPin

_MAX_DEPTH = 8
_MAX_SUBMODULES = 200
"""Limit for one pin, at all depths together; vLLM and CUTLASS have no submodules, PyTorch has about 80."""


def import_commit(pin: GitPin, repository: Repository, ref: str, mirror: str | None) -> None:
    """Fetch a pinned commit and commit its tree, with every submodule's tree at its path, as ``ref`` of an empty repository.

    The base commit has no parents, and our own identity and date; its message names the upstream commit.

    Raises:
        NotTrusted: the URL of the pin or of a submodule is of a form that is not allowed.
        FetchFailed: a repository cannot be read or does not have the commit.
    """
    with reporting.task(f"fetching {pin.project} {pin.version}", None):
        fetch_commit(pin, repository, mirror)
        tree = _full_tree(repository, pin.url, pin.commit, mirror, (), [])
    message = f"{pin.project} {pin.version}\n\ncommit: {pin.commit}\n"
    repository.set_ref(ref, repository.commit_tree(tree, None, message))


def fetch_commit(pin: GitPin, repository: Repository, mirror: str | None) -> str:
    """Fetch a pinned commit without submodules, and return the URL that delivered it. See :func:`import_commit` for errors."""
    if not re.fullmatch(r"[0-9a-f]{40}", pin.commit):
        raise NotTrusted(f"{pin.commit!r} is not a commit", "a pin has 40 hexadecimal digits")
    url = _fetch_url(pin.url, mirror, pin.project, ("file",), f"the git URL of {pin.project} {pin.version}")
    _fetch(repository, url, pin.commit)
    return url


def _full_tree(
    repository: Repository, url: str, commit: str, mirror: str | None, parents: tuple[str, ...], fetched: list[str]
) -> str:
    """The tree of a commit with the trees of its submodules, which are fetched.

    ``parents`` are the paths of the submodules above it; all submodules fetched so far are in ``fetched``, which grows.
    """
    listed = repository.git("ls-tree", "-r", "-z", commit).raw.split(b"\0")
    links = {}
    for line in listed:
        entry, _, name = line.partition(b"\t")
        if entry.startswith(b"160000 "):
            links[os.fsdecode(name)] = entry.split()[2].decode()
    if not links:
        return repository.tree_of(commit)
    if len(parents) >= _MAX_DEPTH:
        raise FetchFailed(f"submodules nest more than {_MAX_DEPTH} deep: {'/'.join(parents)}", "pin another commit")
    if len(links) + len(fetched) > _MAX_SUBMODULES:
        raise FetchFailed(f"{redacted(url)} at {commit} has more than {_MAX_SUBMODULES} submodules", "pin another commit")
    urls = _submodule_urls(repository, commit)
    with repository.index(commit) as index:
        for path, pinned in sorted(links.items()):
            if path not in urls:
                raise FetchFailed(
                    f"{redacted(url)} at {commit} has a submodule at {path} without a URL",
                    "pin a commit whose .gitmodules is complete",
                )
            submodule_url = _resolve(url, urls[path])
            local = ("file",) if _git_urls.transport_of(url) == "file" else ()
            project = repository_name(submodule_url).removesuffix(".git")
            source = _fetch_url(submodule_url, mirror, project, local, f"the URL of the submodule {path!r}")
            _fetch(repository, source, pinned)
            fetched.append(path)
            index.graft(path, _full_tree(repository, submodule_url, pinned, mirror, (*parents, path), fetched))
        return index.write_tree()


def _submodule_urls(repository: Repository, commit: str) -> dict[str, str]:
    """Path to URL, from ``.gitmodules`` of a commit."""
    config = repository.git("config", "--blob", f"{commit}:.gitmodules", "-z", "--list", check=False)
    modules: dict[str, dict[str, str]] = {}
    for entry in config.raw.decode(errors="surrogateescape").split("\0"):
        name, _, value = entry.partition("\n")
        if name.startswith("submodule."):
            section, _, key = name.removeprefix("submodule.").rpartition(".")
            modules.setdefault(section, {})[key] = value
    return {module["path"]: module["url"] for module in modules.values() if "path" in module and "url" in module}


def _resolve(parent: str, url: str) -> str:
    """A submodule's URL; ``./`` and ``../`` are relative to the URL of its parent."""
    if not url.startswith(("./", "../")):
        return url
    if urlsplit(parent).scheme:
        scheme, rest = parent.rstrip("/").split("://", 1)
        return f"{scheme}://" + urljoin(f"http://{rest}/", url).removeprefix("http://")
    host, colon, path = parent.rpartition(":")
    return host + colon + os.path.normpath(f"{path}/{url}")


def _fetch(repository: Repository, url: str, commit: str) -> None:
    """Fetch one commit: alone where the server allows it, else with all branches and tags.

    Raises:
        FetchFailed: the repository cannot be read, sends too much, or does not have the commit.
    """
    ref = f"refs/upstream/{commit}"
    options = ("--no-recurse-submodules", "--no-auto-maintenance")
    single = repository.fetch(url, f"+{commit}:{ref}", options=(*options, "--depth=1"), check=False, network=True)
    _require_below_limit(single, url)
    if single.returncode != 0 and "not our ref" not in single.stderr:
        heads_and_tags = [f"+refs/{kind}/*:refs/other/{commit}/{kind}/*" for kind in ("heads", "tags")]
        full = repository.fetch(url, *heads_and_tags, options=options, check=False, network=True)
        _require_below_limit(full, url)
        if full.returncode != 0:
            raise FetchFailed(
                f"{redacted(url)} cannot be read, for commit {commit}: {_reason(full)}",
                "check the URL, the network and git's settings, such as its credential helper; "
                f"or give the directory of a bare clone {repository_name(url)} with --mirror, once: the commit is kept",
            )
    kind = repository.git("cat-file", "-t", commit, check=False).stdout.strip()
    if kind == "commit":
        repository.set_ref(ref, commit)
        return
    if kind:
        raise FetchFailed(f"{commit} is a {kind} in {redacted(url)}, not a commit", "pin the commit to which it points")
    raise FetchFailed(f"{redacted(url)} has no commit {commit}", "check the pin: a tag of the version may have moved")


def _require_below_limit(fetched: Completed, url: str) -> None:
    """Raise FetchFailed if a file of the fetch exceeded :data:`sm120kit.sources.git.MAX_FETCH_BYTES` (EFBIG)."""
    if fetched.returncode != 0 and "File too large" in fetched.stderr:
        raise FetchFailed(
            f"{redacted(url)} sends more than {git.MAX_FETCH_BYTES / 2**30:g} GiB; the fetch was stopped",
            "check the URL, or name a directory that holds a clone with --mirror",
        )


def _fetch_url(url: str, mirror: str | None, project: str, local: tuple[str, ...], subject: str) -> str:
    """The URL to fetch from: ``url`` with a transport of ``git_urls.REMOTE`` or ``local``, or its clone in the mirror.

    Raises:
        NotTrusted: the URL is of a form that is not allowed; the message starts with ``subject``.
        FetchFailed: the mirror is a directory without a clone.
    """
    if not mirror:
        _git_urls.require_allowed(url, (*_git_urls.REMOTE, *local), subject)
        return url
    _git_urls.require_allowed(url, (*_git_urls.MIRROR, "git"), subject)
    name = repository_name(url)
    if not re.fullmatch(r"[\w+-][\w.+-]*\.git", name):
        raise NotTrusted(
            f"{subject} is {redacted(url)!r}, and {name!r} is not a valid file name for a mirror", "pin another URL"
        )
    directory = local_directory(mirror)
    if directory is None:
        clone = f"{mirror.rstrip('/')}/{name}"
        _git_urls.require_allowed(clone, _git_urls.MIRROR, "the mirror")
        return clone
    stem = name.removesuffix(".git")
    names = [name, stem, f"{stem}.bundle", f"{project}.git", project, f"{project}.bundle"]
    for candidate in names:
        if (directory / candidate).exists():
            return str(directory / candidate)
    raise FetchFailed(
        f"the mirror {directory} has no clone of {redacted(url)}", f"looked for {', '.join(dict.fromkeys(names))} in it"
    )


def _reason(failed: Completed) -> str:
    lines = [line for line in failed.stderr.splitlines() if re.match(r"(fatal|error|remote|ERROR)\b", line)]
    return redacted(lines[0]) if lines else f"git ended with exit code {failed.returncode}"
