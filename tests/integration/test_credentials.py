"""Credentials of servers: sent with every request, and in nothing that is printed or kept."""

from __future__ import annotations

import base64
import http.server
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sm120kit.cli import main
from sm120kit.core import retry

SECRET = "hunter2-%2F"
PLAIN = "hunter2-/"
WORKLOAD = 'summary = "x"\nprompts = ["a"]\nconcurrency = [1]\noutput_tokens = [8]\nrequests_per_stream = 1\n'
CONFIGURATION = "qwen3.5-27b-fp8-1x-rtx-pro-6000"


class Server(http.server.ThreadingHTTPServer):
    """An OpenAI-compatible server that answers only who shows ``accepts``: a header, or the query of the URL."""

    def __init__(self, accepts: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.accepts, self.refused, self.answered = accepts, 0, set[str]()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self._accepted():
            known: dict[str, Any] = {"/v1/models": {"data": [{"id": "tiny"}]}, "/version": {"version": "1"}}
            answer = known.get(urlsplit(self.path).path)
            self._answer(404 if answer is None else 200, json.dumps(answer).encode())

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._accepted():
            return
        if "prompt_logprobs" in request:
            listed = [None, *({"1": {"logprob": -0.5}, "2": {"logprob": -1.0}} for _ in request["prompt"][0][1:])]
            choices = [{"index": number, "prompt_logprobs": listed} for number, _ in enumerate(request["prompt"])]
            self._answer(200, json.dumps({"choices": choices}).encode())
            return
        usage = {"prompt_tokens": 1, "completion_tokens": 2}
        pieces = [{"choices": [{"index": 0, "delta": {"content": "x"}}]}] * 2 + [{"choices": [], "usage": usage}]
        self._answer(200, b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in pieces) + b"data: [DONE]\n\n")

    def _accepted(self) -> bool:
        """Whether the request has the credentials; one that has not is told what it sent, as some proxies do."""
        shown = f"{self.headers['Authorization']} {urlsplit(self.path).query}"
        if self.server.accepts in shown:
            self.server.answered.add(urlsplit(self.path).path)
            return True
        self.server.refused += 1
        self._answer(401, f"not accepted: {shown}".encode())
        return False

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


BASIC = f"Basic {base64.b64encode(f'user:{PLAIN}'.encode()).decode()}"
BEARER = "Bearer hunter2-key"


@pytest.fixture
def serve() -> Iterator[Any]:
    started: list[Server] = []

    def start(accepts: str) -> Server:
        started.append(Server(accepts))
        return started[-1]

    yield start
    for one in started:
        one.shutdown()


@dataclass(frozen=True)
class Ran:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def sm120kit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Ran]]:
    """The command in this process, in ``tmp_path``; ``key`` is in the environment."""
    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(retry, "PAUSE_SECONDS", 0)

    def run(*words: object, key: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["sm120kit", *map(str, words)])
        monkeypatch.setenv("SM120KIT_API_KEY", key)
        with pytest.raises(SystemExit) as ended:
            main()
        return Ran(int(ended.value.code or 0), *capfd.readouterr())

    yield run
    for kind, handler in before.items():
        signal.signal(kind, handler)


def nothing_of_it(place: Path, *ran: Ran) -> None:
    """No password, key or encoded header is in an output or in a file below ``place``."""
    texts = [text for one in ran for text in (one.stdout, one.stderr)]
    texts += [path.read_text() for path in place.rglob("*") if path.is_file() and path.name != "key"]
    for secret in ("hunter2", BASIC.split()[1]):
        assert not [text for text in texts if secret in text]


CASES = {
    "password": (BASIC, f"http://user:{SECRET}@HOST", (), ""),
    "token in the query": ("token=hunter2", "http://HOST/?token=hunter2", (), ""),
    "variable": (BEARER, "http://HOST", (), "hunter2-key"),
    "option": (BEARER, "http://HOST/v1", ("--api-key", "hunter2-key"), ""),
    "file": (BEARER, "http://HOST", ("--api-key", "@key"), ""),
    "HOST:PORT": (BEARER, "HOST/v1", ("--api-key", "@key"), ""),
}


@pytest.mark.parametrize("name", CASES)
def test_a_measurement(name: str, serve: Any, sm120kit: Any, tmp_path: Path) -> None:
    accepts, url, options, key = CASES[name]
    server = serve(accepts)
    url = url.replace("HOST", server.host)
    (tmp_path / "key").write_text("hunter2-key\n")
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    run = sm120kit("bench", "run", url, "--force", "-w", "mine.toml", *options, key=key)
    assert run.returncode == 0, run.stderr
    assert server.refused == 0 and server.answered == {"/v1/models", "/version", "/v1/chat/completions"} | {
        path for path in server.answered if path in ("/metrics", "/get_server_info", "/tokenize", "/v1/completions")
    }
    show = [sm120kit("bench", "show", "result.json", *json_) for json_ in ((), ("--json",))]
    compare = sm120kit("bench", "compare", "result.json", "result.json")
    assert server.host in show[0].stdout and compare.returncode == 0
    kept = json.loads((tmp_path / "result.json").read_text())["environment"]["url"]
    assert kept == f"http://{server.host}"
    nothing_of_it(tmp_path, run, *show, compare)


def test_headers(serve: Any, sm120kit: Any, tmp_path: Path) -> None:
    """The server repeats the credential that it refuses."""
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    (tmp_path / "key").write_text("Authorization: Token hunter2-key\n")
    server = serve("Token hunter2-key")
    run = sm120kit("bench", "run", server.host, "--force", "-w", "mine.toml", "--header", "@key", "--header", "X-Team: a")
    assert run.returncode == 0 and server.refused == 0, run.stderr
    refused = sm120kit("bench", "run", server.host, "-o", "other.json", "--header", "Authorization: hunter2-no")
    assert refused.returncode == 70 and "--header" in refused.stderr, refused.stderr
    nothing_of_it(tmp_path, run, refused)


@pytest.mark.parametrize("name", CASES)
def test_a_comparison_of_distributions(name: str, serve: Any, sm120kit: Any, tmp_path: Path) -> None:
    accepts, url, options, key = CASES[name]
    server = serve(accepts)
    url = url.replace("HOST", server.host)
    (tmp_path / "key").write_text("hunter2-key\n")
    (tmp_path / "ids.json").write_text(json.dumps(list(range(64))))
    words = ("kld", url, url, "--text", "ids.json", "--windows", 2, "--window", 8, "--stride", 4, "-o", "out.json", *options)
    ran = sm120kit(*words, key=key)
    assert ran.returncode == 0 and server.refused == 0, ran.stderr
    assert json.loads((tmp_path / "out.json").read_text())["test"] == f"tiny at http://{server.host}"
    nothing_of_it(tmp_path, ran)


def test_what_a_server_repeats_of_a_refused_credential_is_not_shown(serve: Any, sm120kit: Any, tmp_path: Path) -> None:
    server = serve("Bearer another")
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    (tmp_path / "ids.json").write_text(json.dumps(list(range(64))))
    password = sm120kit("bench", "run", f"http://user:{SECRET}@{server.host}", "--force", "-w", "mine.toml")
    key = sm120kit("bench", "run", f"http://{server.host}", "--force", "-w", "mine.toml", key="hunter2-key")
    token = sm120kit(
        "kld",
        f"http://{server.host}?token=hunter2",
        f"http://{server.host}",
        "--text",
        "ids.json",
        "--windows",
        1,
        "--window",
        8,
    )
    for one in (password, key, token):
        assert one.returncode == 70 and "HTTP 401" in one.stderr and "SM120KIT_API_KEY" in one.stderr, one.stderr
    nothing_of_it(tmp_path, password, key, token)
    assert server.answered == set()


def test_errors_of_a_server_that_goes_away(serve: Any, sm120kit: Any, tmp_path: Path) -> None:
    """Only the list of models is answered: each request afterwards fails, and its error is kept."""
    server = serve("token=hunter2")
    server.RequestHandlerClass = type("Refusing", (Handler,), {"do_POST": lambda self: self._echo()})
    server.RequestHandlerClass._echo = lambda self: self._answer(500, f"{self.path} {self.headers['Authorization']}".encode())
    (tmp_path / "mine.toml").write_text(WORKLOAD)
    ran = sm120kit("bench", "run", f"http://{server.host}?token=hunter2", "--force", "-w", "mine.toml")
    assert ran.returncode == 70 and "HTTP 500: /v1/chat/completions?token=***" in ran.stderr, ran.stderr
    nothing_of_it(tmp_path, ran)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--api-key", "@absent"), "cannot read absent: No such file"),
        (("--api-key", "@empty"), "the file is empty"),
        (("--api-key", "two words"), "printable ASCII characters without spaces"),
        (("--api-key", "a\nb"), "printable ASCII characters without spaces"),
        (("--api-key", "ä"), "printable ASCII characters without spaces"),
    ],
)
def test_keys_that_are_none(options: tuple[str, ...], words: str, sm120kit: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    ran = sm120kit("bench", "run", "http://127.0.0.1:9", *options)
    assert ran.returncode == 2 and words in " ".join(ran.stderr.split()), ran.stderr


def test_urls_that_are_none(sm120kit: Any, tmp_path: Path) -> None:
    both = sm120kit("bench", "run", f"http://user:{SECRET}@127.0.0.1:9", key="hunter2-key")
    broken = sm120kit("bench", "run", "http://user:hunter2/@127.0.0.1:9")
    assert both.returncode == broken.returncode == 11, (both, broken)
    nothing_of_it(tmp_path, both, broken)


def test_other_commands_that_take_a_url(sm120kit: Any, tmp_path: Path) -> None:
    """Mirrors, git and logs."""
    url = "http://user:hunter2@127.0.0.1:9"
    state = ("--state", tmp_path / "state")
    fetch = sm120kit("build", "flashinfer@0.6.6", "--to", "fetch", "--mirror", f"{url}/files?token=hunter2", *state)
    (tmp_path / "log").write_text(f"fatal: unable to access {url}/x.git: torch.OutOfMemoryError: CUDA out of memory\n")
    explained = [sm120kit("explain", "log", *more) for more in ((), ("--json",))]
    (tmp_path / "log").unlink()
    published = sm120kit("pull", "flashinfer-0.6.6", "--index", url)
    launched = sm120kit("serve", CONFIGURATION, "--model", tmp_path, "--index", f"{url}/images.json", *state)
    for one in (fetch, published, launched):
        assert one.returncode not in (0, 1, 2) and "Traceback" not in one.stderr, one.stderr
    assert all("127.0.0.1:9" in one.stderr for one in (fetch, published)) and "127.0.0.1:9" in explained[0].stdout
    nothing_of_it(tmp_path, fetch, *explained, published, launched)


@pytest.mark.parametrize(
    "words", [("bench",), ("pull", "name"), ("build", "x", "--jobs"), ("bench", "run", "CONFIG", "--restarts")]
)
def test_usage_errors(words: tuple[str, ...]) -> None:
    """The library that parses arguments prints these by itself."""
    argv = [sys.executable, "-m", "sm120kit", *words, "http://user:hunter2@host"]
    ran = subprocess.run(argv, capture_output=True, text=True)
    assert ran.returncode == 2 and "http://host" in ran.stderr and "hunter2" not in ran.stderr, ran.stderr
