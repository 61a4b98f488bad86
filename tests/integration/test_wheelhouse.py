"""Wheels are fetched several at once, after their sizes are known and the disk is checked."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hostile_server import hostile_server
from small_engine import make_wheel

from sm120kit import sources
from sm120kit.core.errors import FetchFailed, ResourceUnavailable
from sm120kit.core.workspace import Workspace
from sm120kit.sources import resolver
from sm120kit.sources.source_records import LockedWheel

LARGE = 33 * 2**20
"""More than an index page may have."""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    directory = tmp_path / "mirror"
    directory.mkdir()
    for number in range(10):
        make_wheel(directory, f"part-{number}", "1.0")
    make_wheel(directory, "large", "1.0", files={"large.bin": bytes(LARGE)})
    return directory


@pytest.fixture
def url(mirror: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(mirror)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def locked(mirror: Path) -> list[LockedWheel]:
    return [
        LockedWheel(path.name.split("-")[0].replace("_", "-"), "1.0", path.name, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(mirror.glob("*.whl"))
    ]


def test_sizes_are_those_that_the_server_states(mirror: Path, url: str, tmp_path: Path) -> None:
    workspace, wheels = Workspace.open(tmp_path / "state"), locked(mirror)
    sizes = sources.sizes(wheels, workspace, sources.Origin(url))
    assert sizes == {wheel: (mirror / wheel.filename).stat().st_size for wheel in wheels} and max(sizes.values()) > LARGE
    assert sources.sizes(wheels, workspace, sources.Origin(offline=True)) == sizes, "queried once"


def test_wheels_are_fetched_in_the_order_of_the_call(mirror: Path, url: str, tmp_path: Path) -> None:
    workspace, wheels = Workspace.open(tmp_path / "state"), locked(mirror)
    paths = sources.wheelhouse(wheels, workspace, sources.Origin(url))
    assert [path.name for path in paths] == [wheel.filename for wheel in wheels]
    assert all(path.read_bytes() == (mirror / path.name).read_bytes() for path in paths)


def test_disk_is_checked_before_the_first_fetch(mirror: Path, tmp_path: Path) -> None:
    workspace, wheels = Workspace.open(tmp_path / "state"), locked(mirror)
    workspace.cache.mkdir(parents=True, exist_ok=True)
    (workspace.cache / "wheel-sizes.json").write_text(json.dumps({"bytes": {wheels[0].sha256: 2**60}}))
    with pytest.raises(ResourceUnavailable, match="fetching 11 of 11 wheels needs"):
        sources.wheelhouse(wheels, workspace, sources.Origin(str(mirror)))
    assert not workspace.downloads.exists()


def test_missing_wheel_fails_and_leaves_no_partial_file(mirror: Path, url: str, tmp_path: Path) -> None:
    workspace, wheels = Workspace.open(tmp_path / "state"), locked(mirror)
    (mirror / wheels[3].filename).unlink()
    with pytest.raises(FetchFailed, match=wheels[3].name):
        sources.wheelhouse(wheels, workspace, sources.Origin(url))
    assert not list(workspace.downloads.glob(".*"))


def test_page_without_end_does_not_take_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "MAX_RESOLVER_BYTES", 2**29)
    with hostile_server() as server:
        server.respond("/x/", b" " * 2**20, endless=True, Content_Type="text/html")
        requirements = resolver.Requirements(("x==1",), "3.12", "manylinux_2_35_x86_64")
        with pytest.raises(FetchFailed, match=r"uv needs more than 0\.5 GiB"):
            resolver.resolve_wheels(requirements, Workspace.open(tmp_path / "state"), sources.Origin(server.url))


def test_lower_limit_of_memory_stays() -> None:
    """Of a user who cannot raise it: the resolver runs with it."""

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
        if os.geteuid() == 0:
            os.setuid(65_534)

    argv = ["/bin/sh", "-c", resolver._LIMITED, str(resolver.MAX_RESOLVER_BYTES >> 10), "/bin/sh", "-c", "ulimit -d"]
    done = subprocess.run(argv, capture_output=True, text=True, preexec_fn=restrict)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{2**20}\n", "")
