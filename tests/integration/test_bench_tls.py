"""Servers with TLS: own authorities, and none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from schedule_server import schedule_server
from tls_certificates import Authority
from typer.testing import CliRunner

from sm120kit.bench import result_file
from sm120kit.cli import app
from sm120kit.core import server_requests
from sm120kit.core.errors import Sm120kitError


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def bench_run(url: str, output: Path, *options: str | Path) -> tuple[int, str]:
    """Exit code and messages of a run of one case with one request."""
    arguments = ["bench", "run", url, "--quick", "--output-tokens", "4", "-o", str(output), *map(str, options)]
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, Sm120kitError):
        return done.exception.exit_code, f"{done.exception.message} {done.exception.hint}"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, re.sub(r"[\s│]+", " ", done.stderr)


def test_server_is_verified(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    server_requests.certificates.cache_clear()
    with schedule_server(0.0001, TLS_CERTIFICATE=str(authority.issue("server"))) as url:
        code, message = bench_run(url, tmp_path / "refused.json")
        assert (code, "SSL_CERT_FILE" in message) == (70, True), message
        assert bench_run(url.replace("https", "http"), tmp_path / "refused.json")[0] == 70
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
        server_requests.certificates.cache_clear()
        assert bench_run(url, tmp_path / "ca.json")[0] == 0
        named = url.replace("127.0.0.1", "localhost")
        assert "CERTIFICATE_VERIFY_FAILED" in bench_run(named, tmp_path / "refused.json")[1]
    server_requests.certificates.cache_clear()
    measured = result_file.read(tmp_path / "ca.json")
    assert measured.environment.url == url and not any(sample.error for sample in measured.cases[0].samples)
    assert not (tmp_path / "refused.json").exists()
