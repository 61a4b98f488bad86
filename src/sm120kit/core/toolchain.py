"""Find nvcc and the host C++ compiler, and check that they meet the requirements of a build."""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import Version

from sm120kit.core import process
from sm120kit.core.errors import CommandFailed, RequirementMissing
from sm120kit.core.records import Arch, Toolchain

PLACEHOLDERS = Path(__file__).with_name("absent")
"""Directory with placeholders for headers that a toolkit may lack (cuBLAS): FlashInfer's headers only name one type of them."""

FIRST_NVCC = {Arch.SM_120A: Version("12.8"), Arch.SM_120F: Version("12.9"), Arch.SM_121A: Version("12.9")}
"""The first CUDA release whose nvcc supports a target (CUDA Toolkit release notes 12.8 and 12.9)."""

INSTALL_HINT = "install the compiler as wheels: pip install 'sm120kit[cuda]'"


def compiler_launcher(name: str) -> Path:
    """The file of a program that starts compilers, by its name on ``PATH`` or its path.

    Raises:
        RequirementMissing: there is no such program.
    """
    found = process.find_program(name)
    if found is None:
        raise RequirementMissing(f"--launcher {name}: there is no such program", "install it, or omit --launcher")
    return found.absolute()


def find(archs: Sequence[Arch] = (), headers: Sequence[str] = (), version: str = "") -> Toolchain:
    """The first suitable CUDA toolkit of: ``CUDA_HOME``, nvcc on PATH, the CUDA wheels of this environment.

    A toolkit is suitable if it is new enough for all ``archs``, its include directory has all ``headers``, and its nvcc has
    exactly ``version``, if one is given.

    Raises:
        RequirementMissing: no nvcc or no C++ compiler is installed.
        RequirementMissing: no installed toolkit is suitable; the message has the reasons for each.
    """
    host, host_version = host_compiler()
    rejected = []
    for home, origin in _homes():
        release = _nvcc_version(home / "bin" / "nvcc")
        reasons = _unsuitable(home, release, archs, headers)
        if version and release != Version(version):
            reasons.append(f"nvcc {release} is not {version}")
        if not reasons:
            return Toolchain(home, str(release), host, host_version)
        rejected.append(f"{origin} ({home}): {'; '.join(reasons)}")
    if not rejected:
        raise RequirementMissing(
            "no CUDA compiler: CUDA_HOME is not set, no nvcc on PATH, no CUDA wheels in this environment", INSTALL_HINT
        )
    raise RequirementMissing("no suitable CUDA compiler\n" + "\n".join(f"  {line}" for line in rejected), INSTALL_HINT)


def installed() -> list[str]:
    """The C++ compiler and the CUDA toolkits of this machine with their versions, or why there are none."""
    try:
        return [*host_compiler(), *(f"{home}: {_nvcc_version(home / 'bin' / 'nvcc')}" for home, _ in _homes())]
    except (RequirementMissing, CommandFailed) as error:
        return [str(error)]


def assembler(home: Path) -> dict[str, str]:
    """The sha256 of a toolkit's ptxas; of a script, which may choose options or keep results, its first 4,096 characters."""
    content = (home / "bin" / "ptxas").read_bytes()
    digest = {"sha256": hashlib.sha256(content).hexdigest()}
    return digest if not content.startswith(b"#!") else digest | {"script": content.decode(errors="replace")[:4096]}


def at(home: Path, archs: Sequence[Arch] = (), headers: Sequence[str] = ()) -> Toolchain:
    """The CUDA toolkit in ``home``, with this machine's C++ compiler.

    Raises:
        RequirementMissing: no C++ compiler.
        RequirementMissing: see :func:`find`.
    """
    host, host_version = host_compiler()
    version = _nvcc_version(home / "bin" / "nvcc")
    if reasons := _unsuitable(home, version, archs, headers):
        raise RequirementMissing(f"unsuitable CUDA compiler in {home}: {'; '.join(reasons)}", "lock a newer one in the recipe")
    return Toolchain(home, str(version), host, host_version)


def _unsuitable(home: Path, version: Version, archs: Sequence[Arch], headers: Sequence[str]) -> list[str]:
    """The reasons against a toolkit."""
    reasons = [
        f"nvcc {version} is older than {FIRST_NVCC[arch]}, the first for {arch}" for arch in archs if version < FIRST_NVCC[arch]
    ]
    absent = [name for name in headers if not (home / "include" / name).is_file()]
    if absent:
        reasons.append(f"no {', '.join(absent)} in {home / 'include'}")
    return reasons


def host_compiler() -> tuple[str, str]:
    """The C++ compiler (``CXX``, else ``c++``, else ``g++``) and its version line.

    Raises:
        RequirementMissing: none of them is a program.
    """
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++")):
        path = process.find_program(name)
        if path:
            return str(path), _run_once(path, "--version").stdout.splitlines()[0]
    raise RequirementMissing("no C++ compiler: neither CXX nor c++ nor g++ names a program", "install one: apt-get install g++")


def installed_version(distribution: str) -> str:
    """The version of a distribution in this environment; ``absent`` when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _homes() -> Iterator[tuple[Path, str]]:
    """CUDA toolkits in the order in which they are tried, each with its origin."""
    named = os.environ.get("CUDA_HOME")
    if named:
        if not (Path(named) / "bin" / "nvcc").is_file():
            raise RequirementMissing(f"CUDA_HOME={named} has no bin/nvcc", "correct or unset CUDA_HOME")
        yield Path(named), "CUDA_HOME"
    on_path = process.find_program("nvcc")
    if on_path:
        # nvcc on PATH may be a script or a link; its own output has the directory of the toolkit.
        dry = _run_once(on_path, "--dryrun", "-x", "cu", "-c", "/dev/null", check=False).stderr
        directory = re.search(r"^#\$ _HERE_=(.+)$", dry, re.MULTILINE)
        if directory:
            yield Path(directory[1]).resolve().parent, "nvcc on PATH"
    spec = importlib.util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for home in sorted(Path(location).glob("cu*"), reverse=True):
            if (home / "bin" / "nvcc").is_file():
                yield home, "CUDA wheels"


def _nvcc_version(nvcc: Path) -> Version:
    text = _run_once(nvcc, "--version").stdout
    release = re.search(r"release [\d.]+, V([\d.]+)", text)
    if not release:
        raise RequirementMissing(f"{nvcc} --version does not state a release: {text.strip()[:200]!r}", INSTALL_HINT)
    return Version(release[1])


def _run_once(program: Path | str, *arguments: str, check: bool = True) -> process.Completed:
    """The output of a compiler that prints facts about itself. It runs once per process, unless its file or PATH changes."""
    identity: tuple[object, ...] = ()
    with contextlib.suppress(OSError):  # a missing program is an error of the run
        status = Path(program).stat()
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, os.environ.get("PATH", ""))
    return _completed((str(program), *arguments), identity, check)


@functools.lru_cache(maxsize=16)
def _completed(argv: tuple[str, ...], identity: tuple[object, ...], check: bool) -> process.Completed:
    return process.run(argv, check=check)
