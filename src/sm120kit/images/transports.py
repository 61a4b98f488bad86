"""Ways from and to a registry: through its HTTP API with the images in the state directory, or through the container daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sm120kit.core.disk import require_disk
from sm120kit.core.errors import NotVerified
from sm120kit.images.distribution import Compression, RegistryClient
from sm120kit.images.docker import Daemon
from sm120kit.images.image_records import Image
from sm120kit.images.oci import Layout


class ImageTransport(Protocol):
    """Local images, and how they are pushed and pulled. Errors are those of :class:`LayoutTransport`."""

    def inspect(self, reference: str) -> Image | None:
        """Look up a local image by id or tag; None if there is none."""

    def in_registry(self, repository: str, reference: str) -> str | None:
        """The digest of a tag or digest of a repository; None if the registry does not have it."""

    def push(self, image: Image, repository: str, tag: str) -> str:
        """Push a local image and return its digest in the registry."""

    def has_content(self, image: Image, repository: str, digest: str) -> bool:
        """Whether an image in a registry has the content of a local one."""

    def pull(self, expected: Image, repository: str, digest: str) -> Image:
        """Pull an image without a tag."""

    def tag(self, image: Image, reference: str) -> None:
        """Tag a local image."""

    def discard(self, image: Image, repository: str, digest: str) -> None:
        """Remove an image that :meth:`pull` returned, unless it was there before."""


class LayoutTransport:
    """Registries through their HTTP API; images in an OCI layout. No daemon is needed."""

    def __init__(self, layout: Layout, compression: Compression = Compression.GZIP) -> None:
        self.layout = layout
        self._compression = compression

    def inspect(self, reference: str) -> Image | None:
        """Look up an image by id, tag or digest; None if the layout does not have it."""
        manifest = self.layout.find(reference)
        return self.layout.image(manifest.digest) if manifest else None

    def in_registry(self, repository: str, reference: str) -> str | None:
        """See :meth:`sm120kit.images.distribution.RegistryClient.in_registry`."""
        with RegistryClient(repository) as client:
            return client.in_registry(reference)

    def push(self, image: Image, repository: str, tag: str) -> str:
        """See :meth:`sm120kit.images.distribution.RegistryClient.push`."""
        with RegistryClient(repository) as client:
            return client.push(self.layout, self._manifest(image), tag, self._compression)

    def has_content(self, image: Image, repository: str, digest: str) -> bool:
        """Whether an image in a registry has the content of a local one; its layers are read for that."""
        with RegistryClient(repository) as client:
            remote = client.image(digest, image.platform)
            if remote.content != image.content:
                return False
            client.verify(remote, self.layout)
        return True

    def pull(self, expected: Image, repository: str, digest: str) -> Image:
        """Pull an image into the layout. Its content and labels are compared before layers are fetched.

        Raises:
            NotVerified: it has other content, or other labels.
            NotFound, NotTrusted, RegistryFailed: see :meth:`RegistryClient.pull`.
            ResourceUnavailable: the state directory's file system is too small.
        """
        with RegistryClient(repository) as client:
            remote = client.image(digest, expected.platform)
            if remote.content != expected.content or remote.labels != expected.labels:
                raise other_image(f"{repository}@{digest}", remote.content, remote.labels, expected)
            missing = expected.bytes - sum(self._size(layer) for layer in {*remote.diff_ids})
            require_disk(self.layout.directory, max(0, missing), "the image")
            return self.layout.image(client.pull(self.layout, remote).digest)

    def tag(self, image: Image, reference: str) -> None:
        """Tag an image. The tag moves if another image has it."""
        self.layout.tag(self._manifest(image), reference)

    def discard(self, image: Image, repository: str, digest: str) -> None:
        """Remove an image, unless it has a tag."""
        manifest = self._manifest(image)
        if not any(references for listed, references in self.layout.images() if listed.digest == manifest):
            self.layout.remove(manifest)

    def _size(self, layer: str) -> int:
        return self.layout.path(layer).stat().st_size if self.layout.has(layer) else 0

    def _manifest(self, image: Image) -> str:
        manifest = self.layout.find(image.id)
        assert manifest is not None
        return manifest.digest


class DaemonTransport:
    """Registries and images of the container daemon."""

    def __init__(self, daemon: Daemon, report: Callable[[str], None] = lambda line: None) -> None:
        self._daemon = daemon
        self._report = report

    def inspect(self, reference: str) -> Image | None:
        """See :meth:`Daemon.inspect`."""
        return self._daemon.inspect(reference)

    def in_registry(self, repository: str, reference: str) -> str | None:
        """See :meth:`Daemon.in_registry`."""
        return self._daemon.in_registry(f"{repository}{'@' if reference.startswith('sha256:') else ':'}{reference}")

    def push(self, image: Image, repository: str, tag: str) -> str:
        """See :meth:`Daemon.push`."""
        target = f"{repository}:{tag}"
        self._daemon.tag(image.id, target)
        try:
            return self._daemon.push(target, self._report)
        finally:
            self._daemon.remove(target)

    def has_content(self, image: Image, repository: str, digest: str) -> bool:
        """Whether an image in a registry has the content of a local one; it is pulled for that."""
        pulled = self._daemon.pull(f"{repository}@{digest}", self._report)
        self._daemon.remove(f"{repository}@{digest}")
        return pulled.content == image.content

    def pull(self, expected: Image, repository: str, digest: str) -> Image:
        """See :meth:`Daemon.pull`."""
        return self._daemon.pull(f"{repository}@{digest}", self._report)

    def tag(self, image: Image, reference: str) -> None:
        """See :meth:`Daemon.tag`."""
        self._daemon.tag(image.id, reference)

    def discard(self, image: Image, repository: str, digest: str) -> None:
        """See :meth:`Daemon.remove`."""
        self._daemon.remove(f"{repository}@{digest}")


def transport_of(reference: str, layout: Layout, compression: Compression, report: Callable[[str], None]) -> ImageTransport:
    """The transport of the layout if it has an image, else that of the daemon.

    Raises:
        DaemonUnreachable, RequirementMissing: the layout does not have it, and no daemon can be used.
    """
    if layout.find(reference):
        return LayoutTransport(layout, compression)
    return DaemonTransport(Daemon(), report)


def other_image(shown: str, content: str, labels: dict[str, str], expected: Image) -> NotVerified:
    """The error about an image in a registry that is not the one that was verified."""
    names = {**labels, **expected.labels}
    differ = sorted(key for key in names if labels.get(key) != expected.labels.get(key))
    return NotVerified(
        f"{shown} is not the image that was verified: its content is {content}, not {expected.content}"
        + (f"; labels that differ: {', '.join(differ)}" if differ else ""),
        "nothing of it is kept; report it to the publisher of the index",
    )
