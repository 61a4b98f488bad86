"""Containers of configurations, and what is refused before a start."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import layout_images
import pytest
import synthetic_hosts
import yaml as yaml_library
from check_jsonschema.builtin_schemas import get_builtin_schema
from model_folders import HYBRID, MINIMAX, MTP, NVFP4, folder
from typer.testing import CliRunner

from sm120kit import engines, recipes, serving
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import (
    BadInput,
    Mismatch,
    NotFound,
    NotVerified,
    RequirementMissing,
    ResourceUnavailable,
    Sm120kitError,
    SystemRefused,
    families,
)
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.hosts import doctor
from sm120kit.hosts.facts import probe
from sm120kit.images.image_index import FORMAT, PublishedIndex
from sm120kit.images.image_inputs import entrypoint
from sm120kit.images.image_records import Check, CheckResult, Image, PublishedImage, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.recipes import configurations
from sm120kit.serving import checkpoint
from sm120kit.serving import resolve as resolving
from sm120kit.serving._container import Mount
from sm120kit.serving._render import written_yaml
from sm120kit.serving.kv_cache import KvCache, Vectors

ROOT = Path(__file__).parents[2]
FOUR, SPARK = "qwen3.5-397b-nvfp4-4x-rtx-pro-6000", "qwen3.5-122b-int4-1x-dgx-spark"
SPARK_ENGINE = "vllm-0.33.0-spark"
DIGEST = "sha256:" + "d" * 64
GPUS = [serving.Device(number, "RTX PRO 6000", 97887 << 20) for number in range(4)]
NAME = f"sm120kit/vllm:0.19.1-sm120kit.{'4' * 12}"
LABELS = {
    "org.opencontainers.image.version": "0.19.1",
    "sm120kit.kind": "vllm",
    "sm120kit.context": "4" * 64,
    "sm120kit.reference": NAME,
    "sm120kit.recipe": "vllm-0.19.1",
    "sm120kit.wheels": "x==1",
}
VERIFIED = VerifiedImage(
    Image("sha256:1", "c" * 64, "linux/amd64", (), LABELS, "1000", 1),
    NAME,
    "5" * 64,
    (Check("base", "python", CheckResult.PASSED),),
    {},
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return folder(tmp_path / "a model", HYBRID, NVFP4, MTP)


def service(model: Path, tmp_path: Path, **changes: Any) -> serving.Service:
    configuration = configurations.load(FOUR).model_copy(update=changes)
    engine = recipes.load_engine(configuration.engine)
    gpus = [(number, "RTX PRO 6000") for number in range(4)]
    placement = serving.Placement(gpus, 8123, Workspace(tmp_path / "state"))
    return serving.make_service(configuration, engine, VERIFIED.image, f"r.example/vllm@{DIGEST}", model, placement)


def test_docker_command_survives_a_shell(model: Path, tmp_path: Path) -> None:
    argv = serving.docker_run(service(model, tmp_path))
    pasted = tmp_path / "pasted"
    pasted.write_text("#!/bin/sh\n" + shlex.join(argv).replace("docker run", "printf '%s\\n'", 1))
    pasted.chmod(0o755)
    output = subprocess.run([str(pasted)], capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == list(argv[2:])
    assert argv[argv.index("--gpus") + 1] == '"device=0,1,2,3"'
    assert argv[argv.index("--publish") + 1] == "127.0.0.1:8123:8000"
    assert "--shm-size=32g" in argv
    assert f"type=bind,source={model},target=/model,readonly" in argv
    at = argv.index(f"r.example/vllm@{DIGEST}")
    assert argv[at - 2 : at] == ("--entrypoint", "vllm") and argv[at + 1 : at + 3] == ("serve", "/model")
    configuration = configurations.load(FOUR)
    assert argv[-len(configuration.arguments) :] == configuration.arguments
    assert {f"{name}={value}" for name, value in configuration.environment.items()} <= set(argv)


def test_folder_of_links_is_mounted_with_their_targets(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    (cache / "snapshots" / "f00").mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in model.iterdir():
        path.rename(cache / "blobs" / path.name)
        (cache / "snapshots" / "f00" / path.name).symlink_to(Path("../../blobs") / path.name)
    snapshot = cache / "snapshots" / "f00"
    planned = service(snapshot, tmp_path)
    mounts = [mount for mount in planned.mounts if mount.read_only]
    assert mounts == [Mount(snapshot, "/model/snapshots/f00", True), Mount(cache / "blobs", "/model/blobs", True)]
    assert "/model/snapshots/f00" in planned.argv
    for link in snapshot.iterdir():
        inside = Path(os.path.normpath(Path("/model/snapshots/f00") / link.readlink()))
        assert (mounts[1].source / inside.relative_to(mounts[1].target)).read_bytes() == link.read_bytes()
    (snapshot / "1_Pooling").mkdir()
    (snapshot / "1_Pooling" / "config.json").symlink_to("../../../blobs/config.json")
    assert [mount for mount in service(snapshot, tmp_path).mounts if mount.read_only] == mounts


@pytest.mark.parametrize("name", ["tokenizer.model", "deep/down/tokenizer.model"])
@pytest.mark.parametrize("place", ["models/evil", "models--a--b/snapshots/f00"])
@pytest.mark.parametrize(
    ("relative", "text"),
    [
        ("../../.bashrc", ""),
        ("../../.ssh", ""),
        ("../sibling.json", ""),
        ("../../blobs/stolen", ""),
        ("../../.absent", ""),
        ("", "{home}/models/evil/config.json"),
        ("", "{folder}/config.json"),
        ("", "tokenizer.model"),
    ],
)
def test_link_out_of_a_model_mounts_nothing_else(name: str, place: str, relative: str, text: str, tmp_path: Path) -> None:
    """Neither a link two levels up, nor one to what looks like a download cache, makes a directory of the user visible."""
    home = tmp_path / "home"
    path = folder(home / place, HYBRID, NVFP4, MTP)
    (home / ".ssh").mkdir()
    for other in (home / ".bashrc", path.parent / "sibling.json", home / "secret"):
        other.write_text("secret")
    for blobs in {home / "blobs", path.parents[1] / "blobs"}:
        blobs.mkdir()
        (blobs / "stolen").symlink_to(home / "secret")
    link = path / name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(text.format(home=home, folder=path) or os.path.relpath(path / relative, link.parent))
    with pytest.raises(NotFound, match="tokenizer"):
        service(path, tmp_path)


def test_link_within_a_model_is_mounted_with_it(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.model").symlink_to("config.json")
    assert [mount for mount in service(model, tmp_path).mounts if mount.read_only] == [Mount(model, "/model", True)]
    (tmp_path / "link").symlink_to(model)
    assert service(tmp_path / "link", tmp_path).mounts[0].source == model


def test_docker_mount_of_a_path_with_a_comma(model: Path, tmp_path: Path) -> None:
    argv = serving.docker_run(service(model.rename(tmp_path / "a, b"), tmp_path))
    assert f'type=bind,"source={tmp_path}/a, b",target=/model,readonly' in argv


def test_docker_command_without_values_of_variables(model: Path, tmp_path: Path) -> None:
    argv = serving.docker_run(service(model, tmp_path, environment={"HF_TOKEN": "hunter2"}), values=False)
    assert argv[argv.index("--env") + 1] == "HF_TOKEN" and "hunter2" not in " ".join(argv)


def container(**changes: Any) -> configurations.Container:
    return configurations.load(FOUR).container.model_copy(update=changes)


def test_private_ipc_namespace_has_shared_memory_and_ulimits(model: Path, tmp_path: Path) -> None:
    argv = serving.docker_run(service(model, tmp_path, container=container(ulimits={"memlock": -1})))
    assert "--shm-size=32g" in argv and "--ipc=host" not in argv and argv[argv.index("--ulimit") + 1] == "memlock=-1"
    argv = serving.docker_run(service(model, tmp_path, container=container(ipc_host=True)))
    assert "--ipc=host" in argv and not any(word.startswith("--shm-size") for word in argv)


TEMPORARY = "rw,exec,nosuid,nodev,mode=1777"


def test_container_has_no_privileges(model: Path, tmp_path: Path) -> None:
    planned = service(model, tmp_path)
    argv = serving.docker_run(planned)
    assert {"--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"} <= set(argv)
    assert [after for word, after in pairwise(argv) if word == "--tmpfs"] == [
        f"/tmp:{TEMPORARY},size=16g",
        f"/home/sm120kit:{TEMPORARY},size=2g",
    ]
    assert not {"--privileged", "--cap-add", "--pid=host", "--network=host"} & set(argv)
    written = yaml_documents(serving.compose(planned))[0]["services"][planned.name]
    assert (written["cap_drop"], written["security_opt"], written["read_only"]) == (["ALL"], ["no-new-privileges:true"], True)
    assert written["tmpfs"] == [f"/tmp:{TEMPORARY},size=16g", f"/home/sm120kit:{TEMPORARY},size=2g"]
    root = service(model, tmp_path, container=container(writable_root=True))
    argv = serving.docker_run(root)
    assert "--cap-drop=ALL" in argv and "--read-only" not in argv and "--tmpfs" not in argv
    assert "read_only: true" in serving.compose(planned) and "read_only: true\n    tmpfs" not in serving.compose(root)


def yaml_documents(text: str) -> list[dict[str, Any]]:
    return list(yaml_library.safe_load_all(text))


def every_service(model: Path, tmp_path: Path) -> Iterator[tuple[str, serving.Service]]:
    """The service of each configuration, as far as its engine has a recipe."""
    for name in configurations.names():
        configuration = configurations.load(name)
        engine, gpus = (
            recipes.load_engine(configuration.engine),
            [(number, "GPU") for number in range(configuration.hardware.gpus)],
        )
        yield (
            name,
            serving.make_service(
                configuration,
                engine,
                VERIFIED.image,
                f"r.example/x@{DIGEST}",
                model,
                serving.Placement(gpus, 8000, Workspace(tmp_path / "s")),
            ),
        )


def test_compose_files_are_valid(model: Path, tmp_path: Path) -> None:
    validator = jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    services = [planned for _, planned in every_service(model, tmp_path)]
    services.append(service(model, tmp_path, container=container(ipc_host=True, writable_root=True)))
    for planned in services:
        (document,) = yaml_documents(serving.compose(planned))
        assert list(validator.iter_errors(document)) == []
    document["services"][planned.name]["read-only"] = True
    assert list(validator.iter_errors(document))


def test_granted_privileges_are_announced(options: list[str], tmp_path: Path) -> None:
    configuration = configurations.load(FOUR)
    assert serving.risks(configuration) == ()
    risky = configuration.model_copy(
        update={"container": container(ipc_host=True, writable_root=True), "arguments": ("--trust-remote-code",)}
    )
    assert [risk.partition(":")[0] for risk in serving.risks(risky)] == ["--ipc=host", "--trust-remote-code", "writable_root"]
    text = (ROOT / "recipes" / "configurations" / f"{FOUR}.toml").read_text()
    text = text.replace("shm_gib = 32", "shm_gib = 32\nipc_host = true")
    text = text.replace("arguments = [", 'arguments = ["--trust-remote-code",')
    reason = '[[deviations]]\nfield = "arguments: --trust-remote-code"\nreason = "because of X"\n'
    (tmp_path / f"{FOUR}.toml").write_text(f"{text}\n{reason}")
    result = CliRunner().invoke(app, ["serve", str(tmp_path / f"{FOUR}.toml"), *options, "--print"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    (code,) = (line for line in lines if "--trust-remote-code: Python code of the checkpoint runs" in line)
    assert "reason: because of X" in code and any("--ipc=host: the container shares memory" in line for line in lines)


def test_privileges_in_configurations_have_reasons() -> None:
    """Each privilege that is left is the publication's, or has a reason of ours; no configuration shares the host's memory."""
    granted = {name: serving.risks(configurations.load(name)) for name in configurations.names()}
    several = [name for name in granted if configurations.load(name).hardware.nodes > 1]
    assert len(several) >= 3
    for name in several:
        assert any(risk.startswith("--network=host: ") and risk.partition("; reason: ")[2] for risk in granted[name]), name
    others = [risk for risks in granted.values() for risk in risks if not risk.startswith("--network=host: ")]
    assert others and all(risk.startswith("--trust-remote-code: ") for risk in others)
    (risk,) = granted["kimi-k2.5-8x-rtx-pro-6000"]
    assert "reason: as published (" not in risk
    assert all("reason: as published (" in other for other in others if other != risk)


def test_api_key_of_a_configuration() -> None:
    configuration = configurations.load(FOUR)
    assert serving.api_key(configuration) == ""
    for changes in ({"environment": {"VLLM_API_KEY": "k"}}, {"arguments": ("--api-key", "k")}, {"arguments": ("--api-key=k",)}):
        assert serving.api_key(configuration.model_copy(update=changes)) == "k"
    for engine, key in (("vllm-0.33.0", "k"), ("sglang-0.5.23", "")):
        changes = {"engine": engine, "arguments": (), "environment": {"VLLM_API_KEY": "k", "SM120KIT_API_KEY": "k"}}
        assert serving.api_key(configuration.model_copy(update=changes)) == key, "SGLang has only an argument"


def test_caches_differ_by_image_gpu_and_configuration(model: Path, tmp_path: Path) -> None:
    def directory(**changes: Any) -> Path:
        return service(model, tmp_path, **changes).mounts[1].source.parent

    first = service(model, tmp_path)
    assert [mount.target for mount in first.mounts[1:]] == [f"/home/sm120kit/{name}" for name in (".cache", ".triton")]
    assert all(mount.source.is_dir() and mount.source.stat().st_mode & 0o777 == 0o777 for mount in first.mounts[1:])
    assert directory().parent.stat().st_mode & 0o777 == 0o700
    assert directory() == directory() == directory(summary="another", host=())
    configuration = configurations.load(FOUR)
    assert directory() != directory(environment={"A": "1"}) != directory(arguments=configuration.arguments[:-2])
    workspace = Workspace(tmp_path / "state")
    other = replace(VERIFIED.image, content="e" * 64)
    keys = {
        serving._container.cache_directory(configuration, image, gpus, workspace)
        for image in (VERIFIED.image, other)
        for gpus in (["RTX PRO 6000"] * 4, ["RTX 5090"] * 4)
    }
    assert len(keys) == 4


def test_compose_file_has_the_same_container(model: Path, tmp_path: Path) -> None:
    planned = service(model, tmp_path, environment={"A": "$HOME $(B)", "NO": "yes"})
    text = serving.compose(planned)
    assert '      A: "$$HOME $$(B)"' in text and '      "NO": "yes"' in text
    assert '      - "127.0.0.1:8123:8000"' in text and '{\\"method\\":\\"mtp\\"' in text and "ulimits" not in text


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
    assert written_yaml(value).splitlines() == lines


def check_fit(folder: Path, **changes: Any) -> serving.Fit:
    values: dict[str, Any] = {"configuration": configurations.load(FOUR), "image": VERIFIED, "devices": GPUS} | changes
    facts = values.get("model") or checkpoint.read(folder)
    serving.require_image(values["configuration"], values["image"])
    gpus = serving.select_gpus(values["configuration"], values["devices"], values.get("taken", {}))
    return serving.check_fit(values["configuration"], facts, gpus)


def test_fit_of_a_configuration(model: Path) -> None:
    big = replace(checkpoint.read(model), weight_bytes=240_000_000_000)
    fit = check_fit(model, model=big)
    assert fit.weight_bytes == 60_000_000_000 and fit.share == 0.9 and fit.context == 262144
    # K and V of a full layer and of MTP, a head per GPU, 32 elements of 2 bytes
    assert fit.kv_bytes_per_token == 2 * 2 * 1 * 32 * 2 and fit.kv_bytes_per_sequence == 0
    assert fit.capacity_tokens == (int((97887 << 20) * 0.9) - 60_000_000_000) // 256
    assert any("60.0 GB on each GPU" in line for line in fit.lines())
    assert check_fit(model, model=replace(big, kv_quantization="fp8")).kv_bytes_per_token == 128
    assert check_fit(model, devices=[replace(gpu, bytes=None) for gpu in GPUS]).capacity_tokens is None
    assert check_fit(model, configuration=configurations.load(FOUR).model_copy(update={"arguments": ()})).share == 0.9
    assert check_fit(model, model=replace(big, kv_quantization="nvfp4")).kv_bytes_per_token == 72, "with scales"
    for share in ("²", "nan", "most", "0", "2"):
        changed = configurations.load(FOUR).model_copy(update={"arguments": ("--gpu-memory-utilization", share)})
        with pytest.raises(BadInput, match=share):
            check_fit(model, configuration=changed)
    strange = check_fit(model, model=replace(big, kv_quantization="float3"))
    assert strange.kv_bytes_per_token is None and "float3" in strange.lines()[2]
    staged = configurations.load(FOUR).model_copy(update={"pipeline_parallel": 2})
    three = replace(big, kv_cache=KvCache(((Vectors(4, 64), 3),)))
    assert check_fit(model, model=three, configuration=staged).kv_bytes_per_token == 2 * 2 * 1 * 32 * 2, "of the longest stage"
    odd = check_fit(model, model=replace(big, kv_cache=None, why_no_kv="its layers differ by some_key"))
    assert odd.kv_bytes_per_token is None and "some_key" in odd.lines()[2]


def test_misfits_are_refused(model: Path) -> None:
    facts = checkpoint.read(model)
    configuration = configurations.load(FOUR)
    bad = configurations.BadVersion(distribution="some.thing", version="1.0", reason="wrong numbers", source="a report")
    labels = VERIFIED.image.labels
    cases: list[tuple[type[Sm120kitError], str, dict[str, Any]]] = [
        (ResourceUnavailable, "needs 4", {"devices": GPUS[:3]}),
        (ResourceUnavailable, "3 of 4 are free, others are used by sm120kit-a", {"taken": {1: "sm120kit-a"}}),
        (BadInput, "none of the 7 tensors", {"model": replace(facts, mtp=())}),
        (ResourceUnavailable, "weights of 93.0 GB exceed", {"model": replace(facts, weight_bytes=4 * 93_000_000_000)}),
        (ResourceUnavailable, "and one sequence has", {"model": replace(facts, weight_bytes=4 * 92_350_000_000)}),
        (Mismatch, "image of flashinfer-0.6.6", {"image": labelled({**labels, "sm120kit.recipe": "flashinfer-0.6.6"})}),
        (Mismatch, "labelled with no recipe", {"image": labelled({})}),
        (
            Mismatch,
            "some.thing 1.0, known to be bad: wrong numbers",
            {
                "image": labelled({**labels, "sm120kit.wheels": "a==1,some-thing==1.0"}),
                "configuration": configuration.model_copy(update={"known_bad": (bad,)}),
            },
        ),
    ]
    for error, message, changes in cases:
        with pytest.raises(error) as caught:
            check_fit(model, **changes)
        assert message in caught.value.message and caught.value.hint
    without = configuration.model_copy(update={"model": configuration.model.model_copy(update={"needs_mtp": False})})
    assert check_fit(model, model=replace(facts, mtp=()), configuration=without).gpus == tuple(GPUS)
    eight = [*GPUS, *(replace(gpu, number=gpu.number + 4) for gpu in GPUS)]
    beside = check_fit(model, devices=eight, taken={0: "sm120kit-a", 5: "sm120kit-b"})
    assert [gpu.number for gpu in beside.gpus] == [1, 2, 3, 4], "the first ones that no other server has"
    newer = labelled({**labels, "sm120kit.wheels": "some-thing==1.1"})
    assert check_fit(model, image=newer, configuration=configuration.model_copy(update={"known_bad": (bad,)})).gpus


def test_memory_that_a_desktop_has_is_not_the_servers(model: Path) -> None:
    shown = [replace(GPUS[0], used=12 << 30), *GPUS[1:]]
    with pytest.raises(ResourceUnavailable, match=r"GPU 0, .* takes 90%") as caught:
        check_fit(model, devices=shown)
    assert "--gpu-memory-utilization 0.86" in caught.value.hint
    assert check_fit(model, devices=[replace(GPUS[0], used=1 << 30), *GPUS[1:]]).memory_bytes == GPUS[0].bytes
    sglang = configurations.load(FOUR).model_copy(update={"engine": "sglang-0.5.23", "arguments": ()})
    assert check_fit(
        model,
        configuration=sglang,
        devices=shown,
        image=labelled({**VERIFIED.image.labels, "sm120kit.recipe": "sglang-0.5.23"}),
    ).memory_bytes == GPUS[0].bytes - (12 << 30)


def labelled(labels: dict[str, str]) -> VerifiedImage:
    return replace(VERIFIED, image=replace(VERIFIED.image, labels=labels))


def published(path: Path, image: VerifiedImage = VERIFIED) -> Path:
    write_record(path, PublishedIndex(FORMAT, (PublishedImage("r.example/vllm", "t", DIGEST, "vllm-0.19.1", "b" * 64, image),)))
    return path


@pytest.fixture
def options(model: Path, tmp_path: Path) -> list[str]:
    root = synthetic_hosts.build("turin-8", tmp_path / "host")
    index = published(tmp_path / "images.json")
    return ["--model", str(model), "--root", str(root), "--index", str(index), "--state", str(tmp_path / "state")]


def test_print_docker_command(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print"])
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("docker run ") and result.stdout.count("\n") == 1
    assert f"r.example/vllm@{DIGEST} serve /model" in result.stdout and "device=0,1,2,3" in result.stdout
    for line in ("16 elements per scale", "2 MTP tensors", "GPUs     0, 1, 2, 3", "unverified on SM120", "doctor   "):
        assert line in result.stderr
    assert CliRunner().invoke(app, ["serve", FOUR, *options]).exit_code == 2, "nothing can be started on a recorded host"


def test_without_tensors_it_is_unknown_whether_some_are_of_mtp(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", FOUR, *options[2:], "--offline", "--print"])
    assert result.exit_code == 0, result.output
    assert "by its sizes in recipes/" in result.stderr and "MTP tensors is unknown" in result.stderr


def test_what_the_all_reduce_lacks_is_shown_only_where_it_is_used(tmp_path: Path) -> None:
    """Minor on a host that need not use it: NVIDIA's driver refuses P2P between GeForce GPUs."""
    root, state = synthetic_hosts.build("container", tmp_path / "host"), tmp_path / "state"
    arguments = ["serve", "qwen3.8-27b-nvfp4-2x-rtx-5090", "--root", str(root), "--state", str(state), "--offline", "--print"]
    shown = [CliRunner().invoke(app, [*arguments, "--allreduce", method]).stderr for method in ("pcie-ipc", "nccl")]
    assert ["pcie-ipc minor: p2p-grant" in each for each in shown] == [True, False]


def test_print_for_an_image_in_the_state_directory(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No daemon is needed, and the command that loads the image is printed."""
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    workspace = Workspace.open(tmp_path / "state")
    _, name = layout_images.add_image(workspace, (1,), more=LABELS)
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--image", name, "--print"])
    assert result.exit_code == 0, result.output
    assert f"{LocalImages(workspace).find(name).id} serve /model" in result.stdout
    assert f"sm120kit image load {name}" in result.stderr


def test_plan_on_a_host_without_the_gpus(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned for another host, of which nothing is known but that it has the configuration's GPUs, with their memory."""
    host = synthetic_hosts.build("no-gpu", tmp_path / "none")
    monkeypatch.setattr(resolving, "HOST", host)
    monkeypatch.setattr("sm120kit.cli.serve.HOST", host)
    at = options.index("--root")
    words = [*options[:at], *options[at + 2 :]]
    files = ["--compose", str(tmp_path / "c.yaml")]
    result = CliRunner().invoke(app, ["serve", FOUR, *words, "--print", *files])
    assert result.exit_code == 0, result.output
    assert "device=0,1,2,3" in result.stdout and "capabilities" in (tmp_path / "c.yaml").read_text()
    assert "memory 96.0 GB" in result.stderr and "planned for one that does" in result.stderr
    assert f"  sm120kit doctor {FOUR}\n" in result.stderr and "doctor   " not in result.stderr, "findings are of another host"
    result = CliRunner().invoke(app, ["serve", FOUR, *words, "--gpus", "4,5,6,7", "--print"])
    assert "device=4,5,6,7" in result.stdout
    shard = json.dumps({"w": {"dtype": "BF16", "shape": [200 << 30], "data_offsets": [0, 400 << 30]}}).encode()
    large = folder(tmp_path / "large", {"architectures": HYBRID["architectures"]}, {})
    with (large / "model.safetensors").open("wb") as file:
        file.write(len(shard).to_bytes(8, "little") + shard)
        file.truncate(8 + len(shard) + (400 << 30))  # sparse
    text = (
        (data_root() / "recipes" / "configurations" / f"{FOUR}.toml")
        .read_text()
        .replace("needs_mtp = true", "needs_mtp = false")
    )
    (tmp_path / "plain.toml").write_text(text.replace(f'name = "{FOUR}"', 'name = "plain"'))
    planned = [str(tmp_path / "plain.toml"), "--model", str(large), *words[2:], "--print"]
    assert isinstance(CliRunner().invoke(app, ["serve", *planned]).exception, ResourceUnavailable)
    for refused in (
        ["--gpus", "4", "--print"],
        ["--port", str(free_port())],
        ["--print", "--root", str(synthetic_hosts.build("no-gpu", tmp_path / "b"))],
    ):
        result = CliRunner().invoke(app, ["serve", FOUR, *words, *refused])
        assert isinstance(result.exception, ResourceUnavailable), (refused, result.output)


def test_model_of_another_architecture_is_refused_first(options: list[str], tmp_path: Path) -> None:
    other = folder(tmp_path / "other", MINIMAX, NVFP4, MTP)
    for command in (["serve", FOUR], ["serve", FOUR, "--print"], ["bench", "run", FOUR]):
        words = ["--model", str(other), *([] if "bench" in command else ["--root", str(tmp_path / "no host")])]
        failure = CliRunner().invoke(app, [*command, *words[: 2 if "--print" not in command else 4]]).exception
        assert isinstance(failure, NotFound) and "MiniMaxM2ForCausalLM" in failure.message, (command, failure)
    unnamed = {key: value for key, value in HYBRID.items() if key != "architectures"}
    at = options.index("--model") + 1
    options[at] = str(folder(tmp_path / "unnamed", unnamed, NVFP4, MTP))
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print"])
    assert result.exit_code == 0 and "unknown architecture" in result.stderr, result.output


def test_print_without_an_image(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    monkeypatch.chdir(tmp_path / "host")  # without images.json, the default of --index
    at = options.index("--index")
    arguments = [*options[:at], *options[at + 2 :]]
    result = CliRunner().invoke(app, ["serve", FOUR, *arguments, "--print", "--compose", str(tmp_path / "c.yaml")])
    assert result.exit_code == 0, result.output
    assert " IMAGE serve /model" in result.stdout and "sm120kit build vllm-0.19.1" in result.stderr
    assert "image: IMAGE\n" in (tmp_path / "c.yaml").read_text()


@pytest.mark.parametrize(
    ("listen", "url", "published"),
    [
        ("127.0.0.2", "http://127.0.0.2:8000", "127.0.0.2:8000:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000", "0.0.0.0:8000:8000"),
        ("::", "http://[::1]:8000", "[::]:8000:8000"),
    ],
)
def test_address_of_a_server(listen: str, url: str, published: str, model: Path, tmp_path: Path) -> None:
    planned = replace(service(model, tmp_path), listen=listen, port=8000)
    argv = serving.docker_run(planned)
    assert planned.url == url and argv[argv.index("--publish") + 1] == published
    (container,) = yaml_library.safe_load(serving.compose(planned))["services"].values()
    assert container["ports"] == [published]


def test_api_key_is_only_in_the_environment_of_docker(model: Path, tmp_path: Path) -> None:
    vllm = replace(service(model, tmp_path), key="hunter2")
    sglang = replace(vllm, argv=("python", "a b"), api_key=engines.SGLANG.api_key)
    for planned in (vllm, sglang):
        argv = serving.docker_run(planned, values=False)
        assert planned.api_key.variable in argv and "hunter2" not in " ".join(argv) and "hunter2" not in repr(planned)
        assert planned.variables[planned.api_key.variable] == "hunter2"
    shell, *words = sglang.command
    shown = subprocess.run(
        [shell, *words[:-2], "printf", "%s\n", *words[-2:]],
        env={"SM120KIT_API_KEY": "hunter2", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines() == ["python", "a b", "--api-key", "hunter2"]


def test_address_for_others_requires_an_api_key(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SM120KIT_API_KEY", raising=False)
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--listen", "0.0.0.0"])
    assert isinstance(result.exception, RequirementMissing) and "SM120KIT_API_KEY" in result.exception.hint
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--listen", "0.0.0.0", "--api-key", "k"])
    assert result.exit_code == 0 and "--publish 0.0.0.0:8000:8000" in result.stdout, result.output
    for listen, message in (("here", "is not an IP address"), ("fe80::1%eth0", "has a zone")):
        result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--listen", listen, "--api-key", "k"])
        assert result.exit_code == 2 and message in result.stderr and not result.stdout


def test_findings_of_the_host_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the observed fact; what breaks the server as a warning. Neither prevents the start."""
    root = synthetic_hosts.build("neglected", tmp_path / "the host")
    model = folder(tmp_path / "a model", HYBRID | {"architectures": ["Qwen3_5ForConditionalGeneration"]}, NVFP4, MTP)
    monkeypatch.chdir(tmp_path)  # without images.json, the default of --index
    file = tmp_path / "qwen3.5-27b-fp8-1x-rtx-pro-6000.toml"
    file.write_bytes((data_root() / "recipes" / "configurations" / file.name).read_bytes())
    options = ["--model", str(model), "--root", str(root), "--state", str(tmp_path / "state"), "--print"]
    result = CliRunner().invoke(app, ["serve", file.name, *options])
    assert result.exit_code == 0 and result.stdout.startswith("docker run "), result.output
    findings = doctor.diagnose(probe(root), doctor.checks_for(configurations.load("qwen3.5-27b-fp8-1x-rtx-pro-6000")))
    text = " ".join(result.stderr.split())
    shown = {impact: [each for each in findings if each.verdict.impact == impact] for impact in doctor.Impact}
    for finding in shown[doctor.Impact.BREAKS]:
        verdict = finding.verdict
        assert " ".join(f"warning: doctor: {finding.check} breaks: {verdict.fact}; {verdict.consequence}".split()) in text
    for finding in shown[doctor.Impact.SLOWS]:
        assert " ".join(f"doctor {finding.check} slows: {finding.verdict.fact}".split()) in text
    assert not any(f"doctor {finding.check} " in text for finding in shown[doctor.Impact.MINOR])
    assert "config-driver" in {finding.check for finding in shown[doctor.Impact.BREAKS]} and shown[doctor.Impact.SLOWS]
    assert f"remedies: sm120kit doctor {file} --root '{root}'" in text, "of the recorded host, not of this one"


def test_revision_is_for_downloads(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--revision", "main"])
    assert result.exit_code == 2 and "--revision: it is for downloads" in result.stderr and not result.stdout


def test_chosen_gpus(options: list[str]) -> None:
    result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--gpus", "7,2, 3,5"])
    assert result.exit_code == 0 and "device=2,3,5,7" in result.stdout and "GPUs     2, 3, 5, 7" in result.stderr, result.output
    for numbers, message in (
        ("2,3", "needs 4 GPUs, and --gpus names 2"),
        ("0,1,2,3,4", "needs 4 GPUs, and --gpus names 5"),
        ("0,1,8,9", "cannot use GPU 8, 9; of this host it can use 0, 1, 2, 3, 4, 5, 6, 7"),
    ):
        result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--gpus", numbers])
        assert (
            isinstance(result.exception, ResourceUnavailable) and message in result.exception.message and result.exception.hint
        )
    for numbers in ("0,1,2,2", "0,01,1,2", "0,1,2,", "0;1", "all", "-1,2,3,4", "0,1,2,\u0663", "1" * 5000):
        result = CliRunner().invoke(app, ["serve", FOUR, *options, "--print", "--gpus", numbers])
        assert result.exit_code == 2 and "--gpus" in result.stderr and not result.stdout


def test_chosen_gpu_that_a_server_has_is_refused() -> None:
    configuration = configurations.load(FOUR)
    eight = [*GPUS, *(replace(gpu, number=gpu.number + 4) for gpu in GPUS)]
    chosen = serving.choose_gpus(configuration, eight, (2, 3, 5, 7))
    assert [gpu.number for gpu in serving.select_gpus(configuration, chosen, {0: "sm120kit-a"})] == [2, 3, 5, 7]
    with pytest.raises(ResourceUnavailable, match="3 of 4 are free, others are used by sm120kit-a"):
        serving.select_gpus(configuration, chosen, {5: "sm120kit-a"})


def test_plan_for_a_spark_on_any_machine(model: Path, tmp_path: Path) -> None:
    """Its engine's image is for aarch64, independent of the machine that plans."""
    labels = LABELS | {"sm120kit.recipe": SPARK_ENGINE}
    spark = replace(VERIFIED, image=replace(VERIFIED.image, platform="linux/arm64", labels=labels))
    entry = PublishedImage("r.example/vllm", "t", DIGEST, SPARK_ENGINE, "b" * 64, spark)
    write_record(tmp_path / "images.json", PublishedIndex(FORMAT, (entry,)))
    root = synthetic_hosts.build("gb10-ready", tmp_path / "host")
    arguments = [
        "--model",
        model,
        "--root",
        root,
        "--index",
        tmp_path / "images.json",
        "--state",
        tmp_path / "state",
        "--print",
    ]
    result = CliRunner().invoke(app, ["serve", SPARK, *map(str, arguments)])
    assert result.exit_code == 0 and f" r.example/vllm@{DIGEST} " in result.stdout, result.output
    assert " sh vllm serve /model " in result.stdout, "through the guard of unified memory"


def test_compose_file_with_an_api_key_is_not_readable_by_others(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    for words, mode in (((), 0o644), (("--overwrite", "--api-key", "hunter2"), 0o600)):
        result = CliRunner().invoke(app, ["serve", FOUR, *options, "--compose", str(file), *words])
        assert result.exit_code == 0 and ("hunter2" in file.read_text()) == bool(words), result.output
        assert file.stat().st_mode & 0o777 == mode


def test_existing_file_is_kept(options: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("services: {database: {}}\n")
    words = ["serve", FOUR, *options, "--compose", str(mine)]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, SystemRefused) and str(mine) in result.exception.message, result.output
    assert "database" in mine.read_text()
    assert CliRunner().invoke(app, [*words, "--overwrite"]).exit_code == 0 and "database" not in mine.read_text()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": "qwen3.5-397b-nvfp4-4x-rtx-pro-600"}, NotFound, "did you mean"),
        ({"--model": "absent"}, NotFound, "no model folder"),
        ({"--root": "absent"}, BadInput, "does not exist or is not readable"),
        ({"--index": "absent"}, BadInput, "absent does not exist"),
        ({"host": "node-forced"}, ResourceUnavailable, "this host has 2"),
        ({"host": "no-gpu"}, ResourceUnavailable, "this host has 0"),
        ({"mtp": False}, BadInput, "none"),
        ({"checks": (Check("base", "python", CheckResult.FAILED),)}, NotVerified, "did not pass"),
        ({"checks": ()}, NotVerified, "none was run"),
    ],
)
def test_bad_input(
    change: dict[str, Any], error: type[Sm120kitError], message: str, options: list[str], tmp_path: Path
) -> None:
    values = dict(zip(options[::2], options[1::2], strict=True))
    values |= {name: str(tmp_path / value) for name, value in change.items() if name.startswith("--")}
    if "host" in change:
        values["--root"] = str(synthetic_hosts.build(change["host"], tmp_path / "other"))
    if "mtp" in change:
        values["--model"] = str(folder(tmp_path / "without", HYBRID, NVFP4))
    if "checks" in change:
        published(Path(values["--index"]), replace(VERIFIED, checks=change["checks"]))
    arguments = [text for pair in values.items() for text in pair]
    result = CliRunner().invoke(app, ["serve", change.get("config", FOUR), *arguments, "--print"])
    assert isinstance(result.exception, error), result.output
    assert message in result.exception.message and not result.stdout and not (tmp_path / "state" / "caches").exists()


def test_documentation_has_the_exit_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    rows = {line.rpartition("| ")[2].strip(" |") for line in page.splitlines() if line.startswith("| ") and line[-3].isdigit()}
    assert {10, 12, 20, 21, 41} < set(map(int, rows)) <= {family.exit_code for family in families()}


@pytest.mark.parametrize("name", configurations.names())
def test_every_configuration_of_a_known_engine_can_be_planned(name: str, tmp_path: Path) -> None:
    configuration = configurations.load(name)
    if configuration.engine not in recipes.names():
        with pytest.raises(NotFound):
            recipes.load_engine(configuration.engine)
        return
    engine = recipes.load_engine(configuration.engine)
    planned = serving.make_service(
        configuration,
        engine,
        VERIFIED.image,
        "sha256:1",
        tmp_path,
        serving.Placement([(0, "g")], 8000, Workspace(tmp_path / "state")),
    )
    ahead = engine.b12x or engine.name in ("sglang-0.5.23", "vllm-0.33.0")  # the entrypoint adds kernels of the image to caches
    program = tuple(entrypoint(engine.serve)) if ahead else engine.serve
    assert planned.argv[: len(program)] == program and planned.argv[-len(configuration.arguments) :] == configuration.arguments
    assert (
        len({mount.source for mount in planned.mounts})
        == len({mount.target for mount in planned.mounts})
        == len(planned.mounts)
    )
    for cache in configuration.container.caches:
        inside = cache.replace("/root", "/home/sm120kit")
        assert any(Path(inside).is_relative_to(mount.target) for mount in planned.mounts if not mount.read_only)
    assert planned.argv.count("--enable-metrics") == (engine.engine == "sglang")
    for flag in ("--host", "--port", "--served-model-name", "--model-path"):
        assert planned.argv.count(flag) <= 1, f"{flag} is set by launch"
