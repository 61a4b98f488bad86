"""The index of published images, ``images.json``: read it strictly and find an image in it."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.errors import BadInput, BadRecord, NotFound, RegistryFailed
from sm120kit.core.outside import file_problem
from sm120kit.core.record_files import read_record
from sm120kit.images.image_records import PublishedImage
from sm120kit.sources.debian import ARCHITECTURES

FORMAT = 1

REPOSITORY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::\d+)?(?:/[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*)*")
"""A registry's host and port, and lower-case names (https://distribution.github.io/distribution/spec/api/)."""


def require_repository(repository: str) -> None:
    """Require a repository with its registry, or with a user of Docker Hub: without a slash it would be Docker Hub's own.

    Raises:
        RegistryFailed: it is malformed.
    """
    if not REPOSITORY.fullmatch(repository) or "/" not in repository:
        raise RegistryFailed(
            f"{repository!r} is not a repository",
            "REGISTRY/NAME, without scheme, user name and tag; docker login keeps the credentials of a registry",
        )


_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_TIME = re.compile(r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?")


@dataclass(frozen=True)
class PublishedIndex:
    """All published images, sorted by recipe, build id and platform."""

    format: int
    images: tuple[PublishedImage, ...]


def read_index(path: Path) -> PublishedIndex:
    """Read an index from its file.

    Raises:
        BadInput: the file is missing, not an index, or of another format.
    """
    if why := file_problem(path):
        raise BadInput(f"the index {path} {why}", "publish writes it; --index names another")
    try:
        index = read_record(PublishedIndex, path, "an index of images")
    except (BadRecord, OSError) as error:
        why = f"{path}: {error.strerror}" if isinstance(error, OSError) else error.message
        raise BadInput(why, "restore it; publish writes it") from error
    if index.format != FORMAT:
        raise BadInput(f"{path} has format {index.format}, this version reads {FORMAT}", "use the version that wrote it")
    for image in index.images:
        for field, value, pattern in (
            ("repository", image.repository, REPOSITORY),
            ("digest", image.digest, _DIGEST),
            ("time of publishing", image.published, _TIME),
        ):
            if not pattern.fullmatch(value):
                raise BadInput(f"{path}: {image.tag}: {value!r} is not a {field}", "restore the index; publish writes it")
    return index


def own_platform() -> str:
    """The platform of images that run on this machine, as ``linux/arm64``."""
    machine = os.uname().machine
    return f"linux/{ARCHITECTURES.get(machine, machine)}"


def any_machine(recipe: str) -> str:
    """The name that recipes of the same engine for several kinds of machines share: those for DGX Spark end in ``-spark``."""
    return recipe.removesuffix("-spark")


def find_image(name: str, path: Path, platform: str) -> PublishedImage:
    """Find the image for ``platform`` in an index by recipe name, tag, or the first 8 or more digits of its build id.

    A recipe's name without the kind of machine selects that for ``platform``.

    Raises:
        NotFound: there is none, or more than one.
        BadInput: see :func:`read_index`.
    """
    images = read_index(path).images
    recipe_or_tag = name.replace("@", "-")
    matches = [
        image
        for image in images
        if image.verified.image.platform == platform
        and (
            recipe_or_tag in (image.recipe, any_machine(image.recipe), image.tag)
            or (len(name) >= 8 and image.build_id.startswith(name))
        )
    ]
    if not matches:
        recipes = ", ".join(sorted({image.recipe for image in images})) or "nothing"
        raise NotFound(f"{path} has no image {name!r} for {platform}", f"it lists {recipes}")
    if len(matches) > 1:
        tags = ", ".join(image.tag for image in matches)
        raise NotFound(f"{path} has {len(matches)} images {name!r} for {platform}", f"select by tag: {tags}")
    return matches[0]
