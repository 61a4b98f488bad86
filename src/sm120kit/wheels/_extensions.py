"""Build extension modules of an engine from its own CMake project and put them into its upstream wheel.

The work directory is also CMake's build directory. It contains ``source`` and the projects that the engine requires,
``environment`` with the locked wheels, and ``cuda`` with the compiler of these. So no absolute path in a command changes the
result, and :data:`sm120kit.wheels._cuda_home.FRONT_END` works.
"""

import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core import archives, process
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.errors import BadInput, CheckFailed, CommandFailed, RequirementMissing
from sm120kit.core.memory import Gate
from sm120kit.core.record_files import record_json
from sm120kit.kernels.cubin.cubin_records import Cubin
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import EngineRecipe, FromSourceTable
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels._check import check_modules
from sm120kit.wheels._cuda_home import link_toolchain
from sm120kit.wheels._published_wheels import publish
from sm120kit.wheels._repack import repack, repacked_record
from sm120kit.wheels.build_records import Artifacts, BuildPlan, Module
from sm120kit.wheels.compile import LOG, CompileSettings, compile_error, ninja_program, run_gated
from sm120kit.wheels.pack import local_version

ENVIRONMENT = "environment"
"""The directory of the locked wheels below a work directory."""


def find_python(version: str) -> tuple[Path, str]:
    """Find an interpreter of ``version`` (``3.12``): that of this process, else ``python3.12`` on PATH. Also its full version.

    Raises:
        RequirementMissing: there is none.
    """
    program = f"python{version}"
    own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    path = sys.executable if own else process.find_program(program)
    code = "import platform, sys; print(sys.executable, platform.python_version())"
    done = process.run([path, "-I", "-c", code], check=False) if path else None
    if done is None or done.returncode != 0:
        raise RequirementMissing(
            f"no Python {version}: the locked wheels of the build environment are for it, and {program} on PATH "
            + ("does not run" if done else "does not exist"),
            f"install Python {version} with its headers, and put {program} on PATH",
        )
    executable, _, full_version = done.stdout.strip().rpartition(" ")
    return Path(executable), full_version


def cuda_home_of(compiler: str) -> Path:
    """The CUDA home of the wheels of a compiler version, below the work directory: ``environment/nvidia/cu13``."""
    return Path(ENVIRONMENT) / "nvidia" / f"cu{compiler.partition('.')[0]}"


def network_isolation() -> tuple[str, ...]:
    """The prefix of a command that is to run without a network; empty if this system permits no network namespaces."""
    for prefix in (("unshare", "--net"), ("unshare", "--map-root-user", "--net")):
        try:
            if process.run([*prefix, "true"], check=False).returncode == 0:
                return prefix
        except RequirementMissing:
            break
    return ()


@dataclass(frozen=True)
class Interpreter:
    """A Python with the wheels of ``packages`` in its path, and the stub of the driver that it loads first."""

    python: Path
    packages: Path
    driver: Path


def wrong_answers(
    library: Path, imports: Sequence[str], expected: dict[str, str], interpreter: Interpreter, before: Path | None = None
) -> tuple[str, ...]:
    """Load a module after ``imports`` and return every problem: why it does not load, or expressions with another value.

    Every symbol has to resolve. The library ``before`` is loaded before it. ``expected`` is the printed value by Python
    expression, in which the module is ``library``.
    """
    program = "\n".join(
        [
            "import ctypes, importlib, os, sys",
            "ctypes.CDLL(sys.argv[2], ctypes.RTLD_GLOBAL)",
            *(f"import {name}" for name in imports),
            *(["ctypes.CDLL(sys.argv[3], os.RTLD_NOW)"] if before else []),
            "library = ctypes.CDLL(sys.argv[1], os.RTLD_NOW)",
            *(f"print('answer', {expression})" for expression in expected),
        ]
    )
    environment = {
        **dict.fromkeys(("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHOME")),
        "PYTHONPATH": str(interpreter.packages),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
    }
    done = process.run(
        [interpreter.python, "-c", program, library, interpreter.driver, before or ""], env=environment, check=False
    )
    if done.returncode != 0:
        return (f"does not load: {(done.stderr.strip().splitlines() or [f'exit code {done.returncode}'])[-1]}",)
    answers = [line.removeprefix("answer ") for line in done.stdout.splitlines() if line.startswith("answer ")]
    return tuple(
        f"{expression} is {answer}, not {value}"
        for (expression, value), answer in zip(expected.items(), answers, strict=True)
        if answer != value
    )


def dynamic_section(library: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """The libraries that a shared object needs, and the directories that it adds to the loader's search path.

    Raises:
        CommandFailed: it is not a shared object.
    """
    output = process.run(["readelf", "--dynamic", "--wide", library]).stdout
    if "Dynamic section at" not in output:
        raise CommandFailed(f"{library} is no shared object", f"command: readelf --dynamic {library}")
    entries = re.findall(r"\((NEEDED|RPATH|RUNPATH)\).*\[(.*)\]", output)
    needed = frozenset(value for kind, value in entries if kind == "NEEDED")
    return needed, tuple(value for kind, value in entries if kind != "NEEDED")


SOURCE, STAND_INS = "source", "stand-ins"
"""Directories of the work directory, beside that of the environment and those of projects, which have the projects' names."""


@dataclass(frozen=True)
class ExtensionBuild:
    """Inputs of the build of an engine's extension modules.

    ``tree`` is the patched source of the engine, ``flashinfer`` that of the FlashInfer that the recipe uses. ``official`` is
    the wheel that is packed again, ``wheels`` are installed for the build, ``versions`` are of other programs, and ``python``
    runs the locked wheels.
    """

    recipe: EngineRecipe
    tree: PatchedTree
    flashinfer: PatchedTree
    plan: BuildPlan
    official: LockedWheel
    wheels: tuple[LockedWheel, ...]
    versions: dict[str, str]
    python: Path

    @property
    def table(self) -> FromSourceTable:
        """The part of the recipe that describes the modules."""
        assert self.recipe.from_source is not None
        return self.recipe.from_source


@dataclass(frozen=True)
class BuildSite:
    """Work directory of a build, Python of its environment, and the command prefix that removes the network."""

    work: Path
    python: Path
    isolation: tuple[str, ...]

    @property
    def environment(self) -> Path:
        """The directory of the locked wheels."""
        return self.work / ENVIRONMENT


def cmake_program() -> str:
    """Path of the cmake in this environment's wheel.

    Raises:
        RequirementMissing: there is none.
    """
    if importlib.util.find_spec("cmake") is None:
        raise RequirementMissing(
            "building an engine's extensions needs cmake, which this environment lacks",
            "install it: pip install 'sm120kit[kernels]'",
        )
    import cmake

    return str(Path(cmake.CMAKE_BIN_DIR) / "cmake")


def compile_extensions(build: ExtensionBuild, site: BuildSite, settings: CompileSettings) -> None:
    """Configure the engine's project, unless an earlier run did, and bring the targets of the plan up to date.

    Raises:
        RequirementMissing: the environment has no nvcc.
        RequirementMissing: the path of the work directory splits arguments of CMake.
        CommandFailed: CMake fails, as it does when it would have to fetch something.
        CheckFailed: CMake fetched something, or compiles other units than those of the recipe.
        ResourceUnavailable, CompileFailed: as :func:`sm120kit.wheels.compile.compile_units`.
    """
    plan, work, configured = build.plan, site.work, site.work / "configured"
    if not configured.is_file():
        _configure(plan, build.table, site)
        configured.touch()
    _require_units(plan, site)
    units = [unit for module in plan.modules for unit in module.units]
    libraries = [module.library for module in plan.modules]
    done, finished = run_gated(
        [*site.isolation, ninja_program(), "-j", str(settings.parallel), *libraries],
        work,
        [unit for unit in units if not (work / unit.output).is_file()],
        units,
        settings,
        env={**dict.fromkeys(_user_variables()), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    if done.returncode != 0:
        raise compile_error(done.stdout + done.stderr, finished, work / LOG)


def _configure(plan: BuildPlan, table: FromSourceTable, site: BuildSite) -> None:
    """Run CMake on the engine's project."""
    _require_path_for_cmake(site.work)
    work, toolchain = site.work, plan.toolchain
    home = work / toolchain.cuda_home
    if not (home / "bin" / "nvcc").is_file():
        raise RequirementMissing(
            f"the build environment of {plan.recipe} has no CUDA compiler: {toolchain.cuda_home}/bin/nvcc does not exist",
            "name nvidia-cuda-nvcc and its dependencies in from_source.environment of the recipe",
        )
    cuda = link_toolchain(work / "cuda", replace(toolchain, cuda_home=home))
    variables, directories = _inject(table, work)
    definitions = {**_definitions(plan, site, cuda), **directories}
    gate = Gate(work / "gate")
    gate.open({}, 0)  # CMake compiles tests of the compilers
    dropped = [*_user_variables(), *(name for name in os.environ if name.endswith("_SRC_DIR")), "LD_LIBRARY_PATH"]
    package_root = Path(__file__).parents[2]
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
        env={
            **dict.fromkeys(dropped),
            **variables,
            "TORCH_CUDA_ARCH_LIST": " ".join(arch.number for arch in plan.archs),
            "CUDA_HOME": str(cuda),
            "PYTHONPATH": f"{site.environment}{os.pathsep}{package_root}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONNOUSERSITE": "1",
            "SM120KIT_GATE_DIR": str(gate.directory),
        },
        logfile=work / "configure.log",
        tied=True,
    )
    fetched = sorted(path.name for path in (work / "_deps").glob("*-src"))
    if fetched:
        raise CheckFailed(
            f"the CMake project of {plan.recipe} fetched {', '.join(fetched)}",
            "every source must be pinned: fill its variable in from_source.injected of the recipe",
        )


def _require_path_for_cmake(work: Path) -> None:
    """Require a directory in which CMake and nvcc can work."""
    separator = re.search(r"[\s,;'\"$]", str(work))
    if separator:
        raise RequirementMissing(
            f"CMake and nvcc cannot work in {work}: {separator[0]!r} splits their arguments",
            "name a state directory without it: --state or SM120KIT_STATE",
        )


def _user_variables() -> list[str]:
    """Environment variables that would change the output of CMake and its compilers."""
    return [
        name
        for name in os.environ
        if name.startswith(("CMAKE_", "SKBUILD_", "CUDA")) or name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")
    ]


def _inject(table: FromSourceTable, work: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Create the stand-ins of a recipe; return the environment variables and CMake definitions that name the projects."""
    variables, definitions = {}, {}
    for variable, filled in table.injected.items():
        directory = work / (filled.project or f"{STAND_INS}/{variable}")
        for file in filled.files:
            write_atomic(directory / file, b"")
        variables[variable] = str(directory)
        definitions.update({name: str(directory / below) for name, below in filled.definitions.items()})
    return variables, definitions


def _definitions(plan: BuildPlan, site: BuildSite, cuda: Path) -> dict[str, str]:
    """CMake definitions of every engine."""
    host_compiler, launcher = plan.toolchain.host_compiler, f"{sys.executable};-m;sm120kit.core.memory"
    return {
        "CMAKE_MAKE_PROGRAM": ninja_program(),
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_CXX_COMPILER": host_compiler,
        "CMAKE_CUDA_COMPILER": str(cuda / "bin" / "nvcc"),
        "CMAKE_CUDA_HOST_COMPILER": host_compiler,
        "CMAKE_CXX_COMPILER_LAUNCHER": launcher,
        "CMAKE_CUDA_COMPILER_LAUNCHER": launcher,
        # __FILE__ has to be the same in every directory.
        "CMAKE_CXX_FLAGS": f"-ffile-prefix-map={site.work}=.",
        "CMAKE_CUDA_FLAGS": f"-Xcompiler=-ffile-prefix-map={site.work}=.",
        # Symbol tables contain names of nvcc's temporary files, and a build id would hash them.
        "CMAKE_MODULE_LINKER_FLAGS": "-Wl,-s -Wl,--build-id=none",
        "CMAKE_SKIP_RPATH": "ON",
        "CMAKE_SUPPRESS_REGENERATION": "ON",
        "CUDAToolkit_ROOT": str(cuda),
        "CUDA_TOOLKIT_ROOT_DIR": str(cuda),
        "VLLM_PYTHON_EXECUTABLE": str(site.python),
    }


def _commands(module: Module, work: Path) -> dict[str, list[str]]:
    """The compiler command of each unit of a module in CMake's ninja file, by output."""
    output = process.run([ninja_program(), "-t", "commands", module.library], cwd=work).stdout
    commands = [shlex.split(line) for line in output.splitlines() if " -c " in line]
    return {argv[argv.index("-o") + 1]: argv for argv in commands}


def _require_units(plan: BuildPlan, site: BuildSite) -> None:
    """Require that CMake compiles exactly the units of a plan."""
    problems = []
    for module in plan.modules:
        expected, compiled = {unit.output for unit in module.units}, {*_commands(module, site.work)}
        problems += [
            f"{module.name}: {output} is compiled, and no unit of the recipe" for output in sorted(compiled - expected)
        ]
        problems += [f"{module.name}: {output} is not compiled" for output in sorted(expected - compiled)]
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CheckFailed(
            f"CMake compiles other units than those of {plan.recipe}\n{listed}",
            "correct from_source.targets of the recipe, or patch the project",
        )


def check_extensions(build: ExtensionBuild, official: Path, site: BuildSite) -> dict[str, tuple[Cubin, ...]]:
    """Check finished modules, also that they can replace those of the wheel ``official``, and return their cubins by module.

    Raises:
        CheckFailed: device code that SM12x cannot run, an expected kernel that is missing, a library that the upstream
            module does not need, a search path for the loader, a symbol that does not resolve, or a wrong answer.
        BadInput: the wheel has no such module.
    """
    work = site.work
    interpreter = Interpreter(site.python, site.environment, work / "cuda" / "lib64" / "stubs" / "libcuda.so")

    def load_problems(module: Module) -> tuple[str, ...]:
        target, library = build.table.targets[module.name], work / module.library
        member = target.overrides or target.member
        official_module = work / "official" / member
        with archives.open_wheel(official) as wheel:
            if member not in wheel.namelist():
                raise BadInput(f"{official.name} has no {member}", "correct from_source.targets of the recipe")
            write_atomic(official_module, archives.read_member(wheel, member))
        needed, search_paths = dynamic_section(library)
        further = sorted(needed - dynamic_section(official_module)[0])
        problems = [f"needs {name}, which the upstream module does not need" for name in further]
        problems += [f"has a search path for the loader: {path}" for path in search_paths]
        problems += wrong_answers(
            library, target.imports, target.answers, interpreter, official_module if target.overrides else None
        )
        return tuple(problems)

    return check_modules(build.plan, work, load_problems)


def publish_extensions(
    build: ExtensionBuild, site: BuildSite, official: Path, patched_files: Mapping[str, Path | None], directory: Path
) -> Artifacts:
    """Check the modules, pack the wheel, and publish it with its records in ``directory``, completely or not at all.

    ``official`` is the file of the wheel that is packed again; ``patched_files`` are those of the engine's own package, by
    member.
    """
    plan, table, work = build.plan, build.table, site.work
    cubins = check_extensions(build, official, site)
    libraries = {table.targets[module.name].member: work / module.library for module in plan.modules}
    replaced = {**patched_files, **libraries}
    commands = {output: argv for module in plan.modules for output, argv in _commands(module, work).items()}
    record = {
        **repacked_record(plan, build.tree, (build.official, official), replaced),
        "injected": {variable: filled.source or f"stand-in: {filled.reason}" for variable, filled in table.injected.items()},
        "versions": dict(build.versions),
        "flags": {unit.source: _flags(commands[unit.output]) for module in plan.modules for unit in module.units},
    }
    added = {"sm120kit.json": record_json(record).encode()}
    version = local_version(plan.version, plan.digest)
    logs = [work / "configure.log", work / LOG]
    return publish(plan, directory, lambda out: repack(official, version, replaced, added, out), libraries, cubins, logs)


def _flags(argv: list[str]) -> str:
    """The flags of a compiler command that are no paths and do not differ between directories."""
    with_value = {"-o", "-c", "-MT", "-MF", "-isystem", "-I"}
    launcher = {"-MD", "-x", "cu", "-m", "sm120kit.core.memory"}
    flags = [
        argument
        for before, argument in zip(["", *argv], argv, strict=False)
        if argument not in with_value | launcher and before not in with_value and "/" not in argument
    ]
    return " ".join(flags)
