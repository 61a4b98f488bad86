"""Series of patches that a test makes, checkouts they apply to, and git as a developer runs it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from sm120kit import patches
from sm120kit.patches import _export
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin, VendoredProject

RECIPE = "flashinfer-0.6.6"
KEY = b"k" * 32
"""Seals the records of directories in which a series is edited."""

CUTLASS = "3rdparty/cutlass"
VERSION_H = f"{CUTLASS}/include/cutlass/version.h"


def version_h(version: str) -> str:
    """CUTLASS's ``version.h``."""
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    return "".join(f"#define CUTLASS_{name} {number}\n" for name, number in parts)


KERNEL = "".join(f"line {n}\n" for n in range(1, 31))
BASE = {
    "csrc/launcher.cu": KERNEL,
    "setup.py": "one\n",
    f"{CUTLASS}/include/cutlass/builder.inl": KERNEL,
    VERSION_H: version_h("4.2.1"),
}
TRAILERS = """\
Applies-To: {project} {versions}
Upstream-Status: Pending
Origin: seen in a table of tiles
Matters-For: everybody with a
  small GPU
No-Effect-For: the rest
Evidence: tests/unit/test_patches.py
Drop-When: never
"""


def trees(repository: Repository, *versions: dict[str, str]) -> list[str]:
    """Store sets of files as trees with a single git process; returns the tree ids."""
    stream = b""
    for number, files in enumerate(versions):
        stream += f"commit refs/heads/made\nmark :{number + 1}\ncommitter a <a> 0 +0000\ndata 0\ndeleteall\n".encode()
        for name, text in files.items():
            content = text.encode()
            stream += f'M 100644 inline "{name}"\ndata {len(content)}\n'.encode() + content + b"\n"
        stream += f"get-mark :{number + 1}\n".encode()
    commits = repository.git("fast-import", "--quiet", "--force", "--cat-blob-fd=1", stdin=stream).stdout.split()
    return repository.git("rev-parse", *(f"{commit}^{{tree}}" for commit in commits)).stdout.split()


def checkout_of(path: Path, files: dict[str, str], version: str = "0.6.6") -> Checkout:
    repository = Repository.init(path)
    (tree,) = trees(repository, files)
    return Checkout(
        GitPin("flashinfer", "file:///nowhere", "0" * 40, version), path, repository.commit_tree(tree, None, "b"), tree
    )


_diffs: dict[str, bytes] = {}


def diff_of(path: Path, files: dict[str, str], change: dict[str, str | None], below: str) -> bytes:
    """The diff of a change to some of ``files``, computed once for equal arguments."""
    key = repr((files, change, below))
    if key not in _diffs:
        repository = Repository.init(path)
        after = {name: text for name, text in {**files, **change}.items() if text is not None}
        _diffs[key] = _export.diff(repository, *trees(repository, files, after), below)
    return _diffs[key]


def patch_text(diff: bytes, project: str = "cutlass", versions: str = ">=4.2,<4.4.2", subject: str = "builder: count") -> bytes:
    head = f"""\
From {"0" * 40} Mon Sep 17 00:00:00 2001
From: Jo Doe <jo@example.invalid>
Date: Mon, 5 Jan 2026 01:02:03 +0200
Subject: {subject}

Why it exists.

{TRAILERS.format(project=project, versions=versions)}
"""
    return head.encode() + diff


def changed(text: str, line: int, to: str) -> str:
    return text.replace(f"line {line}\n", to)


class PatchDirectory:
    """A directory of series, with patches that a test puts there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "patches"
        self.overrides = path / "cutlass_overrides"
        self.count = 0

    def put(self, slug: str, content: bytes, project: str = "cutlass", *, listed: bool = True) -> Path:
        directory = self.root / project
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{slug}.patch").write_bytes(content)
        if listed:
            with (directory / "series").open("a") as series:
                series.write(f"{slug}\n")
        return directory / f"{slug}.patch"

    def diff(self, files: dict[str, str], change: dict[str, str | None], below: str = CUTLASS) -> bytes:
        self.count += 1
        return diff_of(self.path / f"diff{self.count}", files, change, below)

    def edit(self, name: str, old: int, to: str, base: dict[str, str] = BASE, below: str = CUTLASS) -> bytes:
        return self.diff(base, {name: changed(base[name], old, to)}, below)


BUILDER = f"{CUTLASS}/include/cutlass/builder.inl"
LAUNCHER = "csrc/launcher.cu"


def inside(version: str = "4.2.1") -> tuple[VendoredProject, ...]:
    return (VendoredProject("cutlass", CUTLASS, version),)


def two_projects(patch_dir: PatchDirectory) -> None:
    """Put two patches of CUTLASS, the second on top of the first, a patch of FlashInfer, and an override."""
    first = {**BASE, BUILDER: changed(KERNEL, 10, "ten\n")}
    patch_dir.put("first", patch_text(patch_dir.edit(BUILDER, 10, "ten\n")))
    patch_dir.put("second", patch_text(patch_dir.edit(BUILDER, 11, "eleven\n", first), subject="builder: more"))
    launcher = patch_text(patch_dir.edit(LAUNCHER, 3, "three\n", below=""), "flashinfer", "==0.6.*", "launcher: é")
    patch_dir.put("third", launcher, "flashinfer")
    assert patches.lint(patch_dir.root), "the accent makes git add headers"
    patch_dir.put("third", patches.normal_form(parsed(launcher, "flashinfer")), "flashinfer", listed=False)
    (patch_dir.overrides / "include/sm120kit").mkdir(parents=True)
    (patch_dir.overrides / "include/sm120kit/sf.hpp").write_text("#pragma once\n")


def parsed(content: bytes, project: str = "cutlass") -> patches.Patch:
    patch, _ = patches.format.parse(project, Path("x.patch"), content)
    assert patch is not None
    return patch


def text_at(tree: PatchedTree, path: str) -> str:
    return Repository(tree.checkout.repository).read(tree.tree, path).decode()


def contents(root: Path) -> dict[str, str]:
    """Every file below the patch directory, hidden files too."""
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def refs_of(repository: Path) -> str:
    return Repository(repository).git("for-each-ref").stdout


def git_in(clone: Path, *arguments: str) -> None:
    """Run git in a directory that ``edit`` made, as a developer does."""
    identity = ("-c", "user.name=A. B.", "-c", "user.email=a@example.invalid")
    subprocess.run(["git", "-C", clone, *identity, *arguments], check=True)


def export_edits(
    clone: Path, checkout: Checkout, root: Path, version: str = "4.2.1", overwrite: tuple[str, ...] = ()
) -> list[Path]:
    """Export a directory of ``patches.edit`` as the recipe of a checkout; ``version`` is CUTLASS's."""
    recipe = f"flashinfer-{checkout.pin.version}"
    return patches.export_edits(clone, patches.EditedSource(recipe, checkout.pin, inside(version)), root, KEY, overwrite)


def write_blob(repository: Repository, content: bytes) -> str:
    """Store a file's content and return its blob id."""
    return repository.git("hash-object", "-w", "--stdin", stdin=content).stdout.strip()
