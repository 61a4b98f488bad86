"""The explanation of a conflict: every hunk and upstream's text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from patch_series import BASE, BUILDER, CUTLASS, KERNEL, PatchDirectory, changed, checkout_of, inside, patch_text

from sm120kit import patches
from sm120kit.core.errors import PatchConflict
from sm120kit.patches.patch_records import PatchState, PatchStatus


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    return PatchDirectory(tmp_path)


def status_of(patch_dir: PatchDirectory, builder: str) -> PatchStatus:
    """The status of a patch of lines 5, 15 and 25 in FlashInfer 0.6.6, where the file has another content."""
    edited = changed(changed(changed(KERNEL, 5, "five\n"), 15, "fifteen\n"), 25, "twentyfive\n")
    patch_dir.put("first", patch_text(patch_dir.diff(BASE, {BUILDER: edited})))
    (status,) = patches.status(checkout_of(patch_dir.path / "r", {**BASE, BUILDER: builder}), inside(), patch_dir.root)
    assert status.state is PatchState.CONFLICTS
    return status


def test_every_hunk_is_listed_with_the_text_of_upstream(patch_dir: PatchDirectory) -> None:
    """git names the first hunk of a file only. Lines above move the place."""
    builder = "inserted\n" * 3 + changed(changed(KERNEL, 6, "six upstream\n"), 24, "x\ntwentyfive\n")
    status = status_of(patch_dir, builder)
    first, last = status.conflicts
    assert (first.path, first.hunk, first.place, last.hunk) == ("include/cutlass/builder.inl", 1, 5, 3)
    lines = status.detail.splitlines()
    assert [line for line in lines if "does not fit" in line] == [
        "  include/cutlass/builder.inl:2: hunk 1 @@ -2,7 +2,7 @@ line 1 (line 21 of first.patch) does not fit",
        "  include/cutlass/builder.inl:22: hunk 3 @@ -22,7 +22,7 @@ line 21 (line 39 of first.patch) does not fit",
    ]
    assert list(first.excerpt)[:3] == ["     8   line 5", "       - line 6", "     9 + six upstream"]


def test_apply_explains_and_json_has_the_hunks(patch_dir: PatchDirectory) -> None:
    status = status_of(patch_dir, changed(KERNEL, 6, "six upstream\n"))
    with pytest.raises(PatchConflict, match=r"\n     9? *.*\+ six upstream"):
        patches.apply(
            checkout_of(patch_dir.path / "r2", {**BASE, BUILDER: changed(KERNEL, 6, "six upstream\n")}),
            inside(),
            patch_dir.root,
            patch_dir.overrides,
        )
    (conflict,) = json.loads(json.dumps(asdict(status)))["conflicts"]
    assert conflict["path"] == "include/cutlass/builder.inl"


def test_long_and_foreign_text_is_shortened(patch_dir: PatchDirectory) -> None:
    """A file without any line of the patch, and lines of any length and encoding."""
    (first, *_) = status_of(patch_dir, "nothing\n" * 5).conflicts
    assert (first.place, first.excerpt) == (0, ())
    (patch_dir.root / "cutlass/series").write_text("")
    (patch_dir.root / "cutlass/first.patch").unlink()
    long = changed(KERNEL, 6, "y" * 500 + "\n" + "z\n" * 50)
    (first, *_) = status_of(patch_dir, long).conflicts
    assert len(first.excerpt) <= 18
    assert max(map(len, first.excerpt)) < 200
    assert f"{CUTLASS}/" not in first.path
