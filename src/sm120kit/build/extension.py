"""Extension modules of an engine from its own CMake project, put into its official wheel in the place of the official ones.

Everything lies in the work directory, which is CMake's build directory as well: ``source`` and the projects that it asks for,
``environment`` with the locked wheels, ``cuda`` with the compiler of these. So commands run without absolute paths that matter,
and :data:`sm120kit.build.cuda.FRONT_END` works.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit import process
from sm120kit.build.compiling import Means, compile_error, ninja_program, under_gate
from sm120kit.build.cuda import link_toolchain
from sm120kit.build.environment import ENVIRONMENT, answers, linked
from sm120kit.build.finishing import artifact, check, repacked
from sm120kit.build.kernels import require_fit_for_cmake, user_settings
from sm120kit.build.pack import local_version
from sm120kit.build.repack import repack
from sm120kit.errors import ExpectationFailed, ToolchainMissing
from sm120kit.memory import Gate
from sm120kit.recipe import EngineRecipe, FromSourceTable
from sm120kit.records import Artifact, Artifacts, BuildPlan, LockedWheel, Module, PatchedTree
from sm120kit.workspace import file_sha256, publish_directory, record_json, write_atomic, write_record

SOURCE, STAND_INS = "source", "stand-ins"
"""Directories of the work directory, beside the environment's and those of projects by their names."""


@dataclass(frozen=True)
class Site:
    """Where an engine's extensions are built: the directory, the Python of its environment, and what keeps the network out."""

    work: Path
    python: Path
    isolation: tuple[str, ...]

    @property
    def environment(self) -> Path:
        """The directory of the locked wheels."""
        return self.work / ENVIRONMENT


def cmake_program() -> str:
    """The cmake of this environment's wheel.

    Raises:
        ToolchainMissing: there is none.
    """
    if importlib.util.find_spec("cmake") is None:
        raise ToolchainMissing(
            "building an engine's extensions needs cmake, which this environment lacks",
            "install it: pip install 'sm120kit[kernels]'",
        )
    import cmake

    return str(Path(cmake.CMAKE_BIN_DIR) / "cmake")


def compile_extensions(plan: BuildPlan, table: FromSourceTable, site: Site, means: Means) -> None:
    """Configure the engine's project, unless an earlier run did, and bring the targets of a plan up to date.

    Raises:
        ToolchainMissing: the environment has no nvcc.
        ToolchainUnsuitable: the path of the work directory divides arguments of CMake.
        CommandFailed: CMake refuses, as it does when it would have to fetch something.
        ExpectationFailed: CMake fetched something, or compiles other units than the recipe says.
        NotEnoughMemory, NotEnoughDisk, CompileFailed: as :func:`sm120kit.build.compiling.compile_units`.
    """
    work, configured = site.work, site.work / "configured"
    if not configured.is_file():
        _configure(plan, table, site)
        configured.touch()
    _require_units(plan, site)
    log = work / "compile.log"
    log.unlink(missing_ok=True)
    units = [unit for module in plan.modules for unit in module.units]
    done, events = under_gate(
        [*site.isolation, ninja_program(), "-j", str(means.at_once), *(module.library for module in plan.modules)],
        work,
        [unit for unit in units if not (work / unit.output).is_file()],
        units,
        means,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
        drop=user_settings(),
        log=log,
    )
    if done.returncode != 0:
        raise compile_error(done.stdout + done.stderr, events, log)


def _configure(plan: BuildPlan, table: FromSourceTable, site: Site) -> None:
    require_fit_for_cmake(site.work)
    work, tools = site.work, plan.toolchain
    home = work / tools.cuda_home
    if not (home / "bin" / "nvcc").is_file():
        raise ToolchainMissing(
            f"the build environment of {plan.recipe} has no CUDA compiler: {tools.cuda_home}/bin/nvcc is not there",
            "name nvidia-cuda-nvcc and what it needs in from_source.environment of the recipe",
        )
    cuda = link_toolchain(work / "cuda", replace(tools, cuda_home=home))
    environment = {"TORCH_CUDA_ARCH_LIST": " ".join(arch.number for arch in plan.archs)}
    definitions = {
        "CMAKE_MAKE_PROGRAM": ninja_program(),
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": tools.host_compiler,
        "CMAKE_CUDA_COMPILER": str(cuda / "bin" / "nvcc"),
        "CMAKE_CUDA_HOST_COMPILER": tools.host_compiler,
        **dict.fromkeys(
            ("CMAKE_CXX_COMPILER_LAUNCHER", "CMAKE_CUDA_COMPILER_LAUNCHER"), f"{sys.executable};-m;sm120kit.memory"
        ),
        # Where __FILE__ shows a path, it is to be the same in every directory.
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={work}=.",
        "CMAKE_CUDA_FLAGS": f"-Xcompiler=-ffile-prefix-map={work}=.",
        # Symbol tables name nvcc's temporary files, and a build id would hash them.
        "CMAKE_MODULE_LINKER_FLAGS": "-Wl,-s -Wl,--build-id=none",
        "CMAKE_SKIP_RPATH": "ON",
        "CMAKE_SUPPRESS_REGENERATION": "ON",
        "CUDAToolkit_ROOT": str(cuda),
        "CUDA_TOOLKIT_ROOT_DIR": str(cuda),
        "VLLM_PYTHON_EXECUTABLE": str(site.python),
    }
    for variable, filled in table.injected.items():
        place = work / (filled.project or f"{STAND_INS}/{variable}")
        for file in filled.files:
            write_atomic(place / file, b"")
        environment[variable] = str(place)
        definitions |= {name: str(place / below) for name, below in filled.definitions.items()}
    gate = Gate(work / "gate")
    gate.open({}, 0)  # CMake tries compilers out
    ours = Path(__file__).parents[2]
    process.run(
        [
            *site.isolation,
            cmake_program(),
            "-G",
            "Ninja",
            "-S",
            work / SOURCE,
            "-B",
            work,
            *(f"-D{name}={value}" for name, value in definitions.items()),
        ],
        cwd=work,
        env=environment
        | {
            "CUDA_HOME": str(cuda),
            "PYTHONPATH": f"{site.environment}{os.pathsep}{ours}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "SM120KIT_GATE_DIR": str(gate.directory),
        },
        drop=[*user_settings(), *(name for name in os.environ if name.endswith("_SRC_DIR")), "LD_LIBRARY_PATH"],
        logfile=work / "configure.log",
        tied=True,
    )
    fetched = sorted(path.name for path in (work / "_deps").glob("*-src"))
    if fetched:
        raise ExpectationFailed(
            f"the CMake project of {plan.recipe} fetched {', '.join(fetched)}",
            "every source must be pinned: fill its variable in from_source.injected of the recipe",
        )


def _commands(module: Module, work: Path) -> dict[str, list[str]]:
    """How each unit of a module is compiled, by its output: what CMake wrote down."""
    said = process.run([ninja_program(), "-t", "commands", module.library], cwd=work).stdout
    commands = [shlex.split(line) for line in said.splitlines() if " -c " in line]
    return {words[words.index("-o") + 1]: words for words in commands}


def _require_units(plan: BuildPlan, site: Site) -> None:
    """Make sure that just the units of a plan are compiled."""
    problems = []
    for module in plan.modules:
        wanted, here = {unit.output for unit in module.units}, {*_commands(module, site.work)}
        problems += [f"{module.name}: {output} is compiled, and no unit of the recipe" for output in sorted(here - wanted)]
        problems += [f"{module.name}: {output} is not compiled" for output in sorted(wanted - here)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise ExpectationFailed(
            f"CMake compiles other units than {plan.recipe} says\n{listed}",
            "correct from_source.targets of the recipe, or patch the project",
        )


def check_extensions(plan: BuildPlan, item: EngineRecipe, official: Path, site: Site) -> int:
    """Ask finished modules what they are, and whether they can take the place of the official ones. Counts their kernels.

    Raises:
        ExpectationFailed: device code that SM12x cannot run, an expected kernel that is not there, a library needed that the
            official module does not need, a path for the loader, a symbol that does not resolve, or a wrong answer.
    """
    assert item.from_source is not None
    targets, work = item.from_source.targets, site.work
    driver = work / "cuda" / "lib64" / "stubs" / "libcuda.so"

    def refused(module: Module) -> tuple[str, ...]:
        target = targets[module.name]
        with zipfile.ZipFile(official) as wheel:
            theirs = wheel.extract(target.member, work / "official")
        needed, paths = linked(work / module.library)
        further = sorted(needed - linked(Path(theirs))[0])
        problems = [f"needs {name}, which the official module does not need" for name in further]
        problems += [f"has a path for the loader: {path}" for path in paths]
        problems += answers(work / module.library, target.imports, target.answers, site.python, site.environment, driver)
        return tuple(problems)

    found = check(plan, work, refused)
    return sum(len(cubin.kernels) for images in found.values() for cubin in images)


def finish_extensions(
    plan: BuildPlan,
    item: EngineRecipe,
    tree: PatchedTree,
    official: tuple[LockedWheel, Path],
    versions: Mapping[str, str],
    overlay: Mapping[str, Path],
    site: Site,
    target: Path,
) -> Artifacts:
    """Check the modules, pack the wheel, and publish it with its records in ``target``: whole or not at all.

    ``official`` is the wheel that is packed again and where it lies, ``versions`` what else the build was made with,
    ``overlay`` patched files of the engine's own package by member.
    """
    table = item.from_source
    assert table is not None
    path = official[1]
    kernels = check_extensions(plan, item, path, site)
    work = site.work
    libraries = {table.targets[module.name].member: work / module.library for module in plan.modules}
    places = {**overlay, **libraries}
    commands = {output: words for module in plan.modules for output, words in _commands(module, work).items()}
    record = {
        **repacked(plan, tree, official, places),
        "injected": {
            variable: f"{filled.project} {filled.version}" if filled.project else f"stand-in: {filled.reason}"
            for variable, filled in table.injected.items()
        },
        "versions": dict(versions),
        "flags": {unit.source: _flags(commands[unit.output]) for module in plan.modules for unit in module.units},
    }
    with publish_directory(target) as beside:
        write_record(beside / "plan.json", plan)
        packed = repack(path, local_version(plan), places, {"sm120kit.json": record_json(record).encode()}, beside)
        (beside / "logs").mkdir()
        for log in ("configure.log", "compile.log"):
            shutil.copyfile(work / log, beside / "logs" / log)
        artifacts = Artifacts(
            plan=plan.digest,
            wheel=artifact(packed, beside),
            modules=tuple(
                Artifact(member, file_sha256(library), library.stat().st_size) for member, library in sorted(libraries.items())
            ),
            kernels=kernels,
            left_out=plan.left_out,
        )
        write_record(beside / "artifacts.json", artifacts)
    return artifacts


def _flags(words: list[str]) -> str:
    """What of a compiler's command is no path and does not differ between directories."""
    values = {"-o", "-c", "-MT", "-MF", "-isystem", "-I"}
    kept = [
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in {*values, "-MD", "-x", "cu", "-m", "sm120kit.memory"} and before not in values and "/" not in word
    ]
    return " ".join(kept)
