"""What doctor finds on synthetic hosts, and that each check has a host on which it fires and one on which it does not."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit import doctor
from sm120kit.cli import app
from sm120kit.doctor import CHECKS, Finding, Impact, Scope, Status, measure
from sm120kit.doctor.model import check, ok
from sm120kit.errors import CannotMeasure
from sm120kit.host import Host, Link, PeerCache, probe

HERE = Path(__file__).parent / "hosts"
HOSTS = runpy.run_path(str(HERE / "build.py"))
NAMES = sorted(HOSTS["HOSTS"])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Host]:
    root = tmp_path_factory.mktemp("hosts")
    return {name: probe(HOSTS["build"](name, root / name)) for name in NAMES}


def report(findings: Sequence[Finding]) -> str:
    """Findings as the files beside the hosts have them: what applies line by line, then the names of what does not."""
    lines = [f"{one.verdict.impact or one.status:<8}{one.check}: {one.verdict.fact}" for one in findings if applies(one)]
    rest = [one.check for one in findings if not applies(one)]
    return "\n".join(lines) + f"\nnot applicable: {', '.join(rest)}\n"


def applies(finding: Finding) -> bool:
    return finding.status is not Status.NOT_APPLICABLE


@pytest.mark.parametrize("name", NAMES)
def test_findings_are_exactly_these(name: str, hosts: dict[str, Host]) -> None:
    assert report(doctor.diagnose(hosts[name])) == (HERE / f"{name}.txt").read_text()


@pytest.mark.parametrize("one", CHECKS, ids=lambda one: one.name)
def test_each_check_fires_somewhere_and_is_content_elsewhere(one: doctor.Check, hosts: dict[str, Host]) -> None:
    answers = {doctor.diagnose(host, [one])[0].status for host in hosts.values()}
    assert {Status.PROBLEM, Status.OK} <= answers


def test_every_problem_has_a_way_out_and_every_unknown_a_command(hosts: dict[str, Host]) -> None:
    for host in hosts.values():
        for finding in doctor.diagnose(host):
            verdict = finding.verdict
            assert finding.source and finding.title
            if finding.status is Status.PROBLEM:
                assert verdict.cause and verdict.consequence and verdict.fix and verdict.impact, finding.check
            else:
                assert verdict.impact is None
            if finding.status is Status.UNKNOWN:
                assert verdict.fact and verdict.fix, finding.check


def test_names_are_unique() -> None:
    assert len({one.name for one in CHECKS}) == len(CHECKS)


def test_only_hosts_without_serious_problems_are_fit(hosts: dict[str, Host]) -> None:
    assert {name for name in NAMES if doctor.fit(doctor.diagnose(hosts[name]))} == {
        "gb10-ready",
        "geforce-careful",
        "node-forced",
        "tuned",
    }


def test_a_check_that_crashes_is_a_finding(hosts: dict[str, Host]) -> None:
    @check("odd", "this host is odd", Scope.ANY, "this test")
    def odd(host: Host) -> doctor.Verdict:
        return ok(str(host.memory_total // 0))  # type: ignore[operator]

    finding, *others = doctor.diagnose(hosts["node-forced"], [odd, *CHECKS])
    assert finding.verdict.impact is Impact.MINOR and "ZeroDivisionError" in finding.verdict.fact
    assert len(others) == len(CHECKS)


@pytest.mark.parametrize("registry", ["ForceP2P=0x11", "ForceP2P=17;RMForceP2PType=0", "ForceP2P=zero"])
def test_incomplete_registry_keys_are_named(registry: str, tmp_path: Path) -> None:
    HOSTS["HOSTS"]["some-keys"] = {"registry": registry}
    host = probe(HOSTS["build"]("some-keys", tmp_path))
    del HOSTS["HOSTS"]["some-keys"]
    (finding,) = [one for one in doctor.diagnose(host) if one.check == "force-p2p"]
    assert finding.verdict.impact is Impact.SLOWS and "RMForceP2PType" in finding.verdict.fact
    assert ("ForceP2P," in finding.verdict.fact) == ("zero" in registry)


def test_gpus_that_are_not_sm12x_or_not_the_drivers(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    hopper = replace(host, gpus=tuple(replace(gpu, capability="9.0", name="NVIDIA H200") for gpu in host.gpus))
    held = replace(host, gpus=tuple(replace(gpu, driver="vfio-pci") for gpu in host.gpus))
    mixed = replace(host, gpus=(host.gpus[0], hopper.gpus[1]))
    found = [{one.check: one.verdict for one in doctor.diagnose(each)} for each in (hopper, held, mixed)]
    assert found[0]["gpu"].impact is Impact.BREAKS and "9.0" in found[0]["gpu"].fact
    assert found[1]["driver"].impact is Impact.BREAKS and "vfio-pci" in found[1]["driver"].fact
    assert found[2]["gpu"].status is Status.OK
    assert found[0]["bar1"].fact == "no SM12x GPU found" and found[2]["acs"].fact == "only one GPU"


def test_a_gpu_for_the_display_is_left_aside(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    old = replace(
        host.gpus[0], bus="0000:05:00.0", name="GT 710", capability="3.5", aperture_mib=128, bridges=("0000:00:03.1",)
    )
    port = replace(host.bridges[0], bus="0000:00:03.1", acs=0x1D)
    pairs = tuple(replace(host.pairs[0], second=old.bus, kind="PHB", granted="GNS") for _ in range(2))
    mixed = replace(host, gpus=(*host.gpus, old), bridges=(*host.bridges, port), pairs=(*host.pairs, *pairs))
    assert [one.verdict for one in doctor.diagnose(mixed)][1:] == [one.verdict for one in doctor.diagnose(host)][1:]


def test_bars_without_a_place(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    homeless = replace(host, gpus=(replace(host.gpus[0], aperture_mib=0), host.gpus[1]))
    (finding,) = [one for one in doctor.diagnose(homeless) if one.check == "bar1"]
    assert (
        finding.verdict.impact is Impact.BREAKS and "pci=realloc" in finding.verdict.fix and "41:00" not in finding.verdict.fact
    )


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
def test_cached_p2p_verdicts_that_are_out_of_date(
    granted: str | None, verdicts: dict[str, bool] | None, stale: bool, hosts: dict[str, Host]
) -> None:
    host = hosts["node-forced"]
    pairs = tuple(replace(pair, granted=granted) for pair in host.pairs)
    assert verdict(replace(host, pairs=pairs, peer_caches=(PeerCache("/x.json", verdicts),)), "peer-cache").status is (
        Status.PROBLEM if stale else Status.OK
    )


def verdict(host: Host, name: str) -> doctor.Verdict:
    return doctor.diagnose(host, [one for one in CHECKS if one.name == name])[0].verdict


def test_four_gpus_do_not_meet_the_turin_problem(hosts: dict[str, Host]) -> None:
    host = hosts["turin-8"]
    assert verdict(replace(host, gpus=host.gpus[:4]), "turin-graph").status is Status.NOT_APPLICABLE
    assert verdict(replace(host, names=("NCCL_GRAPH_FILE",)), "turin-graph").status is Status.OK


def test_acs_is_not_cleared_under_guests_without_a_warning(hosts: dict[str, Host]) -> None:
    host = replace(hosts["pix-pair"], passthrough=("0000:05:00.0",))
    assert "passthrough of 0000:05:00.0" in verdict(host, "acs").fix
    assert "passthrough" not in verdict(hosts["pix-pair"], "acs").fix


def test_command_line(tmp_path: Path) -> None:
    root = HOSTS["build"]("neglected", tmp_path / "neglected")
    said = CliRunner().invoke(app, ["doctor", "--root", str(root)])
    assert said.exit_code == 1
    assert said.output.rstrip().splitlines()[-1].startswith("not fit: ")
    assert "acs" in said.output and "setpci" not in said.output and "breaks" in said.output
    assert said.output.index("driver (breaks)") < said.output.index("power-limit (slows)") < said.output.index("zfs (minor)")
    record = json.loads(CliRunner().invoke(app, ["doctor", "--root", str(root), "--json"]).stdout)
    assert (
        record["fit"] is False and len(record["findings"]) == len(CHECKS) and "hunter2" not in said.output + json.dumps(record)
    )
    assert CliRunner().invoke(app, ["doctor", "--root", str(root), "--measure"]).exit_code == 2
    good = HOSTS["build"]("node-forced", tmp_path / "good")
    assert CliRunner().invoke(app, ["doctor", "--root", str(good), "--all"]).exit_code == 0


def test_documentation_lists_every_check() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in page.splitlines() if line.startswith("| `")]
    assert rows == [(f"`{one.name}`", one.title, one.scope.value, one.source) for one in CHECKS]


def told(*lines: dict[str, object], **ended: str) -> measure.Told:
    return measure.Told(lines, **ended)


def copied(one_way: float, both_ways: float, wrong: int = 0) -> dict[str, object]:
    return {"pair": [0, 1], "one_way": one_way, "both_ways": both_ways, "wrong": wrong}


@pytest.mark.parametrize(
    ("name", "line", "impacts"),
    [
        ("node-forced", copied(55.6, 111.1), [None, None]),
        ("node-forced", copied(22.9, 23.5), [None, Impact.SLOWS]),
        ("node-forced", copied(55.6, 60.0), [None, Impact.SLOWS]),
        ("node-forced", copied(55.6, 111.1, wrong=3), [Impact.BREAKS, None]),
        ("pix-pair", copied(52.3, 103.0), [None, None]),
        ("pix-pair", copied(52.3, 51.0), [None, Impact.SLOWS]),
        ("vfio-guest", copied(1.0, 1.0), [None, Impact.SLOWS]),
    ],
)
def test_copies_are_judged_by_class(
    name: str, line: dict[str, object], impacts: list[Impact | None], hosts: dict[str, Host]
) -> None:
    found = measure.judge_copies(hosts[name], told(line))
    assert [one.verdict.impact for one in found] == impacts
    assert all(one.verdict.fix for one in found if one.verdict.impact)


def test_copies_without_a_published_figure_and_writes_that_collapse(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    nvlink = replace(host, pairs=tuple(replace(pair, said="NV18") for pair in host.pairs))
    _, speed = measure.judge_copies(nvlink, told(copied(400, 800), {"together": 390.0}))
    assert speed.status is Status.OK and "no published figure" in speed.verdict.fact
    _, speed = measure.judge_copies(host, told(copied(55, 110), {"together": 2.7}))
    assert speed.verdict.impact is Impact.SLOWS and "2.7" in speed.verdict.fact


def reduced(bus: float, *wrong: int) -> list[dict[str, object]]:
    return [{"rank": rank, "wrong": count} for rank, count in enumerate(wrong)] + [{"small_us": 20.0, "bus": bus}]


def test_collectives_are_judged(hosts: dict[str, Host]) -> None:
    old = replace(
        hosts["node-forced"],
        gpus=tuple(replace(gpu, link=Link(16, 16, 16.0, 16.0, False)) for gpu in hosts["node-forced"].gpus),
    )
    for host, lines, impact in (
        (old, reduced(18.3, 0, 0), None),
        (old, reduced(5.0, 0, 0), Impact.SLOWS),
        (old, reduced(18.3, 0, 7), Impact.BREAKS),
        (old, reduced(18.3, 0), Impact.BREAKS),
        (hosts["node-forced"], reduced(1.0, 0, 0), None),
    ):
        (finding,) = measure.judge_collective(host, 2, told(*lines))
        assert finding.verdict.impact is impact, finding.verdict


def test_what_hangs_or_fails_breaks(hosts: dict[str, Host]) -> None:
    host = hosts["node-forced"]
    for ended in ({"hung": "the first all-reduce of 2 ranks"}, {"failed": "NCCL error"}, {}):
        (finding,) = measure.judge_collective(host, 2, told(**ended))
        assert finding.verdict.impact is Impact.BREAKS and finding.verdict.fix
    (finding,) = measure.judge_copies(host, told(copied(1, 1), hung="copies between GPU 0 and GPU 2"))
    assert "GPU 0 and GPU 2" in finding.verdict.fact


@pytest.mark.parametrize("name", ["no-gpu", "x4-link", "gb10"])
def test_measuring_needs_two_gpus(name: str, hosts: dict[str, Host]) -> None:
    with pytest.raises(CannotMeasure, match="two GPUs"):
        measure.measure(hosts[name])
