"""Servers with TLS: own authorities, none, and client certificates."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from schedule_server import schedule_server
from tls_certificates import Authority
from typer.testing import CliRunner

from sm120kit.bench import result_file
from sm120kit.cli import app
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
    other = Authority(tmp_path)
    with schedule_server(0.0001, TLS_CERTIFICATE=str(authority.issue("server"))) as url:
        for options in ([], ["--cacert", other.certificate]):
            code, message = bench_run(url, tmp_path / "refused.json", *options)
            assert (code, "name the CA" in message, "--cacert FILE" in message) == (70, True, True), message
        assert bench_run(url, tmp_path / "ca.json", "--cacert", authority.certificate)[0] == 0
        assert bench_run(url, tmp_path / "insecure.json", "-k")[0] == 0
        named = url.replace("127.0.0.1", "localhost")
        assert "CERTIFICATE_VERIFY_FAILED" in bench_run(named, tmp_path / "refused.json", "--cacert", authority.certificate)[1]
        code, message = bench_run(url.replace("https", "http"), tmp_path / "refused.json")
        assert code == 70, message
        monkeypatch.setenv("SSL_CERT_FILE", str(authority.certificate))
    measured = result_file.read(tmp_path / "ca.json")
    assert measured.environment.url == url and not any(sample.error for sample in measured.cases[0].samples)
    assert not (tmp_path / "refused.json").exists()


def test_client_certificate(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    client, stranger = authority.issue("client"), other.issue("stranger")
    required = {"TLS_CERTIFICATE": str(authority.issue("server")), "TLS_CLIENTS": str(authority.certificate)}
    trusted = ("--cacert", authority.certificate)
    with schedule_server(0.0001, **required) as url:
        code, message = bench_run(url, tmp_path / "refused.json", *trusted)
        assert (code, "require a client certificate: --cert" in message) == (70, True), message
        code, message = bench_run(url, tmp_path / "refused.json", *trusted, "--cert", stranger)
        assert (code, "which it accepts" in message) == (70, True), message
        assert bench_run(url, tmp_path / "one.json", *trusted, "--cert", client)[0] == 0
        apart = ("--cert", client.with_suffix(".crt"), "--key", client.with_suffix(".key"))
        assert bench_run(url, tmp_path / "two.json", *trusted, *apart)[0] == 0


def test_bad_files_and_plain_http(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("none")
    encrypted, client = authority.issue("encrypted", b"secret"), authority.issue("client")
    with schedule_server(0.0001) as url:
        for options, code, message in (
            (("--cacert", tmp_path / "none.pem"), 2, "No such file"),
            (("--cacert", tmp_path / "text.pem"), 2, "not a certificate"),
            (("--cacert", tmp_path), 2, "cannot read"),
            (("--cert", encrypted), 2, "encrypted"),
            (("--cert", client.with_suffix(".crt")), 2, "not a certificate and its key"),
            (("--cert", client, "--key", encrypted.with_suffix(".key")), 2, "encrypted"),
            (("--key", client), 2, "add --cert"),
        ):
            got, text = bench_run(url, tmp_path / "refused.json", *options)
            assert (got, message in text) == (code, True), text
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as plain:
        threading.Thread(target=plain.serve_forever, daemon=True).start()
        got, text = bench_run(f"https://127.0.0.1:{plain.server_port}", tmp_path / "refused.json", "--insecure")
        plain.shutdown()
    assert (got, "does not speak TLS" in text) == (70, True), text
