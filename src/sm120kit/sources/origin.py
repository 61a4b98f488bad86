"""The mirror, index and network options of a command."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core.errors import BadInput, OfflineMiss
from sm120kit.sources._settings import Settings, read_settings
from sm120kit.sources.index import local_directory
from sm120kit.sources.source_records import APT_SOURCES, DebianArchives


@dataclass(frozen=True)
class Origin:
    """Where sources and wheels are fetched from.

    ``mirror`` is used instead of indexes and git hosts. ``index_url`` replaces the index of pip's and uv's settings;
    ``find_links`` are searched before it. ``offline`` allows only cached files and a mirror that is a local directory.
    ``debian`` are the archives of Debian packages.
    """

    mirror: str | None = None
    index_url: str = ""
    find_links: tuple[str, ...] = ()
    offline: bool = False
    debian: DebianArchives = APT_SOURCES

    @property
    def directory(self) -> Path | None:
        """The mirror's directory, if it is local."""
        return local_directory(self.mirror)

    @property
    def reachable(self) -> bool:
        """Whether a file that is not cached may be fetched."""
        return not self.offline or self.directory is not None

    def require_reachable(self, what: str, absent: Sequence[str], downloads: Path) -> None:
        """Require that ``what``, files that are not cached, may be fetched; ``absent`` are their names.

        Raises:
            OfflineMiss: they may not.
        """
        if not self.reachable:
            listed = ", ".join(absent[:3]) + (", ..." if len(absent) > 3 else "")
            raise OfflineMiss(
                f"{what} are not cached and --offline is given: {listed}",
                f"name a directory that holds them with --mirror, or copy each to {downloads}/<sha256>/",
            )

    @property
    def links(self) -> tuple[str, ...]:
        """``find_links``, with absolute paths of directories."""
        return tuple(link if "://" in link else str(Path(link).expanduser().absolute()) for link in self.find_links)

    def settings(self) -> Settings:
        """The settings of pip and uv, with the options of this command applied; empty for a local mirror.

        Raises:
            BadInput: ``index_url`` is not a URL.
        """
        if self.directory is not None:
            return Settings(no_index=True)
        settings = read_settings()
        if self.index_url:
            if not self.index_url.startswith(("https://", "http://", "file:///")):
                raise BadInput(f"{self.index_url!r} is not the URL of a package index", "write https://HOST/PATH/simple")
            settings = replace(settings, index=(self.index_url,), no_index=False)
        return replace(settings, find_links=tuple(dict.fromkeys((*self.links, *settings.find_links))))


DEFAULT = Origin()
"""The settings of pip, uv and git."""
