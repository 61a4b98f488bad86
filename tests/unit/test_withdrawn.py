"""Locked wheels that an index on loopback yanks, replaces, or no longer lists."""

from __future__ import annotations

import http.server
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from loopback import http_served

from sm120kit.core import reporting
from sm120kit.sources.origin import Origin
from sm120kit.sources.releases import Releases, Withdrawals
from sm120kit.sources.source_records import GitPin, LockedWheel, SdistPin

SHA = "a" * 64
JSON = "application/vnd.pypi.simple.v1+json"


def wheel(name: str = "demo", version: str = "1.0") -> LockedWheel:
    return LockedWheel(name, version, f"{name}-{version}-py3-none-any.whl", SHA)


def listed(version: str = "1.0", sha256: str = SHA, **more: object) -> dict[str, object]:
    filename = f"demo-{version}-py3-none-any.whl"
    return {"filename": filename, "url": f"/files/{filename}", "hashes": {"sha256": sha256}, **more}


@dataclass
class IndexServer:
    """A package index (PEP 691): JSON or HTML pages of projects, and the paths that were requested."""

    pages: dict[str, list[dict[str, object]]]
    html: bool = False
    requested: list[str] = field(default_factory=list)
    url: str = ""

    def page(self, name: str) -> tuple[str, str]:
        files = self.pages[name]
        if not self.html:
            return JSON, json.dumps({"meta": {"api-version": "1.1"}, "name": name, "files": files})
        hashes = [file["hashes"]["sha256"] for file in files]  # type: ignore[index]
        links = (
            f'<a href="{file["url"]}#sha256={sha256}"{" data-yanked=broken" * bool(file.get("yanked"))}>{file["filename"]}</a>'
            for file, sha256 in zip(files, hashes, strict=True)
        )
        return "text/html", "<!DOCTYPE html><html><body>" + "".join(links) + "</body></html>"


@pytest.fixture
def server() -> Iterator[IndexServer]:
    index = IndexServer({})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/").rpartition("/")[2]
            index.requested.append(name)
            kind, text = index.page(name) if name in index.pages else ("text/plain", "")
            self.send_response(200 if name in index.pages else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *arguments: object) -> None: ...

    with http_served(Handler) as url:
        index.url = f"{url}/simple"
        yield index


def withdrawals(url: str) -> Withdrawals:
    return Withdrawals(Releases(Origin(index_url=url)))


CASES = {
    "as it was locked": ([listed(), listed("2.0", yanked=True)], ""),
    "yanked": ([listed(yanked=True), listed("2.0")], "yanked"),
    "yanked with a reason": ([listed(yanked="wrong numbers")], "yanked"),
    "replaced": ([listed(sha256="b" * 64)], "b" * 64),
    "replaced and yanked": ([listed(sha256="b" * 64, yanked=True)], "b" * 64),
    "removed": ([listed("2.0")], "no longer listed"),
    "without a hash": ([listed() | {"hashes": {}}], ""),
    "unknown to the index": (None, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_locked_wheel_is_compared(case: str, server: IndexServer) -> None:
    files, expected = CASES[case]
    server.pages = {} if files is None else {"demo": files}
    lines = [*withdrawals(server.url).of([wheel()])]
    assert server.requested
    assert bool(lines) == bool(expected) and all(wheel().filename in line and expected in line for line in lines)


@pytest.mark.parametrize("case", ["as it was locked", "yanked", "replaced", "removed"])
def test_pages_in_html_state_the_same(case: str, server: IndexServer) -> None:
    files, expected = CASES[case]
    assert files is not None
    server.pages, server.html = {"demo": files}, True
    lines = [*withdrawals(server.url).of([wheel()])]
    assert bool(lines) == bool(expected) and all(expected in line for line in lines)


@pytest.mark.parametrize("case", CASES)
def test_locked_sdist_is_compared(case: str, server: IndexServer) -> None:
    files, expected = CASES[case]
    renamed = [json.loads(json.dumps(file).replace("-py3-none-any.whl", ".tar.gz")) for file in files or ()]
    server.pages = {} if files is None else {"demo": renamed}
    pins = (SdistPin("demo", "demo", "1.0", SHA), GitPin("demo", "https://example.org/demo", "0" * 40, "1.0"))
    lines = [*withdrawals(server.url).of(pins)]
    assert bool(lines) == bool(expected) and all("demo 1.0" in line and expected in line for line in lines)


def test_page_of_a_distribution_is_read_once(server: IndexServer) -> None:
    server.pages = {"demo": [listed(), listed("2.0", yanked=True)]}
    compared = withdrawals(server.url)
    assert not [*compared.of([wheel()])] and len([*compared.of([wheel(), wheel(version="2.0")])]) == 1
    assert server.requested.count("demo") == 1


def test_index_that_cannot_be_read_is_reported_once(server: IndexServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unknown is not called withdrawn."""
    server.pages, server.html = {"demo": []}, False
    warned: list[str] = []
    monkeypatch.setattr(reporting, "warn", warned.append)
    monkeypatch.setattr(server, "page", lambda name: (JSON, "{"))
    server.pages |= {"other": []}
    assert not [*withdrawals(server.url).of([wheel(), wheel("other")])]
    assert len(warned) == 1
