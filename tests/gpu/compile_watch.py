"""What compiles while servers start: compiler processes, Triton and Inductor, with what asked for them.

:func:`install` is a plugin of vLLM: in each of its processes it writes a line of JSON to ``$COMPILE_WATCH/PID.jsonl`` for each
compiler that Python starts and for each compilation in the process. :class:`Processes` looks at /proc for compilers that others
start. ``python3 tests/gpu/compile_watch.py DIR`` prints the table of a folder with both.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

COMPILERS = {"nvcc", "cicc", "ptxas", "ptxas-blackwell", "fatbinary", "nvlink", "cudafe++", "tileiras", "ninja", "cmake"}
COMPILERS |= {"gcc", "g++", "cc", "c++", "cc1", "cc1plus", "as", "ld", "collect2", "clang", "clang++"}
INTERVAL = 0.01
"""Seconds between two looks at /proc: shorter processes may be missed."""


def record(line: dict[str, Any]) -> None:
    with Path(os.environ["COMPILE_WATCH"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def caller() -> str:
    """The innermost function of vLLM or FlashInfer that leads here, else of another package but Triton and torch."""
    frames = [frame for frame in traceback.extract_stack() if "site" in frame.filename or "packages" in frame.filename]
    packages = [(frame.filename.rpartition("packages/")[2].rpartition("site/")[2], frame.name) for frame in frames]
    for package in ("vllm/", "flashinfer/", ""):
        found = [each for each in packages if each[0].startswith(package)]
        if found:
            return "{}:{}".format(*found[-1])
    return ""


def install() -> None:
    """Record this process's compilations; without ``COMPILE_WATCH`` in the environment, nothing."""
    if "COMPILE_WATCH" not in os.environ:
        return
    sys.addaudithook(_audit)
    _watch_triton()
    _watch_inductor()


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen":
        return
    argv = [os.fsdecode(word) for word in arguments[1]] if isinstance(arguments[1], list | tuple) else [str(arguments[1])]
    if Path(argv[0]).name in COMPILERS:
        record({"started": Path(argv[0]).name, "by": caller(), "argv": " ".join(argv)[-200:]})


def _watch_triton() -> None:
    import triton

    def compiled(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            name = getattr(src, "name", "") or getattr(getattr(src, "fn", None), "__name__", "")
            stages = {stage: 1e-6 * spent for stage, spent in times.lowering_stages}
            record({"compiled": "Triton", "name": str(name), "by": caller(), "seconds": 1e-6 * times.total, "stages": stages})

    triton.knobs.compilation.listener = compiled


def _watch_inductor() -> None:
    from torch._inductor import compile_fx

    kind: Any = compile_fx._InProcessFxCompile
    original = kind.codegen_and_compile

    def timed(self: Any, *arguments: Any, **named: Any) -> Any:
        begin = time.monotonic()
        result = original(self, *arguments, **named)
        record({"compiled": "Inductor", "name": "graph", "by": caller(), "seconds": time.monotonic() - begin})
        return result

    kind.codegen_and_compile = timed


class Processes(threading.Thread):
    """Compilers in /proc, by process: name, seconds, the command's end, and the name of the process that started it; with
    ``asked_by``, those whose ``COMPILE_WATCH`` that is."""

    def __init__(self, asked_by: Path | None = None) -> None:
        super().__init__(daemon=True)
        self.asked_by = f"COMPILE_WATCH={asked_by}\0".encode() if asked_by else b""
        self.seen: dict[tuple[int, str], dict[str, Any]] = {}
        self.known: dict[int, str] = {}
        self.born: dict[int, float] = {}
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(INTERVAL):
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        running = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
        for number in running:
            name = self.known.get(number)
            if name in COMPILERS or name is None or now % 1 < INTERVAL:  # a process changes its name by exec
                self.one(number, now)
        for number in self.known.keys() - running:
            del self.known[number]

    def one(self, number: int, now: float) -> None:
        try:
            name, _, rest = Path(f"/proc/{number}/stat").read_text().partition("(")[2].rpartition(")")
            if name not in COMPILERS:
                if now - self.born.setdefault(number, now) >= 0.2:
                    self.known[number] = name
                return
            if self.asked_by not in Path(f"/proc/{number}/environ").read_bytes():
                self.known[number] = ""
                return
            begun = rest.split()[19]
            argv = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            parent = int(rest.split()[1])
            above = Path(f"/proc/{parent}/comm").read_text().strip()
        except OSError:
            return
        self.known[number] = name
        found = self.seen.setdefault((number, begun), {"process": name, "from": now, "argv": argv[-200:], "parent": above})
        found["until"] = now

    def stop(self, folder: Path) -> None:
        self.ended.set()
        self.join()
        with (folder / "processes.jsonl").open("w") as file:
            for each in self.seen.values():
                seconds = each.pop("until") - each.pop("from")
                file.write(json.dumps(each | {"seconds": round(seconds, 3)}) + "\n")


def table(folder: Path) -> list[str]:
    """A line for each kind of compilation: how often, how many different ones, seconds of all processes, and who asked."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for file in folder.glob("*.jsonl"):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            kind = line.get("compiled") or (f"process {line['process']}" if "process" in line else f"started {line['started']}")
            groups[kind, line.get("by") or f"below {line.get('parent')}"].append(line)
    rows = []
    for (kind, by), lines in sorted(groups.items()):
        seconds = sum(line.get("seconds", 0.0) for line in lines)
        names = {line.get("name", "") for line in lines}
        shown = ", ".join(sorted(names)[:12]) if kind == "Triton" else ""
        rows.append(f"{kind} | {len(lines)} | {len(names)} | {seconds:.1f} s | {by} | {shown}")
    return rows


if __name__ == "__main__":
    print("\n".join(table(Path(sys.argv[1]))))
