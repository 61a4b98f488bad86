"""A commit of a git repository, its submodules put in their places, becomes one plain tree."""

from __future__ import annotations

import os
import re
from urllib.parse import urljoin, urlsplit

from sm120kit import console
from sm120kit.errors import FetchFailed
from sm120kit.gitrepo import Repository
from sm120kit.process import Completed
from sm120kit.records import GitPin
from sm120kit.sources.places import local_directory, redacted, repository_name

_MAX_DEPTH = 8


def import_commit(pin: GitPin, repository: Repository, ref: str, mirror: str | None) -> None:
    """Fetch a pinned commit and commit its tree, with every submodule's tree at its path, as ``ref`` of an empty repository.

    The base commit has no parents and our own identity and date; its message names the upstream commit.

    Raises:
        FetchFailed: a repository cannot be read or does not have the commit that is asked of it.
    """
    with console.progress() as display:
        display.add_task(f"fetching {pin.project} {pin.version}", total=None)
        _fetch(repository, pin.url, pin.commit, mirror, pin.project, pin.version)
        tree = _whole_tree(repository, pin.url, pin.commit, mirror, ())
    message = f"{pin.project} {pin.version}\n\ncommit: {pin.commit}\n"
    repository.point(ref, repository.commit_tree(tree, None, message))


def _whole_tree(repository: Repository, url: str, commit: str, mirror: str | None, above: tuple[str, ...]) -> str:
    listed = repository.git("ls-tree", "-r", "-z", commit).raw.split(b"\0")
    links = {}
    for line in listed:
        entry, _, name = line.partition(b"\t")
        if entry.startswith(b"160000 "):
            links[os.fsdecode(name)] = entry.split()[2].decode()
    if not links:
        return repository.tree_of(commit)
    if len(above) >= _MAX_DEPTH:
        raise FetchFailed(f"submodules nest more than {_MAX_DEPTH} deep: {'/'.join(above)}", "pin another commit")
    urls = _submodule_urls(repository, commit)
    with repository.index(commit) as index:
        for path, wanted in sorted(links.items()):
            if path not in urls:
                raise FetchFailed(
                    f"{redacted(url)} at {commit} records a submodule at {path} but no URL for it",
                    "pin a commit whose .gitmodules is complete",
                )
            its_url = _resolve(url, urls[path])
            _fetch(repository, its_url, wanted, mirror, repository_name(its_url).removesuffix(".git"))
            index.graft(path, _whole_tree(repository, its_url, wanted, mirror, (*above, path)))
        return index.write_tree()


def _submodule_urls(repository: Repository, commit: str) -> dict[str, str]:
    """Path to URL, as ``.gitmodules`` of a commit has them."""
    read = repository.git("config", "--blob", f"{commit}:.gitmodules", "-z", "--list", check=False)
    modules: dict[str, dict[str, str]] = {}
    for entry in read.raw.decode(errors="surrogateescape").split("\0"):
        name, _, value = entry.partition("\n")
        if name.startswith("submodule."):
            section, _, key = name.removeprefix("submodule.").rpartition(".")
            modules.setdefault(section, {})[key] = value
    return {module["path"]: module["url"] for module in modules.values() if "path" in module and "url" in module}


def _resolve(parent: str, url: str) -> str:
    """A submodule's URL; ``./`` and ``../`` count from its parent's."""
    if not url.startswith(("./", "../")):
        return url
    if urlsplit(parent).scheme:
        scheme, rest = parent.rstrip("/").split("://", 1)
        return f"{scheme}://" + urljoin(f"http://{rest}/", url).removeprefix("http://")
    host, colon, path = parent.rpartition(":")
    return host + colon + os.path.normpath(f"{path}/{url}")


def _fetch(repository: Repository, url: str, commit: str, mirror: str | None, project: str, version: str = "") -> None:
    """Have one commit: asked for alone where the other side grants that, else with all branches and tags."""
    place = _place(url, mirror, project)
    ref = f"refs/upstream/{commit}"
    options = ["--quiet", "--no-tags", "--no-write-fetch-head", "--no-recurse-submodules", "--no-auto-maintenance"]
    alone = repository.git("fetch", *options, "--depth=1", place, f"+{commit}:{ref}", check=False, network=True)
    if alone.returncode != 0 and "not our ref" not in alone.stderr:
        heads_and_tags = [f"+refs/{kind}/*:refs/other/{commit}/{kind}/*" for kind in ("heads", "tags")]
        every = repository.git("fetch", *options, place, *heads_and_tags, check=False, network=True)
        if every.returncode != 0:
            raise FetchFailed(
                f"{redacted(place)} cannot be read: {_reason(every)}",
                "check the URL, the network and git's settings, or --mirror",
            )
    kind = repository.git("cat-file", "-t", commit, check=False).stdout.strip()
    if kind == "commit":
        repository.point(ref, commit)
        return
    if kind:
        raise FetchFailed(f"{commit} is a {kind} in {redacted(place)}, not a commit", "pin the commit that it names")
    raise FetchFailed(f"{redacted(place)} has no commit {commit}{_tag_now(repository, place, version)}", "check the pin")


def _place(url: str, mirror: str | None, project: str) -> str:
    """What git is told to fetch from."""
    name = repository_name(url)
    directory = local_directory(mirror)
    if directory is None:
        return f"{mirror.rstrip('/')}/{name}" if mirror else url
    stem = name.removesuffix(".git")
    names = [name, stem, f"{stem}.bundle", f"{project}.git", project, f"{project}.bundle"]
    for candidate in names:
        if (directory / candidate).exists():
            return str(directory / candidate)
    raise FetchFailed(
        f"the mirror {directory} has no clone of {redacted(url)}", f"looked for {', '.join(dict.fromkeys(names))} in it"
    )


def _tag_now(repository: Repository, place: str, version: str) -> str:
    """Where the version's tag points by now, when the pinned commit is gone."""
    if not version:
        return ""
    tags = [f"refs/tags/{prefix}{version}{peeled}" for prefix in ("v", "") for peeled in ("^{}", "")]
    listed = repository.git("ls-remote", place, *tags, check=False, network=True).stdout.split()
    there = dict(zip(listed[1::2], listed[::2], strict=False))
    for tag in tags:
        if tag in there:
            return f"; its tag {tag.removeprefix('refs/tags/').removesuffix('^{}')} is at {there[tag]} now"
    return ""


def _reason(failed: Completed) -> str:
    lines = [line for line in failed.stderr.splitlines() if re.match(r"(fatal|error|remote|ERROR)\b", line)]
    return re.sub(r"//[^/@\s]+@", "//", lines[0]) if lines else f"git ended with exit code {failed.returncode}"
