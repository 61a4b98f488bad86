"""Requirements of configurations, checked on synthetic hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_hosts
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import NotFound
from sm120kit.hosts import doctor
from sm120kit.hosts.doctor import CHECKS, Impact, Status
from sm120kit.hosts.facts import Host, probe
from sm120kit.recipes import configurations
from sm120kit.recipes.configurations import Configuration

ONE, TWO, EIGHT = "qwen3.5-27b-fp8-1x-rtx-pro-6000", "qwen3.5-122b-nvfp4-2x-rtx-pro-6000", "glm-5-nvfp4-8x-rtx-pro-6000"
SPARK = "qwen3.5-122b-int4-1x-dgx-spark"
OK, BREAKS, SLOWS, MINOR = Status.OK, Impact.BREAKS, Impact.SLOWS, Impact.MINOR
SKIP, UNKNOWN = Status.NOT_APPLICABLE, Status.UNKNOWN


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Host]:
    root = tmp_path_factory.mktemp("hosts")
    return {name: probe(synthetic_hosts.build(name, root / name)) for name in synthetic_hosts.HOSTS}


def findings_by_check(host: Host, configuration: Configuration) -> dict[str, doctor.Finding]:
    return {finding.check: finding for finding in doctor.diagnose(host, doctor.checks_for(configuration))}


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        # gpus, memory, host
        (TWO, "node-forced", (OK, OK, OK)),
        (TWO, "node-pair", (OK, OK, BREAKS)),
        (TWO, "x4-link", (BREAKS, OK, OK)),
        (TWO, "wsl2", (MINOR, BREAKS, OK)),
        (TWO, "no-gpu", (BREAKS, SKIP, SKIP)),
        (TWO, "closed-module", (OK, UNKNOWN, UNKNOWN)),
        (TWO, "container", (MINOR, BREAKS, OK)),
        (EIGHT, "tuned", (OK, OK, OK)),
        (EIGHT, "node-forced", (BREAKS, OK, OK)),
        (SPARK, "gb10-ready", (OK, OK, SKIP)),
        (SPARK, "node-forced", (BREAKS, SKIP, SKIP)),
        (ONE, "gb10-ready", (BREAKS, SKIP, SKIP)),
        (ONE, "geforce-patched", (MINOR, BREAKS, SKIP)),
    ],
)
def test_requirements(config: str, name: str, expected: tuple[object, ...], hosts: dict[str, Host]) -> None:
    by_check = findings_by_check(hosts[name], configurations.load(config))
    findings = [by_check[f"config-{topic}"] for topic in ("gpus", "memory", "host")]
    statuses = tuple(finding.verdict.impact or finding.status for finding in findings)
    assert statuses == expected, [finding.verdict.fact for finding in findings]
    for finding in findings:
        diagnosis = finding.verdict
        assert diagnosis.fact and finding.source.endswith(f"{config}.toml")
        assert finding.status is not Status.PROBLEM or (diagnosis.cause and diagnosis.consequence and diagnosis.fix)


def test_minor_finding_is_a_problem_only_for_required_checks(hosts: dict[str, Host]) -> None:
    host, configuration = hosts["node-forced"], configurations.load(TWO)
    no_persistence = replace(host, gpus=tuple(replace(gpu, persistence=False) for gpu in host.gpus))
    assert findings_by_check(no_persistence, configuration)["persistence"].verdict.impact is Impact.MINOR
    assert findings_by_check(no_persistence, configuration)["config-host"].verdict.impact is Impact.SLOWS
    assert doctor.fit(doctor.diagnose(host, doctor.checks_for(configuration)))
    assert not doctor.fit(doctor.diagnose(no_persistence, doctor.checks_for(configuration)))
    without = configuration.model_copy(update={"host": ()})
    assert doctor.fit(doctor.diagnose(no_persistence, doctor.checks_for(without)))


def test_configuration_for_one_gpu_skips_peer_checks(hosts: dict[str, Host]) -> None:
    host = hosts["node-pair"]
    assert findings_by_check(host, configurations.load(TWO))["iommu"].status is Status.PROBLEM
    assert findings_by_check(host, configurations.load(ONE))["iommu"].status is Status.NOT_APPLICABLE


def test_configurations_require_existing_checks() -> None:
    for name in configurations.names():
        assert len(doctor.checks_for(configurations.load(name))) == len(CHECKS) + 4
    first_edition = configurations.load(TWO).model_copy(update={"host": ("posted-writes", "iommu")})
    assert len(doctor.checks_for(first_edition)) == len(CHECKS) + 4, "users' files name checks that went"
    configuration = configurations.load(TWO).model_copy(update={"host": ("iomu",)})
    with pytest.raises(NotFound, match="'iomu'"):
        doctor.checks_for(configuration)


@pytest.mark.parametrize(("config", "code"), [(TWO, 0), (EIGHT, 1), ("qwen3.5-122b-nvfp4-2x-rtx-pro-600", 10)])
def test_command_line(config: str, code: int, tmp_path: Path) -> None:
    root = synthetic_hosts.build("node-forced", tmp_path / "host")
    result = CliRunner().invoke(app, ["doctor", config, "--root", str(root)])
    if code == 10:
        assert isinstance(result.exception, NotFound) and "did you mean" in result.exception.message
        return
    assert result.exit_code == code
    assert result.output.rstrip().splitlines()[-1].startswith(f"{'fit' if code == 0 else 'not fit'} for {config}: ")
