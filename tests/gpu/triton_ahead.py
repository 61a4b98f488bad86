"""What a server compiles when it starts, without and with kernels of Triton that were compiled ahead, without a GPU.

``python3 tests/gpu/triton_ahead.py DIR WORLD [RECORD]`` on a machine with WORLD GPUs, prepared as for ``vllm_flagship.py``,
whose command line it starts, each time with empty caches. Without RECORD, the first start records the kernels into
``DIR/triton.jsonl``. ``image_programs/triton_ahead/compile.py`` compiles them while no GPU is visible, and the second start has
them as an image has. Prints seconds to the first answer and the table of ``compile_watch.py`` for both.
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
from pathlib import Path

import vllm_checkpoints
import vllm_flagship
import vllm_servers

CAPABILITY = "90"
PROGRAMS = vllm_servers.HERE.parents[1] / "image_programs"
AHEAD = PROGRAMS / "triton_ahead"


def recorded(folder: Path) -> list[str]:
    """Each kernel once that processes launched."""
    return sorted({line for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()})


def one_start(folder: Path, world: int, name: str) -> None:
    """Start the server of ``vllm_flagship.py``, let it answer, end it, and say which kernels of Triton it launched."""
    record = folder / f"compiled-{name}" / "record"
    os.environ["SM120KIT_RECORD_TRITON"] = str(record)
    vllm_flagship.one_start(folder, world, name, probe=False)
    print(f"{name}: {len(recorded(record))} kernels of Triton that modules define", flush=True)


def compiled_ahead(folder: Path, record: Path) -> None:
    """Compile the kernels of a record where an image has them, and add them to the cache as its entrypoint does."""
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
    entrypoint["add"](entries, entries.glob("*/__grp__*.json"), folder / "caches" / "triton", "Triton")


def launchers(folder: Path, record: Path) -> None:
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
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": str(folder / "caches" / "triton")}
    subprocess.run([sys.executable, "-c", program], env=variables, check=False)


def main(folder: Path, world: int, record: Path | None) -> None:
    import triton

    os.environ["PYTHONPATH"] = os.pathsep.join((str(AHEAD / "record"), os.environ["PYTHONPATH"]))
    if not (folder / "qwen35" / "config.json").exists():
        vllm_checkpoints.qwen35(folder / "qwen35")
    if record is None:
        shutil.rmtree(folder / "caches", ignore_errors=True)
        one_start(folder, world, "cold")
        record = folder / "triton.jsonl"
        record.write_text("".join(f"{line}\n" for line in recorded(folder / "compiled-cold" / "record")))
        if out := os.environ.get("OUT"):
            shutil.copy(record, out)
    shutil.rmtree(folder / "caches", ignore_errors=True)
    compiled_ahead(folder, record)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        launchers(folder, record)
    one_start(folder, world, "ahead")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
