"""A directory that holds a patched tree, rewritten only where it differs."""

from __future__ import annotations

from pathlib import Path

from sm120kit.errors import StateUnwritable
from sm120kit.gitrepo import Index, Repository
from sm120kit.records import PatchedTree
from sm120kit.workspace import disk_errors


def materialise(tree: PatchedTree, directory: Path) -> None:
    """Make ``directory`` hold exactly the files of a tree.

    A file whose content is right already is not touched, so its time stays and what was compiled from it stays valid.
    Everything else in the directory goes: files of another tree, generated ones, local edits. It may be ended at any moment;
    the next call repairs. One caller at a time.

    The index ``.<name>.index`` beside the directory is a cache of which files are known to be right; it also marks the
    directory as ours.

    Raises:
        StateUnwritable: the directory holds files and is not ours, or it cannot be written.
    """
    directory = directory.resolve()
    repository = Repository(tree.checkout.repository)
    index = Index(repository, directory.parent / f".{directory.name}.index")
    with disk_errors(directory):
        if directory.exists() and not index.file.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise StateUnwritable(
                f"{directory} was not made by sm120kit and is not empty: all its files would be replaced",
                "name a directory that is empty or does not exist yet",
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        index.file.with_name(f"{index.file.name}.lock").unlink(missing_ok=True)
        if not index.file.exists() or index.git("ls-files", check=False).returncode != 0:
            index.file.unlink(missing_ok=True)
            index.git("read-tree", tree.tree)
        directory.mkdir(exist_ok=True)
    there = f"--work-tree={directory}"
    # Files whose times changed but whose content did not, or about which the index knows nothing, are not to be rewritten.
    index.git(there, "update-index", "-q", "--really-refresh", check=False, tied=True)
    index.git(there, "read-tree", "--reset", "-u", tree.tree, tied=True)
    index.git(there, "clean", "-ffdxq", tied=True)
