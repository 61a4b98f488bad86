"""Pull requests by number, fetched as a mailbox from a server on loopback, and the directories of imported diffs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from locked_engine import LAYERS, MOE, Site
from patch_series import KERNEL, LAUNCHER, changed
from typer.testing import CliRunner

from sm120kit.cli import app
from sm120kit.core.errors import BadInput, FetchFailed, OfflineMiss
from sm120kit.patches import local
from sm120kit.patches.local import read_local
from sm120kit.sources.origin import DEFAULT, Origin

Answer = Callable[[BaseHTTPRequestHandler], None]
NAME = "vllm-project/vllm#123"
PAGE = "/vllm-project/vllm/pull/123.patch"


class Forge(ThreadingHTTPServer):
    """A forge that answers by path."""

    daemon_threads = True

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requested: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Forge

    def do_GET(self) -> None:
        self.server.requested.append(self.path)
        self.server.answers.get(self.path, lambda handler: handler.send_error(404))(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


def body(content: bytes) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def redirect(target: str) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", target)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    return answer


def endless(pause: float) -> Answer:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        for _ in range(200):
            try:
                handler.wfile.write(b"x" * 2**16)
            except OSError:
                return
            time.sleep(pause)

    return answer


@pytest.fixture
def forge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forge]:
    with Forge() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("SM120KIT_FORGE", server.url)
        monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "120")  # several stalls of the machine are shorter
        yield server
        server.shutdown()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
    return Site(tmp_path)


def mail(subject: str, diff: bytes) -> bytes:
    head = f"From {'1' * 40} Mon Sep 17 00:00:00 2001\nFrom: A Person <a@example.com>\n"
    date = "Date: Fri, 6 Nov 2026 10:00:00 +0100\n"
    return f"{head}{date}Subject: [PATCH] {subject}\n\nWhy.\n---\n".encode() + diff + b"-- \n2.40.0\n\n"


def three_commits(site: Site) -> bytes:
    """The second is of the same file as the first, the third of tests only."""
    files = {LAYERS: KERNEL}
    second = {LAYERS: changed(KERNEL, 10, "first\n")}
    third = {LAYERS: changed(second[LAYERS], 11, "second\n")}
    test = site.patches.diff({"tests/test_a.py": "one\n"}, {"tests/test_a.py": "two\n"}, "")
    return b"".join(
        [
            mail("layers: first", site.patches.diff(files, second, "")),
            mail("layers: second", site.patches.diff(second, third, "")),
            mail("tests: third", test),
        ]
    )


def test_commits_of_a_pull_request_are_applied_in_order(forge: Forge, site: Site) -> None:
    forge.answers = {PAGE: redirect("/raw"), "/raw": body(three_commits(site))}
    patches = read_local([Path(NAME)], DEFAULT)
    assert [patch.message.subject for patch in patches] == ["layers: first", "layers: second", "tests: third"]
    target = site.target_of(patches)
    assert target.engine_tree and [patch.slug for patch in target.engine_tree.local] == ["layers-first", "layers-second"]


def test_import_of_a_pull_request(forge: Forge, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_STATE", str(site.root / "state"))
    assert site.target().engine_tree is None, "nothing is fetched after this"
    forge.answers = {PAGE: body(three_commits(site))}
    result = CliRunner().invoke(app, ["patch", "import", NAME, "--recipe", "vllm-7.0"])
    assert result.exit_code == 0, result.output
    series = (site.data / "patches/vllm/series").read_text().split()
    assert series == ["layers-first", "layers-second"] and forge.requested == [PAGE]
    text = (site.data / "patches/vllm/layers-first.patch").read_text()
    assert "From: A Person <a@example.com>" in text and "Date: Fri, 6 Nov 2026" in text
    page = forge.url.rstrip("/") + PAGE.removesuffix(".patch")
    assert f"\nUpstream-Status: Submitted [{page}]\nOrigin: {page}\n" in text


def test_the_origin_that_a_commit_states_stays_the_only_one(forge: Forge, site: Site) -> None:
    diff = site.patches.diff({LAYERS: KERNEL}, {LAYERS: changed(KERNEL, 5, "5\n")}, "")
    forge.answers = {PAGE: body(mail("layers: first", diff).replace(b"Why.", b"Origin: mine"))}
    (patch,) = read_local([Path(NAME)], DEFAULT)
    assert patch.message.body.count("Origin: ") == 1


@pytest.mark.parametrize(
    ("answers", "limits", "said"),
    [
        ({}, {}, "404"),
        ({PAGE: endless(0)}, {"MAX_BYTES": 2**20}, "more than 1 MiB"),
        ({PAGE: endless(0.1)}, {"MAX_SECONDS": 0.3}, "more than 0.3 s"),
        ({PAGE: redirect(PAGE)}, {}, "redirects"),
        ({PAGE: redirect("file:///etc/passwd")}, {}, "redirects from http to file"),
    ],
)
def test_refused_fetch_names_the_file_to_save(
    answers: dict[str, Answer], limits: dict[str, float], said: str, forge: Forge, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge.answers = answers
    for name, value in limits.items():
        monkeypatch.setattr(local, name, value)
    with pytest.raises(FetchFailed, match=said) as error:
        read_local([Path(NAME)], DEFAULT)
    assert f"{forge.url}{PAGE}" in error.value.message and "vllm-project-vllm-123.patch" in error.value.hint


def test_unreachable_forge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_FORGE", "http://127.0.0.1:1/sub/")
    with pytest.raises(FetchFailed) as error:
        read_local([Path(NAME)], DEFAULT)
    assert f"http://127.0.0.1:1/sub{PAGE}" in error.value.message


@pytest.mark.parametrize("origin", [Origin(offline=True), Origin("/mirror")])
def test_offline_names_the_file_to_save(origin: Origin, forge: Forge) -> None:
    with pytest.raises(OfflineMiss) as error:
        read_local([Path(NAME)], origin)
    assert f"{forge.url}{PAGE}" in error.value.hint and "vllm-project-vllm-123.patch" in error.value.hint
    assert not forge.requested


def test_page_that_is_no_patch(forge: Forge) -> None:
    forge.answers = {PAGE: body(b"<html>Sign in</html>")}
    with pytest.raises(BadInput, match="contains no diff"):
        read_local([Path(NAME)], DEFAULT)


def test_forge_without_https_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_FORGE", "http://forge.example.com")
    with pytest.raises(BadInput, match="SM120KIT_FORGE"):
        read_local([Path(NAME)], DEFAULT)


@pytest.mark.parametrize("text", ["vllm#123", "a/b/c#1", "a/b#x", "a/b#0", "../b#1", "a/b#1234567890"])
def test_other_text_is_a_file(text: str, forge: Forge) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_local([Path(text)], DEFAULT)
    assert not forge.requested


def test_file_of_that_name_is_read(forge: Forge, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(NAME).parent.mkdir()
    Path(NAME).write_bytes(site.diff("x.diff", LAYERS, 5).read_bytes())
    assert len(read_local([Path(NAME)], DEFAULT)) == 1 and not forge.requested


# The directory of an imported diff


def imported(site: Site, file: Path, *options: str) -> list[str]:
    words = ["--recipe", "vllm-7.0", "--mirror", str(site.mirror), "--state", str(site.root / "state")]
    before = set((site.data / "patches").rglob("*.patch"))
    result = CliRunner().invoke(app, ["patch", "import", str(file), *words, *options])
    if result.exception:
        raise result.exception
    return [path.parent.name for path in sorted({*(site.data / "patches").rglob("*.patch")} - before)]


@pytest.mark.parametrize(
    ("path", "text", "project"),
    [
        (LAYERS, KERNEL, "vllm"),
        ("layers.py", KERNEL, "vllm"),
        ("srt/deep.py", KERNEL, "vllm"),
        ("python/vllm/srt/deep.py", KERNEL, "vllm"),
        (MOE, KERNEL, "b12x"),
        ("moe.py", KERNEL, "b12x"),
        (LAUNCHER, None, "flashinfer"),
    ],
)
def test_import_finds_project_and_directory(path: str, text: str | None, project: str, site: Site) -> None:
    file = site.diff("mine.diff", path, 20, {path: text} if text else None)
    assert imported(site, file) == [project]


def test_files_of_several_projects_are_refused(site: Site) -> None:
    site.add_to_wheels("same.py")
    with pytest.raises(BadInput, match="vllm and b12x"):
        imported(site, site.diff("mine.diff", "same.py", 4))
    assert imported(site, site.diff("mine.diff", "same.py", 4), "--directory", "vllm") == ["vllm"]


def test_options_are_not_guessed(site: Site) -> None:
    with pytest.raises(BadInput, match=r"layers\.py does not exist"):
        imported(site, site.diff("mine.diff", "layers.py", 4), "-p", "1")
