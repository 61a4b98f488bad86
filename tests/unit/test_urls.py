"""Credentials in URLs: removed from every text, and sent with every request."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sm120kit import recipes
from sm120kit.core import console, process
from sm120kit.core.errors import BadInput, CommandFailed
from sm120kit.core.urls import Endpoint, redacted

TEXTS = {
    "http://user:hunter2@host:80/x": "http://host:80/x",
    "https://hunter2@git.invalid/a.git": "https://git.invalid/a.git",
    "ssh://git@git.invalid/a.git": "ssh://git.invalid/a.git",
    "see 'https://u:hunter2@host/a', \"http://v:hunter2@host\" and more": "see 'https://host/a', \"http://host\" and more",
    "http://u:hunter2@ss@host/": "http://host/",
    "http://u:hunter2/ss@host/": "http://host/",
    "http://u:hunter2?ss#@host/": "http://host/",
    "https:/u:hunter2@host/x": "https:/host/x",
    "http://host/x?token=hunter2&y=1": "http://host/x?token=***&y=1",
    "http://host/x?y=1&X-Amz-Signature=hunter2 z": "http://host/x?y=1&X-Amz-Signature=*** z",
    "http://host/#access_token=hunter2": "http://host/#access_token=***",
    "GET /v1/models?api-key=hunter2 HTTP/1.1": "GET /v1/models?api-key=*** HTTP/1.1",
    '{"url": "http://u:hunter2@host"}': '{"url": "http://host"}',
    # Nothing of these is a credential.
    "https://host:8080/a@b": "https://host:8080/a@b",
    "http://[::1]:8000/a@b": "http://[::1]:8000/a@b",
    "git+https://host/repository@v1": "git+https://host/repository@v1",
    "r.example:5000/vllm@sha256:0f": "r.example:5000/vllm@sha256:0f",
    "type=bind,source=/a:/b@c": "type=bind,source=/a:/b@c",
    "http://host/x?page=2&format=json#top": "http://host/x?page=2&format=json#top",
}


@pytest.mark.parametrize("text", TEXTS)
def test_redacted(text: str) -> None:
    assert redacted(text) == TEXTS[text]
    assert redacted(redacted(text)) == TEXTS[text]


@pytest.mark.parametrize("text", ["://" * 300_000, "://a:" * 150_000, "?a" * 300_000, "://@" * 150_000, "https:/a:b@" * 90_000])
def test_redacted_takes_linear_time(text: str) -> None:
    start = time.process_time()
    redacted(text)
    assert time.process_time() - start < 5


def test_all_output_functions_redact(capsys: pytest.CaptureFixture[str]) -> None:
    url = "http://user:hunter2@host/?token=hunter2"
    console.info(url)
    console.warn(url)
    console.error(url, url)
    console.data(url)
    console.table((url,), [(url,)])
    console.json_data({url: [url]})
    out, err = capsys.readouterr()
    assert "hunter2" not in out + err and (out + err).count("http://host/?token=***") == 9
    console.data(url, credentials=True)
    assert capsys.readouterr().out == f"{url}\n", "a command that is to be pasted"


def test_logs_of_programs_are_redacted(tmp_path: Path) -> None:
    url = "http://user:hunter2@host/"
    with pytest.raises(CommandFailed):
        process.run(["/bin/sh", "-c", 'echo "$0" >&2; echo "$0"; exit 3', url], logfile=tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert "hunter2" not in log and log.count("http://host/") == 3


def test_endpoint_separates_credentials() -> None:
    server = Endpoint.parse("http://us%40er:p%3Aw@Host:8000/prefix/v1/?token=hunter2")
    assert server.url == "http://host:8000/prefix"
    assert server.request_url("/v1/models") == "http://host:8000/prefix/v1/models?token=hunter2"
    assert server.headers == {"Authorization": "Basic dXNAZXI6cDp3"}
    assert "hunter2" not in repr(server) and "dXNA" not in repr(server)
    keyed = Endpoint.parse("https://[::1]:8/", "hunter2")
    assert (keyed.url, keyed.headers) == ("https://[::1]:8", {"Authorization": "Bearer hunter2"})
    assert keyed.without_secrets("key hunter2 is wrong; http://u:p@x") == "key *** is wrong; http://x"
    assert Endpoint.parse("http://host").headers == {}


@pytest.mark.parametrize(
    "text",
    ["http://", "ftp://u:hunter2@host", "http://u:hunter2@host:port", "http://u:hunter2@[::1", "u:hunter2@host", "http:host"],
)
def test_invalid_url_is_rejected(text: str) -> None:
    with pytest.raises(BadInput) as error:
        Endpoint.parse(text)
    assert "hunter2" not in error.value.message
    assert "looks like http://" in error.value.hint


def test_two_credentials_are_rejected() -> None:
    with pytest.raises(BadInput, match="has a user name, and an API key is given"):
        Endpoint.parse("http://user:hunter2@host", "key")


def test_recipe_with_credentials_in_url_is_rejected(tmp_path: Path) -> None:
    source = next(path for path in sorted((Path(__file__).parents[2] / "recipes" / "engines").glob("flashinfer-0.6.6.toml")))
    text = source.read_text()
    start = text.index("[sources.flashinfer]")
    end = text.index("\n[", start)
    for url, fits in (
        ("https://hunter2@git.invalid/x", False),
        ("ssh://git@git.invalid/x", True),
        ("https://git.invalid/x", True),
    ):
        table = f'[sources.flashinfer]\ngit = "{url}"\nversion = "0.6.6"\ncommit = "{"0" * 40}"\n'
        path = tmp_path / "flashinfer-0.6.6.toml"
        path.write_text(text[:start] + table + text[end:])
        if fits:
            recipes.load_flashinfer(str(path))
            continue
        with pytest.raises(BadInput, match=r"sources\.flashinfer\.git: has credentials, which would be published") as error:
            recipes.load_flashinfer(str(path))
        assert "hunter2" not in error.value.message
