"""Cost of a build on a machine whose team has built the same before, with ``--cache``, against that of the first build.

    python tests/bench/remote_cache.py DIRECTORY [RECIPE [OPTION...]]

Two state directories in DIRECTORY, which start empty, and a registry on loopback (Debian's docker-registry). OPTIONs are
those of ``sm120kit build``. CPU seconds are those of the command and its children, without the registry. A build of a lockfile
that the cache knows neither unpacks compilers nor measures tiles.

Prints a table, asserts that both wheels are equal.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import containers

from sm120kit.core.digests import file_sha256


def measure(argv: list[str], state: Path) -> tuple[float, float]:
    """Wall time and CPU time of a build with its children, in seconds. What it prints is in a file beside the state."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with state.with_suffix(".log").open("w") as log:
        subprocess.run(argv, env={**os.environ, "SM120KIT_STATE": str(state)}, stdout=log, stderr=log, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(directory: Path, recipe: str = "flashinfer", *options: str) -> None:
    """Build twice and print both costs."""
    directory.mkdir()
    key, public = directory / "key.pem", directory / "key.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    rows, wheels = [], set()
    with containers.registry(directory / "registry") as address:
        shared = ["--cache", f"{address}/team/cache", "--trust", str(public)]
        for name, more in (("first", ["--cache-push", "--key", str(key)]), ("second", [])):
            out = directory / f"{name}.out"
            argv = ["sm120kit", "build", recipe, *options, "-o", str(out), *shared, *more]
            rows.append((name, *measure(argv, directory / name)))
            wheels |= {(path.name, file_sha256(path)) for path in out.iterdir()}
    assert len(wheels) == 1, wheels
    for name, wall, processor in rows:
        print(f"{name}: {wall:.1f} s, {processor:.1f} CPU-s")
    print(f"ratio: {rows[1][1] / rows[0][1]:.3f} of the time, {rows[1][2] / rows[0][2]:.3f} of the CPU seconds")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
