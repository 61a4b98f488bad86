"""One FlashInfer module, built by sm120kit and by stock FlashInfer's own build beside it: seconds, peak memory, units.

    python tests/bench/stock_flashinfer.py [GROUP] [JOBS]

Both start cold, with the same nvcc and as many jobs, one after the other. Stock means: the pristine tree, FlashInfer's
generators and its ``JitSpec.build`` with MAX_JOBS. The peak is the largest sum of resident sizes over all processes of a build,
looked at four times a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

STOCK = """
import json, sys, types, importlib
from pathlib import Path
tree = Path(sys.argv[1])
for name in ("3rdparty/cutlass", "3rdparty/spdlog", "csrc", "include"):
    link = tree / "flashinfer" / "data" / Path(name).name
    link.parent.mkdir(exist_ok=True)
    if not link.exists():
        link.symlink_to(tree / name)
package = types.ModuleType("flashinfer")
package.__path__ = [str(tree / "flashinfer")]
sys.modules["flashinfer"] = package
units = 0
for generator in json.loads(sys.argv[2]):
    module, function = generator.split(":")
    spec = getattr(importlib.import_module(module), function)()
    units += len(spec.sources)
    spec.write_ninja()
    spec.build(verbose=False)
print(units)
"""


def measured(argv: list[str], env: dict[str, str]) -> tuple[str, float, float]:
    """Output, seconds, and peak GiB of a program with all its children."""
    started = time.monotonic()
    child = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    root, peak, done = psutil.Process(child.pid), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.25):
            total = 0
            for process in (root, *root.children(recursive=True)):
                try:
                    total += process.memory_info().rss
                except psutil.Error:
                    continue
            peak = max(peak, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    out = child.communicate()[0]
    done.set()
    watcher.join()
    if child.returncode:
        raise SystemExit(f"{argv} failed")
    return out, time.monotonic() - started, peak / 2**30


def main() -> None:
    from sm120kit import recipes
    from sm120kit.core import toolchain

    group = sys.argv[1] if len(sys.argv) > 1 else "fp4-gemm"
    jobs = sys.argv[2] if len(sys.argv) > 2 else str(os.cpu_count())
    item = recipes.load_flashinfer("flashinfer@0.6.6")
    tools = toolchain.find(item.archs, item.headers)
    generators = [item.modules[name].generator for name in recipes.group(item, group).modules]
    with tempfile.TemporaryDirectory() as scratch:
        state = {**os.environ, "SM120KIT_STATE": f"{scratch}/state"}
        tool = [sys.executable, "-m", "sm120kit", "build", item.name, "--kernels", group, "--jobs", jobs]
        subprocess.run([*tool, "--to", "patch"], env=state, check=True)
        _, ours, our_peak = measured([*tool, "--to", "compile"], state)
        (plan,) = [
            json.loads(subprocess.run([*tool, "--to", "plan", "--json"], env=state, stdout=subprocess.PIPE, check=True).stdout)
        ]
        our_units = sum(len(module["units"]) for module in plan["modules"])

        (sdist,) = Path(scratch).rglob("*.tar.gz")
        subprocess.run(["tar", "xf", str(sdist), "-C", scratch], check=True)
        cuda = next((Path(scratch) / "state" / "work").glob("*/cuda"))
        env = {
            **os.environ,
            "MAX_JOBS": jobs,
            "CUDA_HOME": str(cuda),
            "CXX": tools.host_compiler,
            "FLASHINFER_CUDA_ARCH_LIST": "12.0f",
            "FLASHINFER_WORKSPACE_BASE": f"{scratch}/stock",
        }
        tree = f"{scratch}/flashinfer_python-{item.version}"
        printed, stock, stock_peak = measured(
            [sys.executable, "-c", STOCK, tree, json.dumps(generators)], {**env, "PYTHONPATH": tree}
        )
    print(f"kernel group {group}, {jobs} jobs, nvcc {tools.nvcc_version}, load before {os.getloadavg()[2]:.1f}")
    print(f"sm120kit {ours:7.0f} s  peak {our_peak:5.1f} GiB  {our_units} units")
    print(f"stock    {stock:7.0f} s  peak {stock_peak:5.1f} GiB  {printed.strip()} units")
    print(f"ratio    {ours / stock:7.2f}")


if __name__ == "__main__":
    main()
