"""vLLM's server with one rank and with several: the same tokens, and what ``verify server`` finds, healthy and with faults.

``python3 tests/gpu/vllm_servers.py DIR WORLD [--seconds N] [SERVER ...]`` with vLLM and FlashInfer (``carry_vllm.py``) and
``src`` on PYTHONPATH. With fewer GPUs than ranks some ranks share one (``one_gpu.py``). Servers of one rank run side by side,
others one after the other, with models of random weights that it writes to DIR, and its logs. Prints each comparison and each
probed server as soon as it is known, and keeps them in DIR: begun again, after N seconds say, it does what is not done. Exit
code 1 if a server ends, answers other tokens in float32 than one rank where neither is a tie, or a verdict is not as expected.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import one_gpu
import vllm_checkpoints
from vllm_faults import took_effect

HERE = Path(__file__).resolve().parent

PROMPTS, TOKENS, TOGETHER, TOP = 32, 24, 8, 5
ASKED = 6
"""Servers that compute at once: under MPS, kernels of ranks that wait for each other stay on the GPU."""
GRACE_SECONDS = 15
ANSWER_SECONDS = 75
"""The first answer compiles kernels; a server that stands still costs this."""
BEAT_SECONDS = 20
TIE_NATS = 0.01
"""In float32, two tokens whose log-probabilities differ by less may change places. In bfloat16 answers are not judged."""
NGRAM = '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":4,"prompt_lookup_min":2}'
GRAPHS = '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16]}'
EAGER = ("--enforce-eager",)
CAPTURED = ("--compilation-config", GRAPHS)
CHUNKS = ("--max-num-batched-tokens", "256")
SPECULATE = ("--speculative-config", NGRAM)
MTP = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":1}')
NCCL = ("--disable-custom-all-reduce",)
PCIE_IPC = {"VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC": "1"}
LABORATORY = {"TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor-sm120"}
"""For a run below ``sm12x-lab run``, once ``one-float32`` has answered: Inductor finds what it compiled by the GPU's name, the
same there."""
SAFE = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SAFE |= {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
"""Without NVLink multicast, which can put a shared host's GPUs out of service, and FlashInfer's sampler, which it compiles."""


@dataclass(frozen=True)
class Server:
    """With all ranks, or with ``gpu`` one rank on that GPU; ``like`` names the server of one rank with the same weights.

    Each of ``faults`` is seeded while it runs (``vllm_faults.py``) and must be found, with the server ``like`` as a reference.
    ``truth`` names one in float32.
    """

    model: str
    arguments: tuple[str, ...]
    like: str = ""
    dtype: str = "bfloat16"
    faults: tuple[str, ...] = ()
    gpu: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    truth: str = ""
    refused: str = ""

    @property
    def ranks(self) -> int:
        """1, or more than that."""
        return 1 if self.gpu is not None else 2

    @property
    def exact(self) -> bool:
        """Whether its answers must be those of ``like``, but for ties."""
        return self.dtype == "float32"


FAULTS = (
    "stale-all-reduce",
    "left-out-all-reduce",
    "exchanged-rows",
    "neighbour-blocks",
    "half-scale-layer",
    "blocks-by-length",
)
SERVERS = {
    "one": Server("moe", EAGER, gpu=0, truth="one-float32"),
    "one-again": Server("moe", EAGER, "one", gpu=1, truth="one-float32"),
    "several": Server("moe", EAGER, "one", truth="one-float32", faults=FAULTS),
    "several-nccl": Server("moe", (*EAGER, *NCCL), "one", truth="one-float32"),
    "several-graphs-chunks": Server("moe", (*CAPTURED, *CHUNKS), "one", truth="one-float32"),
    "several-pcie-ipc": Server("moe", (*CAPTURED, *CHUNKS), "one", environment=PCIE_IPC, truth="one-float32"),
    "all-experts-one": Server("all-experts", EAGER, gpu=0),
    "all-experts-several": Server("all-experts", EAGER, "all-experts-one"),
    "one-ngram": Server("moe", (*EAGER, *SPECULATE), "one", gpu=1),
    "several-ngram": Server("moe", (*EAGER, *SPECULATE), "one", faults=("drafts-all",)),
    "one-float32": Server("moe", EAGER, dtype="float32", gpu=0),
    "lab-float32": Server("moe", EAGER, "one-float32", "float32", gpu=0, environment=LABORATORY),
    "several-float32": Server("moe", EAGER, "one-float32", "float32"),
    "several-float32-nccl": Server("moe", (*EAGER, *NCCL), "one-float32", "float32"),
    "dense-one": Server("dense", EAGER, dtype="float32", gpu=1),
    "dense-several": Server("dense", EAGER, "dense-one", "float32"),
    "dense-several-graphs-chunks-ngram": Server("dense", (*CAPTURED, *CHUNKS, *SPECULATE), "dense-one", "float32"),
    "dense-one-float16": Server("dense", EAGER, dtype="float16", gpu=1),
    "dense-several-float16-pcie-ipc": Server("dense", CAPTURED, "dense-one-float16", "float16", environment=PCIE_IPC),
    "mtp-off": Server("glm", EAGER, dtype="float32", gpu=0),
    "mtp-one": Server("glm", (*EAGER, *MTP), "mtp-off", "float32", gpu=1),
    "mtp-one-graphs-chunks": Server("glm", (*CAPTURED, *CHUNKS, *MTP), "mtp-off", "float32", gpu=1),
    "mtp-several-graphs-chunks": Server("glm", (*CAPTURED, *CHUNKS, *MTP), "mtp-off", "float32"),
    "mtp-several-bfloat16-pcie-ipc": Server("glm", (*CAPTURED, *CHUNKS, *MTP), environment=PCIE_IPC),
}
PROBES = [
    "log-probabilities",
    "counts of tokens",
    "repeated requests",
    "decoding against prefill",
    "cached prefixes",
    "needles",
]
Begin = Callable[[str, int], "subprocess.Popen[bytes]"]
Listening = Callable[[int, "subprocess.Popen[bytes]", float], bool]
PLUGINS = "[vllm.general_plugins]\nshared = one_gpu:install\nseeded = vllm_faults:seed\nwatched = compile_watch:install\n"


def launch(
    argv: list[str], environment: Mapping[str, str], folder: Path, name: str, gate: Path | None = None
) -> subprocess.Popen[bytes]:
    """A server's process, in a session of its own, with the plugins beside this file; its log is ``folder/name.log``.

    With ``gate`` it imports its modules and waits for that file (``vllm_gate.py``).
    """
    plugins = folder / "plugins"
    entry = plugins / "seeded_faults-0.dist-info" / "entry_points.txt"
    entry.parent.mkdir(parents=True, exist_ok=True)
    entry.write_text(PLUGINS)
    entry.with_name("METADATA").write_text("Metadata-Version: 2.1\nName: seeded-faults\nVersion: 0\n")
    variables = {**os.environ, **SAFE, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"VLLM_HOST_IP": "127.0.0.1", **environment}
    if (ninja := shutil.which("ninja")) and not server_compiles(environment):
        found = [path for path in variables["PATH"].split(os.pathsep) if Path(path) != Path(ninja).parent]
        variables["PATH"] = os.pathsep.join(found)
    variables["PYTHONPATH"] = os.pathsep.join((str(plugins), str(HERE), variables.get("PYTHONPATH", "")))
    variables |= {"VLLM_WORKER_MULTIPROC_METHOD": "fork"} if gate else {}
    program = [str(HERE / "vllm_gate.py"), str(gate)] if gate else ["-m", "vllm.entrypoints.cli.main"]
    command = [sys.executable, *program, "serve", *argv, "--host", "127.0.0.1", "--served-model-name", "small"]
    log = (folder / f"{name}.log").open("wb")
    return subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def server_compiles(environment: Mapping[str, str]) -> bool:
    """Whether FlashInfer may compile: without ninja, vLLM does not use it for operators whose sources are not carried."""
    return bool(PCIE_IPC.keys() & environment.keys())


def seedable(folder: Path, name: str, server: Server) -> dict[str, str]:
    """Variables with which faults are seeded in a server by a file, and its prefix cache can be emptied."""
    return {"SEEDED_FAULT": str(folder / f"{name}.fault"), "VLLM_SERVER_DEV_MODE": "1"} if server.faults else {}


def end(processes: Mapping[str, subprocess.Popen[bytes]], grace: float = 0) -> None:
    """End servers and all that they started. With grace (s), ask them before: a client of MPS that is killed at work can end
    all others."""
    until = time.monotonic() + grace
    for process in processes.values() if grace else ():
        process.terminate()
    for process in processes.values() if grace else ():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
    for process in processes.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes.values():
        process.wait()


def started(name: str, port: int, folder: Path, world: int, gpus: int) -> subprocess.Popen[bytes]:
    """The process of a server."""
    server = SERVERS[name]
    environment = {**server.environment, **seedable(folder, name, server)}
    if server.gpu is not None:
        environment |= one_gpu.alone(server.gpu % gpus)
    elif gpus < world:
        environment |= one_gpu.variables(gpus)
    argv = [str(folder / server.model), "--port", str(port), "--dtype", server.dtype]
    argv += ["--tensor-parallel-size", str(world if server.gpu is None else 1), "--max-model-len", "2048"]
    argv += ["--distributed-executor-backend", "mp"] if server.gpu is None else []
    argv += ["--gpu-memory-utilization", "0.03", "--kv-cache-memory-bytes", "1G", "--attention-backend", "TRITON_ATTN"]
    return launch([*argv, *server.arguments], environment, folder, name, gate(folder, name))


def gate(folder: Path, name: str) -> Path:
    """The file that lets a server begin."""
    return folder / f"{name}.begin"


def ready(port: int, process: subprocess.Popen[bytes], until: float) -> bool:
    """Whether a server answers before a time."""
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return True
        except OSError:
            time.sleep(0.5)
    return False


def completion(port: int, prompt: str, **more: Any) -> dict[str, Any]:
    """A greedy answer."""
    body = {"model": "small", "prompt": prompt, "temperature": 0, **more}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as response:
        choice: dict[str, Any] = json.load(response)["choices"][0]
    return choice


def prompts() -> list[str]:
    """Of 2 to 622 words."""
    from sm120kit.probes import probe_prompts

    words = " ".join(probe_prompts.inventory(60, "two")).split()
    return [" ".join(words[:length]) for length in (2 + 20 * number for number in range(PROMPTS))]


def answers(port: int, together: int = TOGETHER, texts: list[str] | None = None) -> list[list[tuple[str, dict[str, float]]]]:
    """Of each prompt, or of other texts, the tokens with the most likely ones at their places."""

    def answer(prompt: str) -> list[tuple[str, dict[str, float]]]:
        listed = completion(port, prompt, max_tokens=TOKENS, logprobs=TOP, ignore_eos=True)["logprobs"]
        return list(zip(listed["tokens"], listed["top_logprobs"], strict=True))

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(answer, texts or prompts()))


def read(port: int) -> list[float]:
    """The log-probability of each token of the prompts."""

    def one(prompt: str) -> list[float]:
        listed = completion(port, prompt, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"][1:]
        return [next(iter(each.values()))["logprob"] for each in listed]

    with ThreadPoolExecutor(TOGETHER) as pool:
        return [each for found in pool.map(one, prompts()) for each in found]


def apart(one: list[float], two: list[float]) -> dict[str, float]:
    """How far log-probabilities of the same tokens are from each other."""
    gaps = sorted(abs(a - b) for a, b in zip(one, two, strict=True))
    shown = {"tokens": len(gaps), "mean": statistics.fmean(gaps), "median": gaps[len(gaps) // 2]}
    return {name: round(value, 5) for name, value in {**shown, "p99": gaps[len(gaps) * 99 // 100], "max": gaps[-1]}.items()}


def compared(one: list[Any], two: list[Any]) -> dict[str, Any]:
    """Equal answers; where the others part, the first one's gap between both tokens, and by how much that gap differs in the
    second; how much it differs between the two most likely tokens at all places before that: median, 99th percentile, largest.
    """
    equal, parts, swings, worst = 0, [], [], 0.0
    for a, b in zip(one, two, strict=True):
        first = next((number for number, (x, y) in enumerate(zip(a, b, strict=False)) if x[0] != y[0]), None)
        equal += first is None
        for (token, x), (_, y) in list(zip(a, b, strict=False))[: None if first is None else first + 1]:
            worst = max([worst, *(abs(x[each] - y[each]) for each in x.keys() & y.keys())])
            other = next((each for each in sorted(x, key=x.__getitem__, reverse=True) if each != token), token)
            swings += [abs(x[token] - x[other] - y[token] + y[other])] if {token, other} <= y.keys() else []
        if first is not None:
            (ours, x), (theirs, y) = a[first], b[first]
            gap = x[ours] - x.get(theirs, float("-inf"))
            parts.append((round(gap, 4), round(gap + y[theirs] - y.get(ours, float("-inf")), 4)))
    swings.sort()
    noise = [round(swings[min(len(swings) - 1, len(swings) * share // 100)], 4) for share in (50, 99, 100)] if swings else []
    return {
        "equal": equal,
        "of": len(one),
        "part": sorted(parts),
        "noise": noise,
        "differ": round(worst, 5),
        "other": sum(gap > TIE_NATS for gap, _ in parts),
    }


class Found(Exception):
    """A probe found something wrong: the others need not run."""


def probed(port: int, reference: int | None, record: Path, *, first: bool = False) -> tuple[bool, list[str]]:
    """Whether a server is wrong, and what each probe found, with ``first`` up to the first that finds something; requests and
    answers are in ``record``."""
    from pydantic import TypeAdapter

    from sm120kit import probes
    from sm120kit.core.urls import Endpoint

    endpoint = Endpoint.parse(f"http://127.0.0.1:{port}")
    like = (Endpoint.parse(f"http://127.0.0.1:{reference}"), "small") if reference else None
    so_far: list[probes.ServerVerification] = []

    def keep(verification: probes.ServerVerification) -> None:
        so_far.append(verification)
        if first and verification.wrong:
            raise Found

    with contextlib.suppress(Found):
        probes.verify(probes.VerifiedServer(endpoint, "small", like), probes.selected(PROBES), 150, on_result=keep)
    record.write_bytes(TypeAdapter(probes.ServerVerification).dump_json(so_far[-1]))
    return bool(so_far[-1].wrong), [f"{each.probe}: {each.verdict.value}: {each.saw}" for each in so_far[-1].probes]


def accepted(port: int) -> str:
    """What the server's metrics say of drafts, if it has metrics."""
    lines: list[str] = []
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = {line.split("{")[0].rpartition(":")[2]: line.split()[-1] for line in lines if line.startswith("vllm:spec_decode")}
    return ", ".join(f"{name} {value}" for name, value in found.items() if "total" in name)


def log_lines(folder: Path, name: str, words: tuple[str, ...]) -> list[str]:
    """The lines of a server's log with one of these words, each once."""
    lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
    return list(dict.fromkeys(line.partition("] ")[2] for line in lines if any(word in line for word in words)))


def all_ready(
    processes: Mapping[str, subprocess.Popen[bytes]], ports: Mapping[str, int], folder: Path, seconds: float
) -> list[str]:
    """The servers that answer in time; the end of the log of each other is printed."""
    begin = time.monotonic()
    with ThreadPoolExecutor(len(ports)) as pool:
        up = list(pool.map(lambda name: ready(ports[name], processes[name], begin + seconds), ports))
    for name, answering in zip(ports, up, strict=True):
        if not answering:
            errors = log_lines(folder, name, ("Error", "error:"))
            print(f"{name}: no answer", *errors[:12], *errors[-4:], sep="\n    ", flush=True)
    print(f"{sum(up)} of {len(up)} servers answer after {time.monotonic() - begin:.0f} s", flush=True)
    return [name for name, answering in zip(ports, up, strict=True) if answering]


class Run:
    """Servers with their ports and processes, and what is known of them so far.

    ``begin`` starts a server, at once if it is ``gated``. Those of several ranks answer one after the other, each after
    ``fresh``, until they are probed, those of one rank all the time. ``listening`` waits for a server; ``reads``: it lists
    the log-probabilities of prompts. What is known is kept in ``folder``, and is not asked again.
    """

    reset = "/reset_prefix_cache"
    gated = True

    def __init__(self, folder: Path, servers: Mapping[str, Any], ports: Mapping[str, int], begin: Begin) -> None:
        self.folder, self.servers, self.begin = folder, servers, begin
        self.fresh: Callable[[], object] = lambda: None
        self.since, self.right, self.lock = time.monotonic(), True, threading.RLock()
        self.asked = threading.Semaphore(ASKED)
        self.alive: set[str] = set()
        self.results: dict[str, Any] = kept(folder / "results.json")
        self.answers: dict[str, Any] = kept(folder / "answers.json")
        self.read: dict[str, Any] = kept(folder / "read.json")
        self.ports = {name: port for name, port in ports.items() if not self.known(name).get("done")}
        self.done = {name: threading.Event() for name in self.ports}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def known(self, name: str) -> dict[str, Any]:
        """What is known of a server."""
        found: dict[str, Any] = self.results.get(self.servers[name].model, {}).get(name, {})
        return found

    def note(self, name: str, key: str, value: Any) -> None:
        """Keep a result of a server in ``results.json``, by its model."""
        with self.lock:
            self.results.setdefault(self.servers[name].model, {}).setdefault(name, {})[key] = value
            for folder in {self.folder, Path(os.environ.get("OUT", self.folder))}:
                file = folder / ("results.json" if folder == self.folder else f"results-{self.folder.name}.json")
                keep(file, self.results)

    def say(self, *lines: str) -> None:
        with self.lock:
            print(f"[{time.monotonic() - self.since:.0f} s] {lines[0]}", *lines[1:], sep="\n    ", flush=True)

    def compare(self, name: str) -> None:
        """Print a server against its like and its truth, and those that it is the like or truth of, where both are known."""
        for each in self.answers:
            server = self.servers[each]
            if name in (each, server.like) and server.like in self.answers:
                result = compared(self.answers[server.like], self.answers[each])
                self.right &= not result["other"] or not server.exact
                self.note(each, f"against {server.like}", result)
                self.say(f"{each} against {server.like}: {json.dumps(result)}")
        for each in self.read:
            for other in sorted({self.servers[each].like, self.servers[each].truth} & self.read.keys()):
                if name in (each, other):
                    self.note(each, f"prompts against {other}", apart(self.read[other], self.read[each]))
                    self.say(f"{each}, prompts against {other}: {json.dumps(apart(self.read[other], self.read[each]))}")

    def ask(self, name: str, until: float, listening: Listening, reads: bool) -> None:
        """Wait for a server, and compare its answers."""
        server = self.servers[name]
        if not listening(self.ports[name], self.processes[name], until):
            log = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
            expected = bool(server.refused) and any(server.refused in line for line in log)
            self.right &= expected
            errors = [line for line in log if "Error" in line or "error:" in line]
            self.note(name, "no answer", errors[:12])
            self.say(f"{name}: no answer, {'as' if expected else 'NOT as'} expected", *errors[:12], *log[-6:])
            return
        self.say(f"{name}: answers")
        with self.asked:
            found, tokens = answers(self.ports[name]), read(self.ports[name]) if reads else None
        with self.lock:
            self.alive.add(name)
            self.answers[name] = json.loads(json.dumps(found))
            self.read |= {name: tokens} if reads else {}
            keep(self.folder / "answers.json", self.answers)
            keep(self.folder / "read.json", self.read)
            self.compare(name)
        if any(each.like == name and not each.exact for each in self.servers.values()):
            alone = compared(found, answers(self.ports[name], 1))
            self.note(name, "one by one against itself", alone)
            self.say(f"{name} one by one against itself: {json.dumps(alone)}")

    def probe(self, name: str) -> None:
        """What ``verify server`` finds, and with each fault, whose cached prefixes are dropped, and without them again."""
        faults = self.servers[name].faults
        self.judge(name, "")
        for fault in (*faults, "") if faults else ():
            if fault and f"verify server, {fault}" in self.known(name):
                continue
            self.say(f"{name}, {fault or 'without a fault again'}: begins")
            took_effect(self.folder / f"{name}.fault", fault).unlink(missing_ok=True)
            (self.folder / f"{name}.fault").write_text(fault)
            request = urllib.request.Request(f"http://127.0.0.1:{self.ports[name]}{self.reset}", b"")
            with urllib.request.urlopen(request, timeout=60):
                self.judge(name, fault)

    def judge(self, name: str, fault: str) -> None:
        """What ``verify server`` finds now; with a fault, which must have taken effect, a reference is waited for.

        A healthy server must be right in all probes but needles, which models of random weights do not recall.
        """
        like = self.servers[name].like
        if fault and like in self.done:
            self.done[like].wait()
        reference = self.ports[like] if fault and like in self.alive else None
        which = f"{name}, {fault}" if fault else name
        with self.asked:
            wrong, found = probed(self.ports[name], reference, self.folder / f"{which}.verification.json", first=bool(fault))
        right = all(": ok: " in each for each in found if not each.startswith("needles: "))
        met = took_effect(self.folder / f"{name}.fault", fault).exists()
        expected = wrong and met if fault else right and not wrong
        self.right &= expected
        verdict = f"{'wrong' if wrong else 'none wrong'}, {'as' if expected else 'NOT as'} expected"
        self.note(name, f"verify server, {fault}" if fault else "verify server", {"wrong": wrong, "probes": found})
        stated = log_lines(self.folder, name, ("all-reduce backends", "PCIe IPC", "accept rate", "accept len"))
        self.say(f"{which}: {verdict}; {accepted(self.ports[name])}", *found, *(line[:300] for line in stated[-3:]))

    def one(self, name: str, seconds: float, listening: Listening, reads: bool) -> None:
        """All of one server; an error is printed, as the others go on."""
        several = self.servers[name].ranks > 1
        try:
            if several:
                self.fresh()
            if not self.gated:
                self.processes[name] = self.begin(name, self.ports[name])
            gate(self.folder, name).touch()
            self.say(f"{name}: begins")
            self.ask(name, time.monotonic() + seconds, listening, reads)
            self.done[name].set()
            if name in self.alive:
                self.probe(name)
                self.note(name, "done", True)
        except Exception as error:
            self.right = False
            self.note(name, "error", repr(error))
            self.say(f"{name}: {error!r}")
        finally:
            self.done[name].set()
            end({name: self.processes[name]} if several and name in self.processes else {}, GRACE_SECONDS)

    def beat(self) -> None:
        """Say now and then what the servers that do not answer yet do, by their logs."""
        while True:
            for name, ended in self.done.items():
                if name in self.processes and name not in self.alive and not ended.is_set():
                    log = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
                    self.say(f"{name} starts: {log[-1][:200] if log else ''}")
            time.sleep(BEAT_SECONDS)

    def stop(self, why: str) -> None:
        """End all, with what is known so far."""
        self.say(f"{why}; not done: {[name for name in self.ports if not self.known(name).get('done')]}")
        end(self.processes)
        os._exit(1)

    def all(self, listening: Listening, *, reads: bool, limit: float = 3600) -> bool:
        """Whether all is as expected; the servers end, and after ``limit`` seconds all does."""
        seconds = float(os.environ.get("READY_SECONDS", "300"))
        signal.signal(signal.SIGTERM, lambda number, frame: self.stop("asked to end"))
        for after, work in ((BEAT_SECONDS, self.beat), (limit, lambda: self.stop("time limit"))):
            timer = threading.Timer(after, work)
            timer.daemon = True
            timer.start()
        for name in self.ports:
            gate(self.folder, name).unlink(missing_ok=True)
            if self.gated:
                self.processes[name] = self.begin(name, self.ports[name])
        alone = [[name] for name in self.ports if self.servers[name].ranks == 1]
        groups = [*alone, [name for name in self.ports if self.servers[name].ranks > 1]]
        try:
            with ThreadPoolExecutor(len(groups)) as pool:
                list(pool.map(lambda names: [self.one(name, seconds, listening, reads) for name in names], groups))
        finally:
            end(self.processes, GRACE_SECONDS)
        return self.right


def kept(file: Path) -> dict[str, Any]:
    """What :func:`keep` stored, or nothing."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def keep(file: Path, content: object) -> None:
    """Store it whole or not at all."""
    part = file.with_name(f".{file.name}")
    part.write_text(json.dumps(content, indent=1))
    part.replace(file)


def limited(words: list[str]) -> tuple[list[str], float]:
    """Arguments without ``--seconds N``, and N."""
    if "--seconds" not in words:
        return words, 3600
    at = words.index("--seconds")
    return [*words[:at], *words[at + 2 :]], float(words[at + 1])


def main(folder: Path, world: int, names: list[str], limit: float = 3600) -> bool:
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "glm" / "config.json").exists():
        vllm_checkpoints.small(folder)
    gpus = torch.cuda.device_count() or 1
    ports = {name: 18100 + number for number, name in enumerate(names)}
    run = Run(folder, SERVERS, ports, lambda name, port: started(name, port, folder, world, gpus))
    run.fresh = one_gpu.fresh if gpus < world else run.fresh
    return run.all(ready, reads=True, limit=limit)


if __name__ == "__main__":
    given, seconds = limited(sys.argv[1:])
    sys.exit(not main(Path(given[0]), int(given[1]), given[2:] or list(SERVERS), seconds))
