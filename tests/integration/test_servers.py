"""Servers that outlive the command that started them: what is kept of them, with a program in place of docker's client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import BadRecord, DaemonUnreachable, SystemRefused
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.serving import Run, server_containers
from sm120kit.serving.server_containers import ServingContainer

CACHE = "0123456789abcdef"
PRINTED = "one\ntwo\n"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a docker program first on PATH. It writes its arguments to the file that this returns."""

    def write(**commands: str) -> Path:
        directory, calls = tmp_path / "bin", tmp_path / "calls"
        directory.mkdir(exist_ok=True)
        cases = "".join(f"{name}) {script} ;;\n" for name, script in commands.items())
        (directory / "docker").write_text(f'#!/bin/sh\necho "$@" >> {calls}\ncase $1 in\n{cases}esac\n')
        (directory / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
        return calls

    return write


@pytest.fixture
def server(tmp_path: Path) -> ServingContainer:
    """A running server whose log has what was printed until its first answer."""
    state = Workspace.open(tmp_path / "state").root
    log, record = state / "runs" / "a-1.log", state / "runs" / "a-1.json"
    write_record(record, Run("a", "e", "i", "n", "/m", (), (), "http://127.0.0.1:1", str(log), "2026-01-01T00:00:00Z"))
    log.write_text("one\n")
    (state / "caches" / CACHE / "kernels").mkdir(parents=True)
    (state / "caches" / ("f" * 16)).mkdir()
    return ServingContainer("s", "a", "0", "http://127.0.0.1:1", "running", str(record))


def kept(server: ServingContainer) -> tuple[str, str]:
    """The log and the ending of a server that was stopped; nothing else is left beside them."""
    record = Path(server.record)
    assert {path.name for path in record.parent.iterdir()} == {"a-1.log", "a-1.json"}
    return record.with_suffix(".log").read_text(), read_record(Run, record).ending


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        (f"printf '{PRINTED}'", PRINTED),
        ("printf 'Error response from daemon: configured logging driver does not support reading'; exit 1", "one\n"),
        ("printf 'o'", "one\n"),
    ],
    ids=["complete", "no-log-driver", "less"],
)
def test_stop_replaces_the_log_only_by_a_complete_one(
    logs: str, expected: str, docker: Callable[..., Path], server: ServingContainer
) -> None:
    docker(logs=logs, inspect="echo 0")
    server_containers.stop(server)
    assert kept(server) == (expected, "stopped")


def test_stop_ends_although_docker_does_not_end_the_log(
    docker: Callable[..., Path], server: ServingContainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(logs="exec sleep 60", inspect="echo 0")
    monkeypatch.setattr(server_containers, "LOAD_SECONDS", 0.2)
    server_containers.stop(server)
    assert kept(server) == ("one\n", "stopped")


def test_server_of_another_user_is_not_stopped(docker: Callable[..., Path], server: ServingContainer, tmp_path: Path) -> None:
    calls = docker(inspect="echo 0")
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)  # not even root reads it
    with pytest.raises(SystemRefused, match="the record of s cannot be completed"):
        server_containers.stop(ServingContainer("s", "a", "0", server.url, "running", str(loop)))
    assert not calls.exists(), "the server runs on"


@pytest.mark.parametrize(
    "label", ["other/runs/a-1.json", "state/a-1.json", "state/runs/../../other/runs/a-1.json", "link/a-1.json"]
)
def test_nothing_is_written_where_a_label_points(
    label: str, docker: Callable[..., Path], server: ServingContainer, tmp_path: Path
) -> None:
    """The label of a container names a file that is no record of a state directory: nothing is stopped or written."""
    calls = docker(inspect="echo 0")
    (tmp_path / "link").symlink_to("other/runs")
    for path in (tmp_path / "other/runs/a-1.json", tmp_path / "state/a-1.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Path(server.record).read_text())
    before = (tmp_path / label).read_bytes()
    with pytest.raises(SystemRefused):
        server_containers.stop(replace(server, record=f"{tmp_path}/{label}"))
    assert (tmp_path / label).read_bytes() == before and not calls.exists()


def test_log_of_a_record_that_names_another_file(docker: Callable[..., Path], server: ServingContainer, tmp_path: Path) -> None:
    docker(logs=f"printf '{PRINTED}'", inspect="echo 0")
    path, mine = Path(server.record), tmp_path / "mine"
    mine.write_text("")
    write_record(path, replace(read_record(Run, path), log=str(mine)))
    server_containers.stop(server)
    assert mine.read_text() == "" and kept(server) == (PRINTED, "stopped")


def test_record_without_a_time_stops_nothing(docker: Callable[..., Path], server: ServingContainer) -> None:
    calls, path = docker(inspect="echo 0"), Path(server.record)
    write_record(path, replace(read_record(Run, path), started="²"))
    with pytest.raises(BadRecord):
        server_containers.stop(server)
    assert not calls.exists() and kept(server)[1] == ""


def test_clean_keeps_what_running_servers_use(docker: Callable[..., Path], server: ServingContainer, tmp_path: Path) -> None:
    record = Path(server.record)
    state = record.parents[1]
    mounts = [{"Type": "bind", "Source": str(state / "caches" / CACHE / "kernels")}, {"Type": "tmpfs", "Source": ""}]
    labels = {"sm120kit.record": str(record), "sm120kit.configuration": "a\tb"}
    row = json.dumps(["/s", "running", "2026-01-01T00:00:00Z", labels, mounts])
    (tmp_path / "inspected").write_text(f"{row}\n\n")  # the second container was removed meanwhile
    docker(ps="echo 1234", inspect=f"cat {tmp_path}/inspected")
    for arguments in (("--older", "0h"), ("servers", "records")):
        result = CliRunner().invoke(app, ["cache", "--clean", *arguments, "--state", str(state)])
        assert result.exit_code == 0, result
        assert [path.name for path in (state / "caches").iterdir()] == [CACHE] and (
            state / "caches" / CACHE / "kernels"
        ).is_dir()
        assert kept(server) == ("one\n", "")
    docker(ps="true")
    assert CliRunner().invoke(app, ["cache", "--clean", "servers", "records", "--state", str(state)]).exit_code == 0
    assert not [*(state / "caches").iterdir(), *(state / "runs").iterdir()]


def test_clean_keeps_what_a_container_of_a_compose_file_uses(
    docker: Callable[..., Path], server: ServingContainer, tmp_path: Path
) -> None:
    state = Path(server.record).parents[1]
    mounts = [{"Type": "bind", "Source": str(state / "caches" / CACHE / "kernels")}]
    (tmp_path / "inspected").write_text(json.dumps(["/s", "running", "2026-01-01T00:00:00Z", None, mounts]))
    docker(ps='case "$*" in *label=*) ;; *) echo 1234 ;; esac', inspect=f"cat {tmp_path}/inspected")
    assert CliRunner().invoke(app, ["cache", "--clean", "servers", "--state", str(state)]).exit_code == 0
    assert [path.name for path in (state / "caches").iterdir()] == [CACHE]


def test_clean_keeps_servers_and_records_if_docker_does_not_respond(
    docker: Callable[..., Path], server: ServingContainer
) -> None:
    state = Path(server.record).parents[1]
    docker(ps="echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    result = CliRunner().invoke(app, ["cache", "--clean", "servers", "records", "--state", str(state)])
    assert result.exit_code == 0 and result.stderr
    assert kept(server) == ("one\n", "") and len([*(state / "caches").iterdir()]) == 2


@pytest.mark.parametrize("command", [("ps",), ("logs",), ("stop", "s")], ids=" ".join)
def test_servers_cannot_be_listed_without_a_daemon(command: tuple[str, ...], docker: Callable[..., Path]) -> None:
    docker(ps="echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    error = CliRunner().invoke(app, command).exception
    assert isinstance(error, DaemonUnreachable) and "Cannot connect to the Docker daemon" in error.message
