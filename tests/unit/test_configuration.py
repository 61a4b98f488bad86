"""Configurations: strict validation, and references to recipes, checks and options that exist."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.bench import published, roofline
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput, NotFound
from sm120kit.engines import parser
from sm120kit.hosts.doctor import CHECKS
from sm120kit.recipes import arguments, configuration_file, configurations, reported
from sm120kit.recipes.configurations import Hardware, Speculation
from sm120kit.serving.fit import planned

GOOD = (data_root() / "recipes" / "configurations" / "qwen3.5-122b-nvfp4-2x-rtx-pro-6000.toml").read_text()


def test_speculation_is_on_wherever_no_reason_stands_against_it() -> None:
    """Of a checkpoint that cannot draft, the recorded config.json has no MTP layers, or is reported to be wrong."""
    for configuration in map(configurations.load, configurations.names()):
        reason = configuration.no_speculation
        assert configuration.historical or (reason is None) is (configuration.speculation is not None), configuration.name
        if reason and reason.because == "checkpoint":
            repository = configuration.model.repository
            assert not reported.drafters(repository, recipes.load_engine(configuration.engine)), configuration.name
            (path,) = (data_root() / "recipes" / "checkpoints").glob(f"{repository.replace('/', '--')}.json")
            claims = re.search(r'"(mtp_num_hidden|num_nextn_predict)_layers": *[1-9]', path.read_text())
            assert bool(claims) is ("claims" in reason.reason), configuration.name


@pytest.mark.parametrize("name", configurations.names())
def test_every_configuration_has_valid_references(name: str) -> None:
    configuration = configurations.load(name)
    assert configuration.summary and configuration.original and configuration.model.quantization
    assert configuration.model.revision != configurations.UNPINNED or configuration.model.why_unpinned
    assert set(configuration.host) <= {check.name for check in CHECKS}
    engine = recipes.load_engine(configuration.engine)
    known_bad = {(bad.distribution, bad.version) for bad in configuration.known_bad}
    assert not known_bad & {tuple(pin.split("==")) for pin in engine.environment.requires}
    if configuration.speculation:
        assert any(argument.startswith("--speculative") for argument in configuration.arguments)
    flags = [argument for argument in configuration.arguments if argument.startswith("--")]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("name", configurations.names())
def test_every_configuration_parses_answers_states_a_context_and_fits(name: str) -> None:
    configuration = configurations.load(name)
    for meaning in ("reasoning_parser", "tool_parser", "context"):
        assert configuration.option_for(meaning), meaning
    fit = planned(configuration)
    assert fit and fit.capacity_tokens is not None, fit.why_no_kv if fit else "the sizes are not recorded"
    assert fit.context and fit.context <= fit.capacity_tokens, fit.lines()


def test_planned_memory_has_draft_model_and_tables_on_the_host() -> None:
    base = configurations.load("qwen3.8-27b-fp8-1x-rtx-pro-6000")
    plain = planned(base)
    assert plain and plain.weight_bytes == 30_900_000_000
    drafting = base.model_copy(update={"speculation": Speculation(method="dflash", draft_tokens=3, gigabytes=4, kv_bytes=1000)})
    more = planned(drafting)
    assert more and (more.weight_bytes, more.kv_bytes_per_token) == (34_900_000_000, (plain.kv_bytes_per_token or 0) + 1000)
    tables = base.model_copy(update={"model": base.model.model_copy(update={"host_gigabytes": 10.0})})
    less = planned(tables)
    assert less and less.weight_bytes == 20_900_000_000
    shared = tables.model_copy(update={"hardware": base.hardware.model_copy(update={"unified": True})})
    assert (planned(shared) or plain).weight_bytes == 30_900_000_000, "the host's memory is the GPU's"


def load_error(tmp_path: Path, old: str, new: str) -> str:
    """The message for a configuration in which ``old`` is replaced by ``new``."""
    assert old in GOOD
    file = tmp_path / "qwen3.5-122b-nvfp4-2x-rtx-pro-6000.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        configurations.load(str(file))
    assert str(file) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('revision = "unpinned"', 'revision = "main"', "model.revision: 'main' is not a commit"),
        ("gpus = 2", "gpus = 100000000", "hardware.gpus: input should be less than or equal to 9999"),
        ("memory_gb = ", "memory_gb = 1e300 # ", "hardware.memory_gb: input should be less than or equal to 1000000"),
        ("why_unpinned", "why_unpined", "did you mean"),
        ("tensor_parallel = 2", "tensor_parallel = 4", "tensor_parallel: 4, but hardware.gpus is 2"),
        ('"--tp-size", "2"', '"--tp-size", "4"', "tensor_parallel: 2, but arguments have --tp-size 4"),
        ('"--tp-size", "2"', '"--tensor-parallel-size=4"', "tensor_parallel: 2, but arguments have --tensor-parallel-size 4"),
        ('"--tp-size", "2",', "", "tensor_parallel: 2, but arguments have no --tensor-parallel-size, so that"),
        ('"--tp-size", "2"', '"--tp-size", "2", "--pp-size", "2"', "pipeline_parallel 2, but hardware.gpus is 2"),
        ("tensor_parallel = 2", 'tensor_parallel = "2"', "tensor_parallel: input should be a valid integer"),
        ("[speculation]", "[speculation_]", "speculation_: unknown key"),
        ("[hardware]", '[no_speculation]\nbecause = "memory"\nreason = "x"\n[hardware]', "no_speculation: stated, but"),
        ('reproducibility = "withdrawn"', 'reproducibility = "sure"', "reference.0.reproducibility"),
        ('name = "qwen', 'name = "other-qwen', "is not the file's name"),
        ("edition = 1", "edition = ", "not TOML"),
        ("value = 198.0\n", "", "reference.0.value: missing"),
    ],
)
def test_problem_is_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message in load_error(tmp_path, old, new)


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    assert "3 problems" in load_error(tmp_path, "tensor_parallel = 2", "tensor_parallel = 3\nfoo = 1")


def test_errors_are_short_and_have_no_value_of_a_variable(tmp_path: Path) -> None:
    many = "".join(f"key{number} = 1\n" for number in range(1000))
    assert len(load_error(tmp_path, "edition = 1", f'edition = "{"x" * 10**6}"\n{many}')) < 5000
    words = '"--tp-size", "2"'
    assert "at most 1000 items" in load_error(tmp_path, words, words + ', "--enforce-eager"' * 20_000)
    own = tmp_path / "own.toml"
    own.write_text('engine = "vllm-0.33.0"\narguments = []\n[environment]\nVLLM_API_KEY = ["hunter2hunter2"]\n')
    with pytest.raises(BadInput, match=r"environment\.VLLM_API_KEY: is not a text") as caught:
        configurations.load(str(own))
    assert "hunter2" not in caught.value.message


def refusal(tables: str, tmp_path: Path) -> str:
    """The error of a configuration with these tables."""
    own = tmp_path / "own.toml"
    own.write_text(f'engine = "vllm-0.33.0"\narguments = []\n[model]\nrepository = "me/model"\n{tables}\n')
    with pytest.raises(BadInput) as caught:
        configurations.load(str(own), arguments.problems)
    return caught.value.message


@pytest.mark.parametrize(
    "target",
    [
        "/model",
        "/model/x",
        "/x/../model",
        "//model",
        "/opt",
        "/home/sm120kit",
        "/home",
        "/tmp",
        "/root",
        "/root/.cache",
        "/mine",
    ],
)
def test_mounts_where_the_container_has_something_else_are_refused(target: str, tmp_path: Path) -> None:
    mounts = f'"/models" = "/srv"\n"/root/.cache/mine" = "/srv"\n"{target}" = "/srv"'
    message = refusal(f'[container]\ncaches = ["/root/.cache/vllm", "/mine/x"]\n[container.mounts]\n{mounts}', tmp_path)
    assert "1 problem\n" in message and f"container.mounts: {target!r}" in message


@pytest.mark.parametrize("name", ["A\\u001bB", "A\\nB", "A=B", "A B", ""])
def test_names_of_variables_are_one_printable_word(name: str, tmp_path: Path) -> None:
    message = refusal(f'[environment]\n"{name}" = "hunter2"', tmp_path)
    assert "1 problem\n" in message and message.count("\n") == 1 and "hunter2" not in message
    assert message.replace("\n", "").isprintable()


@pytest.mark.parametrize("revision", ["main", "abc\\ndef", "f" * 41, "unpinned "])
def test_wrong_revision_is_one_problem_of_one_line(revision: str, tmp_path: Path) -> None:
    message = refusal(f'revision = "{revision}"', tmp_path)
    assert "1 problem\n  model.revision: " in message and message.count("\n") == 1


def test_unknown_name_suggests_similar_name() -> None:
    with pytest.raises(NotFound, match=r"did you mean .*qwen3\.5-397b-nvfp4-4x"):
        configurations.load("qwen3.5-397b-nvfp4-4x-rtx-pro")


@pytest.mark.parametrize(
    ("engine", "argv", "gpus", "speculation"),
    [
        ("vllm-0.33.0", [], 1, None),
        ("vllm-0.33.0", ["-tp=2", "-pp", "2"], 4, None),
        ("vllm-0.33.0", ["-sc", '{"method":"qwen3_5_mtp","num_speculative_tokens":2}'], 1, ("qwen3_5_mtp", 2, True)),
        ("vllm-0.33.0", ["-sc.method", "eagle3", "-sc.model", "a/b", "-sc.num_speculative_tokens=4"], 1, ("eagle3", 4, False)),
        ("sglang-0.5.23", ["--tp", "2", "--speculative-algo", "NEXTN", "--speculative-num-steps", "3"], 2, ("nextn", 3, True)),
        ("sglang-0.5.23", ["--speculative-algorithm=EAGLE3", "--speculative-draft-model-path=x"], 1, ("eagle3", 1, False)),
    ],
)
def test_model_engine_and_arguments_are_a_configuration(
    engine: str, argv: list[str], gpus: int, speculation: tuple[str, int, bool] | None, tmp_path: Path
) -> None:
    """Nothing has to be invented: what else there is follows from the arguments."""
    own = tmp_path / "own.toml"
    own.write_text(f'engine = "{engine}"\narguments = {json.dumps(argv)}\n[model]\nrepository = "me/model"\n')
    configuration = configurations.load(str(own))
    assert configuration.name == "own" and configuration.hardware.gpus == gpus and configuration.hardware.memory_gb is None
    drafts = configuration.speculation
    found = (drafts.method, drafts.draft_tokens, configuration.model.needs_mtp) if drafts else None
    assert found == speculation
    assert configuration.reference == configuration.deviations == ()
    assert published.workloads(configuration) == ()
    for command in ("check", "show"):
        result = CliRunner().invoke(app, ["config", command, str(own)])
        assert result.exit_code == 0, result.output


def test_figures_of_another_setup_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    rows = CliRunner().invoke(app, ["config", "list", "--all"]).stdout.splitlines()
    for configuration in map(configurations.load, configurations.names()):
        if not configuration.historical:
            (row,) = (row for row in rows if row.split()[:1] == [configuration.name])
            assert row.endswith(" *") == any(reference.differs for reference in configuration.reference[:1])
    name = "minimax-m2.7-nvfp4-2x-rtx-pro-6000"
    shown = CliRunner().invoke(app, ["config", "show", name]).stdout
    assert configurations.load(name).reference[0].differs in " ".join(shown.split())


def test_list_is_by_gpus_and_fits_80_columns_with_old_engines_by_name() -> None:
    rows = CliRunner().invoke(app, ["config", "list", "--all"]).stdout.splitlines()
    heads = [row for row in rows if re.match(r"\d x ", row)]
    assert heads[0] == "1 x RTX 5090" and "2 x DGX Spark" in heads and len(heads) == len({*heads})
    assert max(map(len, rows)) <= 80
    old = " ".join(rows[rows.index(next(row for row in rows if row.startswith("historical"))) :])
    loaded = [configurations.load(name) for name in configurations.names()]
    assert {one.name for one in loaded if one.historical} == {
        one.name for one in loaded if f" {one.name}" in old.replace(",", "")
    }
    assert {one.engine for one in loaded if one.historical} == {"vllm-0.19.1", "sglang-0.5.11", "sglang-0.5.11-b12x"}


@pytest.mark.parametrize("gpu", ["", "rtx-5090", "rtx-pro-6000", "dgx-spark"])
def test_list_is_one_screen(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sm120kit.cli.config.host_gpus", lambda: None)
    listed = CliRunner().invoke(app, ["config", "list", *(["--gpu", gpu] if gpu else [])])
    rows = listed.stdout.splitlines()
    assert listed.exit_code == 0, listed.exception
    loaded = [one for one in map(configurations.load, configurations.names()) if not one.historical]
    if gpu:
        assert {row.split()[0] for row in rows if row.startswith("  ")} == {one.name for one in loaded if gpu in one.name}
    else:
        assert [row for row in rows if row.startswith("sm120kit")] == [
            f"sm120kit config list --gpu {kind}" for kind in ("rtx-pro-6000", "rtx-5090", "dgx-spark")
        ]
    assert max(map(len, rows)) <= 80 and len(rows) <= 30


def test_list_is_of_the_gpus_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Hardware(gpu="NVIDIA RTX PRO 6000 Blackwell Workstation Edition", gpus=2)
    monkeypatch.setattr("sm120kit.cli.config.host_gpus", lambda: two)
    rows = CliRunner().invoke(app, ["config", "list"]).stdout.splitlines()
    assert [row for row in rows if row[0].isdigit()] == ["1 x RTX PRO 6000", "2 x RTX PRO 6000"]


def test_ablations_apply_where_the_option_is_missing() -> None:
    names = {each.name for each in reported.ablations(configurations.load("glm-5.3-flash-nvfp4-4x-rtx-pro-6000"))}
    assert {"pcie-ipc", "sampled-drafts", "no-speculation"} <= names and "b12x-experts" not in names
    assert "quantized-draft-head" not in names, "vLLM refuses it with DFlash"
    one = configurations.load("minimax-m2.7-nvfp4-2x-rtx-pro-6000")
    chosen = one.model_copy(update={"arguments": (), "environment": {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}})
    assert [each.name for each in reported.ablations(chosen)] == ["b12x-experts", "b12x-linear", "nvfp4-kv", "fair-prefill"]
    assert reported.ablations(configurations.load("qwen3.5-397b-nvfp4-8x-rtx-pro-6000")) == ()
    shown = CliRunner().invoke(app, ["config", "show", "glm-5.3-flash-nvfp4-4x-rtx-pro-6000"]).stdout
    assert "VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC=1" in shown and "without --speculative-config" in " ".join(shown.split())


@pytest.mark.parametrize(
    "ablation",
    {
        (each.name, each.engine): each
        for configuration in map(configurations.load, configurations.names())
        for each in reported.ablations(configuration)
    }.values(),
)
def test_options_of_ablations_exist_in_the_engine(ablation: reported.Ablation) -> None:
    assert ablation.effect and ablation.source
    for recipe in recipes.names(recipes.EngineRecipe):
        known = parser.load(recipe) if recipe.startswith(ablation.engine) else None
        if known and ablation.arguments:
            model = ["/model"] * recipe.startswith("vllm")
            assert parser.rejection(known, [*model, *ablation.arguments]) == ""


def test_ceiling_is_of_the_configuration_whatever_its_figures_were_measured_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dense model without drafts reads its weights for each token: GB10 has 273 GB/s."""
    monkeypatch.setenv("COLUMNS", "400")
    published = data_root() / "recipes" / "configurations" / "qwen3.8-27b-fp8-1x-dgx-spark.toml"
    file = tmp_path / published.name
    file.write_text(re.sub(r'  "--(speculative|enable-linear-replayssm).*\n', "", published.read_text()))
    name = str(file)
    made = configurations.load(name)
    assert all(reference.differs for reference in made.reference) and made.speculation is None
    model = roofline.model_of("Qwen/Qwen3.8-27B-FP8")
    assert model is not None
    limit = 273e9 / model.main.fixed_bytes
    assert f"ceiling {limit:.0f}\n" in re.sub(" +\n", "\n", CliRunner().invoke(app, ["config", "show", name]).stdout)
    for other in ("gpt-oss-20b-1x-dgx-spark", "minimax-m2.7-nvfp4-2x-dgx-spark"):
        assert "roofline" not in CliRunner().invoke(app, ["config", "show", other]).stdout
    drafting = CliRunner().invoke(app, ["config", "show", "qwen3.6-27b-nvfp4-1x-dgx-spark"]).stdout
    assert "if every draft is accepted" in drafting


def test_names_of_the_first_edition_are_read(tmp_path: Path) -> None:
    source = (data_root() / "recipes/configurations/qwen3.5-27b-fp8-1x-rtx-pro-6000.toml").read_text()
    assert "[[deviations]]" in source
    file = tmp_path / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml"
    file.write_text(source.replace("[[deviations]]", "[[ours]]").replace("concurrency = ", "users = "))
    assert configurations.load(str(file)) == configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")


@pytest.mark.parametrize("name", configurations.names())
def test_written_configuration_is_the_same(name: str) -> None:
    """`config new` of a configuration loses nothing, such as the checks of the host that it requires."""
    configuration = configurations.load(name)
    content = configuration_file.content(configuration)
    text = configuration_file.text(content, ("a comment",))
    assert tomllib.loads(text) == content and text.startswith("# a comment\n")
    assert configurations.Configuration.model_validate(tomllib.loads(text)) == configuration


def test_written_options_have_a_line_each_whatever_their_values() -> None:
    given = {"engine": "vllm-0.33.0", "arguments": ["--max-model-len", "8", "--seed", "a\x7fb"], "model": {"repository": "o/m"}}
    text = configuration_file.text(given)
    assert tomllib.loads(text) == given
    assert '  "--max-model-len", "8",\n' in text


def test_names_longer_than_a_file_name(tmp_path: Path) -> None:
    """Records are files by the name of a recipe or a repository: none has a name of 3,000 characters."""
    long = "x" * 3000
    path = tmp_path / "qwen3.5-122b-nvfp4-2x-rtx-pro-6000.toml"
    path.write_text(GOOD.replace("sglang-0.5.11-b12x", long).replace("txn545/", f"{long}/"))
    assert configurations.load(str(path)).engine == long
    with pytest.raises(NotFound, match="no configuration"):
        configurations.load(long)
