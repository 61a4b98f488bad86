"""Apply series to a checkout: commits with the same ids on every machine.

First our headers from ``cutlass_overrides/``, then a commit per patch that applies. No working directory is involved.
"""

from collections.abc import Sequence
from pathlib import Path

from sm120kit.core.disk import disk_errors
from sm120kit.core.errors import BadInput, PatchConflict, SystemRefused
from sm120kit.core.outside import read_found
from sm120kit.patches.drift import Step, complete_steps, steps
from sm120kit.patches.format import Patch
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree, PatchState, projects_in_tree
from sm120kit.patches.series import load_for_tree
from sm120kit.sources.git import GitIndex, Repository
from sm120kit.sources.source_records import Checkout, VendoredProject


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


REFS = "refs/sm120kit/patched"
"""Below it, each patched commit has a ref named after its id, so that git does not collect it."""

OWN_HEADERS = "include/sm120kit/"
"""The directory in CUTLASS that has our headers only."""

_OVERRIDES_MESSAGE = """\
overrides: add the headers of cutlass_overrides

They lie before CUTLASS's own on the include path. The patches above hook into them.
"""


def apply(checkout: Checkout, inside: tuple[VendoredProject, ...], root: Path, overrides: Path) -> PatchedTree:
    """Apply our headers and every patch for these versions to a checkout, as reproducible commits.

    All or nothing: if a patch conflicts or is already upstream, no ref of the repository changes.

    Raises:
        BadInput: a series is not well-formed, a patch leaves its project, or an override would hide an upstream header.
        PatchConflict: patches do not apply; the message has file, line and hunk of each conflict.
        PatchConflict: the checkout already contains what a patch changes.
    """
    repository = Repository(checkout.repository)
    commit, tree = base_commit(repository, checkout, inside, overrides)
    tried = list(complete_steps(steps(checkout, inside, load_for_tree(checkout.pin, inside, root), tree)))
    _require_all_apply(tried)
    applied = []
    for step in tried:
        if step.status.state is PatchState.APPLIES:
            patch, tree = step.patch, step.tree
            commit = commit_patch(repository, patch, tree, commit)
            applied.append(AppliedPatch(patch.project, patch.slug, patch.sha256, commit))
    repository.set_ref(f"{REFS}/{commit}", commit)
    return PatchedTree(checkout, inside, commit, tree, tuple(applied))


def compose(
    checkout: Checkout, inside: tuple[VendoredProject, ...], chosen: Sequence[Patch], overrides: Path | None
) -> tuple[str, tuple[Step, ...]]:
    """The git tree id below some patches, and a step for each of them. No commit is made.

    The tree contains our headers unless ``overrides`` is None. ``chosen`` is in the order in which a series is applied.
    """
    tree = _with_overrides(Repository(checkout.repository), checkout, inside, overrides) if overrides else checkout.tree
    return tree, tuple(steps(checkout, inside, chosen, tree))


def base_commit(
    repository: Repository, checkout: Checkout, inside: tuple[VendoredProject, ...], overrides: Path
) -> tuple[str, str]:
    """Commit our headers on top of a checkout, in a repository that contains it; returns the ids of commit and tree."""
    tree = _with_overrides(repository, checkout, inside, overrides)
    if tree == checkout.tree:
        return checkout.commit, tree
    return repository.commit_tree(tree, checkout.commit, _OVERRIDES_MESSAGE), tree


def commit_patch(repository: Repository, patch: Patch, tree: str, parent: str) -> str:
    """Commit ``tree`` as the result of a patch; returns the commit id, which depends on the arguments alone.

    A last trailer ``Patch`` has the name of the file.
    """
    date = f"@{int(patch.date.timestamp())} {patch.date:%z}"
    message = f"{patch.subject}\n\n{patch.body}\nPatch: {patch.name}\n"
    return repository.commit_tree(tree, parent, message, author=patch.author, date=date)


def _require_all_apply(tried: list[Step]) -> None:
    conflicts = [step.status for step in tried if step.status.state is PatchState.CONFLICTS]
    if conflicts:
        lines = [f"{s.project}/{s.slug} does not apply to {s.project} {s.version}:\n{s.detail}" for s in conflicts]
        raise PatchConflict(
            "\n".join(lines),
            "tighten its Applies-To and add a variant <slug>--<name>.patch for this version",
        )
    upstream = [step for step in tried if step.status.state is PatchState.ALREADY_UPSTREAM]
    if upstream:
        lines = [
            f"{step.patch.name} is already in {step.status.project} {step.status.version}"
            f" (Applies-To: {step.patch.trailer('Applies-To')}; Drop-When: {step.patch.trailer('Drop-When')})"
            for step in upstream
        ]
        raise PatchConflict("\n".join(lines), "end its Applies-To below this version, or drop it if its Drop-When is fulfilled")


def _with_overrides(repository: Repository, checkout: Checkout, inside: tuple[VendoredProject, ...], overrides: Path) -> str:
    """The git tree id of a checkout with our headers among those of CUTLASS; unchanged if it does not contain CUTLASS."""
    base = overrides / "include"
    files = sorted(path for path in base.rglob("*") if path.is_file() and not path.name.startswith("."))
    cutlass = next((p for p in projects_in_tree(checkout.pin, inside) if p.project == "cutlass"), None)
    if cutlass is None or not files:
        return checkout.tree
    upstream = set(repository.paths(checkout.tree, f"{cutlass.prefix}include"))
    with repository.index(checkout.tree) as index:
        for file in files:
            path = f"{cutlass.prefix}include/{file.relative_to(base).as_posix()}"
            if path in upstream:
                raise BadInput(
                    f"{file} would hide {path} of {cutlass.project} {cutlass.version}",
                    "give it a name of its own below include/sm120kit and let a patch hook into it",
                )
            index.add(path, read_found(file))
        return index.write_tree()
