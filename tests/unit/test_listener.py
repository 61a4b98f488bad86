"""Whether the process that listens on a port is an engine: command lines, sockets of other users, tunnels."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm120kit.bench import _listener

TABLE = """  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0000000000000000
   1: 0100007F:1F41 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4343 1 0000000000000000
"""


def host(root: Path, *, owner: str = "", others: tuple[str, ...] = (), gpu: bool = False) -> Path:
    """A /proc in which ``owner`` listens on port 8000; without it the socket belongs to a process that is not readable."""
    (root / "net").mkdir(parents=True)
    (root / "net" / "tcp").write_text(TABLE)
    for number, argv in enumerate((owner, *others), 100):
        (root / str(number) / "fd").mkdir(parents=True)
        (root / str(number) / "cmdline").write_bytes("\0".join([*argv.split(), ""]).encode() if argv else b"")
        if number == 100 and owner:
            (root / "100/fd/3").symlink_to("socket:[4242]")
            (root / "100/task/100").mkdir(parents=True)
            (root / "100/task/100/children").write_text("101 " if others else "")
        if number == 101 and gpu:
            (root / "101/fd/7").symlink_to("/dev/nvidia0")
    return root


@pytest.mark.parametrize(
    ("owner", "engine"),
    [
        ("/venv/bin/python /venv/bin/vllm serve model --port 8000", True),
        ("python3 -m sglang.launch_server --port 8000", True),
        ("python -u -m vllm.entrypoints.openai.api_server", True),
        ("VLLM::APIServer", True),
        ("/opt/llama-server -m model.gguf", True),
        ("/usr/bin/docker-proxy -proto tcp -host-port 8000", True),
        ("ssh -N -L 8000:127.0.0.1:8000 vllm", False),
        ("kubectl port-forward svc/vllm 8000", False),
        ("python relay.py vllm", False),
        ("python -c print() vllm", False),
        ("python -m litellm --model vllm", False),
        ("python", False),
    ],
)
def test_engine_is_recognised_by_its_program(owner: str, engine: bool, tmp_path: Path) -> None:
    assert _listener.is_engine(8000, host(tmp_path, owner=owner)) is engine
    assert not _listener.is_engine(8001, tmp_path), "a connection is not a listener"


def test_engine_is_recognised_by_the_gpu_of_a_process_that_it_started(tmp_path: Path) -> None:
    assert _listener.is_engine(8000, host(tmp_path / "a", owner="python serve.py", others=("worker",), gpu=True))
    assert not _listener.is_engine(8000, host(tmp_path / "b", owner="python serve.py", others=("worker",)))


def test_process_of_another_user_names_the_port(tmp_path: Path) -> None:
    assert _listener.is_engine(8000, host(tmp_path / "a", others=("/usr/bin/docker-proxy -host-port 8000",)))
    assert not _listener.is_engine(8000, host(tmp_path / "b", others=("/usr/bin/docker-proxy -host-port 8080",)))
    assert not _listener.is_engine(8000, host(tmp_path / "c", others=("ssh -L 8000:vllm:8000",)))
