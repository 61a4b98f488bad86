"""All local images: those in the state directory, and those in the container daemon if there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sm120kit.core.errors import DaemonUnreachable, NotFound, RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images.docker import Daemon
from sm120kit.images.image_records import ContainerResult, Image, ImageStore
from sm120kit.images.local_images import LocalImages


class EveryStore:
    """The state directory's images, then the daemon's. An image that both have is that of the state directory.

    The daemon is contacted for what the state directory does not have.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.layout = LocalImages(workspace)
        self.unreachable: DaemonUnreachable | RequirementMissing | None = None
        """Why no daemon is used, once it was contacted."""

    @cached_property
    def daemon(self) -> Daemon | None:
        """The daemon; None if there is none."""
        try:
            return Daemon()
        except (DaemonUnreachable, RequirementMissing) as error:
            self.unreachable = error
            return None

    def stores(self) -> dict[str, ImageStore]:
        """The stores that can be used, by name."""
        return {"state directory": self.layout, **({"docker": self.daemon} if self.daemon else {})}

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if no store has it."""
        image = self.layout.inspect(reference)
        return self.daemon.inspect(reference) if image is None and self.daemon else image

    def find(self, reference: str) -> Image:
        """Look up an image that must exist.

        Raises:
            NotFound: no store has it.
            DaemonUnreachable, RequirementMissing: the state directory does not have it, and no daemon can be used.
        """
        image = self.inspect(reference)
        if image is not None:
            return image
        if self.unreachable is not None:
            message = f"the state directory has no image {reference}, and the container daemon cannot be used: "
            raise type(self.unreachable)(message + self.unreachable.message, self.unreachable.hint)
        raise NotFound(f"there is no image {reference}", "sm120kit build builds it, sm120kit pull fetches it")

    def images(self, label: str) -> list[tuple[Image, tuple[str, ...]]]:
        """All images with a label, each with its tags; those of the state directory first."""
        return [entry for store in self.stores().values() for entry in store.images(label)]

    def base_of(self, image: Image) -> Image | None:
        """The base in an image's labels; None if they have none or its store does not have it."""
        return self._of(image.id).base_of(image)

    def settings(self, reference: str) -> dict[str, Any]:
        """The settings with which a container of an image starts."""
        return self._of(reference).settings(reference)

    def history(self, reference: str) -> tuple[str, ...]:
        """The build commands in the history of an image, newest first."""
        return self._of(reference).history(reference)

    def run(self, image: str, argv: Sequence[str], files: Mapping[str, bytes]) -> ContainerResult:
        """Run a program as the image's user, by the store that has it."""
        return self._of(image).run(image, argv, files)

    def owners(self, image: str) -> dict[str, str] | None:
        """See :meth:`ImageStore.owners`."""
        return self._of(image).owners(image)

    def digests(self, image: str) -> dict[str, str]:
        """See :meth:`ImageStore.digests`."""
        return self._of(image).digests(image)

    def fetch(self, image: str, path: str, into: Path) -> bool:
        """Copy a file or directory of an image below ``into``; false if the image does not have it."""
        return self._of(image).fetch(image, path, into)

    def tag(self, image: str, reference: str) -> None:
        """Tag an image in its store."""
        self._of(image).tag(image, reference)

    def remove(self, reference: str) -> None:
        """Remove a tag from the store that has it."""
        self._of(reference).remove(reference)

    def _of(self, reference: str) -> ImageStore:
        """The store that has an image."""
        self.find(reference)
        return self.layout if self.layout.inspect(reference) is not None or self.daemon is None else self.daemon
