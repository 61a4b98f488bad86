"""Make a user's own repository for recipes, patches and configurations."""

import os
from pathlib import Path

from sm120kit.core import data_roots, process
from sm120kit.core.disk import disk_error, disk_errors
from sm120kit.core.errors import AlreadyExists, RequirementMissing, SystemRefused
from sm120kit.core.temporary import publish_directory

_README = """\
# {name}

Recipes, patches and configurations for sm120kit. Commands that run below this directory read it before the data that is built
into sm120kit, and write only here.

    sm120kit patch edit RECIPE --into DIR           # the source with the patches as commits: change it, commit
    sm120kit patch export RECIPE --from DIR         # write the commits to patches/
    sm120kit recipe lock RECIPE                     # lock them, for `sm120kit build RECIPE`

| directory | content |
|---|---|
| `recipes/` | recipes and their lockfiles |
| `patches/<project>/` | `series` and a patch file for each of its lines, applied after the built-in series |
| `configurations/` | how models are served |
| `files/` | files that recipes add to images |

A file with the name of a built-in one replaces it; `sm120kit recipe list`, `patch list` and `config list` print which do.
"""

_IGNORED = """\
__pycache__/
*.partial
"""


def make(directory: Path) -> Path:
    """Make a git repository with the directories of a user's repository, all or nothing; returns its path.

    Nothing is committed. Inside the work tree of another git repository, no second one is made.

    Raises:
        AlreadyExists: the directory is in a repository of sm120kit already, or is not empty.
        RequirementMissing: there is no git.
        SystemRefused: it is a file, or cannot be written.
    """
    directory = Path(os.path.realpath(directory))  # a link to itself stays one, which creating it reports
    _require_outside_others(directory)
    with disk_errors(directory):
        existing = next(above for above in (directory, *directory.parents) if above.exists())
        if not existing.is_dir():
            raise SystemRefused(f"{existing} is a file", "name a new or empty directory")
        if not os.access(existing, os.W_OK):
            raise SystemRefused(f"{existing} cannot be written to", "name a directory elsewhere: sm120kit init DIR")
        if directory.exists() and any(directory.iterdir()):
            raise AlreadyExists(f"{directory} is not empty", "name a new or empty directory")
    if process.find_program("git") is None:
        raise RequirementMissing("git is not installed, or not in PATH", "install it: apt-get install git")
    try:
        with publish_directory(directory) as new:
            _write(new, directory.name)
            if not _is_in_git(directory):
                process.run(["git", "init", "--quiet", new])
    except OSError as error:  # as below /proc
        refused = SystemRefused(
            f"{directory} cannot be made: {error.strerror}", "name a directory elsewhere: sm120kit init DIR"
        )
        raise disk_error(error, directory) or refused from error
    return directory


def _require_outside_others(directory: Path) -> None:
    for above in (directory, *directory.parents):
        if (above / data_roots.REPOSITORY_FILE).exists():
            raise AlreadyExists(f"{above} is a repository of sm120kit already", "work in it, or name a directory outside it")
        if above == data_roots.data_root():
            raise AlreadyExists(f"{directory} is in {above}, the data of sm120kit itself", "name a directory outside it")


def _write(new: Path, name: str) -> None:
    for folder in data_roots.FOLDERS:
        (new / folder).mkdir()
        (new / folder / ".gitkeep").touch()  # git stores no empty directories
    (new / data_roots.REPOSITORY_FILE).write_text(f"edition = {data_roots.EDITION}\n")
    (new / "README.md").write_text(_README.format(name=name))
    (new / ".gitignore").write_text(_IGNORED)


def _is_in_git(directory: Path) -> bool:
    """Whether a directory is in a git work tree; it need not exist."""
    existing = next(above for above in (directory, *directory.parents) if above.is_dir())
    return process.run(["git", "rev-parse", "--is-inside-work-tree"], cwd=existing, check=False).stdout.strip() == "true"
