"""Time, CPU time, memory and bytes of the layers of an engine's image, beside `pip install` and `uv pip install` of its wheels.

    python tests/bench/image_layers.py [RECIPE] [DIRECTORY] [MB]

Fetches the wheels of the recipe's lockfile (default vllm-0.19.1) to the state directory, then writes the layers of an image of
them below DIRECTORY three times: all, with nothing changed, and with our wheel changed, for which a small stand-in is used. The
base is empty, its Python this machine's /usr/bin/python3, which must be of the version that the wheels are for. The result is
removed before the others start. With MB, without wheels that are larger. Needs 13 GB of disk below
DIRECTORY for all of vllm-0.19.1. Prints a table; asserts nothing.
docs/measurements/image-layers.md has the figures.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from small_assembly import SmallImage  # noqa: E402

from sm120kit import sources  # noqa: E402
from sm120kit.core.state import Workspace, data_root  # noqa: E402
from sm120kit.images import context  # noqa: E402
from sm120kit.recipes import lockfile  # noqa: E402
from sm120kit.sources.records import LockedWheel  # noqa: E402

PYTHON = "/usr/bin/python3"


class OfLock(SmallImage):
    """An image of fetched wheels."""

    fetched: dict[LockedWheel, Path] = {}  # noqa: RUF012

    def wheels(self) -> dict[LockedWheel, Path]:
        return self.fetched


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "vllm-0.19.1"
    closure = lockfile.read(data_root() / "recipes" / "engines" / f"{name}.lock.json").closures[0]
    locked = [wheel for wheel in closure.wheels if wheel.name != "flashinfer-python"]
    *paths, pip = sources.wheelhouse((*locked, context.INSTALLER), Workspace.open())
    limit = float(sys.argv[3]) * 1e6 if len(sys.argv) > 3 else float("inf")
    OfLock.fetched = {wheel: path for wheel, path in zip(locked, paths, strict=True) if path.stat().st_size <= limit}
    locked, paths = [*OfLock.fetched], [*OfLock.fetched.values()]
    print(f"{name}: {len(locked)} wheels, {sum(path.stat().st_size for path in paths) / 1e9:.2f} GB; "
          f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")  # fmt: skip
    print(f"{'':28}{'seconds':>9}{'CPU-s':>9}{'MB RSS':>9}{'GB':>8}")
    with scratch() as directory:
        image = OfLock(directory, python=(PYTHON,))
        for case, ours in (("layers", b"1"), ("layers, nothing changed", b"1"), ("layers, our wheel changed", b"2")):
            measure(case, lambda ours=ours: image.assemble(b"patched = " + ours), directory / "state" / "oci")
    with scratch() as directory:
        links = directory / "links"
        links.mkdir()
        for path in paths:
            (links / path.name).symlink_to(path)
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", directory / "venv"], check=True)
        listed = directory / "requirements.txt"
        listed.write_bytes(context._requirements([*OfLock.fetched.items()]))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHON"))}
        environment = kept | {"PYTHONPATH": str(pip), "PIP_CONFIG_FILE": os.devnull}
        argv = [directory / "venv/bin/python", "-m", "pip", "install", "--quiet", "--root-user-action", "ignore", "--no-index"]
        argv += ["--no-deps", "--no-cache-dir", "--find-links", links, "--root", directory / "pip", "--requirement", listed]
        measure("pip install", lambda: subprocess.run(argv, check=True, env=environment), directory / "pip")
        shutil.rmtree(directory / "pip")
        argv = [
            "uv",
            "pip",
            "install",
            "--quiet",
            "--python",
            PYTHON,
            "--no-index",
            "--no-deps",
            "--no-cache",
            "--compile-bytecode",
        ]
        argv += ["--link-mode", "copy", "--find-links", links, "--target", directory / "uv", "--requirement", listed]
        measure("uv pip install", lambda: subprocess.run(argv, check=True, env=kept), directory / "uv")


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory below that of the command line."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=sys.argv[2] if len(sys.argv) > 2 else None) as directory:
        yield Path(directory)


def measure(case: str, work: Callable[[], object], result: Path) -> None:
    """Run ``work`` in a child, and print what it took, all its programs included."""
    started = time.monotonic()
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    seconds = time.monotonic() - started
    assert status == 0, case
    size = sum(path.lstat().st_size for path in result.rglob("*") if not path.is_dir())
    cpu = usage.ru_utime + usage.ru_stime
    print(f"{case:28}{seconds:9.1f}{cpu:9.1f}{usage.ru_maxrss / 1024:9.0f}{size / 1e9:8.2f}", flush=True)


if __name__ == "__main__":
    main()
