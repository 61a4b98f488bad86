"""Two builds of one context are the same image, whoever builds it; and what goes wrong on the way leaves nothing half done.

The image is the small one with four wheels of others and without torch: it cannot pass its checks, and is built in seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import containers
import pytest
from small_image import CLOSURE, Place, tampered

from sm120kit.daemon import Daemon
from sm120kit.workspace import digest_of

SITE = "opt/venv/lib/python3.11/site-packages"
BUILDKIT = Path("/usr/bin/docker")

pytestmark = [
    pytest.mark.containers,
    pytest.mark.compiler,
    pytest.mark.skipif(bool(containers.why_not()), reason=containers.why_not()),
]


def closure(folder: Path, *names: str) -> Path:
    """Some of the small image's wheels."""
    whole = json.loads(CLOSURE.read_text())
    wheels = [wheel for wheel in whole["wheels"] if wheel["name"] in names]
    path = folder / f"{'-'.join(names)}.json"
    path.write_text(json.dumps(whole | {"wheels": wheels, "sha256": digest_of(wheels)}))
    return path


def program(folder: Path, name: str, text: str = "") -> dict[str, str]:
    """An environment in which ``docker`` is BuildKit's program, or a program that cannot build."""
    place = folder / name
    place.mkdir()
    if text:
        (place / "docker").write_text(text)
        (place / "docker").chmod(0o755)
    else:
        (place / "docker").symlink_to(BUILDKIT)
    return {"PATH": f"{place}:{os.environ['PATH']}"}


@dataclass
class Bench(Place):
    """A place with a state directory of its own, settings of the environment, and a base."""

    base: str = ""
    closure: Path = CLOSURE
    settings: dict[str, str] | None = None
    before: tuple[str, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, **(self.settings or {})}

    def argv(self, *words: object) -> list[str]:
        return [*self.before, *super().argv(*words)]

    @property
    def words(self) -> list[object]:
        return ["image", "flashinfer@0.6.6", "--kernels", "tiny", "--base", self.base, "--closure", self.closure]

    def build(self, *words: object, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self.run(*self.words, *words, code=code)

    def context(self) -> dict[str, Any]:
        """The record of the one context that was made here."""
        (record,) = self.state.glob("images/*/context.json")
        return dict(json.loads(record.read_text()))

    def own_state(self, folder: Path) -> Bench:
        """The same with another state directory, in which the wheel is built already and no image was made."""
        shutil.copytree(self.state, folder, ignore=shutil.ignore_patterns("images", "locks", "work", "checkouts"))
        return replace(self, state=folder)


@pytest.fixture(scope="module")
def pinned(place: Place, base: str, registry: tuple[str, Path]) -> str:
    """The base by name and digest, as BuildKit needs it."""
    name = f"{registry[0]}/base"
    place.client.api.tag(base, name, "pinned")
    said = [json.loads(line) for line in place.client.api.push(name, tag="pinned").splitlines()]
    (digest,) = (line["aux"]["Digest"] for line in said if "aux" in line)
    return f"{name}@{digest}"


@pytest.fixture(scope="module")
def bench(place: Place, pinned: str, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("faults")
    four = closure(folder, "idna", "packaging", "tabulate", "tqdm")
    plain = Bench(place.state, place.data, place.socket, folder, pinned, four)
    return replace(plain.own_state(folder / "state"), settings=program(folder, "classic", "#!/bin/sh\nexit 1\n"))


@pytest.fixture(scope="module")
def classic(bench: Bench) -> str:
    """Built by the classic builder, after everything was fetched, without any network."""
    assert "left to do" in bench.build("--context-only").stderr
    cut = replace(bench, before=("unshare", "--net"))
    assert "built" in cut.build("--offline").stderr
    return bench.build().stdout.strip()


def test_what_is_not_fetched_cannot_be_had_without_a_network(bench: Bench, tmp_path: Path) -> None:
    here = bench.own_state(tmp_path / "state")
    shutil.rmtree(here.state / "downloads")
    assert "--offline" in replace(here, before=("unshare", "--net")).build("--offline", code=23).stderr
    assert not (here.state / "images").exists()


def test_built_without_a_network_from_what_was_fetched(bench: Bench, classic: str) -> None:
    assert classic.startswith("sha256:") and "nothing to do" in bench.build("--offline").stderr


@pytest.fixture(scope="module")
def buildkit(bench: Bench, daemon: containers.Dockerd) -> Bench:
    """BuildKit's side, in a state directory of its own. Its first build loses the daemon in the middle."""
    if not BUILDKIT.exists():
        pytest.skip(f"no {BUILDKIT} (Debian: docker.io)")
    here = replace(bench.own_state(bench.folder / "other"), settings=program(bench.folder, "buildkit"))
    child = subprocess.Popen(here.argv(*here.words), env=here.environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    for line in child.stderr:
        if re.match(r"#\d+ \[.*\] RUN ", line):
            break
    daemon.kill()
    rest = child.stderr.read()
    assert child.wait() == 60, rest
    daemon.stop()
    daemon.start()
    assert not list(here.state.glob("images/*/image.json"))
    return here


def test_buildkit_goes_on_and_makes_the_same_image(bench: Bench, classic: str, buildkit: Bench) -> None:
    done = buildkit.build()
    other = done.stdout.strip()
    assert re.search(r"^#\d+ writing image", done.stderr, re.M), "BuildKit did not build it"
    first, second = bench.context(), buildkit.context()
    assert first["digest"] == second["digest"] and first["directory"] != second["directory"]
    assert first["labels"]["sm120kit.tree"] == second["labels"]["sm120kit.tree"]
    assert first["locked"] == second["locked"] and first["ours"] == second["ours"]
    assert "no difference" in bench.run("image", "diff", classic, other).stdout


def test_the_base_is_found_by_name_and_digest(bench: Bench, classic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", bench.socket)
    daemon = Daemon()
    image = daemon.inspect(classic)
    assert image is not None
    base = daemon.base_of(image)
    assert base is not None and image.layers[: len(base.layers)] == base.layers != ()


def test_a_changed_file_is_found_and_has_no_cause(bench: Bench, classic: str) -> None:
    changed = tampered(bench, classic, f"echo '# changed' >> /{SITE}/idna/core.py && chmod 4755 /bin/sh; touch /usr/extra")
    said = bench.run("image", "diff", classic, changed, code=1).stdout
    assert {line for line in said.splitlines() if line.startswith("unexplained")} == {
        f"unexplained: content {SITE}/idna/core.py: both were made from the same context",
        "unexplained: mode usr/bin/dash: 755 -> 4755",
        "unexplained: added usr/extra: both were made from the same context",
    }
    bench.client.images.remove(changed, noprune=True)


def test_another_closure_explains_what_it_brings(bench: Bench, classic: str) -> None:
    fewer = replace(bench, closure=closure(bench.folder, "idna", "packaging", "tqdm"))
    found = json.loads(bench.run("image", "diff", classic, fewer.build().stdout.strip(), "--json", code=1).stdout)
    assert {one["cause"] for one in found["differences"]} <= {"wheels", "time"}
    removed = {one["path"] for one in found["differences"] if one["what"] == "removed"}
    assert f"{SITE}/tabulate/__init__.py" in removed and all("tabulate" in path for path in removed)


def test_a_full_disk_and_a_registry_that_fails_then_the_same_image(
    bench: Bench, classic: str, registry: tuple[str, Path], tmp_path: Path
) -> None:
    """On another host with nothing in its cache: the layers have the same digests."""
    root = tmp_path / "d"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=350m", "tmpfs", root], check=True)
    stored, away = registry[1] / "docker", registry[1] / "away"
    try:
        with containers.dockerd(root) as running:
            other = replace(bench.own_state(tmp_path / "state"), socket=running.socket)
            stored.rename(away)
            stored.write_text("not a directory")
            other.build(code=65)
            back = threading.Timer(2, lambda: (stored.unlink(), away.rename(stored)))
            back.start()
            assert "full" in other.build(code=43).stderr
            back.join()
            assert not list(other.state.glob("images/*/image.json")) and other.names() == set()
            subprocess.run(["mount", "-o", "remount,size=2g", root], check=True)
            made = other.client.images.get(other.build().stdout.strip())
            assert made.attrs["RootFS"] == bench.client.images.get(classic).attrs["RootFS"]
    finally:
        if away.exists():
            stored.unlink(missing_ok=True)
            away.rename(stored)
        subprocess.run(["umount", "-l", root], check=False)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda wheel: wheel.pop("sha256"), "wheels.0.sha256"),
        (lambda wheel: wheel.update(sha256="0" * 64), "were edited"),
        (lambda wheel: wheel.update(version="9"), "were edited"),
    ],
)
def test_a_wheel_that_is_not_pinned(bench: Bench, tmp_path: Path, edit: Any, words: str) -> None:
    lock = json.loads(bench.closure.read_text())
    edit(lock["wheels"][0])
    path = tmp_path / "closure.json"
    path.write_text(json.dumps(lock))
    assert words in replace(bench, closure=path).build(code=11).stderr


def test_a_wheel_of_another_hash_than_the_index_has(bench: Bench, tmp_path: Path) -> None:
    lock = json.loads(bench.closure.read_text())
    lock["wheels"][0]["sha256"] = "0" * 64
    path = tmp_path / "closure.json"
    path.write_text(json.dumps(lock | {"sha256": digest_of(lock["wheels"])}))
    here = replace(bench.own_state(tmp_path / "state"), closure=path)
    assert "0" * 64 in here.build(code=21).stderr
    assert not (here.state / "images").exists()
