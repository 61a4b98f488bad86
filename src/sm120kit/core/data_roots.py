"""The directories with recipes, patches and configurations."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from sm120kit.core.errors import NotFound, SystemRefused


def data_root() -> Path:
    """The directory that holds ``recipes/``, ``patches/`` and ``cutlass_overrides/``.

    The directory in ``SM120KIT_DATA``, else the data in the installed wheel, else the top level of a checkout.

    Raises:
        NotFound: ``SM120KIT_DATA`` names a directory without recipes.
    """
    named = os.environ.get("SM120KIT_DATA")
    if named:
        root = Path(os.path.realpath(named))
        if not (root / "recipes").is_dir():
            problem = "has no recipes/" if root.is_dir() else "is not a directory"
            raise NotFound(f"SM120KIT_DATA names {root}, which {problem}", "unset it, or name a copy of sm120kit's data")
        return root
    package = Path(__file__).resolve().parents[1]
    installed = package / "data"
    return installed if (installed / "recipes").is_dir() else package.parents[1]


def writable_data_root() -> Path:
    """The data directory, for a command that writes recipes, patches, proofs or locks to it.

    Raises:
        SystemRefused: it is part of an installation.
    """
    root = data_root()
    require_not_installed(root)
    return root


def require_not_installed(path: Path) -> None:
    """Require that a file to be written is not in the data of an installation, whose next version deletes it.

    Raises:
        SystemRefused: it is.
    """
    with suppress(NotFound):
        root = data_root()
        if _is_installed(root) and Path(os.path.realpath(path)).is_relative_to(root):
            raise SystemRefused(
                f"{root} is part of an installation of sm120kit, and the next installation deletes what is written there",
                "work in a git clone of sm120kit (pip install -e CLONE), or name a copy of this directory with SM120KIT_DATA",
            )


def _is_installed(root: Path) -> bool:
    return root.is_relative_to(Path(__file__).resolve().parents[1]) or bool({"site-packages", "dist-packages"} & {*root.parts})
