"""Publish verified images and pull them again, by digest. What was published is listed in an index, ``images.json``.

A tag is never moved: one that a registry has already is refused. What is pulled must have the content that was verified, byte
for byte; the digest alone says only what the registry has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from sm120kit.daemon import Daemon
from sm120kit.errors import BadIndex, NotVerified, RegistryFailed, TagTaken
from sm120kit.records import Attested, Image, PublishedImage, Verdict, VerifiedImage
from sm120kit.workspace import read_record, write_record

FORMAT = 1


@dataclass(frozen=True)
class Index:
    """Every image that was published, sorted by recipe, build id and platform."""

    format: int
    images: tuple[PublishedImage, ...]


def read_index(path: Path) -> Index:
    """An index from its file; an empty one where there is none.

    Raises:
        BadIndex: it is not an index, or of another format.
    """
    if not path.is_file():
        return Index(FORMAT, ())
    try:
        index = read_record(Index, path)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise BadIndex(f"{path} is not an index of images: {where}: {first['msg']}", "restore it; publish writes it") from error
    if index.format != FORMAT:
        raise BadIndex(f"{path} has format {index.format}, this version reads {FORMAT}", "use the version that wrote it")
    return index


def publish(
    image: VerifiedImage,
    repository: str,
    index: Path,
    daemon: Daemon,
    attest: Callable[[PublishedImage], Attested],
    tell: Callable[[str], None] = lambda line: None,
) -> PublishedImage:
    """Push a verified image to ``repository`` and list it in ``index``. What is listed and still there is not pushed again.

    ``attest`` writes what is listed beside it, from the entry without it or from the one that is listed already.

    Raises:
        NotVerified: the image that has the name now is not the one that was verified, or a check failed.
        TagTaken: the registry has that tag with another image.
        RegistryFailed: it does not answer, or refuses.
    """
    require_passed(image)
    here = daemon.inspect(image.reference)
    if here is None or here.content != image.image.content:
        raise NotVerified(
            f"{image.reference} is {'gone' if here is None else 'another image now'}: it was verified with content "
            f"{image.image.content}",
            f"sm120kit verify image {image.reference}",
        )
    listed = read_index(index)
    tag = image.reference.rpartition(":")[2]
    target = f"{repository}:{tag}"
    there = daemon.in_registry(target)
    known = [one for one in listed.images if (one.repository, one.tag) == (repository, tag)]
    if there is not None and known and known[0].digest == there and known[0].verified.image.content == here.content:
        entry = known[0]
    else:
        if there is not None and not _ours(daemon, repository, there, here, tell):
            raise TagTaken(
                f"{target} is in the registry already, with another image: {there}", "tags are never moved; build another one"
            )
        digest = there or _pushed(here, repository, tag, daemon, tell)
        labels = here.labels
        entry = PublishedImage(
            repository, tag, digest, labels.get("sm120kit.recipe", ""), labels.get("sm120kit.build-id", ""), image
        )
    entry = replace(entry, attested=attest(entry))
    if known != [entry]:
        kept = [one for one in listed.images if one not in known]
        write_record(index, Index(FORMAT, tuple(sorted([*kept, entry], key=_order))))
    return entry


def _pushed(here: Image, repository: str, tag: str, daemon: Daemon, tell: Callable[[str], None]) -> str:
    """The digest under which a registry has an image after it was pushed."""
    target = f"{repository}:{tag}"
    daemon.tag(here.id, target)
    try:
        digest = daemon.push(target, tell)
    finally:
        daemon.remove(target)
    if daemon.in_registry(f"{repository}@{digest}") is None:
        raise RegistryFailed(f"{repository} does not have {digest} after a push", "look at the registry's log")
    return digest


def find(name: str, index: Path, platform: str) -> PublishedImage:
    """The entry of an index that a recipe's name, a tag or the start of a build id means, for ``platform``.

    Raises:
        BadIndex: there is none, or more than one.
    """
    images = read_index(index).images
    wanted = name.replace("@", "-")
    found = [
        one
        for one in images
        if one.verified.image.platform == platform
        and (wanted in (one.recipe, one.tag) or (len(name) >= 8 and one.build_id.startswith(name)))
    ]
    if not index.is_file():
        raise BadIndex(f"there is no index {index}", "publish writes it; --index names another")
    if not found:
        known = ", ".join(sorted({one.recipe for one in images})) or "nothing"
        raise BadIndex(f"{index} has no image {name!r} for {platform}", f"it lists {known}")
    if len(found) > 1:
        tags = ", ".join(one.tag for one in found)
        raise BadIndex(f"{index} has {len(found)} images {name!r} for {platform}", f"name one by its tag: {tags}")
    return found[0]


def pull(entry: PublishedImage, daemon: Daemon, tell: Callable[[str], None] = lambda line: None) -> VerifiedImage:
    """Pull an image by digest and give it its name, when it is the one that was verified; else nothing is kept.

    Raises:
        NotVerified: the index lists it without checks, or it is not the image that passed them.
        NoSuchImage, HashMismatch, RegistryFailed: the registry does not deliver what is listed.
    """
    require_passed(entry.verified)
    reference = f"{entry.repository}@{entry.digest}"
    pulled = daemon.pull(reference, tell)
    said = entry.verified.image
    if pulled.content != said.content or pulled.labels != said.labels:
        daemon.remove(reference)
        differ = [key for key in {**pulled.labels, **said.labels} if pulled.labels.get(key) != said.labels.get(key)]
        raise NotVerified(
            f"{reference} is not the image that was verified: its content is {pulled.content}, not {said.content}"
            + (f"; labels that differ: {', '.join(sorted(differ))}" if differ else ""),
            "it was not kept; ask whoever publishes the index",
        )
    daemon.tag(pulled.id, entry.verified.reference)
    return entry.verified


_LISTS = {"wheels": ("wheel", "=="), "patches": ("patch", "@"), "modules": ("module", "="), "archs": ("arch", "=")}
"""Labels that list things, what one is called, and what divides its name from its version or hash."""
_FOLLOWS = ("context", "reference")
"""Labels that differ whenever anything else does."""


def changes(before: Image, after: Image) -> tuple[str, ...]:
    """What is new in ``after``, a line each: wheels, patches, modules, base, build id and whatever else the labels name."""
    old, new = (_named(image.labels) for image in (before, after))
    found = [_change(what, old.get(what), new.get(what)) for what in sorted({**old, **new}) if old.get(what) != new.get(what)]
    if not found and before.content != after.content:
        found = ["its content, for no reason that its labels name"]
    return tuple(found)


def _named(labels: Mapping[str, str]) -> dict[str, str]:
    """Everything that labels name, each by its kind and name, with version, hash or value."""
    named = {"base": labels.get("org.opencontainers.image.base.digest", "")}
    for key in (key.removeprefix("sm120kit.") for key in labels if key.startswith("sm120kit.")):
        value = labels[f"sm120kit.{key}"]
        if key in _LISTS:
            what, divider = _LISTS[key]
            parts = (part.partition(divider) for part in value.split(",") if part)
            named |= {f"{what} {name}": version for name, _, version in parts}
        elif key not in _FOLLOWS:
            named[key] = value
    return named


def _change(what: str, old: str | None, new: str | None) -> str:
    if old is None or new is None:
        return " ".join(filter(None, (what, _short(old or new or ""), "added" if old is None else "removed")))
    return f"{what} {_short(old)} -> {_short(new)}"


def _short(value: str) -> str:
    """A value in which no digest has more than the 12 digits by which one knows it."""
    return re.sub(r"[0-9a-f]{40,}", lambda found: found[0][:12], value)


def unresolved(images: Sequence[PublishedImage], daemon: Daemon) -> tuple[PublishedImage, ...]:
    """Entries whose digest their registry does not have."""
    return tuple(one for one in images if daemon.in_registry(f"{one.repository}@{one.digest}") is None)


def require_passed(image: VerifiedImage) -> None:
    """A record must show checks, and none that failed.

    Raises:
        NotVerified: it does not.
    """
    failed = [f"{check.suite}/{check.name}" for check in image.checks if check.verdict is Verdict.FAILED]
    if failed or not any(check.verdict is Verdict.PASSED for check in image.checks):
        raise NotVerified(
            f"{image.reference} did not pass its checks: {', '.join(failed) or 'none was run'}",
            f"sm120kit verify image {image.reference}",
        )


def _ours(daemon: Daemon, repository: str, digest: str, here: Image, tell: Callable[[str], None]) -> bool:
    """Whether what a registry has is this very image: an earlier publish was interrupted before it wrote the index."""
    pulled = daemon.pull(f"{repository}@{digest}", tell)
    daemon.remove(f"{repository}@{digest}")
    return pulled.content == here.content


def _order(one: PublishedImage) -> tuple[str, str, str, str]:
    return one.recipe, one.build_id, one.verified.image.platform, one.tag
