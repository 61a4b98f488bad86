"""What a configuration requires of a host, on the synthetic hosts of doctor."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit import doctor
from sm120kit.cli import app
from sm120kit.doctor import CHECKS, Impact, Status
from sm120kit.errors import UnknownName
from sm120kit.host import Host, probe
from sm120kit.recipe import configuration
from sm120kit.recipe.configuration import Configuration

HOSTS = runpy.run_path(str(Path(__file__).parent / "hosts" / "build.py"))
ONE, TWO, EIGHT = "qwen3.5-27b-fp8-1x-rtx-pro-6000", "qwen3.5-122b-nvfp4-2x-rtx-pro-6000", "glm-5-nvfp4-8x-rtx-pro-6000"
SPARK = "qwen3.5-122b-int4-1x-dgx-spark"
OK, BREAKS, SLOWS, MINOR = Status.OK, Impact.BREAKS, Impact.SLOWS, Impact.MINOR
AWAY, UNKNOWN = Status.NOT_APPLICABLE, Status.UNKNOWN


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Host]:
    root = tmp_path_factory.mktemp("hosts")
    return {name: probe(HOSTS["build"](name, root / name)) for name in HOSTS["HOSTS"]}


def ask(host: Host, wanted: Configuration) -> dict[str, doctor.Finding]:
    return {one.check: one for one in doctor.diagnose(host, doctor.checks_for(wanted))}


@pytest.mark.parametrize(
    ("config", "name", "answers"),
    [
        # gpus, memory, shm, ulimits, host
        (TWO, "node-forced", (OK, OK, AWAY, AWAY, OK)),
        (TWO, "node-pair", (OK, OK, AWAY, AWAY, BREAKS)),
        (TWO, "x4-link", (BREAKS, OK, AWAY, AWAY, OK)),
        (TWO, "wsl2", (MINOR, BREAKS, AWAY, AWAY, OK)),
        (TWO, "no-gpu", (BREAKS, AWAY, AWAY, AWAY, AWAY)),
        (TWO, "closed-module", (OK, UNKNOWN, AWAY, AWAY, UNKNOWN)),
        (TWO, "container", (MINOR, BREAKS, BREAKS, BREAKS, OK)),
        (EIGHT, "tuned", (OK, OK, OK, OK, OK)),
        (EIGHT, "node-forced", (BREAKS, OK, OK, AWAY, OK)),
        (SPARK, "gb10-ready", (OK, OK, OK, AWAY, AWAY)),
        (SPARK, "node-forced", (BREAKS, AWAY, OK, AWAY, AWAY)),
        (ONE, "gb10-ready", (BREAKS, AWAY, AWAY, AWAY, AWAY)),
        (ONE, "geforce-patched", (MINOR, BREAKS, AWAY, AWAY, AWAY)),
    ],
)
def test_requirements(config: str, name: str, answers: tuple[object, ...], hosts: dict[str, Host]) -> None:
    found = ask(hosts[name], configuration.load(config))
    seen = [found[f"config-{what}"] for what in ("gpus", "memory", "shm", "ulimits", "host")]
    assert tuple(one.verdict.impact or one.status for one in seen) == answers, [one.verdict.fact for one in seen]
    for one in seen:
        assert one.verdict.fact and one.source.endswith(f"{config}.toml")
        assert one.status is not Status.PROBLEM or (one.verdict.cause and one.verdict.consequence and one.verdict.fix)


def test_what_general_checks_call_minor_is_no_problem_unless_it_is_named(hosts: dict[str, Host]) -> None:
    host, wanted = hosts["node-forced"], configuration.load(TWO)
    sleepy = replace(host, gpus=tuple(replace(gpu, persistence=False) for gpu in host.gpus))
    assert ask(sleepy, wanted)["persistence"].verdict.impact is Impact.MINOR
    assert ask(sleepy, wanted)["config-host"].verdict.impact is Impact.SLOWS
    assert doctor.fit(doctor.diagnose(host, doctor.checks_for(wanted)))
    assert not doctor.fit(doctor.diagnose(sleepy, doctor.checks_for(wanted)))
    unnamed = wanted.model_copy(update={"host": ()})
    assert doctor.fit(doctor.diagnose(sleepy, doctor.checks_for(unnamed)))


def test_one_gpu_needs_no_peers(hosts: dict[str, Host]) -> None:
    host = hosts["node-pair"]
    assert ask(host, configuration.load(TWO))["iommu"].status is Status.PROBLEM
    assert ask(host, configuration.load(ONE))["iommu"].verdict.fact == "the configuration uses one GPU"


def test_every_configuration_names_checks_that_exist() -> None:
    for name in configuration.names():
        assert len(doctor.checks_for(configuration.load(name))) == len(CHECKS) + 5
    wanted = configuration.load(TWO).model_copy(update={"host": ("iomu",)})
    with pytest.raises(UnknownName, match="'iomu'"):
        doctor.checks_for(wanted)


@pytest.mark.parametrize(("config", "code"), [(TWO, 0), (EIGHT, 1), ("qwen3.5-122b-nvfp4-2x-rtx-pro-600", 10)])
def test_command_line(config: str, code: int, tmp_path: Path) -> None:
    root = HOSTS["build"]("node-forced", tmp_path / "host")
    said = CliRunner().invoke(app, ["doctor", config, "--root", str(root)])
    if code == 10:
        assert isinstance(said.exception, UnknownName) and "did you mean" in said.exception.message
        return
    assert said.exit_code == code
    assert said.output.rstrip().splitlines()[-1].startswith(f"{'fit' if code == 0 else 'not fit'} for {config}: ")
