"""Run FlashInfer's own generators of kernels and ninja files, and make the paths in their output relative."""

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sm120kit.core import process
from sm120kit.core.errors import CheckFailed
from sm120kit.core.records import Arch, Toolchain
from sm120kit.core.sandbox import Sandbox, wrap
from sm120kit.recipes.locked_toolchain import TvmFfi
from sm120kit.wheels._cuda_home import HOST_COMPILER, link_toolchain, relink, stand_in
from sm120kit.wheels.build_records import Generated


@dataclass(frozen=True)
class GeneratorOutput:
    """The output of the generators of one module: names of sources, path of the library, and the ninja file."""

    sources: tuple[str, ...]
    library: str
    ninja: str


@dataclass(frozen=True)
class GeneratorsOutput:
    """The output of FlashInfer's generators by module, and the directories whose headers the generated code includes."""

    modules: dict[str, GeneratorOutput]
    includes: dict[str, str]


def generate(
    tree: Path, work: Path, requests: dict[str, Any], archs: Sequence[Arch], toolchain: Toolchain, ffi: TvmFfi
) -> tuple[Generated, ...]:
    """Generate the kernels of a FlashInfer ``tree`` below ``work``.

    ``requests`` are from :func:`sm120kit.wheels._plan.generator_requests`; the generated code includes the headers of ``ffi``.

    Raises:
        CommandFailed, CheckFailed: a generator fails, or prints no result.
    """
    output = run_generators(tree, work, requests, archs, toolchain, ffi)
    links = work / "include"
    links.mkdir(exist_ok=True)
    prefixes = {str(work) + "/": ""}
    for name, directory in output.includes.items():
        relink(links / name, Path(directory))
        prefixes[directory] = f"include/{name}"
    modules = []
    for name, module in output.modules.items():
        ninja = module.ninja
        for absolute, relative in sorted(prefixes.items(), key=lambda prefix: -len(prefix[0])):
            ninja = ninja.replace(absolute, relative)
        units = tuple(
            (source, object_file)
            for object_file, source in re.findall(r"^build (\S+): (?:cuda_)?compile (\S+)$", ninja, re.MULTILINE)
        )
        library = module.library.removeprefix(f"{work}/")
        modules.append(Generated(name, library, module.sources, units, ninja))
    return tuple(modules)


def run_generators(
    tree: Path,
    work: Path,
    requests: dict[str, Any],
    archs: Sequence[Arch],
    toolchain: Toolchain,
    ffi: TvmFfi,
    sandbox: Sandbox | None = None,
) -> GeneratorsOutput:
    """Run the generators, which write to ``work/jit``. In a sandbox, that directory and their output are foreign data.

    Raises:
        CommandFailed, CheckFailed: a generator fails, or prints no result.
    """
    _link_data(tree)
    home = link_toolchain if toolchain.cuda_home.is_dir() else stand_in
    cuda, jit, host = home(work / "cuda", toolchain), work / "jit", toolchain.host_compiler
    jit.mkdir(exist_ok=True)
    env = {
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(arch.number for arch in sorted(archs)),
        "FLASHINFER_WORKSPACE_BASE": str(jit),
        "FLASHINFER_NVCC": "$$SM120KIT_GATE $cuda_home/bin/nvcc",
        # Symbol tables name nvcc's temporary files, and a build id would hash them.
        "FLASHINFER_EXTRA_LDFLAGS": "-Wl,-s -Wl,--build-id=none",
        "CUDA_HOME": str(cuda),
        # For another machine nvcc is told which compiler, by a path in the work directory.
        **(dict.fromkeys(("CC", "CXX"), str(cuda / "bin" / HOST_COMPILER)) if toolchain.emulator else {"CXX": host}),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    request = json.dumps({"tree": str(tree), "modules": requests, "tvm_ffi": str(ffi.include)}).encode()
    dropped = [name for name in os.environ if name.startswith("FLASHINFER_") or name in ("CC", "MAX_JOBS")]
    argv, environment = wrap(
        [sys.executable, Path(__file__).with_name("flashinfer_generators.py")],
        sandbox,
        read=[tree, cuda],
        write=[jit],
        env={**dict.fromkeys(dropped), **env},
    )
    done = process.run(argv, env=environment, stdin=request, logfile=work / "generate.log", tied=True)
    try:
        return TypeAdapter(GeneratorsOutput).validate_json((done.stdout.splitlines() or [""])[-1])
    except ValidationError as error:
        raise CheckFailed(f"the generators of {tree} printed no list of modules: {error.errors()[0]['msg']}") from error


def _link_data(tree: Path) -> None:
    """Make the layout below ``flashinfer/data`` that FlashInfer's build backend makes for an editable install."""
    data = tree / "flashinfer" / "data"
    try:
        data.mkdir(exist_ok=True)
        for source in ("3rdparty/cutlass", "3rdparty/spdlog", "3rdparty/cccl", "csrc", "include"):
            link = data / Path(source).name
            if (tree / source).is_dir() and not link.is_symlink():
                link.symlink_to(Path("../..") / source)
    except FileExistsError as error:
        raise CheckFailed(f"{error.filename2 or error.filename} is a file of the source, not its build's link") from error
