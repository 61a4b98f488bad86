"""CI workflows: scripts exist, actions are pinned, permissions are minimal, no file has a secret. GitHub is not contacted."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sm120kit import recipes

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = sorted((ROOT / "ci").glob("*.sh"))
LOCK = ROOT / "ci" / "requirements.txt"
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")
SECRET = re.compile(r"gh[pousr]_\w{20,}|AKIA\w{16}|-----BEGIN|://[^/\s$]+:[^/\s$]+@")


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used and all(PINNED.fullmatch(action) for action in used), used
    # The comment shows the release to those who renew a pin.
    assert len(re.findall(r"uses: \S+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", path.read_text(), re.M)) == len(used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_scripts_of_workflows_exist(path: Path) -> None:
    commands = [step["run"] for step in steps(path) if "run" in step]
    scripts = [path for command in commands for path in re.findall(r"(?:^|(?<=\s))\.?ci/[\w./-]+", command)]
    assert commands and scripts
    for command in commands:
        assert "${{" not in command, f"the value of an expression would run as code: {command}"
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK), f"{path.name} runs {script}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_permissions_and_secrets(path: Path) -> None:
    text = path.read_text()
    assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
    assert not SECRET.search(text)
    for step in steps(path):
        for name, value in step.get("env", {}).items():
            if re.search("PASSWORD|KEY|TOKEN", name):
                assert value in (f"${{{{ secrets.{name} }}}}", "${{ github.token }}"), f"{path.name}: {name}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_privileged_workflows_run_on_tags_or_by_the_clock(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    jobs = workflow["jobs"].values()
    permissions = {f"{name}: {access}" for job in jobs for name, access in job.get("permissions", {}).items()}
    writes = {f"{name}: write" for name in ("contents", "id-token", "attestations", "pull-requests")}
    assert permissions <= {"contents: read", *writes}
    events = workflow[True]  # YAML reads the key `on` as true
    if permissions - {"contents: read"} or "secrets." in path.read_text():
        assert events.keys() <= {"push", "schedule", "workflow_dispatch"} and events.get("push", {"tags": ["v*"]}) == {
            "tags": ["v*"]
        }
    assert "pull_request_target" not in events


WITHOUT_FOREIGN_CODE = (
    "ci/install.sh",
    "ci/release.sh",
    "ci/publish.sh",
    "ci/hand_over.sh unpack",
    "ci/update.sh propose",
)
"""The scripts that compile nothing, and run no code of an engine, an image or a package that is being built."""


def privileged(job: dict[str, Any]) -> bool:
    """Whether a job has a secret, an identity or a permission to write."""
    return "secrets." in str(job) or any(access == "write" for access in job.get("permissions", {}).values())


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_with_identity_or_secrets_run_no_foreign_code(path: Path) -> None:
    for name, job in yaml.safe_load(path.read_text())["jobs"].items():
        commands = [command for step in job["steps"] for command in re.findall(r"ci/.*|sm120kit .*", step.get("run", ""))]
        foreign = [command for command in commands if not command.startswith(WITHOUT_FOREIGN_CODE)]
        assert not (privileged(job) and foreign), f"{path.name}, job {name}: {foreign}"


def test_foreign_code_hands_its_results_to_jobs_with_an_identity() -> None:
    for workflow, build, publish in (
        ("images", "image", "publish"),
        ("release", "build", "attest"),
        ("update", "recipes", "propose"),
    ):
        jobs = yaml.safe_load((ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text())["jobs"]
        handed = [step["with"]["name"] for step in jobs[build]["steps"] if "upload-artifact" in step.get("uses", "")]
        taken = [step["with"]["name"] for step in jobs[publish]["steps"] if "download-artifact" in step.get("uses", "")]
        assert handed == taken and len(taken) == 1 and build in jobs[publish]["needs"], workflow
        assert privileged(jobs[publish]) and "permissions" not in jobs[build], workflow


def test_release_has_provenance_and_no_password() -> None:
    path = ROOT / ".github" / "workflows" / "release.yml"
    jobs = yaml.safe_load(path.read_text())["jobs"]
    assert "secrets." not in path.read_text()
    build, attest, publish = (
        [step.get("uses", step.get("run", "")).partition("@")[0] for step in jobs[name]["steps"]] for name in jobs
    )
    assert build[1:] == ["ci/install.sh", 'ci/distributions.sh "$GITHUB_REF_NAME"', "actions/upload-artifact"]
    assert attest == ["actions/download-artifact", "actions/attest-build-provenance"], "no other step has this identity"
    assert publish == ["actions/download-artifact", "pypa/gh-action-pypi-publish"], "no other step has this identity"
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["environment"] == "pypi"


def test_every_engine_with_an_image_job_is_locked_and_has_a_base() -> None:
    """The workflow reads the recipes, so that a release of an engine does not touch it."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "images.yml").read_text())["jobs"]
    for name in ("image", "publish"):
        assert jobs[name]["strategy"]["matrix"] == {"recipe": "${{ fromJSON(needs.engines.outputs.recipes) }}"}
        assert "engines" in jobs[name]["needs"]
    built = {path.stem for path in (ROOT / "recipes/engines").glob("*.toml") if not path.stem.startswith("flashinfer-")}
    assert built == {*recipes.names(recipes.EngineRecipe)}
    for name in built:
        assert recipes.lock_path(recipes.path_of(name)).is_file() and recipes.load_engine(name).base, name


def pinned() -> dict[str, list[Requirement]]:
    """The requirements of ci/requirements.txt, by name."""
    requirements: dict[str, list[Requirement]] = {}
    for line in LOCK.read_text().replace("\\\n", " ").splitlines():
        text, *hashes = line.split(" --hash=")
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", each.strip()) for each in hashes), (
            f"not pinned by hash: {line[:80]}"
        )
        requirement = Requirement(text)
        assert re.fullmatch("==[^*]+", str(requirement.specifier)) and not requirement.url, text
        requirements.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    return requirements


@pytest.mark.parametrize("python", ["3.11.2", "3.12.3", "3.13.5", "3.14.0"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_ci_requirements_satisfy_pyproject(python: str, machine: str) -> None:
    """`nox -s lock` renews the file. Requirements of the locked distributions are checked by pip check, in ci/install.sh."""
    assert "://" not in LOCK.read_text()
    environment = {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "platform_machine": machine,
        "sys_platform": "linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    locked = {
        name: [str(each.specifier)[2:] for each in lines if each.marker is None or each.marker.evaluate(environment)]
        for name, lines in pinned().items()
    }
    assert all(len(versions) <= 1 for versions in locked.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = re.findall(r'^INSTALLED_BY_CI = "(.+)"$', (ROOT / "noxfile.py").read_text(), re.M)[0].split(",")
    lists = [project["build-system"]["requires"], project["project"]["dependencies"]]
    lists += [project["project"]["optional-dependencies"][extra] for extra in extras]
    for requirement in map(Requirement, itertools.chain(*lists)):
        versions = locked.get(canonicalize_name(requirement.name), [])
        assert versions and all(requirement.specifier.contains(version) for version in versions), f"{requirement}: {versions}"


def test_recording_sessions_find_their_modules() -> None:
    scripts = re.findall(r'"python", "tests/arguments/(.+?).py"', (ROOT / "noxfile.py").read_text())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    imports = f"import {', '.join(reversed(scripts))}"  # those that import other scripts come first
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT / "tests" / "arguments", env=environment, check=True)


def test_jobs_with_secrets_install_only_locked_files() -> None:
    text = (ROOT / "ci" / "install.sh").read_text()
    installs = re.findall(r"pip install (.+)", text)
    assert installs and all("--no-deps" in options for options in installs)
    assert (
        sum("--require-hashes" in options for options in installs)
        == 1
        == sum("--no-build-isolation ." in options for options in installs)
    )
    for path in WORKFLOWS:
        if "secrets." in path.read_text():
            commands = "".join(step.get("run", "") for step in steps(path))
            assert "ci/install.sh" in commands and not re.search(r"\b(pip|uv|nox|npm)\b", commands), path.name


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_stop_at_first_failure(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and "\nset -euo pipefail\n" in text and os.access(path, os.X_OK)
    assert not SECRET.search(text)


def test_ci_runs_files_that_exist(tmp_path: Path) -> None:
    """pytest ends before the first test if a file that an argument names is absent."""
    for directory in (".ci", "ci"):
        (tmp_path / directory).mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "ci" / "environment.sh").write_text(f'cd {ROOT}\nas_user() {{ echo "$@"; }}\nas_root() {{ echo "$@"; }}\n')
    printed = subprocess.run([tmp_path / ".ci" / "run"], check=True, capture_output=True, text=True).stdout
    named = [word for word in printed.split() if word.startswith("tests/")]
    assert named and [path for path in named if not (ROOT / path).exists()] == []
