"""Configurations that are made from how servers are started elsewhere: scripts, compose files and recipes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import AlreadyExists, BadInput, NotFound
from sm120kit.recipes import configurations, new_repository

LAUNCHES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "data" / "launches.toml").read_text())["launch"]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's repository, in which commands run."""
    own = new_repository.make(tmp_path / "own")
    monkeypatch.chdir(own)
    return own


def import_(launch: dict[str, Any], repository: Path, *options: str) -> Any:
    source = repository / "launch.txt"
    source.write_bytes(launch["text"].encode())
    for name, text in launch.get("files", {}).items():
        (repository / name).write_text(text)
    return CliRunner().invoke(app, ["config", "new", "--from", str(source), "--name", "imported", *options])


@pytest.mark.parametrize("start", ["<<EOF", "> compose.yml <<-EOF", '<< "EOF"'])
def test_compose_file_that_a_script_writes(start: str, repository: Path) -> None:
    size = "2" if '"' in start else "$TP"
    compose = f"services:\n  a:\n    image: vllm/vllm-openai:v0.33.0\n    command: --model openai/gpt-oss-120b -tp {size}\n"
    script = repository / "start.sh"
    script.write_text(f"#!/bin/bash\nset -e\nTP=2\ncat {start}\n{compose}EOF\ndocker compose up -d\n")
    result = CliRunner().invoke(app, ["config", "new", "--from", str(script), "--name", "written"])
    assert result.exit_code == 0, result.stderr
    made = configurations.load("written")
    assert (made.model.repository, made.hardware.gpus) == ("openai/gpt-oss-120b", 2)


@pytest.mark.parametrize("launch", [each for each in LAUNCHES if "refused" not in each], ids=lambda each: each["name"])
def test_launch_becomes_a_configuration(launch: dict[str, Any], repository: Path) -> None:
    result = import_(launch, repository)
    assert result.exit_code == 0, (result.output, result.exception)
    made = configurations.load("imported")
    assert (made.engine, made.model.repository, made.hardware.gpus) == (launch["engine"], launch["model"], launch["gpus"])
    assert made.model.revision == launch.get("revision", made.model.revision)
    assert list(made.arguments) == launch["arguments"] and made.environment == launch.get("environment", {})
    mounts = {target: source.replace("$HERE", str(repository)) for target, source in launch.get("mounts", {}).items()}
    assert made.hardware.nodes == launch.get("nodes", 1) and made.container.mounts == mounts
    assert made.container.ipc_host == launch.get("ipc_host", False) and made.container.ulimits == launch.get("ulimits", {})
    assert made.container.shm_gib == launch.get("shm_gib", 16)
    assert list(made.container.caches) == launch.get("caches", list(configurations.DEFAULT_CACHES))
    assert (made.speculation.method if made.speculation else None) == launch.get("speculation")
    written = (repository / "configurations" / "imported.toml").read_text()
    for part in launch.get("left_out", ()):
        assert part in result.stderr and f"left out: {part}".split()[-1] in written, part
    assert "hf_" not in written and "sk-123" not in written, "secrets are not copied"
    checked = CliRunner().invoke(app, ["config", "check", "imported"])
    assert checked.exit_code == 0 and checked.stdout == "ok imported\n"


@pytest.mark.parametrize("launch", [each for each in LAUNCHES if "refused" in each], ids=lambda each: each["name"])
def test_launch_is_refused_with_every_problem(launch: dict[str, Any], repository: Path) -> None:
    result = import_(launch, repository)
    assert isinstance(result.exception, BadInput), result.output
    assert "launch.txt" in result.exception.message and result.exception.hint
    for part in launch["refused"]:
        assert part in result.exception.message
    assert not [*(repository / "configurations").glob("*.toml")], "nothing is half done"


BOMB = "services: {a: &a [x, x, x, x, x, x, x, x, x, x], " + ", ".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 10)}]" for n in range(9)
)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (BOMB + "}", "values"),
        ("services: &all {again: *all}", "values"),
        ("services: " + "[" * 500 + "]" * 500, "deeply"),
        ("services: {a: [}", "expected"),
        ("services: {a: " + "x" * 300_000 + "}", "characters"),
        ("services: {db: {image: postgres}}", "db"),
        ("services: {}", "no service"),
        ("services: {a: {extends: b, command: vllm serve x}, b: {extends: {service: a}}}", "extends"),
        ("services: {a: {extends: [b]}}", "no service"),
        ("services: {a: {extends: absent}}", "absent"),
        ("services: {llm: {image: vllm/vllm-openai, command: 5, ports: 8000, volumes: {a: b}, environment: [1]}}", "llm"),
        ("model: a/b\nruntime: llama-cpp\n", "llama-cpp"),
        ("model: [a]\ncommand: {b: c}\n", "no command"),
        ("name: x\nversion: 3\n", "services"),
        ('bash -c "bash -c \'bash -c \\"bash -c x\\"\'"', "no command"),
        ("echo 'vllm serve x", "no command"),
        ("docker run", "no command"),
        ("vllm serve", "no model"),
        ("\0\x1b[31m", "no command"),
        ("", "no command"),
    ],
)
def test_malformed_files_are_refused(text: str, word: str, repository: Path) -> None:
    result = import_({"text": text}, repository)
    assert isinstance(result.exception, BadInput) and word in result.exception.message, (result.output, result.exception)


def test_standard_input_and_existing_files(repository: Path) -> None:
    line = "vllm serve Qwen/Qwen3-8B --max-num-seqs 4"
    for options, error in (([], None), ([], AlreadyExists), (["--overwrite"], None)):
        argv = ["config", "new", "--from", "-", "--gpu", "rtx-5090", *options, "--", "--max-num-seqs", "8"]
        result = CliRunner().invoke(app, argv, input=line)
        assert type(result.exception) is (error or type(None)), (result.output, result.exception)
    made = configurations.load("qwen3-8b-1x-rtx-5090")
    assert made.option("--max-num-seqs") == "8" and made.hardware.memory_gb == 32
    other = CliRunner().invoke(app, ["config", "new", "--from", "-", "--engine", "sglang@0.5.23"], input=line)
    assert isinstance(other.exception, BadInput) and "vLLM" in other.exception.message
    unrecorded = CliRunner().invoke(
        app, ["config", "new", "--from", "-", "--engine", "vllm@0.20.0", "--name", "old"], input=line
    )
    assert unrecorded.exit_code == 0 and "not checked" in unrecorded.stderr, unrecorded.output


def test_configuration_that_is_a_circular_link(repository: Path) -> None:
    (repository / "configurations" / "loop.toml").symlink_to("loop.toml")
    with pytest.raises(NotFound, match=r"configurations/loop\.toml: it "):
        configurations.load("loop")
