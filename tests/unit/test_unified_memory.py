"""Memory that CPU and GPU share: what is refused, limits of containers, the guard that stops a server, the page cache."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import synthetic_hosts
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from model_folders import HYBRID, MTP, NVFP4, folder
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import ResourceUnavailable, SystemRefused
from sm120kit.images import backends
from sm120kit.recipes import configurations, load_engine
from sm120kit.serving import fit, unified_memory

SPARK, GIB = "qwen3.5-122b-int4-1x-dgx-spark", 2**30
SPARKS = tuple(each for each in map(configurations.load, configurations.names()) if each.hardware.unified)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    model = folder(tmp_path / "model", HYBRID, NVFP4, MTP)
    root = synthetic_hosts.build("gb10-ready", tmp_path / "host")
    return [SPARK, "--model", str(model), "--root", str(root), "--state", str(tmp_path / "state")]


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "mem info"
    available(path, 64 * GIB)
    return path


def available(path: Path, size: int) -> None:
    new = path.with_suffix(".new")
    new.write_text(f"MemTotal: {128 << 20} kB\nMemFree: 1 kB\nMemAvailable: {size >> 10} kB\nBuffers: 1 kB\n")
    new.rename(path)


@pytest.fixture
def guarded(meminfo: Path) -> Iterator[subprocess.Popen[str]]:
    """A guarded server, which has printed that it runs."""
    program = "import time; print('runs', flush=True); time.sleep(300)"
    script = f'{unified_memory.guarded(meminfo)}exec "$@"'
    argv = ["/bin/sh", "-c", script, "sh", sys.executable, "-c", program]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout and child.stdout.readline() == "runs\n"
        yield child
        child.kill()


def test_guard_stops_a_server_before_the_memory_is_used_up(guarded: subprocess.Popen[str], meminfo: Path) -> None:
    time.sleep(2.5)  # at least one look
    assert guarded.poll() is None
    available(meminfo, GIB)
    assert guarded.wait(30) == -15
    assert guarded.stdout and guarded.stdout.read().startswith(
        f"{unified_memory.STOPPED}: 1024 MiB of memory are available, the least is 2048"
    )


def test_guard_leaves_arguments_and_exit_code_alone(meminfo: Path) -> None:
    program = "import sys; print(sys.argv[1:]); sys.exit(7)"
    argv = ["/bin/sh", "-c", f'{unified_memory.guarded(meminfo)}exec "$@"', "sh", sys.executable, "-c", program, "a b", "$c"]
    with (output := meminfo.with_name("output")).open("w") as file:  # the guard would keep a pipe open for a second
        assert subprocess.run(argv, stdout=file, timeout=60).returncode == 7
    assert output.read_text() == "['a b', '$c']\n"


def test_guard_stops_nothing_where_the_available_memory_is_unknown(guarded: subprocess.Popen[str], meminfo: Path) -> None:
    meminfo.write_text("MemTotal: 1 kB\n")
    time.sleep(2.5)
    assert guarded.poll() is None


def test_container_has_a_limit_and_a_guard(options: list[str], tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    result = CliRunner().invoke(app, ["serve", *options, "--print", "--compose", str(file)])
    assert result.exit_code == 0, result.output
    limit = 122 * 1024 - (unified_memory.RESERVE >> 20)
    assert f"--memory={limit}m --memory-swap={limit}m" in result.stdout and unified_memory.STOPPED in result.stdout
    document = yaml.safe_load(file.read_text())
    jsonschema.validate(document, get_builtin_schema("vendor.compose-spec"))
    (container,) = document["services"].values()
    assert container["mem_limit"] == container["memswap_limit"] == f"{limit}m"


@pytest.mark.parametrize(
    ("host", "share", "most"), [("gb10-ready", "0.95", "0.9"), ("gb10", "0.80", "0.73")], ids=["too much", "programs have it"]
)
def test_what_would_freeze_the_system_is_refused(host: str, share: str, most: str, options: list[str], tmp_path: Path) -> None:
    options[4] = str(synthetic_hosts.build(host, tmp_path / "other"))
    result = CliRunner().invoke(app, ["serve", *options, "--print", "--", "--gpu-memory-utilization", share])
    assert isinstance(result.exception, ResourceUnavailable), result.output
    assert "would freeze the system" in result.exception.message
    assert f"-- --gpu-memory-utilization {most}" in result.exception.hint
    allowed = ["serve", *options, "--print", "--", "--gpu-memory-utilization", result.exception.hint.rpartition(" ")[2]]
    assert CliRunner().invoke(app, allowed).exit_code == 0


@pytest.mark.parametrize("configuration", SPARKS, ids=lambda each: each.name)
def test_configurations_leave_the_system_alive(configuration: configurations.Configuration) -> None:
    planned = fit.planned(configuration)
    share = configuration.option_for("memory_share")
    memory = (configuration.hardware.memory_gb or 0) * 1e9
    assert share and memory * float(share) + unified_memory.RESERVE <= memory
    assert planned is None or planned.verdict[0] is not False, planned.verdict[1]


@pytest.mark.parametrize("configuration", SPARKS, ids=lambda each: each.name)
def test_configurations_are_planned_and_printed(configuration: configurations.Configuration, tmp_path: Path) -> None:
    """By what recipes record of their models, without a network: for the images of DGX Spark, one command a machine."""
    root = synthetic_hosts.build("gb10-ready", tmp_path / "host")
    words = ["--root", str(root), "--state", str(tmp_path / "state"), "--offline"]
    planned = json.loads(CliRunner().invoke(app, ["plan", configuration.name, *words, "--json"]).stdout)
    assert planned["memory"]["fits"] and planned["memory"]["capacity_tokens"] >= planned["memory"]["context"]
    recorded = backends.load(configuration.engine)[configuration.name]["selected"]
    assert planned["backends"]["selected"] == recorded or not recorded
    _, *command = planned["command"].replace("INTERFACE", "eth0").split()
    for number in range(configuration.hardware.nodes):
        command = [word.replace("ADDRESS", f"192.0.2.{number + 1}", 1) for word in command]
    result = CliRunner().invoke(app, [*command, *words, "--print"])
    assert result.exit_code == 0, result.output
    machines = configuration.hardware.nodes
    assert result.stdout.count("docker run ") == result.stdout.count("--memory=") == machines
    assert f"`sm120kit build {configuration.engine}` builds" in result.stderr and configuration.engine.endswith("-spark")
    assert load_engine(configuration.engine).machine == "aarch64"


def test_page_cache_is_dropped_or_the_reason_is_named(tmp_path: Path) -> None:
    control = tmp_path / "drop_caches"
    unified_memory.drop_page_cache(control)
    assert control.read_text() == "3\n"
    with pytest.raises(SystemRefused, match="the page cache cannot be dropped: ") as caught:
        unified_memory.drop_page_cache(tmp_path)
    assert "sudo tee /proc/sys/vm/drop_caches" in caught.value.hint
