"""Run FlashInfer's own generators of kernels and ninja files, and make the paths in their output relative."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sm120kit.core import process
from sm120kit.core.errors import ToolchainMissing
from sm120kit.core.records import Arch, Toolchain
from sm120kit.wheels.cuda_home import link_toolchain, relink
from sm120kit.wheels.records import Generated

GENERATOR_PACKAGES = ("torch", "tvm_ffi", "jinja2", "numpy", "requests", "tqdm", "setuptools")
"""Python packages that FlashInfer's generators and its build backend import."""


def generate(
    tree: Path, work: Path, requests: dict[str, Any], archs: Sequence[Arch], toolchain: Toolchain
) -> tuple[tuple[Generated, ...], dict[str, str]]:
    """Generate the kernels of a FlashInfer ``tree`` below ``work``.

    ``requests`` are from :func:`sm120kit.wheels.plan.generator_requests`. Returns the modules, and versions of packages whose
    headers the generated code includes.

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
    request = json.dumps({"tree": str(tree), "modules": requests}).encode()
    dropped = [name for name in os.environ if name.startswith("FLASHINFER_") or name in ("CC", "MAX_JOBS")]
    done = process.run(
        [sys.executable, Path(__file__).with_name("flashinfer_generators.py")],
        env={**dict.fromkeys(dropped), **env},
        stdin=request,
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
    for name, output in answer["modules"].items():
        ninja = output["ninja"]
        for absolute, relative in sorted(prefixes.items(), key=lambda prefix: -len(prefix[0])):
            ninja = ninja.replace(absolute, relative)
        units = tuple(
            (source, object_file)
            for object_file, source in re.findall(r"^build (\S+): (?:cuda_)?compile (\S+)$", ninja, re.MULTILINE)
        )
        library = output["library"].removeprefix(f"{work}/")
        modules.append(Generated(name, library, tuple(output["sources"]), units, ninja))
    return tuple(modules), {"apache-tvm-ffi": answer["tvm_ffi"]}
