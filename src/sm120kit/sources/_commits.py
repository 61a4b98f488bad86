"""Fetch a pinned commit of a git repository."""

import re

from sm120kit.core import reporting
from sm120kit.core.errors import FetchFailed, NotTrusted
from sm120kit.core.process import Completed
from sm120kit.core.urls import redacted
from sm120kit.sources import _git_urls, git
from sm120kit.sources.git import Repository
from sm120kit.sources.index import local_directory, repository_name
from sm120kit.sources.source_records import GitPin


def import_commit(pin: GitPin, repository: Repository, ref: str, mirror: str | None) -> None:
    """Fetch a pinned commit and commit its tree as ``ref`` of an empty repository.

    The base commit has no parents, and our own identity and date; its message names the upstream commit.

    Raises:
        NotTrusted: the URL of the pin is of a form that is not allowed.
        FetchFailed: the repository cannot be read, does not have the commit, or has submodules.
    """
    with reporting.task(f"fetching {pin.project} {pin.version}", None):
        fetch_commit(pin, repository, mirror)
    _require_complete(repository, pin.url, pin.commit)
    message = f"{pin.project} {pin.version}\n\ncommit: {pin.commit}\n"
    repository.set_ref(ref, repository.commit_tree(repository.tree_of(pin.commit), None, message))


def fetch_commit(pin: GitPin, repository: Repository, mirror: str | None) -> str:
    """Fetch a pinned commit, and return the URL that delivered it. See :func:`import_commit` for errors."""
    if not re.fullmatch(r"[0-9a-f]{40}", pin.commit):
        raise NotTrusted(f"{pin.commit!r} is not a commit", "a pin has 40 hexadecimal digits")
    url = _fetch_url(pin, mirror)
    _fetch(repository, url, pin.commit)
    return url


def _require_complete(repository: Repository, url: str, commit: str) -> None:
    """Require that a commit has no submodules, whose files would be missing."""
    entries = repository.git("ls-tree", "-r", "-z", commit).stdout.split("\0")
    if links := [entry.partition("\t")[2] for entry in entries if entry.startswith("160000 ")]:
        raise FetchFailed(
            f"{redacted(url)} at {commit} has the submodule {links[0]!r}, which is not fetched",
            "pin an sdist of the project, or a commit that has these files in its tree",
        )


def _fetch(repository: Repository, url: str, commit: str) -> None:
    """Fetch one commit: alone where the server allows it, else with all branches and tags."""
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


def _fetch_url(pin: GitPin, mirror: str | None) -> str:
    """The URL to fetch from: that of the pin, or its clone in the mirror."""
    url, project, subject = pin.url, pin.project, f"the git URL of {pin.project} {pin.version}"
    if not mirror:
        _git_urls.require_allowed(url, (*_git_urls.REMOTE, "file"), subject)
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
