"""Known defects of models with an engine, and draft models in other repositories."""

from __future__ import annotations

import re

import pytest
from packaging.specifiers import SpecifierSet

from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import NotFound
from sm120kit.engines import all_engines, parser
from sm120kit.recipes import configurations, load_engine, newest, reported
from sm120kit.recipes.load import read_entries
from sm120kit.serving import fit

SOURCE = re.compile(r"github\.com/[\w.-]+/[\w.-]+")


def defects(name: str, **changes: object) -> str:
    configuration = configurations.load(name).model_copy(update=changes)
    facts = fit.recorded_model(configuration.model.repository)
    assert facts
    quantization = facts.quantization + configuration.model.quantization
    return "\n".join(each.text for each in reported.defects(configuration, facts.model_type, quantization))


def test_every_entry_has_a_source_an_engine_and_its_patch() -> None:
    engines = {engine.name for engine in all_engines()}
    for defect in read_entries(reported.KnownDefect, "known_defects", "defect"):
        assert SOURCE.search(defect.source) and defect.engine in engines and SpecifierSet(defect.versions)
        assert not defect.patch or (data_root() / "patches" / defect.engine / f"{defect.patch}.patch").is_file()
    for drafter in read_entries(reported.Drafter, "drafters", "drafter"):
        assert SOURCE.search(drafter.source) and drafter.versions.keys() <= engines and re.compile(drafter.models)


def test_defects_depend_on_gpu_engine_and_speculation() -> None:
    assert "--moe-backend marlin" in defects("glm-5.3-flash-nvfp4-2x-dgx-spark")
    assert "--moe-backend marlin" not in defects("glm-5.3-flash-nvfp4-2x-rtx-pro-6000")
    with_drafter = defects("qwen3.8-27b-nvfp4-2x-rtx-5090")
    assert "drafter-block-size" in with_drafter and "55279" in with_drafter and "53912" not in with_drafter
    assert "55279" not in defects("qwen3.8-27b-nvfp4-2x-rtx-5090", speculation=None)
    assert "40756" not in with_drafter, "of vLLM 0.19"
    assert not defects("gpt-oss-20b-1x-rtx-5090")


@pytest.mark.parametrize(
    "drafter", read_entries(reported.Drafter, "drafters", "drafter"), ids=lambda drafter: drafter.repository
)
def test_engines_accept_the_options_of_a_drafter(drafter: reported.Drafter) -> None:
    for engine in drafter.versions:
        recipe = load_engine(newest(engine)[0])
        words = recipe.served_by.draft_arguments(drafter.method, drafter.repository, drafter.draft_tokens)
        known = parser.load(recipe.name)
        assert known and parser.rejection(known, ["/model", *words] if engine == "vllm" else words) == ""
        speculation = recipe.served_by.speculation(parser.options(recipe.name, words))
        assert speculation and speculation[0] == drafter.method and not speculation[2], "no MTP layers of the checkpoint"
        assert speculation[1] == drafter.draft_tokens


def test_unknown_drafter_is_refused_with_the_known_ones() -> None:
    recipe = load_engine("vllm-0.33.0")
    assert reported.drafter_named("incoai/Qwen3.8-27B-DFlash2", "nvidia/Qwen3.8-27B-NVFP4", recipe).draft_tokens == 7
    for repository, known in (("nvidia/Qwen3.8-27B-NVFP4", "syvai/"), ("openai/gpt-oss-20b", "known: none")):
        with pytest.raises(NotFound) as caught:
            reported.drafter_named("me/my-draft", repository, recipe)
        assert "me/my-draft" in caught.value.message and known in caught.value.hint and "speculative" in caught.value.hint
