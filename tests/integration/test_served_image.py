"""``verify image --serve``: an image serves a small model on the CPU as its last check.

Replaced are the GPU (an nvidia-smi), the checks inside the image, and docker: a program that starts no container but forwards
the published port to the server of the test.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import layout_images
import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers", reason="the extra serve is not installed")

from cpu_server import CONFIGURATION as TEMPLATE
from cpu_server import MODEL
from cpu_server import tiny_model as model_folder
from small_models import probe_tokenizer, tiny_model, word_ids
from small_server import Options, SmallEngine, small_server

from sm120kit import probes, serving
from sm120kit.cli import app
from sm120kit.core.errors import CheckFailed, Mismatch, RequirementMissing, ResourceUnavailable
from sm120kit.core.signals import SIGNALS, Interrupted
from sm120kit.core.workspace import Workspace
from sm120kit.images.checks import ExpectedImage, _image_checks
from sm120kit.images.image_records import Check, CheckResult
from sm120kit.images.inventory import local_images
from sm120kit.images.oci import Layout
from sm120kit.sources.debian import ARCHITECTURES

DOCKER = r"""#!{python}
import asyncio, json, pathlib, signal, sys
at, argv = pathlib.Path(__file__).parent, sys.argv[1:]
started, taken = at / "started", at / "taken"

async def copy(reader, writer):
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()

async def forward(reader, writer):
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", int((at / "port").read_text()))
    await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer), return_exceptions=True)

async def serve(port):
    server = await asyncio.start_server(forward, "127.0.0.1", port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, sys.exit)
    await server.serve_forever()

with (at / "calls").open("a") as calls:
    print(*argv, file=calls)
if argv[0] == "ps" and any("label=sm120kit.record=" in word for word in argv):
    print("our-id" if started.exists() else "")
elif argv[0] == "ps":
    print("their-id" if taken.exists() else "")
elif argv[:2] == ["image", "inspect"]:
    print((at / "image.json").read_text())
elif argv[0] == "inspect":
    theirs = "their-id" in argv
    print(json.dumps(["/theirs" if theirs else "/ours", "running", "", {"sm120kit.gpus": "0"} if theirs else {}, []]))
elif argv[0] == "rm":
    started.unlink(missing_ok=True)
elif argv[0] == "run":
    started.touch()
    if (at / "dies").exists():
        sys.exit(3)
    asyncio.run(serve(int(argv[argv.index("--publish") + 1].split(":")[-2])))
"""
NVIDIA_SMI = """#!/bin/sh
[ ! -e "$(dirname "$0")/no-gpu" ] || exit 9
case "$*" in
-q*)
    echo '<nvidia_smi_log><driver_version>580.126.09</driver_version><gpu id="00000000:01:00.0">'
    echo '<product_name>NVIDIA RTX PRO 6000 Blackwell Workstation Edition</product_name>'
    echo '<fb_memory_usage><total>97887 MiB</total><used>2 MiB</used></fb_memory_usage></gpu></nvidia_smi_log>' ;;
--query-gpu=pci.bus_id,compute_cap*) echo '00000000:01:00.0, 12.0' ;;
*) exit 1 ;;
esac
"""
CONFIGURATION = TEMPLATE.format(name="tiny", gpus=1, model=MODEL, environment="")


UNTRAINED = ("log-probabilities", "counts of tokens", "repeated requests")
"""Probes that a model of random weights passes."""


class ServingHost:
    """A host with an image that no check has run on, a model folder, and programs docker and nvidia-smi."""

    def __init__(self, directory: Path) -> None:
        self.at, self.workspace = directory / "bin", Workspace.open(directory / "state")
        self.at.mkdir()
        for name, text in (("docker", DOCKER.replace("{python}", sys.executable)), ("nvidia-smi", NVIDIA_SMI)):
            (self.at / name).write_text(text)
            (self.at / name).chmod(0o755)
        layout, labels = Layout(self.workspace.root / "oci"), layout_images.labels("4" * 64)
        machine, layer = ARCHITECTURES[platform.machine()], layout_images.add_layer(layout, "file", 1, 4096)
        manifest = layout.add_image([layer], {"os": "linux", "architecture": machine, "config": {"Labels": labels}}).digest
        self.image, self.tag = layout.image(manifest), labels["sm120kit.reference"]
        root = {"Layers": list(self.image.layers)}
        described = {"Id": self.image.id, "Config": {"Labels": labels}, "RootFS": root, "Os": "linux"}
        (self.at / "image.json").write_text(json.dumps([{**described, "Architecture": machine, "Size": self.image.bytes}]))
        self.model = model_folder(directory / "home")
        self.configuration = directory / "tiny.toml"
        self.configuration.write_text(CONFIGURATION)
        self.checked, self.taken = 0, False

    def inside(self, *arguments: object) -> Iterator[tuple[Check, dict[str, str]]]:
        """The checks inside the image, during which another server may take the GPU."""
        self.checked += 1
        if self.taken:
            (self.at / "taken").touch()
        yield Check("base", "inside", CheckResult.PASSED), {}

    def verify(self, *options: str) -> Result:
        words = ["verify", "image", self.image.id, "--state", str(self.workspace.root)]
        return CliRunner().invoke(app, [*words, *options])

    def serve(self, *options: str) -> Result:
        return self.verify("--serve", str(self.configuration), "--model", str(self.model), *options)

    @contextmanager
    def served_by(self, fault: str = "") -> Iterator[None]:
        tokenizer = probe_tokenizer()
        options = Options(faults=frozenset({fault} - {""}))
        engine = SmallEngine(tiny_model(len(tokenizer)), word_ids(tokenizer), frozenset(), options)
        with small_server(engine, tokenizer) as url:
            (self.at / "port").write_text(url.rpartition(":")[2])
            yield

    @property
    def standing(self) -> tuple[str, tuple[str, ...]]:
        (local,) = local_images(self.workspace)
        return str(local.standing), local.tags

    def require_stopped(self, ending: str = "stopped") -> None:
        (path,) = (self.workspace.root / "runs").glob("*.json")
        record = json.loads(path.read_text())
        calls = [line.split() for line in (self.at / "calls").read_text().splitlines()]
        assert [call[-1] for call in calls if call[0] in ("rm", "stop")] == ["our-id"], "no other one"
        assert record["ending"] == ending and serving.port_is_free(int(record["url"].rpartition(":")[2]))


def served_prompt(report: dict[str, Any]) -> tuple[str, str]:
    (check,) = (check for check in report["checks"] if (check["suite"], check["name"]) == ("engine", "served_prompt"))
    return check["verdict"], check["detail"]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServingHost:
    made = ServingHost(tmp_path)
    monkeypatch.setenv("PATH", f"{made.at}:{os.environ['PATH']}")
    expected = ExpectedImage("vllm", "", "", "", "", "", (), (), (), {})
    monkeypatch.setattr(_image_checks, "expected_image", lambda image, models: expected)
    monkeypatch.setattr(_image_checks, "_inside", made.inside)
    monkeypatch.setattr(probes, "verify", partial(probes.verify, probes=probes.selected(list(UNTRAINED))))
    return made


def test_without_the_option_the_reason_names_it(host: ServingHost) -> None:
    done = host.verify("--json")
    verdict, reason = served_prompt(json.loads(done.stdout))
    assert verdict == "not run" and "verify image IMAGE --serve CONFIG" in reason and "no kernel was run" in done.stderr
    assert host.standing == ("verified", (host.tag,)) and not (host.at / "calls").exists()
    for refused in (host.verify("--model", str(host.model)), host.verify("--revision", "x"), host.serve("--revision", "x")):
        assert refused.exit_code == 2 and "--serve CONFIG" in refused.output


def test_a_healthy_server_passes_and_is_stopped(host: ServingHost) -> None:
    with host.served_by():
        done = host.serve("--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and served_prompt(report) == ("passed", ""), done.output
    assert "log-probabilities ok" in report["facts"]["served"] and "no kernel was run" not in done.stderr
    assert report["verified"]["checks"] == report["checks"] and host.standing == ("verified", (host.tag,))
    host.require_stopped()


def test_a_server_that_answers_wrongly_fails_the_image(host: ServingHost) -> None:
    host.verify()
    assert host.standing[0] == "verified"
    with host.served_by("usage-doubled"):
        done = host.serve("--json")
    verdict, detail = served_prompt(json.loads(done.stdout))
    assert done.exit_code == 1 and verdict == "failed" and "counts of tokens: " in detail, done.output
    assert json.loads(done.stdout)["verified"] is None and host.standing[0] != "verified"
    host.require_stopped()


def test_a_server_that_ends_fails_the_image(host: ServingHost) -> None:
    (host.at / "dies").touch()
    done = host.serve("--json")
    verdict, detail = served_prompt(json.loads(done.stdout))
    assert done.exit_code == 1 and verdict == "failed" and "exit code 3" in detail, done.output
    assert host.standing == ("not verified", ())
    host.require_stopped("died")


def test_a_gpu_that_another_server_took_meanwhile(host: ServingHost) -> None:
    host.taken = True
    done = host.serve("--json")
    verdict, reason = served_prompt(json.loads(done.stdout))
    assert verdict == "not run" and "theirs serves" in reason and isinstance(done.exception, CheckFailed), done.output
    assert host.standing == ("verified", (host.tag,)), "it passed the others"
    assert not any(call.startswith(("run", "rm", "stop")) for call in (host.at / "calls").read_text().splitlines())


def test_a_signal_stops_the_server_and_records_nothing(host: ServingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise Interrupted(SIGNALS[0])

    monkeypatch.setattr(probes, "verify", interrupted)
    with host.served_by(), pytest.raises(Interrupted):
        host.serve()
    assert host.standing == ("not verified", ())
    host.require_stopped()


def test_what_is_missing_is_known_before_the_checks(host: ServingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    other = host.configuration.with_name("other.toml")
    other.write_text(CONFIGURATION.replace("vllm-0.19.1", "vllm-0.33.0").replace('"tiny"', '"other"'))
    assert isinstance(host.verify("--serve", str(other), "--model", str(host.model)).exception, Mismatch)
    (host.at / "no-gpu").touch()
    assert isinstance(host.serve().exception, ResourceUnavailable)
    (host.at / "no-gpu").unlink()
    (host.at / "docker").unlink()
    monkeypatch.setenv("PATH", str(host.at))
    assert isinstance(host.serve().exception, RequirementMissing)
    assert not host.checked and not (host.workspace.root / "runs").exists()


def test_an_image_that_failed_another_check_serves_nothing(host: ServingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Check("base", "inside", CheckResult.FAILED, "a reason"), dict[str, str]()
    monkeypatch.setattr(_image_checks, "_inside", lambda *arguments: iter([failed]))
    done = host.serve("--json")
    assert done.exit_code == 1 and served_prompt(json.loads(done.stdout))[0] == "not run" and host.standing[1] == ()
    assert not (host.workspace.root / "runs").exists()
