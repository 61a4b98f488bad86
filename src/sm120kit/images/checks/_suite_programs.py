"""The programs of the checks: which suites an image of a kind must pass, and their files."""

from pathlib import Path

from sm120kit import engines
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import NotFound
from sm120kit.kernels import driver_stub

COMMON = ("base", "flashinfer", "engine")
"""The suites that an image must pass before that of its engine."""

CHANGED = "changed"
"""The suite of an image that gets quick checks."""


RUNNER = {"run.py": Path(__file__).parent / "suites" / "run.py", "driver_stub.py": Path(driver_stub.__file__)}
"""The program that runs suites, and the module that it imports."""


def required_suites(kind: str) -> tuple[str, ...]:
    """Names of the suites that an image of an engine must pass, parents first.

    Raises:
        NotFound: there is no such engine, or it has no suite.
    """
    if not engines.find(kind) or not (_suite(kind) / f"checks_{kind}.py").is_file():
        raise NotFound(f"there are no checks for images of kind {kind!r}", f"in {_suite(kind)}")
    return (*COMMON, kind)


def suite_digest(kind: str) -> str:
    """sha256 of the programs of the checks for a kind of image."""
    return digest_of([[name, file_sha256(path)] for name, path in files(kind).items()])


def _root() -> Path:
    return Path(__file__).parent / "suites"


def _suite(name: str) -> Path:
    """The directory of a suite: of an engine that names its own, that."""
    engine = engines.find(name)
    return engine.suite if engine and engine.suite else _root() / name


def files(kind: str) -> dict[str, Path]:
    """The programs of the checks for a kind of image, by their path in the container."""
    directories = {name: _suite(name) for name in (*required_suites(kind), CHANGED)}
    listed = ((name, path) for name, directory in directories.items() for path in directory.iterdir())
    return RUNNER | {f"{name}/{path.name}": path for name, path in sorted(listed) if path.suffix in (".py", ".toml")}
