"""Servers that span several machines: what ``serve --nodes`` prints for each, and what it refuses."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import synthetic_hosts
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from model_folders import HYBRID, MINIMAX, MTP, NVFP4, folder
from typer.testing import CliRunner

from sm120kit import recipes, serving
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput, SystemRefused
from sm120kit.core.record_files import write_record
from sm120kit.core.workspace import Workspace
from sm120kit.engines import Node, parser
from sm120kit.images.image_index import FORMAT, PublishedIndex
from sm120kit.images.image_records import Check, CheckResult, Image, PublishedImage, VerifiedImage
from sm120kit.recipes import configurations
from sm120kit.serving import _remote_nodes, nodes
from sm120kit.serving._container import Mount

SPARKS, WORKSTATION = "minimax-m2.7-nvfp4-2x-dgx-spark", "qwen3.5-122b-nvfp4-2x-rtx-pro-6000"
TEXT = (data_root() / "recipes" / "configurations" / f"{SPARKS}.toml").read_text()
ADDRESSES = ("10.0.0.1", "10.0.0.2")


def service(model: Path, state: Path, node: Node, **changes: Any) -> serving.Service:
    configuration = configurations.load(SPARKS).model_copy(update=changes)
    engine = recipes.load_engine(configuration.engine)
    image = Image("sha256:1", "c" * 64, "linux/arm64", (), {}, "1000", 1)
    placement = serving.Placement([(0, "GB10")], 8000, Workspace(state), "0.0.0.0", "hunter2", node)
    return serving.make_service(configuration, engine, image, "r.example/x@sha256:1", model, placement)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Options of a plan for two Sparks, on any machine."""
    root = synthetic_hosts.build("gb10-ready", tmp_path / "host")
    model = folder(tmp_path / "model", MINIMAX, NVFP4)
    return ["--model", str(model), "--root", str(root), "--state", str(tmp_path / "state"), "--interface", "enp1s0f1np1"]


def serve(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", *words])


def scripts(output: str) -> list[list[list[str]]]:
    """The command lines that are printed for each machine, as words."""
    return [[shlex.split(line) for line in part.splitlines()[1:]] for part in output.split("\n\n")]


def value(argv: list[str], option: str) -> str:
    return argv[argv.index(option) + 1]


def variables(argv: list[str]) -> dict[str, str]:
    pairs = (after.partition("=") for word, after in pairwise(argv) if word == "--env")
    return {name: text for name, _, text in pairs}


def test_each_machine_has_a_command(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "host")  # without images.json, the default of --index
    result = serve(SPARKS, *options, "--nodes", ",".join(ADDRESSES), "--print")
    assert result.exit_code == 0, result.output
    assert "--network=host: the machines exchange data unencrypted" in result.stderr
    assert result.stderr.count("warning: ") == 1, "the machines do not differ, and a privilege is announced once"
    head, worker = scripts(result.stdout)
    caches = [word for word in head[2] if word.startswith(str(tmp_path / "state" / "caches"))]
    assert head[0] == worker[0] == ["sm120kit", "doctor", SPARKS] and head[2] == worker[2] and len(caches) == 2
    for rank, (*_, argv) in enumerate((head, worker)):
        assert argv[:2] == ["docker", "run"] and "--network=host" in argv and "--publish" not in argv
        assert (value(argv, "--nnodes"), value(argv, "--node-rank")) == ("2", str(rank))
        assert (value(argv, "--master-addr"), value(argv, "--master-port")) == (ADDRESSES[0], "29501")
        assert ("--headless" in argv) == (rank == 1)
        assert (value(argv, "--host"), value(argv, "--port")) == ("127.0.0.1", "8000")
        assert variables(argv) == {
            "NCCL_SOCKET_IFNAME": "=enp1s0f1np1",
            "GLOO_SOCKET_IFNAME": "enp1s0f1np1",
            "VLLM_HOST_IP": ADDRESSES[rank],
            "VLLM_MARLIN_USE_ATOMIC_ADD": "1",
        }
    same = [[word for word in argv if word not in {*ADDRESSES, "0", "1", "--headless"}] for *_, argv in (head, worker)]
    assert [word for word in same[0] if "HOST_IP" not in word] == [word for word in same[1] if "HOST_IP" not in word]


def test_rdma(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL uses these devices and no others; the container has them, and may lock memory for them."""
    monkeypatch.chdir(tmp_path / "host")
    words = [*options, "--nodes", ",".join(ADDRESSES), "--rdma", "rocep1s0f1,roceP2p1s0f1"]
    result = serve(SPARKS, *words, "--print", "--compose", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    for rank, (*_, argv) in enumerate(scripts(result.stdout)):
        assert variables(argv)["NCCL_IB_HCA"] == "=rocep1s0f1,roceP2p1s0f1"
        assert "--device=/dev/infiniband" in argv and value(argv, "--ulimit") == "memlock=-1"
        (container,) = yaml.safe_load((tmp_path / "out" / f"node-{rank}.yaml").read_text())["services"].values()
        assert container["devices"] == ["/dev/infiniband:/dev/infiniband"] and container["ulimits"] == {"memlock": -1}
        validator = jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
        assert list(validator.iter_errors({"services": {"a": container}})) == []
    without = recipes.load_engine(configurations.load(SPARKS).engine).model_copy(update={"base": "debian-12"})
    with pytest.raises(BadInput, match="based on debian-12, without libibverbs1: NCCL would use TCP"):
        nodes.require_span(configurations.load(SPARKS), without, Node(0, ADDRESSES, "eth0", ("rocep1s0f1",)))


def test_only_the_first_machine_serves(options: list[str], tmp_path: Path) -> None:
    model = Path(options[1])
    head, worker = (service(model, tmp_path / "s", Node(rank, ADDRESSES, "eth0")) for rank in range(2))
    assert (value(list(head.argv), "--host"), head.key) == ("0.0.0.0", "hunter2")
    assert (value(list(worker.argv), "--host"), worker.key) == ("127.0.0.1", "")
    assert "hunter2" not in " ".join(serving.docker_run(worker))


def test_what_machines_share_is_shown_once(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings of a recording that stands for all machines, and the warning on an index without a key."""
    monkeypatch.setitem(synthetic_hosts.HOSTS, "older", {"like": "gb10", "driver": ("570.86.15", "12.8")})
    root = synthetic_hosts.build("older", tmp_path / "older")
    engine = configurations.load(SPARKS).engine
    name, context = f"sm120kit/vllm:0.33.0-sm120kit.{'4' * 12}", "4" * 64
    labels = {"recipe": engine, "kind": "vllm", "context": context, "reference": name, "wheels": "x==1"}
    labels = {f"sm120kit.{key}": text for key, text in labels.items()} | {"org.opencontainers.image.version": "0.33.0"}
    image = Image("sha256:1", "c" * 64, "linux/arm64", (), labels, "1000", 1)
    verified = VerifiedImage(image, name, "", (Check("base", "user", CheckResult.PASSED),), {})
    entry = PublishedImage("r.example/vllm", "t", f"sha256:{'a' * 64}", engine, "b" * 64, verified)
    write_record(tmp_path / "images.json", PublishedIndex(FORMAT, (entry,)))
    words = [*options[:2], "--root", str(root), *options[4:], "--index", str(tmp_path / "images.json")]
    result = serve(SPARKS, *words, "--nodes", ",".join(ADDRESSES), "--print")
    assert result.exit_code == 0, result.output
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len({*warnings}) == len(warnings) > 2 and any("signature not verified" in line for line in warnings), warnings
    assert any(" breaks: " in line for line in warnings)


def test_compose_files(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "host")
    words = (SPARKS, *options, "--nodes", ",".join(ADDRESSES))
    result = serve(*words, "--compose", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    validator = jsonschema.Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["node-0.yaml", "node-1.yaml"]
    for rank, file in enumerate(files):
        document = yaml.safe_load(file.read_text())
        assert list(validator.iter_errors(document)) == []
        (container,) = document["services"].values()
        assert container["network_mode"] == "host" and "ports" not in container
        assert value(container["command"], "--node-rank") == str(rank)
        assert f"# before: sm120kit doctor {SPARKS}\n" in file.read_text()
    again = serve(*words, "--compose", str(tmp_path / "out"))
    assert isinstance(again.exception, SystemRefused) and again.exception.message == f"{files[0]} exists"
    printed = serve(*words, "--compose", "-").stdout
    assert [*yaml.safe_load_all(printed)] == [yaml.safe_load(file.read_text()) for file in files]


def test_each_machine_needs_all_that_is_mounted(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model in a download cache links to files that all models share. Without an image there is none to be named."""
    monkeypatch.chdir(tmp_path / "host")
    hub = tmp_path / "hub"
    snapshot, shared = hub / "models--a--b" / "snapshots" / "c0ffee", hub / "blobs" / "ab"
    for directory in (snapshot, shared, hub / "models--a--b" / "blobs"):
        directory.mkdir(parents=True)
    for file in Path(options[1]).iterdir():
        file.rename(shared / file.name)
        (hub / "models--a--b" / "blobs" / file.name).symlink_to(f"../../blobs/ab/{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (hub / "blobs" / ".huggingface-shared-blobs").write_text("1\n")
    result = serve(SPARKS, "--model", str(snapshot), *options[2:], "--nodes", ",".join(ADDRESSES), "--print")
    assert result.exit_code == 0 and f"source={hub / 'blobs'},target=/blobs" in result.stdout, result.output
    blobs = f"{hub / 'models--a--b' / 'blobs'} and {hub / 'blobs'}"
    assert f" in {snapshot}, and the files that it links to in {blobs}\n" in result.stderr
    assert "replace IMAGE" in result.stderr and "needs the image" not in result.stderr


@pytest.mark.parametrize("name", [name for name in recipes.names() if parser.record_path(name).is_file()])
@pytest.mark.parametrize("addresses", [ADDRESSES, ("fd00::1", "fd00::2")])
def test_parsers_accept_the_arguments(name: str, addresses: tuple[str, ...]) -> None:
    known, engine = parser.load(name), recipes.load_engine(name)
    assert known
    for rank in range(2):
        argv = engine.served_by.node_arguments(Node(rank, addresses, "eth0"))
        assert parser.rejection(known, argv) == ""
    if engine.engine == "sglang":
        head = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        assert argv == ("--nnodes", "2", "--node-rank", "1", "--dist-init-addr", f"{head}:29501")
        assert engine.served_by.node_environment(Node(1, addresses, "eth0"))["SGLANG_HOST_IP"] == addresses[1]


def test_sglang_on_two_workstations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration for two GPUs of one machine, copied and changed to one of each of two machines."""
    published = data_root() / "recipes" / "configurations" / f"{WORKSTATION}.toml"
    file = tmp_path / "my files" / published.name
    file.parent.mkdir()
    file.write_text(published.read_text().replace("gpus = 2\n", "gpus = 2\nnodes = 2\n"))
    root = synthetic_hosts.build("turin-8", tmp_path / "host")
    monkeypatch.chdir(tmp_path)  # without images.json, the default of --index
    model = folder(tmp_path / "model", HYBRID, NVFP4, MTP)
    options = ["--model", "model", "--root", str(root), "--state", str(tmp_path / "state"), "--interface", "eno1,eno2"]
    words = ["--listen", "0.0.0.0", "--port", "8123", "--api-key", "hunter2", "--gpus", "3"]
    result = serve(f"my files/{file.name}", *options, "--nodes", ",".join(ADDRESSES), *words, "--print")
    assert result.exit_code == 0, result.output
    assert f"needs {configurations.load(str(file)).model.repository} in {model}\n" in result.stderr
    engine = recipes.load_engine(configurations.load(str(file)).engine)
    known = parser.load(engine.name)
    assert known
    for rank, (doctor, *_, argv) in enumerate(scripts(result.stdout)):
        assert doctor == ["sm120kit", "doctor", str(file)], "not the published configuration of this name"
        assert variables(argv)["SGLANG_HOST_IP"] == ADDRESSES[rank]
        assert variables(argv)["GLOO_SOCKET_IFNAME"] == f"eno{rank + 1}"
        assert value(argv, "--gpus") == '"device=3"' and value(argv, "--dist-init-addr") == f"{ADDRESSES[0]}:29501"
        assert (value(argv, "--host"), value(argv, "--port")) == ("0.0.0.0" if rank == 0 else "127.0.0.1", "8123")
        assert ("SM120KIT_API_KEY=hunter2" in argv) == (rank == 0), "only the first machine serves"
        command = argv[argv.index("--model-path") :]
        assert parser.rejection(known, command) == "" and value(command, "--node-rank") == str(rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_parser_accepts_the_command_of_each_machine(rank: int, options: list[str], tmp_path: Path) -> None:
    engine = recipes.load_engine(configurations.load(SPARKS).engine)
    known = parser.load(engine.name)
    assert known
    argv = service(Path(options[1]), tmp_path / "s", Node(rank, ADDRESSES, "eth0")).argv
    assert parser.rejection(known, argv[len(engine.serve) :]) == ""


def test_engine_without_the_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    configuration = configurations.load(SPARKS)
    engine = recipes.load_engine(configuration.engine)
    known = parser.load(engine.name)
    assert known
    older = replace(known, options=tuple(option for option in known.options if "--headless" not in option.names))
    monkeypatch.setattr(parser, "load", lambda name: older)
    nodes.require_span(configuration, engine, Node(0, ADDRESSES, "eth0"))
    with pytest.raises(BadInput, match="its argument parser rejects: unknown argument --headless"):
        nodes.require_span(configuration, engine, Node(1, ADDRESSES, "eth0"))
    monkeypatch.setattr(parser, "load", lambda name: None)
    with pytest.raises(BadInput, match="were not recorded"):
        nodes.require_span(configuration, engine, Node(0, ADDRESSES, "eth0"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "10.0.0.1,10.0.0.1", "--print"], "10.0.0.1 occurs twice"),
        (["--nodes", "fd00::1,fd00:0::1", "--print"], "fd00::1 occurs twice"),
        (["--nodes", "10.0.0.1,spark-2", "--print"], "'spark-2' is not an IP address"),
        (["--nodes", "10.0.0.1,", "--print"], "'' is not an IP address"),
        (["--nodes", "10.0.0.1,127.0.0.1", "--print"], "other machines cannot reach 127.0.0.1"),
        (["--nodes", "0.0.0.0,10.0.0.1", "--print"], "other machines cannot reach 0.0.0.0"),
        (["--nodes", "255.255.255.255,10.0.0.1", "--print"], "other machines cannot reach 255.255.255.255"),
        (["--nodes", "fe80::1,fe80::2", "--print"], "other machines cannot reach fe80::1"),
        (["--nodes", "fe80::1%a b,fe80::2%a b", "--print"], "'fe80::1%a b' has a zone"),
        (["--nodes", "10.0.0.1,10.0.0.2", "--print", "--port", "29501"], "the machines meet on port 29501"),
        (["--nodes", "10.0.0.1,10.0.0.2", "--compose", __file__], "is a file; with --nodes, name a directory"),
        (["--nodes", "10.0.0.1", "--print"], "name all machines"),
        (["--nodes", "10.0.0.1,10.0.0.2", "--interface", "", "--print"], "is not a network interface"),
        (["--nodes", "10.0.0.1,10.0.0.2", "--interface", "a,b,c", "--print"], "3 interfaces for 2 machines"),
        (["--nodes", "10.0.0.1,10.0.0.2", "--interface", "a b", "--print"], "'a b' is not a network interface"),
        (["--nodes", "10.0.0.1,10.0.0.2", "--rdma", "roce 1", "--print"], "'roce 1' is not an RDMA device"),
        (["--print"], "requires --nodes"),
    ],
)
def test_wrong_usage(words: list[str], message: str, options: list[str], tmp_path: Path) -> None:
    at = options.index("--root") if not {"--print", "--compose"} & set(words) else len(options)
    result = serve(SPARKS, *options[:at], *options[at + 2 :], *words)
    text = " ".join(word for word in result.stderr.replace("│", " ").split())
    assert result.exit_code == 2 and message in text and not result.stdout, result.output
    assert not (tmp_path / "state" / "caches").exists()


@pytest.mark.parametrize(
    ("config", "addresses", "message"),
    [
        (SPARKS, "", "is for 2 machines, not for 1"),
        (SPARKS, "10.0.0.1,10.0.0.2,10.0.0.3", "is for 2 machines, not for 3"),
        ("minimax-m2.7-nvfp4-2x-rtx-pro-6000", ",".join(ADDRESSES), "is for one machine, not for 2"),
    ],
)
def test_number_of_machines(config: str, addresses: str, message: str, options: list[str], tmp_path: Path) -> None:
    words = [*options, "--nodes", addresses, "--print"] if addresses else [*options[:-2], "--compose", "-"]
    result = serve(config, *words)
    assert isinstance(result.exception, BadInput) and message in result.exception.message, result.output
    assert result.exception.exit_code == 11 and result.exception.hint and not (tmp_path / "state" / "caches").exists()


def test_machines_without_names_are_printed_with_addresses_of_examples(options: list[str]) -> None:
    result = serve(SPARKS, *options[:-2], "--print")
    assert result.exit_code == 0, result.output
    assert "name yours with --nodes and --interface" in result.stderr
    first, second = result.stdout.split("\n\n")
    assert "--node-rank 0" in first and "--node-rank 1" in second and "--master-addr 192.0.2.1" in second


def test_gpus_that_cannot_be_divided(tmp_path: Path) -> None:
    file = tmp_path / f"{SPARKS}.toml"
    file.write_text(TEXT.replace("nodes = 2", "nodes = 3"))
    with pytest.raises(BadInput, match="2 GPUs cannot be divided equally among 3"):
        configurations.load(str(file))
    file.write_text(TEXT.replace("tensor_parallel = 2", "tensor_parallel = 1\npipeline_parallel = 3"))
    with pytest.raises(BadInput, match=r"tensor_parallel: 1 x pipeline_parallel 3, but hardware\.gpus is 2"):
        configurations.load(str(file))
    pipeline = TEXT.replace("tensor_parallel = 2", "tensor_parallel = 1\npipeline_parallel = 2")
    file.write_text(pipeline.replace("--tensor-", "--pipeline-"))
    assert configurations.load(str(file)).hardware.gpus_per_node == 1


def test_memory_of_a_pipeline_is_divided_among_all_gpus(options: list[str], tmp_path: Path) -> None:
    model = serving.checkpoint.read(Path(options[1]))
    tensor = configurations.load(SPARKS)
    pipeline = tensor.model_copy(update={"tensor_parallel": 1, "pipeline_parallel": 2})
    gpus = [serving.Device(0, "GB10", 128_000_000_000)]
    fits = [serving.check_fit(configuration, model, gpus) for configuration in (tensor, pipeline)]
    assert fits[0] == fits[1] and fits[0].weight_bytes == model.weight_bytes // 2


def test_links_of_a_model_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.symlink_to("two")
    two.symlink_to("one")
    mounts = (Mount(tmp_path, "/model", True),)
    started = serving.Service("s", "none", ("sh",), {}, mounts, (0,), 1, False, {}, 8000)
    assert {*_remote_nodes.model_files(started, ())} == {one, two}
