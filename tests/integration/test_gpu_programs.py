"""The loop of ``tests/gpu/vllm_servers.py`` with small servers on the CPU: what is kept, not asked again, and ended in time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from small_models import probe_tokenizer, tiny_model, word_ids
from small_server import Options, SmallEngine, small_server

PROGRAMS = Path(__file__).parents[1] / "gpu"
LOOP = """
import sys
from pathlib import Path
import vllm_servers as v
v.SERVERS |= {"one": v.Server("m", (), dtype="float32", gpu=0), "two": v.Server("m", (), "one", "float32")}
folder, ports = Path(sys.argv[1]), dict(zip(("one", "two", "dead"), map(int, sys.argv[2:])))
v.SERVERS["dead"] = v.Server("m", ())
v.PROMPTS, v.PROBES, v.BEAT_SECONDS = 3, ["log-probabilities"], 0.2
def begin(name, port):
    log = (folder / f"{name}.log").open("wb")
    return v.subprocess.Popen(["sleep", "600"], stdout=log, start_new_session=True)
run = v.Run(folder, v.SERVERS, ports, begin)
run.fresh = lambda: print("fresh", flush=True)
sys.exit(not run.all(v.ready, reads=False, limit=500))
"""


@contextmanager
def engines(number: int) -> Iterator[list[int]]:
    """Ports of servers with the same weights."""
    tokenizer = probe_tokenizer()
    model = tiny_model(len(tokenizer))
    with ExitStack() as running:
        urls = [
            running.enter_context(small_server(SmallEngine(model, word_ids(tokenizer), frozenset(), Options()), tokenizer))
            for _ in range(number)
        ]
        yield [int(url.rpartition(":")[2]) for url in urls]


def started(folder: Path, *ports: int) -> subprocess.Popen[str]:
    """The program's loop."""
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(PROGRAMS), "OUT": str(folder.parent)}
    words = [sys.executable, "-c", LOOP, str(folder), *map(str, ports)]
    return subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_what_is_known_is_kept_and_not_asked_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with engines(2) as ports, started(folder, *ports) as process:
        output = process.communicate(timeout=500)[0]
    assert process.returncode == 0, output
    kept: dict[str, Any] = json.loads((folder / "results.json").read_text())["m"]
    assert kept["one"]["done"] and kept["two"]["done"]
    assert kept["two"]["against one"]["equal"] == 3
    assert not kept["two"]["verify server"]["wrong"]
    assert output.count("fresh") == 1, "before servers of several ranks alone"
    assert json.loads((tmp_path / "results-run.json").read_text()) == {"m": kept}
    with started(folder, *ports) as again:
        again.communicate(timeout=100)
    assert again.returncode == 0, "no server runs any more"


def test_what_is_known_outlasts_a_server_that_does_not_answer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with engines(2) as ports, started(folder, *ports, 9) as process:
        assert process.stdout
        seen = ""
        for line in process.stdout:
            seen += line
            if "dead: begins" in line:
                process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 1
    last = seen.splitlines()[-1]
    assert "'dead'" in last and "'two'" not in last
    assert json.loads((folder / "results.json").read_text())["m"]["two"]["done"]
