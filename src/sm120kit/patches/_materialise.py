"""Write a patched tree to a directory, rewriting only the files that differ."""

from pathlib import Path

from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import SystemRefused
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import GitIndex, Repository


def index_file(directory: Path) -> Path:
    """The git index that :func:`materialise` keeps beside a directory."""
    return directory.parent / f".{directory.name}.index"


def materialise(tree: PatchedTree, directory: Path) -> None:
    """Make ``directory`` contain exactly the files of a tree.

    A file whose content is right is not touched: its modification time stays, and object files compiled from it stay valid.
    All other files are removed: those of another tree, generated files, local edits. The call may be interrupted at any time;
    the next call repairs the directory. Concurrent calls for one directory are not supported.

    The index ``.<name>.index`` beside the directory caches which files are known to be right. It also marks the directory as
    written by sm120kit.

    Raises:
        SystemRefused: the directory contains files and was not written by sm120kit, or it is not writable.
    """
    directory = directory.resolve()
    repository = Repository(tree.checkout.repository)
    index = GitIndex(repository, index_file(directory))
    with disk_errors(directory):
        if directory.exists() and not index.file.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise SystemRefused(
                f"{directory} was not made by sm120kit and is not empty: all its files would be replaced",
                "name a directory that is empty or does not exist yet",
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        index.file.with_name(f"{index.file.name}.lock").unlink(missing_ok=True)
        if not index.file.exists() or index.git("ls-files", check=False).returncode != 0:
            index.file.unlink(missing_ok=True)
            index.git("read-tree", tree.tree)
        directory.mkdir(exist_ok=True)
    work_tree = f"--work-tree={directory}"
    # Refresh first: files whose times changed but not their content, or that are new to the index, must not be rewritten.
    index.git(work_tree, "update-index", "-q", "--really-refresh", check=False, tied=True)
    index.git(work_tree, "read-tree", "--reset", "-u", tree.tree, tied=True)
    index.git(work_tree, "clean", "-ffdxq", tied=True)
