"""What is started, and what is refused before anything starts."""

from __future__ import annotations

import runpy
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from model_folders import HYBRID, MTP, NVFP4, folder
from typer.testing import CliRunner

from sm120kit import checkpoint, launch, recipe
from sm120kit.cli import app
from sm120kit.errors import (
    BadIndex,
    DoesNotFit,
    GpusTaken,
    HostUnreadable,
    MtpMissing,
    NoModel,
    NoSuchImage,
    NotVerified,
    Sm120kitError,
    TooFewGpus,
    UnknownName,
    WrongImage,
)
from sm120kit.launch.render import yaml
from sm120kit.launch.service import Mount
from sm120kit.recipe import configuration
from sm120kit.records import Check, Image, PublishedImage, Verdict, VerifiedImage
from sm120kit.registry import FORMAT, Index
from sm120kit.workspace import Workspace, write_record

HOSTS = runpy.run_path(str(Path(__file__).parent / "hosts" / "build.py"))
FOUR, SPARK = "qwen3.5-397b-nvfp4-4x-rtx-pro-6000", "qwen3.5-122b-int4-1x-dgx-spark"
SPARK_ENGINE = "vllm-0.33.0-spark"
DIGEST = "sha256:" + "d" * 64
GPUS = [launch.Device(number, "RTX PRO 6000", 97887 << 20) for number in range(4)]
VERIFIED = VerifiedImage(
    Image("sha256:1", "c" * 64, "linux/amd64", (), {"sm120kit.recipe": "vllm-0.19.1", "sm120kit.wheels": "x==1"}, "1000", 1),
    "sm120kit/vllm:0.19.1-sm120kit.1",
    "5" * 64,
    (Check("base", "python", Verdict.PASSED),),
    {},
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "a model", HYBRID, NVFP4, MTP)


def service(model: Path, tmp_path: Path, **changes: Any) -> launch.Service:
    wanted = configuration.load(FOUR).model_copy(update=changes)
    engine = recipe.load_engine(wanted.engine)
    gpus = [(number, "RTX PRO 6000") for number in range(4)]
    return launch.make(wanted, engine, VERIFIED, f"r.example/vllm@{DIGEST}", model, gpus, Workspace(tmp_path / "state"), 8123)


def test_the_docker_command_survives_a_shell(model: Path, tmp_path: Path) -> None:
    argv = launch.docker_run(service(model, tmp_path))
    pasted = tmp_path / "pasted"
    pasted.write_text("#!/bin/sh\n" + shlex.join(argv).replace("docker run", "printf '%s\\n'", 1))
    pasted.chmod(0o755)
    said = subprocess.run([str(pasted)], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == list(argv[2:])
    assert argv[argv.index("--gpus") + 1] == '"device=0,1,2,3"'
    assert argv[argv.index("--publish") + 1] == "127.0.0.1:8123:8000"
    assert "--ipc=host" in argv and not any(word.startswith("--shm-size") for word in argv)
    assert f"type=bind,source={model},target=/model,readonly" in argv
    at = argv.index(f"r.example/vllm@{DIGEST}")
    assert argv[at - 2 : at] == ("--entrypoint", "vllm") and argv[at + 1 : at + 3] == ("serve", "/model")
    wanted = configuration.load(FOUR)
    assert argv[-len(wanted.arguments) :] == wanted.arguments
    assert {f"{name}={value}" for name, value in wanted.environment.items()} <= set(argv)


def test_a_folder_of_links_is_mounted_with_what_they_lead_to(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "snapshots" / "f00").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in model.iterdir():
        path.rename(cache / "blobs" / path.name)
        (cache / "snapshots" / "f00" / path.name).symlink_to(Path("../../blobs") / path.name)
    one = service(cache / "snapshots" / "f00", tmp_path)
    assert one.mounts[0] == Mount(cache, "/model", True) and "/model/snapshots/f00" in one.argv
    (tmp_path / "far" / "away" / "at" / "last").mkdir(parents=True)
    (tmp_path / "far" / "away" / "at" / "last" / "config.json").symlink_to(cache / "blobs" / "config.json")
    with pytest.raises(NoModel, match="which the container does not see"):
        service(tmp_path / "far" / "away" / "at" / "last", tmp_path)


def test_a_comma_in_a_path(model: Path, tmp_path: Path) -> None:
    argv = launch.docker_run(service(model.rename(tmp_path / "a, b"), tmp_path))
    assert f'type=bind,"source={tmp_path}/a, b",target=/model,readonly' in argv


def test_values_of_variables_can_stay_out_of_the_command(model: Path, tmp_path: Path) -> None:
    argv = launch.docker_run(service(model, tmp_path, environment={"HF_TOKEN": "hunter2"}), values=False)
    assert argv[argv.index("--env") + 1] == "HF_TOKEN" and "hunter2" not in " ".join(argv)


def test_a_private_ipc_namespace_gets_shared_memory_and_ulimits(model: Path, tmp_path: Path) -> None:
    container = configuration.load(FOUR).container.model_copy(update={"ipc_host": False, "ulimits": {"memlock": -1}})
    argv = launch.docker_run(service(model, tmp_path, container=container))
    assert "--shm-size=32g" in argv and "--ipc=host" not in argv and argv[argv.index("--ulimit") + 1] == "memlock=-1"


def test_caches_are_kept_apart_by_image_gpu_and_configuration(model: Path, tmp_path: Path) -> None:
    def place(**changes: Any) -> Path:
        return service(model, tmp_path, **changes).mounts[1].source.parent

    first = service(model, tmp_path)
    assert [mount.target for mount in first.mounts[1:]] == [f"/home/sm120kit/{name}" for name in (".cache", ".triton")]
    assert all(mount.source.is_dir() and mount.source.stat().st_mode & 0o777 == 0o777 for mount in first.mounts[1:])
    assert place().parent.stat().st_mode & 0o777 == 0o700
    assert place() == place() == place(summary="another", host=())
    wanted = configuration.load(FOUR)
    assert place() != place(environment={"A": "1"}) != place(arguments=wanted.arguments[:-2])
    workspace = Workspace(tmp_path / "state")
    other = replace(VERIFIED, image=replace(VERIFIED.image, content="e" * 64))
    keys = {
        launch.service.caches(wanted, image, gpus, workspace)
        for image in (VERIFIED, other)
        for gpus in (["RTX PRO 6000"] * 4, ["RTX 5090"] * 4)
    }
    assert len(keys) == 4


def test_compose_and_manifest_have_the_same_container(model: Path, tmp_path: Path) -> None:
    one = service(model, tmp_path, environment={"A": "$HOME $(B)", "NO": "yes"})
    text = launch.compose(one)
    assert '      A: "$$HOME $$(B)"' in text and '      "NO": "yes"' in text
    assert '      - "127.0.0.1:8123:8000"' in text and '{\\"method\\":\\"mtp\\"' in text and "ulimits" not in text
    text = launch.kubernetes(one)
    assert '            - chmod\n            - "777"\n            - "/home/sm120kit/.cache"\n' in text
    assert "            nvidia.com/gpu: 4" in text and 'value: "$HOME $$(B)"' in text and text.count("\n---\n") == 1
    assert f'image: "r.example/vllm@{DIGEST}"' in text and 'sizeLimit: "32Gi"' in text


def test_yaml() -> None:
    value = {"a": [], "b": [{"c": 1, "d": [True, "off", "x y"]}, ["e"]], "1": "-", "f": {"g": {}}}
    lines = [
        "a: []",
        "b:",
        "  - c: 1",
        "    d:",
        "      - true",
        '      - "off"',
        '      - "x y"',
        "  - - e",
        '"1": "-"',
        "f:",
        "  g: {}",
    ]
    assert yaml(value).splitlines() == lines


def judge(place: Path, **changes: Any) -> launch.Fit:
    given: dict[str, Any] = {"wanted": configuration.load(FOUR), "image": VERIFIED, "devices": GPUS} | changes
    return launch.judge(given["wanted"], given["image"], given.get("model") or checkpoint.read(place), given["devices"])


def test_what_fits_is_told(model: Path) -> None:
    big = replace(checkpoint.read(model), weight_bytes=240_000_000_000)
    fit = judge(model, model=big)
    assert fit.weight_bytes == 60_000_000_000 and fit.share == 0.9 and fit.context == 262144
    assert fit.kv_bytes_per_token == 2 * 1 * 1 * 32 * 2  # K and V, one full layer, one head per GPU, 32 elements of 2 bytes
    assert fit.room_tokens == (int((97887 << 20) * 0.9) - 60_000_000_000) // 128
    assert any("60.0 GB on each GPU" in line for line in fit.lines())
    assert judge(model, model=replace(big, kv_quantization="fp8")).kv_bytes_per_token == 64
    assert judge(model, devices=[replace(gpu, bytes=None) for gpu in GPUS]).room_tokens is None
    assert judge(model, wanted=configuration.load(FOUR).model_copy(update={"arguments": ()})).share == 0.9
    odd = judge(model, model=replace(big, attention=None, why_not_plain="it keeps a compressed KV cache (MLA)"))
    assert odd.kv_bytes_per_token is None and "MLA" in odd.lines()[2]


def test_what_cannot_work_is_refused(model: Path) -> None:
    found = checkpoint.read(model)
    wanted = configuration.load(FOUR)
    bad = configuration.BadVersion(distribution="some.thing", version="1.0", reason="wrong numbers", source="a report")
    labels = VERIFIED.image.labels
    cases: list[tuple[type[Sm120kitError], str, dict[str, Any]]] = [
        (TooFewGpus, "needs 4", {"devices": GPUS[:3]}),
        (MtpMissing, "not one of its 7 tensors", {"model": replace(found, mtp=())}),
        (DoesNotFit, "weights do not fit", {"model": replace(found, weight_bytes=4 * 93_000_000_000)}),
        (DoesNotFit, "one sequence", {"model": replace(found, weight_bytes=4 * 92_350_000_000)}),
        (WrongImage, "image of flashinfer-0.6.6", {"image": labelled({**labels, "sm120kit.recipe": "flashinfer-0.6.6"})}),
        (WrongImage, "image of nothing", {"image": labelled({})}),
        (
            WrongImage,
            "some.thing 1.0, which is known to be bad here: wrong numbers",
            {
                "image": labelled({**labels, "sm120kit.wheels": "a==1,some-thing==1.0"}),
                "wanted": wanted.model_copy(update={"known_bad": (bad,)}),
            },
        ),
    ]
    for error, words, changes in cases:
        with pytest.raises(error) as caught:
            judge(model, **changes)
        assert words in caught.value.message and caught.value.hint
    without = wanted.model_copy(update={"model": wanted.model.model_copy(update={"needs_mtp": False})})
    assert judge(model, model=replace(found, mtp=()), wanted=without).gpus == tuple(GPUS)
    newer = labelled({**labels, "sm120kit.wheels": "some-thing==1.1"})
    assert judge(model, image=newer, wanted=wanted.model_copy(update={"known_bad": (bad,)})).gpus


def labelled(labels: dict[str, str]) -> VerifiedImage:
    return replace(VERIFIED, image=replace(VERIFIED.image, labels=labels))


def published(path: Path, image: VerifiedImage = VERIFIED) -> Path:
    write_record(path, Index(FORMAT, (PublishedImage("r.example/vllm", "t", DIGEST, "vllm-0.19.1", "b" * 64, image),)))
    return path


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    root = HOSTS["build"]("turin-8", tmp_path / "host")
    index = published(tmp_path / "images.json")
    return ["--model", str(model), "--root", str(root), "--index", str(index), "--state", str(tmp_path / "state")]


def test_print(words: list[str]) -> None:
    said = CliRunner().invoke(app, ["launch", FOUR, *words, "--print"])
    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("docker run ") and said.stdout.count("\n") == 1
    assert f"r.example/vllm@{DIGEST} serve /model" in said.stdout and "device=0,1,2,3" in said.stdout
    for line in ("16 elements per scale", "2 MTP tensors", "GPUs     0, 1, 2, 3", "unverified on SM120", "doctor   "):
        assert line in said.stderr
    assert CliRunner().invoke(app, ["launch", FOUR, *words]).exit_code == 2, "a recorded host starts nothing"


def test_a_spark_is_planned_on_any_machine(model: Path, tmp_path: Path) -> None:
    """Its engine's image is for aarch64, wherever the plan is made."""
    spark = replace(VERIFIED, image=replace(VERIFIED.image, platform="linux/arm64", labels={"sm120kit.recipe": SPARK_ENGINE}))
    entry = PublishedImage("r.example/vllm", "t", DIGEST, SPARK_ENGINE, "b" * 64, spark)
    write_record(tmp_path / "images.json", Index(FORMAT, (entry,)))
    root = HOSTS["build"]("gb10-ready", tmp_path / "host")
    options = ["--model", model, "--root", root, "--index", tmp_path / "images.json", "--state", tmp_path / "state", "--print"]
    said = CliRunner().invoke(app, ["launch", SPARK, *map(str, options)])
    assert said.exit_code == 0 and f"r.example/vllm@{DIGEST} serve /model" in said.stdout, said.output


def test_files(words: list[str], tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["launch", FOUR, *words, "--compose", "-", "--kubernetes", str(tmp_path / "m.yaml")])
    assert (
        said.exit_code == 0
        and said.stdout.startswith("services:\n")
        and "kind: Deployment" in (tmp_path / "m.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("change", "error", "words_"),
    [
        ({"config": "qwen3.5-397b-nvfp4-4x-rtx-pro-600"}, UnknownName, "did you mean"),
        ({"--model": "absent"}, NoModel, "no model folder"),
        ({"--root": "absent"}, HostUnreadable, "not there or not readable"),
        ({"--index": "absent"}, BadIndex, "there is no index "),
        ({"host": "node-forced"}, TooFewGpus, "this host has 2"),
        ({"host": "no-gpu"}, TooFewGpus, "this host has 0"),
        ({"mtp": False}, MtpMissing, "none"),
        ({"checks": (Check("base", "python", Verdict.FAILED),)}, NotVerified, "did not pass"),
        ({"checks": ()}, NotVerified, "none was run"),
    ],
)
def test_bad_input(change: dict[str, Any], error: type[Sm120kitError], words_: str, words: list[str], tmp_path: Path) -> None:
    options = dict(zip(words[::2], words[1::2], strict=True))
    options |= {name: str(tmp_path / value) for name, value in change.items() if name.startswith("--")}
    if "host" in change:
        options["--root"] = str(HOSTS["build"](change["host"], tmp_path / "other"))
    if "mtp" in change:
        options["--model"] = str(folder(tmp_path / "without", HYBRID, NVFP4))
    if "checks" in change:
        published(Path(options["--index"]), replace(VERIFIED, checks=change["checks"]))
    given = [word for pair in options.items() for word in pair]
    said = CliRunner().invoke(app, ["launch", change.get("config", FOUR), *given, "--print"])
    assert isinstance(said.exception, error), said.output
    assert words_ in said.exception.message and not said.stdout and not (tmp_path / "state" / "caches").exists()


def test_an_image_that_only_this_daemon_has_is_no_manifest(model: Path, tmp_path: Path) -> None:
    from sm120kit import launching

    fit = judge(model)
    one = launching.Prepared(
        configuration.load(FOUR), VERIFIED, checkpoint.read(model), fit, service(model, tmp_path), (), published=False
    )
    with pytest.raises(NoSuchImage, match="only in this daemon"):
        launching.manifest(one)
    assert "kind: Service" in launching.manifest(replace(one, published=True))


def test_errors_have_exit_codes_of_their_own() -> None:
    kinds: list[type[Sm120kitError]] = Sm120kitError.__subclasses__()
    assert len({kind.exit_code for kind in kinds}) == len(kinds) and 70 not in {kind.exit_code for kind in kinds}


def test_documentation_has_the_exit_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    rows = [line.rpartition("| ")[2].strip(" |") for line in page.splitlines() if line.startswith("| ") and line[-3].isdigit()]
    kinds = {str(kind.exit_code): kind for kind in Sm120kitError.__subclasses__()}
    assert len(rows) == 15 and set(rows) <= set(kinds)
    named = (
        UnknownName,
        NotVerified,
        WrongImage,
        BadIndex,
        NoModel,
        MtpMissing,
        TooFewGpus,
        DoesNotFit,
        GpusTaken,
        HostUnreadable,
    )
    assert {str(kind.exit_code) for kind in named} <= set(rows)


@pytest.mark.parametrize("name", configuration.names())
def test_every_configuration_of_a_known_engine_can_be_planned(name: str, tmp_path: Path) -> None:
    wanted = configuration.load(name)
    if wanted.engine not in recipe.names():
        with pytest.raises(UnknownName):
            recipe.load_engine(wanted.engine)
        return
    engine = recipe.load_engine(wanted.engine)
    one = launch.make(wanted, engine, VERIFIED, "sha256:1", tmp_path, [(0, "g")], Workspace(tmp_path / "state"), 8000)
    assert one.argv[: len(engine.serve)] == engine.serve and one.argv[-len(wanted.arguments) :] == wanted.arguments
    assert len({mount.source for mount in one.mounts}) == len({mount.target for mount in one.mounts}) == len(one.mounts)
    for cache in wanted.container.caches:
        inside = cache.replace("/root", "/home/sm120kit")
        assert any(Path(inside).is_relative_to(mount.target) for mount in one.mounts if not mount.read_only)
    for flag in ("--host", "--port", "--served-model-name", "--model-path"):
        assert one.argv.count(flag) <= 1, f"{flag} is launch's to set"
