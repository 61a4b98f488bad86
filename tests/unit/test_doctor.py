"""Doctor's findings on synthetic hosts. Each check has a host on which it reports a problem and another on which it is ok."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic_hosts
from pydantic import TypeAdapter
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import RequirementMissing
from sm120kit.hosts import doctor
from sm120kit.hosts.doctor import CHECKS, Finding, Impact, Scope, Status, _gpus, _p2p, measure
from sm120kit.hosts.doctor._findings import ok
from sm120kit.hosts.facts import Host, probe
from sm120kit.hosts.facts._fact_records import PeerCache

EXPECTED = Path(__file__).parent / "hosts"
NAMES = sorted(synthetic_hosts.HOSTS)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Host]:
    root = tmp_path_factory.mktemp("hosts")
    return {name: probe(synthetic_hosts.build(name, root / name)) for name in NAMES}


def report(findings: Sequence[Finding]) -> str:
    """Findings in the form of the expectation files: those that apply, one per line, then the names of the others."""
    lines = [
        f"{finding.verdict.impact or finding.status:<8}{finding.check}: {finding.verdict.fact}"
        for finding in findings
        if applies(finding)
    ]
    rest = [finding.check for finding in findings if not applies(finding)]
    return "\n".join(lines) + f"\nnot applicable: {', '.join(rest)}\n"


def applies(finding: Finding) -> bool:
    return finding.status is not Status.NOT_APPLICABLE


@pytest.mark.parametrize("name", NAMES)
def test_findings_on_synthetic_host(name: str, hosts: dict[str, Host]) -> None:
    findings, expected = report(doctor.diagnose(hosts[name])), EXPECTED / f"{name}.txt"
    if os.environ.get("UPDATE_HOSTS"):  # after a change: write the files, then review the diff
        expected.write_text(findings)
    assert findings == expected.read_text()


@pytest.mark.parametrize("host_check", CHECKS, ids=lambda host_check: host_check.name)
def test_each_check_has_a_problem_and_an_ok_host(host_check: doctor.HostCheck, hosts: dict[str, Host]) -> None:
    statuses = {doctor.diagnose(host, [host_check])[0].status for host in hosts.values()}
    assert {Status.PROBLEM, Status.OK} <= statuses


def test_problems_have_remedies_and_unknown_facts_have_commands(hosts: dict[str, Host]) -> None:
    for host in hosts.values():
        for finding in doctor.diagnose(host):
            diagnosis = finding.verdict
            assert finding.source and finding.title
            if finding.status is Status.PROBLEM:
                assert diagnosis.cause and diagnosis.consequence and diagnosis.fix and diagnosis.impact, finding.check
            else:
                assert diagnosis.impact is None
            if finding.status is Status.UNKNOWN:
                assert diagnosis.fact and diagnosis.fix, finding.check


def test_no_check_fails(hosts: dict[str, Host]) -> None:
    """Values in unexpected form are findings or unknown; "the check failed" is for bugs."""
    facts = {(name, f.check): f.verdict.fact for name, host in hosts.items() for f in doctor.diagnose(host)}
    assert not {key: fact for key, fact in facts.items() if fact.startswith("the check failed")}


@pytest.mark.parametrize(
    ("check", "impact", "fact"),
    [
        ("driver", Impact.BREAKS, "CUDA Not Found"),
        ("nccl-p2p-level", Impact.SLOWS, "NCCL_P2P_LEVEL=BOGUS is not a level"),
        ("nccl-p2p-disable", Impact.MINOR, "NCCL_P2P_DISABLE=true"),
        ("preload", Impact.BREAKS, "libvgpu.so (HAMi)"),
        ("allocator", None, "no expandable segments"),
        ("peer-cache", Impact.BREAKS, "gpu_p2p_access_cache_for_0,1.json"),
    ],
)
def test_odd_values_are_findings(check: str, impact: Impact | None, fact: str, hosts: dict[str, Host]) -> None:
    diagnosis = diagnose(hosts["odd-values"], check)
    assert diagnosis.impact is impact and fact in diagnosis.fact


@pytest.mark.parametrize("level", ["", "²", "9" * 5000, "0004"], ids=lambda level: level[:4])
def test_p2p_levels_that_are_odd(level: str, hosts: dict[str, Host]) -> None:
    host = replace(hosts["node-forced"], environment={"NCCL_P2P_LEVEL": level})
    fact = diagnose(host, "nccl-p2p-level").fact
    assert ("NCCL reads as" if level.isascii() and level else "is not a level") in fact


@pytest.mark.parametrize("version", ["²80.65.06", "\u0665", ""])
def test_versions_that_are_none(version: str) -> None:
    assert _gpus.numbers(version) == ()


def test_empty_variables_are_not_set(hosts: dict[str, Host]) -> None:
    good, empty = (doctor.diagnose(hosts[name]) for name in ("node-forced", "empty-values"))
    assert [finding.verdict for finding in empty] == [finding.verdict for finding in good]


@pytest.mark.parametrize("reason", ["", "driver", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"])
@pytest.mark.parametrize("check", ["iommu", "acs"])
def test_iommu_and_acs_break_only_where_p2p_is_used(check: str, reason: str, hosts: dict[str, Host]) -> None:
    host = replace(hosts["node-pair"], bridges=tuple(replace(port, acs=0x1D) for port in hosts["node-pair"].bridges))
    if reason == "driver":
        host = replace(host, pairs=tuple(replace(pair, granted="GNS") for pair in host.pairs))
    elif reason:
        host = replace(host, environment={reason: "1" if reason == "NCCL_P2P_DISABLE" else "PXB"})
    diagnosis = diagnose(host, check)
    assert diagnosis.impact is (Impact.MINOR if reason else Impact.BREAKS)
    assert reason in diagnosis.consequence


@pytest.mark.parametrize(
    ("product", "granted", "unused"),
    [
        (synthetic_hosts.PRO, None, False),
        (synthetic_hosts.PRO, "OK", False),
        (synthetic_hosts.PRO, "CNS", True),
        (synthetic_hosts.GEFORCE, None, True),
        (synthetic_hosts.GEFORCE, "OK", False),
    ],
)
def test_p2p_of_a_host_whose_status_is_unknown(product: str, granted: str | None, unused: bool, hosts: dict[str, Host]) -> None:
    host = hosts["node-pair"]
    pairs = tuple(replace(pair, granted=granted) for pair in host.pairs)
    host = replace(host, pairs=pairs, gpus=tuple(replace(gpu, name=product) for gpu in host.gpus))
    assert bool(_p2p.p2p_unused(host)) == unused


def test_remedies_have_order_and_risk(hosts: dict[str, Host]) -> None:
    """The reversible remedy first; iommu=pt leaves ACS on, so that only an IOMMU that is off replaces it."""
    acs, iommu = diagnose(hosts["pix-pair"], "acs"), diagnose(hosts["node-pair"], "iommu")
    actions = [acs.fix, *(remedy.action for remedy in acs.alternatives)]
    assert all(name in action for name, action in zip(("setpci", "disable_acs_redir=", "amd_iommu=off"), actions, strict=True))
    assert "0000:02:00.0;0000:02:01.0" in actions[1]
    assert "iommu=pt" in iommu.fix and "still sets ACS" in iommu.risk and "amd_iommu=off" in iommu.alternatives[0].action
    assert all(remedy.risk for remedy in (*acs.alternatives, *iommu.alternatives))


def test_specific_cause_precedes_generic_ones(hosts: dict[str, Host]) -> None:
    """A patched driver without static BAR1 on a host with default IOMMU, HMM and ACS (noonghunna/club-3090#873)."""
    host = hosts["node-pair"]
    driver = replace(host.driver, version="610.43.03", registry={})
    host = replace(host, driver=driver, gpus=tuple(replace(gpu, name=synthetic_hosts.GEFORCE) for gpu in host.gpus))
    names = [finding.check for finding in doctor.ranked(doctor.diagnose(host))]
    assert names[:2] == ["static-bar1", "iommu"] and "hmm" in names


def test_correct_transfers_exclude_generic_causes(hosts: dict[str, Host]) -> None:
    findings = doctor.diagnose(hosts["node-pair"])
    fast = doctor.Finding("measure-bytes", "", ok("unchanged"), "")
    assert not doctor.fit(findings) and doctor.fit(doctor.with_measurements(findings, [fast]))
    slow = replace(fast, verdict=replace(fast.verdict, status=Status.PROBLEM, impact=Impact.SLOWS))
    assert not doctor.fit(doctor.with_measurements(findings, [fast, slow]))


def test_json_has_the_documented_schema(tmp_path: Path) -> None:
    """docs/doctor.schema.json; UPDATE_HOSTS=1 writes it. An incompatible change increases ``schema_version``."""
    schema = TypeAdapter(doctor.DoctorReport).json_schema(mode="serialization")
    file = Path(__file__).parents[2] / "docs" / "doctor.schema.json"
    if os.environ.get("UPDATE_HOSTS"):
        file.write_text(json.dumps(schema, indent=2) + "\n")
    assert json.loads(file.read_text()) == schema
    root = synthetic_hosts.build("neglected", tmp_path)
    result = CliRunner().invoke(app, ["doctor", "--root", str(root), "--json"])
    report = TypeAdapter(doctor.DoctorReport).validate_json(result.stdout)
    assert report.schema_version == 3 and report.problems and not report.fit


def test_check_names_are_unique() -> None:
    assert len({host_check.name for host_check in CHECKS}) == len(CHECKS)


def test_fit_requires_no_breaking_or_slowing_finding(hosts: dict[str, Host]) -> None:
    assert {name for name in NAMES if doctor.fit(doctor.diagnose(hosts[name]))} == {
        "empty-values",
        "gb10",
        "gb10-ready",
        "geforce-careful",
        "geforce-patched",
        "node-forced",
        "tuned",
    }


def test_exception_in_a_check_is_a_minor_finding(hosts: dict[str, Host]) -> None:
    def divide(host: Host) -> doctor.Diagnosis:
        return ok(str(host.memory_total // 0))  # type: ignore[operator]

    odd = doctor.HostCheck("odd", "this host is odd", Scope.ANY, "this test", divide)
    finding, *others = doctor.diagnose(hosts["node-forced"], [odd, *CHECKS])
    assert finding.verdict.impact is Impact.MINOR and "ZeroDivisionError" in finding.verdict.fact
    assert len(others) == len(CHECKS)


@pytest.mark.parametrize("registry", ["ForceP2P=0x11", "ForceP2P=17;RMForceP2PType=0", "ForceP2P=zero"])
def test_incomplete_registry_keys_are_listed(registry: str, tmp_path: Path) -> None:
    synthetic_hosts.HOSTS["some-keys"] = {"registry": registry}
    host = probe(synthetic_hosts.build("some-keys", tmp_path))
    del synthetic_hosts.HOSTS["some-keys"]
    diagnosis = diagnose(host, "force-p2p")
    assert diagnosis.impact is Impact.MINOR and "RMForceP2PType" in diagnosis.fact
    assert ("ForceP2P," in diagnosis.fact) == ("zero" in registry)


def test_gpus_that_are_not_sm12x_or_bound_to_another_driver(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    hopper = replace(host, gpus=tuple(replace(gpu, capability="9.0", name="NVIDIA H200") for gpu in host.gpus))
    vfio = replace(host, gpus=tuple(replace(gpu, driver="vfio-pci") for gpu in host.gpus))
    mixed = replace(host, gpus=(host.gpus[0], hopper.gpus[1]))
    assert diagnose(hopper, "gpu").impact is Impact.BREAKS and "9.0" in diagnose(hopper, "gpu").fact
    assert diagnose(vfio, "driver").impact is Impact.BREAKS and "vfio-pci" in diagnose(vfio, "driver").fact
    assert diagnose(mixed, "gpu").status is Status.OK
    assert diagnose(hopper, "bar1").fact == "no SM12x GPU detected"
    assert diagnose(mixed, "acs").fact == "only one GPU"


def test_display_gpu_is_ignored(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    old = replace(
        host.gpus[0], bus="0000:05:00.0", name="GT 710", capability="3.5", aperture_mib=128, bridges=("0000:00:03.1",)
    )
    port = replace(host.bridges[0], bus="0000:00:03.1", acs=0x1D)
    pairs = tuple(replace(host.pairs[0], second=old.bus, kind="PHB", granted="GNS") for _ in range(2))
    mixed = replace(host, gpus=(*host.gpus, old), bridges=(*host.bridges, port), pairs=(*host.pairs, *pairs))
    assert [finding.verdict for finding in doctor.diagnose(mixed)][1:] == [
        finding.verdict for finding in doctor.diagnose(host)
    ][1:]


def test_unassigned_bar_breaks(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    unassigned = replace(host, gpus=(replace(host.gpus[0], aperture_mib=0), host.gpus[1]))
    diagnosis = diagnose(unassigned, "bar1")
    assert diagnosis.impact is Impact.BREAKS and "pci=realloc" in diagnosis.fix and "41:00" not in diagnosis.fact


@pytest.mark.parametrize(
    ("granted", "verdicts", "stale"),
    [
        ("OK", {"0->0": True, "0->1": True, "1->0": True}, False),
        ("OK", {"0->0": True, "0->1": False, "1->0": True}, True),
        ("CNS", {"0->0": True, "0->1": False, "1->0": False}, False),
        ("CNS", {"0->0": True, "0->1": True}, True),
        (None, {"0->1": True}, False),
        ("OK", {"0->2": True}, True),
        ("OK", None, True),
    ],
)
def test_stale_p2p_cache_is_detected(
    granted: str | None, verdicts: dict[str, bool] | None, stale: bool, hosts: dict[str, Host]
) -> None:
    host = hosts["node-forced"]
    pairs = tuple(replace(pair, granted=granted) for pair in host.pairs)
    assert diagnose(replace(host, pairs=pairs, peer_caches=(PeerCache("/x.json", verdicts),)), "peer-cache").status is (
        Status.PROBLEM if stale else Status.OK
    )


def diagnose(host: Host, name: str) -> doctor.Diagnosis:
    return doctor.diagnose(host, [host_check for host_check in CHECKS if host_check.name == name])[0].verdict


def test_acs_fix_mentions_passthrough_devices(hosts: dict[str, Host]) -> None:
    host = replace(hosts["pix-pair"], passthrough=("0000:05:00.0",))
    assert "passthrough of 0000:05:00.0" in diagnose(host, "acs").fix
    assert "passthrough" not in diagnose(hosts["pix-pair"], "acs").fix


def test_command_line(tmp_path: Path) -> None:
    root = synthetic_hosts.build("neglected", tmp_path / "neglected")
    result = CliRunner().invoke(app, ["doctor", "--root", str(root)])
    output = result.output
    assert result.exit_code == 1
    assert output.rstrip().splitlines()[-1].startswith("not fit: ")
    assert "acs" in output and "setpci" not in output and "breaks" in output
    assert output.index("power-brake (breaks)") < output.index("temperature (slows)")
    record = json.loads(CliRunner().invoke(app, ["doctor", "--root", str(root), "--json"]).stdout)
    assert record["fit"] is False and len(record["findings"]) == len(CHECKS)
    assert "hunter2" not in output + json.dumps(record)
    assert CliRunner().invoke(app, ["doctor", "--root", str(root), "--measure"]).exit_code == 2
    good = synthetic_hosts.build("node-forced", tmp_path / "good")
    assert CliRunner().invoke(app, ["doctor", "--root", str(good)]).exit_code == 0


def test_docs_list_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines() if line.startswith("| `")]
    assert rows == [(f"`{check.name}`", check.title, check.scope.value, check.source) for check in CHECKS]


def output_of(*lines: dict[str, object], **ending: str) -> measure.TransferOutput:
    return measure.TransferOutput(lines, **ending)


@pytest.mark.parametrize(("wrong", "impact"), [(0, None), (3, Impact.BREAKS)])
def test_copies_are_judged_by_their_bytes(wrong: int, impact: Impact | None) -> None:
    (finding,) = measure.judge_copies(output_of({"pair": [0, 1], "one_way": 55.6, "both_ways": 111.1, "wrong": wrong}))
    assert finding.verdict.impact is impact and ("3 bytes" if wrong else "55.6 GB/s") in finding.verdict.fact


@pytest.mark.parametrize(("wrong", "impact"), [((0, 0), None), ((0, 7), Impact.BREAKS), ((0,), Impact.BREAKS)])
def test_all_reduce_is_judged_by_its_sums(wrong: tuple[int, ...], impact: Impact | None) -> None:
    ranks = [{"rank": rank, "wrong": count} for rank, count in enumerate(wrong)]
    (finding,) = measure.judge_collective(2, output_of(*ranks, {"small_us": 20.0, "bus": 18.3}))
    assert finding.verdict.impact is impact


@pytest.mark.parametrize("ending", [{"hung": "the first all-reduce of 2 ranks"}, {"failed": "NCCL error"}, {}])
def test_hung_or_failed_transfers_break(ending: dict[str, str]) -> None:
    for finding in (*measure.judge_collective(2, output_of(**ending)), *measure.judge_copies(output_of(**ending))):
        assert finding.verdict.impact is Impact.BREAKS and finding.verdict.fix
        assert "".join(ending.values()) in finding.verdict.fact


@pytest.mark.parametrize("name", ["no-gpu", "x4-link", "gb10"])
def test_measure_requires_two_discrete_gpus(name: str, hosts: dict[str, Host]) -> None:
    with pytest.raises(RequirementMissing, match="two discrete GPUs"):
        measure.measure(hosts[name])
