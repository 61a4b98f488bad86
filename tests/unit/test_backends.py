"""The recorded back-ends that engines select on SM12x, for every configuration."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from sm120kit.core.data_roots import data_root
from sm120kit.images import backends
from sm120kit.recipes import configurations, load_engine, locate, lock_path, lockfile
from sm120kit.serving import flight_plan

BACKENDS = runpy.run_path(str(Path(__file__).parents[1] / "arguments" / "backends.py"))
PAGE = data_root() / "docs" / "measurements" / "backends.md"
ENTRIES: dict[str, tuple[str, dict[str, Any]]] = BACKENDS["entries"]()
CAPABLE: dict[str, Any] = BACKENDS["capable"]()


RECORDED = sorted({engine for engine, _ in ENTRIES.values() if backends.models(engine)})


def incapable(engine: str, selected: dict[str, list[str]]) -> list[str]:
    """The selected back-ends that the table does not list as running on SM12x."""
    listed = CAPABLE[engine.partition("-")[0]]
    uses = {use: names for use, names in selected.items() if use != "quantization"}
    return [
        f"{use}: {name}"
        for use, names in uses.items()
        for name in names
        if "runs" not in listed.get(use.removeprefix("draft: "), {}).get(name, {})
    ]


def test_every_configuration_is_recorded() -> None:
    assert {*configurations.names()} == {*ENTRIES}, "nox -s backends"


@pytest.mark.parametrize("name", ENTRIES)
def test_record_is_of_the_configuration_as_it_is(name: str) -> None:
    configuration = configurations.load(name)
    entry = ENTRIES[name][1]
    recorded = {key: entry[key] for key in ("arguments", "environment", "gpu", "model")}
    assert recorded == backends.inputs(configuration), f"record again: nox -s backends -- {configuration.engine}"
    assert entry["not_validated"] == backends.not_validated(configuration)


@pytest.mark.parametrize("name", [name for name in ENTRIES if not ENTRIES[name][1]["not_validated"]])
def test_engine_accepts_and_selects_what_sm12x_runs(name: str) -> None:
    engine, entry = ENTRIES[name]
    assert entry["refusal"] == ""
    assert {"attention", "KV cache", "layers"} <= {*entry["selected"]}
    assert incapable(engine, entry["selected"]) == []


@pytest.mark.parametrize("name", [name for name in ENTRIES if not ENTRIES[name][1]["not_validated"]])
def test_plan_of_a_configuration_has_its_own_back_ends(name: str) -> None:
    configuration, entry = configurations.load(name), ENTRIES[name][1]
    assert flight_plan._backends(configuration, None) == (flight_plan.PlannedBackends(name, entry["selected"]), "")


@pytest.mark.parametrize("engine", RECORDED)
def test_models_are_recorded_by_what_an_engine_selects_by(engine: str) -> None:
    cases = BACKENDS["model_cases"](load_engine(engine))
    for entry in backends.models(engine):
        assert entry["signature"] == cases[entry["model"]][0], f"record again: nox -s backends -- {engine}"
        assert bool(entry["refusal"]) != bool(entry["selected"])
        assert incapable(engine, entry["selected"]) == []


def test_a_drafter_whose_configuration_is_not_known_is_left_out() -> None:
    case = backends.case(configurations.load("glm-5.3-flash-nvfp4-4x-rtx-pro-6000"))
    assert case and "--speculative-config" not in case["argv"] and "--moe-backend" in case["argv"]
    own = backends.case(configurations.load("nemotron-3-super-nvfp4-1x-rtx-pro-6000"))
    assert own and "--speculative-config" in own["argv"]


def test_sglang_refuses_the_122b_configuration_without_extra_buffer() -> None:
    refused = ENTRIES["qwen3.5-122b-nvfp4-2x-rtx-pro-6000"][1]["refused_without"]
    assert "please use --mamba-scheduler-strategy extra_buffer" in refused["--mamba-scheduler-strategy"]


def test_changed_configuration_needs_a_new_record() -> None:
    configuration = configurations.load("gpt-oss-20b-1x-rtx-pro-6000")
    entry = ENTRIES[configuration.name][1]
    changed = configuration.model_copy(update={"arguments": (*configuration.arguments, "--attention-backend", "FLASHINFER")})
    assert backends.inputs(changed)["arguments"] != entry["arguments"]
    other = configuration.model_copy(update={"environment": {"VLLM_MXFP4_USE_MARLIN": "0"}})
    assert backends.inputs(other)["environment"] != entry["environment"]


def test_image_is_compared_only_with_the_record_of_the_same_configuration() -> None:
    engine, configuration = load_engine("vllm-0.33.0"), configurations.load("gpt-oss-20b-1x-rtx-pro-6000")
    entry = backends.expected(engine.name, [configuration])[configuration.name]
    assert entry["selected"]["attention"] == ["TRITON_ATTN"] and entry["case"]["model"]["repository"] == "openai/gpt-oss-20b"
    changed = configuration.model_copy(update={"environment": {"VLLM_MXFP4_USE_MARLIN": "0"}})
    assert backends.expected(engine.name, [changed])[configuration.name]["case"] is None
    unknown = configuration.model_copy(update={"name": "another"})
    assert backends.expected(engine.name, [unknown])["another"]["case"] is None


def test_back_end_without_an_entry_in_the_table_is_detected() -> None:
    assert incapable("vllm-0.33.0", {"attention": ["FLASHMLA"], "quantization": ["mxfp4"]}) == ["attention: FLASHMLA"]


def test_table_of_capable_back_ends_has_sources_and_nothing_unused() -> None:
    selections = [*ENTRIES.values(), *((engine, entry) for engine in RECORDED for entry in backends.models(engine))]
    used = {
        (engine.partition("-")[0], use.removeprefix("draft: "), name)
        for engine, entry in selections
        for use, names in entry["selected"].items()
        for name in names
    }
    for engine, uses in CAPABLE.items():
        for use, names in uses.items():
            for name, row in names.items():
                assert row["source"] and (engine, use, name) in used, f"{engine}: {use}: {name}"


@pytest.mark.parametrize("engine", sorted({engine for engine, _ in ENTRIES.values()}))
def test_records_are_of_the_locked_wheel_and_in_written_form(engine: str) -> None:
    text = backends.record_path(engine).read_text()
    record = json.loads(text)
    head = {key: record[key] for key in ("format", "recipe", "wheel")}
    assert BACKENDS["record_text"](head, record["configurations"], record["models"]) == text
    closure = lockfile.read(lock_path(locate(engine))).closures[0]
    (wheel,) = [wheel for wheel in closure.wheels if wheel.name == engine.partition("-")[0]]
    assert record["recipe"] == engine and record["wheel"]["sha256"] == wheel.sha256


def test_page_has_the_recorded_table() -> None:
    assert BACKENDS["table"]() in PAGE.read_text(), "python tests/arguments/backends.py --table"


def test_page_has_the_options_of_each_configuration() -> None:
    assert BACKENDS["options_table"]() in PAGE.with_name("speed-options.md").read_text(), "backends.py --options"
    assert any(reason for _, entry in ENTRIES.values() for reason in entry.get("with", {}).values())


def test_models_have_a_source_and_list_what_is_assumed() -> None:
    served = {configurations.load(name).model.repository for name in configurations.names()}
    for path in sorted((data_root() / "recipes" / "checkpoints").glob("*.json")):
        model = json.loads(path.read_text())
        assert {*model} - {"not_validated", "selected_as"} == {"repository", "source", "assumed", "config"}
        assert model["source"] and model["assumed"]
        assert path.stem == model["repository"].replace("/", "--") and model["repository"] in served
