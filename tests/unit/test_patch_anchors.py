"""``Hunk-Below`` and ``Hunk-Above``: lines of text decide where a hunk belongs that fits at several places."""

from __future__ import annotations

from pathlib import Path

import pytest
from patch_series import (
    BASE,
    BUILDER,
    KEY,
    RECIPE,
    PatchDirectory,
    checkout_of,
    export_edits,
    git_in,
    inside,
    patch_text,
    text_at,
)

from sm120kit import patches
from sm120kit.core.errors import BadInput, PatchConflict
from sm120kit.patches.patch_records import PatchedTree

BODY = "".join(
    f"  {line}\n" for line in ("open", "int v;", "int w;", "int a;", "int b;", "int x;", "int y;", "int z;", "close")
)
NAMES = ("first", "second", "third")


def file_of(*changed: str, above: str = "", names: tuple[str, ...] = NAMES, to: str = "int c;") -> str:
    """A function of equal lines per name; ``changed`` have the change of the patch."""
    bodies = [(name, BODY.replace("int b;", to) if name in changed else BODY) for name in names]
    return above + "".join(f"void {name}()\n{body}" for name, body in bodies)


@pytest.fixture
def patch_dir(tmp_path: Path) -> PatchDirectory:
    return PatchDirectory(tmp_path)


def put(patch_dir: PatchDirectory, *changed: str, trailers: tuple[str, ...] = ()) -> Path:
    diff = patch_dir.diff({**BASE, BUILDER: file_of()}, {BUILDER: file_of(*changed)})
    content = patch_text(diff)
    for trailer in trailers:
        content = content.replace(b"Drop-When:", f"{trailer}\nDrop-When:".encode(), 1)
    return patch_dir.put("first", content)


def anchor(kind: str, name: str, number: int = 1) -> str:
    return f"Hunk-{kind}: include/cutlass/builder.inl#{number} void {name}()"


SECOND = (anchor("Below", "second"), anchor("Above", "third"))


def applied(patch_dir: PatchDirectory, path: Path, text: str) -> PatchedTree:
    checkout = checkout_of(path, {**BASE, BUILDER: text})
    return patches.apply(checkout, inside(), patch_dir.root, patch_dir.overrides)


@pytest.mark.parametrize("moved", ["", "new\n", "new\n" * 10, "new\n" * 11, "new\n" * 50])
def test_line_decides_instead_of_the_line_number(patch_dir: PatchDirectory, tmp_path: Path, moved: str) -> None:
    """Also where the line number is that of another function, as with 10 lines above; the status has the offset."""
    put(patch_dir, "second", trailers=SECOND)
    assert patches.lint(patch_dir.root)[:-1] == []
    tree = applied(patch_dir, tmp_path / "r", file_of(above=moved))
    assert text_at(tree, BUILDER) == file_of("second", above=moved)
    (status,) = patches.status(tree.checkout, inside(), patch_dir.root)
    lines = len(moved.splitlines())
    assert status.detail == (f"include/cutlass/builder.inl: hunk 1 lies {lines} lines further down" if lines else "")


def test_without_the_line_the_candidates_are_shown(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    put(patch_dir, "second")
    with pytest.raises(PatchConflict, match="it fits at lines 4, 14, 24") as error:
        applied(patch_dir, tmp_path / "r", file_of(above="new\n"))
    assert error.value.message.endswith("Hunk-Above: include/cutlass/builder.inl#1 LINE")


def test_several_hunks_of_a_file(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """Each has a line of its own, and one without a line keeps its line number."""
    names = ("one", "two", "three", "four", "five")
    moved = "new\n" * 7
    before, after = (file_of(*changed, names=names) for changed in ((), ("two", "five")))
    content = patch_text(patch_dir.diff({**BASE, BUILDER: before}, {BUILDER: after}))
    assert content.count(b"\n@@ ") == 2
    trailers = [anchor("Below", "two"), anchor("Above", "three"), anchor("Below", "five", 2)]
    patch_dir.put("first", content.replace(b"Drop-When:", "\n".join([*trailers, "Drop-When:"]).encode()))
    tree = applied(patch_dir, tmp_path / "r", file_of(above=moved, names=names))
    assert text_at(tree, BUILDER) == file_of("two", "five", above=moved, names=names)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (file_of(names=("first", "other", "third")), r"no line is 'void second\(\)', which its Hunk-Below names"),
        (file_of(names=("second", "second", "third")), r"lines 1, 11 are 'void second\(\)'"),
        (file_of("second", to="x"), r"it does not fit below line 11 'void second\(\)' and above line 21 'void third\(\)'"),
        (file_of(names=("second", "fourth", "third")), "it fits at lines 3, 13 below line 1"),
        (file_of(names=("third", "first", "second")), "it does not fit below line 21"),
    ],
)
def test_line_that_does_not_decide_is_a_conflict(patch_dir: PatchDirectory, tmp_path: Path, text: str, problem: str) -> None:
    put(patch_dir, "second", trailers=SECOND)
    with pytest.raises(PatchConflict, match=problem) as error:
        applied(patch_dir, tmp_path / "r", text)
    assert "builder.inl:" in error.value.message and "(line " in error.value.message


def test_upstream_has_the_change_below_the_line(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The same change of another function is not that of the patch."""
    names = ("first", "second", "third", "fourth")
    before, after = (file_of(*changed, names=names) for changed in ((), ("second",)))
    content = patch_text(patch_dir.diff({**BASE, BUILDER: before}, {BUILDER: after}))
    patch_dir.put("first", content.replace(b"Drop-When:", "\n".join([*SECOND, "Drop-When:"]).encode()))
    moved = "new\n" * 2
    with pytest.raises(PatchConflict):
        applied(patch_dir, tmp_path / "there", file_of("second", above=moved, names=names))
    tree = applied(patch_dir, tmp_path / "other", file_of("third", above=moved, names=names))
    assert text_at(tree, BUILDER) == file_of("second", "third", above=moved, names=names)


@pytest.mark.parametrize(
    ("trailer", "problem"),
    [
        ("Hunk-Below: builder.inl 1 void second()", "not like 'path/of/file#1"),
        ("Hunk-Above: include/cutlass/builder.inl#0 void second()", "not like"),
        ("Hunk-Below: include/cutlass/builder.inl#1", "not like"),
        (anchor("Below", "second", 2), "is for hunk 2 of include/cutlass/builder.inl, which the diff does not have"),
        ("Hunk-Above: include/other#1 x", "is for hunk 1 of include/other, which"),
    ],
)
def test_malformed_trailers(patch_dir: PatchDirectory, trailer: str, problem: str) -> None:
    file = put(patch_dir, "second", trailers=(trailer,))
    problems = [p for p in patches.lint(patch_dir.root) if "Hunk-" in p.text]
    assert len(problems) == 1 and problem in problems[0].text
    assert trailer in file.read_text().splitlines()[problems[0].line - 1]


def test_a_hunk_has_one_line_of_each_kind(patch_dir: PatchDirectory) -> None:
    put(patch_dir, "second", trailers=(anchor("Below", "second"), anchor("Below", "first")))
    assert any("is for hunk 1 of include/cutlass/builder.inl, as in line 15" in p.text for p in patches.lint(patch_dir.root))


def test_export_refuses_a_line_that_puts_a_hunk_elsewhere(patch_dir: PatchDirectory, tmp_path: Path) -> None:
    """The change is moved to another function, and the trailer is not."""
    put(patch_dir, "second", trailers=SECOND)
    clone = tmp_path / "clone"
    tree = applied(patch_dir, tmp_path / "r", file_of())
    patches.edit(tree, clone, RECIPE, KEY)
    assert export_edits(clone, tree.checkout, patch_dir.root) == []
    (clone / BUILDER).write_text(file_of("first"))
    git_in(clone, "commit", "-qa", "--amend", "--no-edit")
    before = (patch_dir.root / "cutlass/first.patch").read_bytes()
    with pytest.raises(BadInput, match="puts a hunk at another place"):
        export_edits(clone, tree.checkout, patch_dir.root)
    assert (patch_dir.root / "cutlass/first.patch").read_bytes() == before
