"""Views of an image without what builds of one FlashInfer version differ in.

They lack the directory ``flashinfer/data`` (CUDA sources, headers, compiled modules) or a part of it, and the records of the
installed wheel, and FlashInfer has its public version. Checks that run in a view read nothing that it lacks. Its digest covers
everything that they can read, so that images with the same digest have the same results: after a change of what the view lacks,
they need not run again. ``sm120kit verify image`` runs them in the whole image.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit.core.state import digest_of, file_sha256
from sm120kit.images import rootfs
from sm120kit.images.rootfs import LayerRecord, UnpackedLayer

FORMAT = 1
"""Version of what a view lacks; part of its digest."""

VIEWS: dict[str, tuple[str, ...]] = {"without kernels": (), "with sources": ("csrc",)}
"""The directories of ``flashinfer/data`` that each view keeps."""

_METADATA = re.compile(r"flashinfer_python-[^/+]+(?P<local>\+sm120kit\.[0-9a-f]{12})\.dist-info")
_LACKS = ("RECORD", "sm120kit.json")
_VERSIONED = ("METADATA", "_build_meta.py")


@dataclass(frozen=True)
class KernelFreeView:
    """The layers of a view, lowest first, and the sha256 of all that they contain."""

    layers: tuple[UnpackedLayer, ...]
    digest: str


def view(layers: Sequence[UnpackedLayer], site: str, directory: Path, keeps: Sequence[str] = ()) -> KernelFreeView | None:
    """The view of an image whose Python packages are in ``site``, a path relative to its root.

    It keeps the directories ``keeps`` of ``flashinfer/data``.

    The files that replace those of FlashInfer's layers are written below ``directory``, an empty directory. None if the image
    has no FlashInfer that sm120kit built, or one of its layers removes files.
    """
    package = f"{site}/flashinfer"
    replaced = [layer for layer in layers if (layer.tree / package).is_dir()]
    names = [path.name for layer in replaced for path in (layer.tree / site).iterdir()]
    installed = [match for name in names if (match := _METADATA.fullmatch(name))]
    if len(installed) != 1 or any(layer.record.whiteouts for layer in replaced):
        return None
    metadata, local = installed[0][0], installed[0]["local"]
    tree = directory / "tree"
    tree.mkdir(mode=0o755)
    known = rootfs.digests(replaced)
    entries: list[tuple[str, str, str]] = []
    owners: dict[str, str] = {}
    modes: dict[str, int] = {}
    for entry in rootfs.walk(replaced):
        path, name = entry.path.replace(f"/{metadata}", f"/{metadata.replace(local, '')}"), entry.source.name
        inside = entry.path.removeprefix(f"{package}/data/") if entry.path.startswith(f"{package}/data/") else ""
        below = inside.partition("/")[0] not in keeps if inside else entry.path == f"{package}/data" and not keeps
        of_metadata = f"/{metadata}/" in entry.path
        if below or (of_metadata and name in _LACKS) or name.startswith("_build_meta.cpython-"):
            continue
        target, status = tree / path, entry.source.lstat()
        mode = entry.layer.record.modes.get(entry.path, stat.S_IMODE(status.st_mode))
        if entry.below:
            target.mkdir()
            target.chmod(stat.S_IMODE(status.st_mode))
            content = ""
        elif entry.path == f"{package}/_build_meta.py" or (of_metadata and name in _VERSIONED):
            target.write_text(entry.source.read_text().replace(local, ""))
            target.chmod(stat.S_IMODE(status.st_mode))
            content = file_sha256(target)
        else:
            rootfs.link_or_copy(entry.source, target)
            content = f"link {entry.source.readlink()}" if stat.S_ISLNK(status.st_mode) else known.get(f"/{entry.path}", "")
            content = content or file_sha256(entry.source)
        record = entry.layer.record
        owners |= {path: record.owners[entry.path]} if entry.path in record.owners else {}
        modes |= {path: record.modes[entry.path]} if entry.path in record.modes else {}
        entries.append((path, f"{mode:o} {owners.get(path, '')}", content))
    others = [layer for layer in layers if layer not in replaced]
    position = sum(layer not in replaced for layer in layers[: layers.index(replaced[-1])])
    stand_in = UnpackedLayer(tree, LayerRecord(owners, modes, whiteouts=False))
    digest = digest_of([FORMAT, [layer.tree.parent.name for layer in others], position, sorted(entries)])
    return KernelFreeView((*others[:position], stand_in, *others[position:]), digest)
