"""Whether the process that listens on a port is an engine; tests/integration/test_bench_figures.py has real ones."""

from __future__ import annotations

import socket

import pytest

from sm120kit.bench import bench_environment


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
def test_engine_is_recognised_by_its_program(owner: str, engine: bool) -> None:
    assert bench_environment.is_program(owner.split()) is engine


def test_arguments_name_the_port() -> None:
    assert bench_environment.names_port(["docker-proxy", "-host-port", "8000"], 8000)
    assert bench_environment.names_port(["vllm", "serve", "--port=8000"], 8000)
    assert not bench_environment.names_port(["docker-proxy", "-host-port", "8080"], 8000)


def test_this_program_is_no_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert not bench_environment.is_engine(server.getsockname()[1])
