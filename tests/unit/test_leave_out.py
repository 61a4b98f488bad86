"""Files that an image leaves out: rules, RECORD, and the summary."""

from __future__ import annotations

import pytest

from sm120kit import recipes
from sm120kit.core.errors import BadRecipe
from sm120kit.core.records import LeftOut
from sm120kit.images import leave_out
from sm120kit.recipes.schema import FilesLeftOut

FILES = {
    "flashinfer_cubin/__init__.py": 10,
    "flashinfer_cubin/cubins/a/gemm/one_sm100f.cubin": 1000,
    "flashinfer_cubin/cubins/b/two_sm103a.cubin": 500,
    "flashinfer_cubin/cubins/b/checksums.txt": 5,
    "flashinfer_cubin-0.6.6.dist-info/RECORD": 7,
}
CUBINS = FilesLeftOut(distribution="flashinfer-cubin", paths=("flashinfer_cubin/cubins/*.cubin",), reason="code for SM100")


def test_files_of_a_rule_are_absent_from_record_and_summed_up() -> None:
    absent = leave_out.left_out([CUBINS], "flashinfer-cubin", FILES)
    assert absent.keys() == {name for name in FILES if name.endswith(".cubin")}
    rows = leave_out.record_without([[name, "sha256=x", str(size)] for name, size in FILES.items()], absent)
    assert [row[0] for row in rows] == [name for name in FILES if not name.endswith(".cubin")]
    assert rows[0] == ["flashinfer_cubin/__init__.py", "sha256=x", "10"]
    assert leave_out.summary("flashinfer-cubin", absent, FILES) == (
        LeftOut("flashinfer-cubin: 2 files, 1,500 bytes", "code for SM100"),
    )


def test_the_first_rule_that_matches_gives_the_reason() -> None:
    second = FilesLeftOut(distribution="flashinfer-cubin", paths=("*.cubin", "*checksums.txt"), reason="later")
    absent = leave_out.left_out([CUBINS, second], "flashinfer-cubin", FILES)
    assert absent["flashinfer_cubin/cubins/b/checksums.txt"] == "later"
    assert absent["flashinfer_cubin/cubins/b/two_sm103a.cubin"] == "code for SM100"


def test_rules_of_other_distributions_are_ignored() -> None:
    assert leave_out.left_out([CUBINS], "torch", ["torch/__init__.py"]) == {}


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("*.fatbin", "matches no file"),
        ("*/RECORD", "matches flashinfer_cubin-0"),
        ("*cubin/*", "matches flashinfer_cubin/__init__.py"),
    ],
)
def test_rules_that_match_nothing_metadata_or_modules_are_rejected(pattern: str, problem: str) -> None:
    rule = FilesLeftOut(distribution="flashinfer-cubin", paths=(pattern,), reason="any")
    with pytest.raises(BadRecipe, match=problem):
        leave_out.left_out([rule], "flashinfer-cubin", FILES)


def test_only_rules_without_their_reasons_are_inputs_of_a_lock() -> None:
    recipe = recipes.load("vllm-0.19.1")
    assert "leave_out" not in recipe.inputs()
    changed = recipe.model_copy(update={"leave_out": (CUBINS,)})
    assert changed.inputs()["leave_out"] == [{"distribution": "flashinfer-cubin", "paths": [CUBINS.paths[0]]}]
