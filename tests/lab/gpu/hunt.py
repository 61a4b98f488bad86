"""Run kernels of engines with delays: ``hunt.py PROGRAMS JSON [SEEDS]`` with a file of lines ``NAME: COMMAND``.

On a Hopper GPU. Each program runs without delays, then with those of SEEDS (50) seeds. A command with the word ``SEEDS`` gets
them in its place, prints lines ``SEED NAME: RESULT``, and runs each in a process of its own (see :func:`forked`); other
commands run once a seed, and their result is the exit code. A result that differs from that without delays is an alarm, to be
examined. So are a program without a result, one that fails or is wrong without delays, and modules without a site for them:
nothing was shaken. Exit code 0: there is no alarm. ``HUNT_SECONDS`` ends it early, ``HUNT_AT_ONCE`` is the number of processes
of a program.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

DELAYS, EVERY = "SM120KIT_PTX_DELAYS", "0 4294967295 -"
AT_ONCE, SECONDS = int(os.environ.get("HUNT_AT_ONCE", "4")), 60.0
END = time.monotonic() + float(os.environ.get("HUNT_SECONDS", "1e6"))
"""Seeds that have not ended then are left out."""


def forked(seeds: list[int], run: Callable[[], Iterator[str]]) -> int:
    """Call ``run`` in a process for each seed, the first alone, and print its lines; called before CUDA is initialized."""
    running: dict[int, int] = {}

    def ended() -> None:
        pid, status = os.wait()
        seed = running.pop(pid)
        if status:
            print(f"{seed} process: exit code {os.waitstatus_to_exitcode(status)}", flush=True)

    for seed in seeds:
        while len(running) >= (AT_ONCE if seed > seeds[1] else 1):
            ended()
        if pid := os.fork():
            running[pid] = seed
            continue
        try:
            os.environ[DELAYS] = f"{seed} {EVERY}" if seed else ""
            for line in run():
                os.write(1, f"{seed} {line}\n".encode())
        except BaseException as error:
            os.write(1, f"{seed} process: exit code 1: {type(error).__name__}: {' '.join(str(error).split())[:300]}\n".encode())
        os._exit(0)
    while running:
        ended()
    return 0


@dataclass(frozen=True)
class Row:
    """A kernel: its result without delays, the seeds that were run, and those whose result differs.

    ``sites`` are those for delays of the program's modules.
    """

    kernel: str
    result: str
    seeds: int
    differ: dict[int, str]
    sites: int = 0

    @property
    def shaken(self) -> bool:
        """Whether the kernel ran with delays, and as it is meant to without."""
        return self.seeds > 0 and self.sites > 0 and self.result != "" and not self.result.startswith(FAILED)


FAILED = ("exit code ", "did not end", "refused", "WRONG")
"""How results begin of which nothing follows, though they may be equal with delays; see :func:`exit_code`."""


def rows(name: str, command: str, seeds: int, environment: dict[str, str]) -> list[Row]:
    """The kernels of a program, with all seeds; a row without seeds if none has a result."""
    started, found = time.monotonic(), {}
    if "SEEDS" in command:
        words = [word for each in shlex.split(command) for word in (map(str, range(seeds + 1)) if each == "SEEDS" else (each,))]
        for line in output(words, environment).splitlines():
            seed, _, rest = line.partition(" ")
            kernel, colon, result = rest.partition(": ")
            if seed.isdecimal() and colon:
                found.setdefault(kernel, {})[int(seed)] = result
    else:
        words = shlex.split(command)
        first = exit_code(words, environment | {DELAYS: ""}, END - time.monotonic())
        with ThreadPoolExecutor(AT_ONCE) as pool:
            each = pool.map(
                lambda seed: exit_code(words, environment | {DELAYS: f"{seed} {EVERY}"}, SECONDS), range(1, seeds + 1)
            )
            found[name] = {seed: result for seed, result in enumerate([first, *each]) if result}
    print(f"{name}: {len(found)} kernels, {time.monotonic() - started:.0f} s", flush=True)
    return [Row(name, "", 0, {})] * (not found) + [
        Row(f"{name}: {kernel}", runs.get(0, ""), len(runs) - (0 in runs), {s: r for s, r in runs.items() if r != runs.get(0)})
        for kernel, runs in found.items()
    ]


def output(words: list[str], environment: dict[str, str]) -> str:
    """What a program prints until the end; its processes end with it."""
    variables = os.environ | environment
    with subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        try:
            return running.communicate(timeout=max(END - time.monotonic(), 1))[0]
        except BaseException as stopped:
            os.killpg(running.pid, signal.SIGKILL)
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            return running.communicate()[0]


def exit_code(words: list[str], environment: dict[str, str], seconds: float) -> str:
    """How a program ended: ``ended`` if as it should; empty if it was not started in time."""
    if time.monotonic() > END - 2:
        return ""
    try:
        done = subprocess.run(words, env=os.environ | environment, timeout=seconds, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired:
        return "did not end"
    return f"exit code {done.returncode}: {(done.stdout + done.stderr)[-200:]}" if done.returncode else "ended"


def main() -> int:
    from sm12x_lab import gpu
    from sm12x_lab.ptx import interposed
    from sm120kit.core import toolchain
    from sm120kit.core.workspace import Workspace

    listed = [line.split(": ", 1) for line in Path(sys.argv[1]).read_text().splitlines() if line]
    seeds, device = int(sys.argv[3]) if len(sys.argv) > 3 else 50, gpu.probe()
    found: list[Row] = []
    tools = toolchain.find()
    made = {**interposed.digests(), "ptxas": toolchain.assembler(tools.cuda_home), "gpu": asdict(device) if device else None}
    with interposed.prepared(None, Workspace.open(None), tools, perturbed=True) as interposition:

        def examined(program: list[str]) -> list[Row]:
            part = interposition.part(program[0].replace(" ", "-"), False)
            found = rows(program[0], program[1], seeds, part.environment())
            sites = sum(len(module["sites"]) for module in part.modules())
            return [replace(row, sites=sites) for row in found]

        with ThreadPoolExecutor(len(listed)) as pool:
            for each in pool.map(examined, listed):
                found += each
                report(found, Path(sys.argv[2]), made)
    return int(any(row.differ or not row.shaken for row in found))


def report(found: list[Row], file: Path, circumstances: dict[str, object]) -> None:
    """Write the rows so far."""
    file.write_text(json.dumps({**circumstances, "rows": [asdict(row) for row in found]}, indent=1) + "\n")
    for row in found[-1:]:
        print(
            f"{row.kernel}: {row.result}; {row.seeds} seeds, {len(row.differ)} differ {list(row.differ.items())[:2]}",
            flush=True,
        )
    for row in found:
        if not row.shaken:
            print(f"{row.kernel}: NOT SHAKEN: {row.result or 'no result'}; {row.sites} sites for delays", flush=True)


if __name__ == "__main__":
    sys.exit(main())
