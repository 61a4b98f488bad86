"""The directories with recipes, patches and configurations: the user's own repository, above the data that is built in."""

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from sm120kit.core._users import user_label
from sm120kit.core.errors import BadInput, NotFound, NotTrusted, SystemRefused, did_you_mean
from sm120kit.core.outside import file_problem, read_toml

REPOSITORY_FILE = "sm120kit.toml"
"""The file that marks a user's repository."""

FOLDERS = ("recipes", "patches", "configurations", "files")
"""The directories of a user's repository."""

EDITION = 1
"""The value of ``edition`` in :data:`REPOSITORY_FILE`; raised when the form of a repository changes."""

MAX_FILES = 1000
"""Limit for the recipes or configurations of a directory."""

_OWN_FOLDERS = {"engines": "recipes", "configurations": "configurations"}
"""Directories of a user's repository by that of the built-in data below ``recipes/``; others have the same path in both."""


def data_root() -> Path:
    """The directory of the built-in data: ``recipes/``, ``patches/`` and ``cutlass_overrides/``.

    The directory in ``SM120KIT_DATA``; else, in a clone of sm120kit, that clone; else the data in the installed wheel.

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
    if not (installed / "recipes").is_dir():
        return package.parents[1]
    return next((directory for directory in _upward() if _is_clone(directory)), installed)


def user_repository() -> Path | None:
    """The user's repository: the nearest directory with ``sm120kit.toml``, upward from the working directory.

    Raises:
        NotTrusted: it belongs to another user, whose patches would run in builds.
        BadInput: the file is malformed, a directory of the repository is a link that leaves it, or a recipe or configuration
            is where only built-in ones are.
    """
    for directory in _upward():
        if os.path.lexists(directory / REPOSITORY_FILE):
            _require_usable(directory)
            return directory
    return None


def top_root() -> Path:
    """The directory whose patch series are read: the user's repository, whose series lie above the built-in ones, or these."""
    return user_repository() or data_root()


def built_in_below(root: Path) -> Path | None:
    """The built-in patches below the ``patches/`` of a user's repository; None for all other directories."""
    return data_root() / root.name if not file_problem(root.parent / REPOSITORY_FILE) else None


def folders(kind: str) -> list[Path]:
    """The directories with files of a kind, such as ``engines``: the user's first.

    A kind is a directory below the built-in ``recipes/``.
    """
    own = user_repository()
    return [*([own_folder(own, kind)] if own else []), data_root() / "recipes" / kind]


def own_folder(repository: Path, kind: str) -> Path:
    """The directory of a user's repository with files of a kind."""
    return repository / _OWN_FOLDERS.get(kind, f"recipes/{kind}")


def find(kind: str, name: str) -> Path:
    """The file of a kind with a name: the user's if there is one, else the built-in, which may not exist."""
    paths = [folder / name for folder in folders(kind)]
    return next((path for path in paths if os.path.lexists(path)), paths[-1])


def entries(kind: str) -> Mapping[str, Path]:
    """The TOML files of a kind by their stem; the user's override the built-in.

    Raises:
        BadInput: there are more than :data:`MAX_FILES` in a directory.
    """
    found: dict[str, Path] = {}
    for folder in reversed(folders(kind)):
        paths = [*islice(folder.glob("*.toml"), MAX_FILES + 1)]
        if len(paths) > MAX_FILES:
            raise BadInput(f"{folder} has more than {MAX_FILES} files *.toml", "move those that are not in use elsewhere")
        found |= {path.stem: path for path in sorted(paths)}
    return found


def origin(kind: str, path: Path) -> str:
    """Where a file of a kind comes from, in words: built in, or the user's own, with what it overrides."""
    built_in = data_root() / "recipes" / kind / path.name
    return origin_of(path != built_in, built_in.exists())


def origin_of(is_own: bool, is_built_in: bool) -> str:
    """The words for something that is the user's own, built in, or both."""
    return ("own, overrides the built-in" if is_built_in else "own") if is_own else "built-in"


def writable_folder(kind: str) -> Path:
    """The directory to which files of a kind are written. See :func:`writable_data_root` for errors."""
    own = user_repository()
    return own_folder(own, kind) if own else writable_data_root() / "recipes" / kind


def writable_data_root() -> Path:
    """The directory to which recipes, patches and locks are written: the user's repository, a clone, or ``SM120KIT_DATA``.

    Raises:
        SystemRefused: the working directory is in neither, so that built-in data would be changed.
    """
    if own := user_repository():
        return own
    root = data_root()
    require_not_installed(root)
    if not os.environ.get("SM120KIT_DATA") and root not in _upward():
        raise SystemRefused(
            f"the data in {root} is read-only outside that clone of sm120kit",
            f"make a repository of your own (sm120kit init DIR) and work in it; or, to change sm120kit itself, in {root}",
        )
    return root


def require_writable(path: Path) -> None:
    """Require that a recipe or lock may be written: it is no built-in data, or the working directory is in its clone.

    Raises:
        SystemRefused: it may not.
    """
    require_not_installed(path)
    if path.is_relative_to(data_root() / "recipes"):
        writable_data_root()


def require_not_installed(path: Path) -> None:
    """Require that a file to be written is not in the data of an installation, and that no link leads out of a repository.

    The next version of an installation deletes what is in it.

    Raises:
        SystemRefused: it is, or one does.
    """
    real = Path(os.path.realpath(path))
    with suppress(NotFound):
        root = data_root()
        if _is_installed(root) and real.is_relative_to(root):
            raise SystemRefused(
                f"{root} is part of an installation of sm120kit, and the next installation deletes what is written there",
                "make a repository of your own (sm120kit init DIR) and work in it, or work in a git clone of sm120kit; or name"
                " a copy of this directory with SM120KIT_DATA",
            )
    above = Path(os.path.normpath(path.absolute())).parents  # ../x of a repository is not in it
    own = next((each for each in above if not file_problem(each / REPOSITORY_FILE)), None)
    if own and not real.is_relative_to(os.path.realpath(own)):
        raise SystemRefused(f"{path} is outside {own}: a link in it leads to {real}", "replace the link by a directory")


def _upward() -> list[Path]:
    """The working directory and those above it; none if it no longer exists."""
    try:
        directory = Path.cwd()
    except FileNotFoundError:
        return []
    return [directory, *directory.parents]


def _is_clone(directory: Path) -> bool:
    needed = ("recipes/engines", "patches", "cutlass_overrides", "src/sm120kit/core")
    return all((directory / name).is_dir() for name in needed) and _is_trusted(directory)


def _is_installed(root: Path) -> bool:
    return root.is_relative_to(Path(__file__).resolve().parents[1]) or bool({"site-packages", "dist-packages"} & {*root.parts})


def _is_trusted(path: Path) -> bool:
    return path.stat().st_uid in (os.geteuid(), 0)


def _require_usable(repository: Path) -> None:
    """Require that a repository belongs to this user or root, that its file is well-formed, and that it is complete in itself.

    See :func:`user_repository` for errors.
    """
    file = repository / REPOSITORY_FILE
    try:
        for path in (repository, file):
            if not _is_trusted(path):
                owner = user_label(path.stat().st_uid)
                raise NotTrusted(
                    f"{path} belongs to {owner}, not to {user_label(os.geteuid())}: patches of its repository run in builds",
                    f"work as that user, or elsewhere; if you trust all of it: chown -R {os.geteuid()} {repository}",
                )
        content = read_toml(file)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}", "make it a readable file, or remove it") from error
    except ValueError as error:
        raise BadInput(f"{file}: not TOML: {error}", f"its content is: edition = {EDITION}") from error
    unknown = sorted({*content} - {"edition"})
    if unknown:
        raise BadInput(f"{file}: {unknown[0]}: unknown key{did_you_mean(unknown[0], ['edition'])}", "its only key is edition")
    if content.get("edition") != EDITION or isinstance(content["edition"], bool):
        found = f"edition: {content['edition']!r}" if "edition" in content else "edition: missing"
        raise BadInput(f"{file}: {found}", f"this version of sm120kit reads edition = {EDITION}")
    for folder in (repository / name for name in FOLDERS):
        if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(repository)):
            raise BadInput(f"{folder} is a link that leaves the repository", "replace it by a directory")
    for kind, own in _OWN_FOLDERS.items():
        if misplaced := next((repository / "recipes" / kind).glob("*.toml"), None):
            raise BadInput(f"{misplaced} is not where it is read", f"move it to {repository / own}")
