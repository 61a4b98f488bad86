"""What a server compiles when it starts, without and with kernels of Triton that were compiled ahead, without a GPU.

``python3 tests/gpu/triton_ahead.py DIR WORLD [RECORD ...]`` on a machine with WORLD GPUs, prepared as for ``vllm_flagship.py``,
whose command line it starts, each time with empty caches. Without RECORD, a start records the kernels first, alone. Then
``image_programs/triton_ahead/compile.py`` compiles them while no GPU is visible, and two servers start at the same time: one
has them as an image has. Prints seconds to the first answer and the table of ``compile_watch.py`` for each.
"""

from __future__ import annotations

import base64
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import vllm_checkpoints
import vllm_flagship
import vllm_servers

CAPABILITY = "90"
PROGRAMS = vllm_servers.HERE.parents[1] / "image_programs"
AHEAD = PROGRAMS / "triton_ahead"


def recorded(files: list[Path]) -> list[str]:
    """Each kernel once that processes launched."""
    return sorted({line for file in files for line in file.read_text().splitlines()})


def one_start(folder: Path, world: int, name: str, port: int) -> list[str]:
    """Start the server of ``vllm_flagship.py``, let it answer, end it, and say which kernels of Triton it launched."""
    vllm_flagship.one_start(folder, world, name, folder / f"caches-{name}", port=port)
    kernels = recorded(list((folder / f"compiled-{name}" / "record").glob("*.jsonl")))
    print(f"{name}: {len(kernels)} kernels of Triton that modules define", flush=True)
    if out := os.environ.get("OUT"):
        Path(out, f"triton-{name}.jsonl").write_text("".join(f"{line}\n" for line in kernels))
    return kernels


def compiled_ahead(folder: Path, record: Path, cache: Path) -> None:
    """Compile the kernels of a record where an image has them, and add them to a cache as its entrypoint does."""
    entries = Path("/opt/sm120kit/triton_ahead/entries")
    begin = time.monotonic()
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, str(AHEAD / "compile.py"), str(record), CAPABILITY]
    done = json.loads(subprocess.run(argv, env=variables, stdout=subprocess.PIPE, check=True).stdout)
    for path, content in done["entries"].items():
        (entries / path).parent.mkdir(parents=True, exist_ok=True)
        (entries / path).write_bytes(base64.b64decode(content))
    (folder / "compiled.json").write_text(json.dumps({name: done[name] for name in ("kernels", "failed")}, indent=1))
    cpu = sum(kernel["seconds"] for kernel in done["kernels"])
    print(f"ahead: {len(done['kernels'])} kernels, {cpu:.0f} CPU-s, {time.monotonic() - begin:.0f} s; failed: {done['failed']}")
    entrypoint = runpy.run_path(str(PROGRAMS / "serve.py"))
    entrypoint["add"](entries, entries.glob("*/__grp__*.json"), cache, "Triton")


def launchers(record: Path, cache: Path) -> None:
    """Compile the C code that launches the kernels, which Triton before 3.7 has for each signature."""
    program = f"""
import sys; sys.path.insert(0, {str(AHEAD)!r})
import compile, json, pathlib, triton
from concurrent.futures import ThreadPoolExecutor
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
CudaUtils()
record = [json.loads(line) for line in pathlib.Path({str(record)!r}).read_text().splitlines()]
def one(kernel):
    code, options = compile.source(kernel)
    found = triton.compile(code, target=compile.WithoutGpu({CAPABILITY}).get_current_target(), options=options)
    CudaLauncher(found.src, found.metadata)
with compile.reported({CAPABILITY}):
    compile.imported(record)
    with ThreadPoolExecutor(16) as pool:
        print(len(list(pool.map(one, record))), "launchers")
"""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", program], env=variables, check=False)


def main(folder: Path, world: int, records: list[Path]) -> None:
    import triton

    os.environ["PYTHONPATH"] = os.pathsep.join((str(AHEAD / "record"), os.environ["PYTHONPATH"]))
    if not (folder / "qwen35" / "config.json").exists():
        vllm_checkpoints.qwen35(folder / "qwen35")
    for name in ("first", "cold", "ahead"):
        shutil.rmtree(folder / f"caches-{name}", ignore_errors=True)
    kernels = recorded(records) if records else one_start(folder, world, "first", vllm_flagship.PORT)
    record, cache = folder / "triton.jsonl", folder / "caches-ahead" / "triton"
    record.write_text("".join(f"{line}\n" for line in kernels))
    compiled_ahead(folder, record, cache)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        launchers(record, cache)
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(one_start, folder, world, name, port) for port, name in enumerate(("cold", "ahead"), 18210)]
        for start in starts:
            start.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(each) for each in sys.argv[3:]])
