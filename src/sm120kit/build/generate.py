"""Let the engine's own generators write kernels and ninja files, and make their paths relative."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sm120kit import process
from sm120kit.build.cuda import link_toolchain, relink
from sm120kit.errors import ToolchainMissing
from sm120kit.records import Arch, Generated, Toolchain

GENERATOR_PACKAGES = ("torch", "tvm_ffi", "jinja2", "numpy", "requests", "tqdm", "setuptools")
"""What FlashInfer's generators and build backend import."""


def generate(
    tree: Path, work: Path, orders: dict[str, Any], archs: Sequence[Arch], toolchain: Toolchain
) -> tuple[tuple[Generated, ...], dict[str, str]]:
    """Let the engine generate its kernels below ``work`` and return its modules, and the versions their code depends on.

    Raises:
        ToolchainMissing: a Python package that the generators import is absent.
    """
    absent = [name for name in GENERATOR_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ToolchainMissing(
            f"FlashInfer's kernel generators import {', '.join(absent)}, which this environment lacks",
            "install what they need: pip install 'sm120kit[torch]'",
        )
    cuda = link_toolchain(work / "cuda", toolchain)
    env = {
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(arch.number for arch in sorted(archs)),
        "FLASHINFER_WORKSPACE_BASE": str(work / "jit"),
        "FLASHINFER_NVCC": "$$SM120KIT_GATE $cuda_home/bin/nvcc",
        # Symbol tables name nvcc's temporary files, and a build id would hash them.
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s -Wl,--build-id=none",
        "CUDA_HOME": str(cuda),
        "CXX": toolchain.host_compiler,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    asked = json.dumps({"tree": str(tree), "modules": orders}).encode()
    done = process.run(
        [sys.executable, Path(__file__).with_name("engine_modules.py")],
        env=env,
        stdin=asked,
        drop=[name for name in os.environ if name.startswith("FLASHINFER_") or name in ("CC", "MAX_JOBS")],
        logfile=work / "generate.log",
        tied=True,
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    links = work / "include"
    links.mkdir(exist_ok=True)
    prefixes = {str(work) + "/": ""}
    for name, directory in answer["includes"].items():
        relink(links / name, Path(directory))
        prefixes[directory] = f"include/{name}"
    modules = []
    for name, made in answer["modules"].items():
        ninja = made["ninja"]
        for absolute, relative in sorted(prefixes.items(), key=lambda item: -len(item[0])):
            ninja = ninja.replace(absolute, relative)
        units = tuple(
            (source, output) for output, source in re.findall(r"^build (\S+): (?:cuda_)?compile (\S+)$", ninja, re.MULTILINE)
        )
        modules.append(Generated(name, made["library"].removeprefix(str(work) + "/"), tuple(made["sources"]), units, ninja))
    return tuple(modules), {"apache-tvm-ffi": answer["tvm_ffi"]}
