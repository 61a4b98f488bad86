"""Time from a changed patch to a tested image of an engine, beside the first build of that image.

    python tests/bench/changed_patch.py [RECIPE] [DIRECTORY]

Builds RECIPE (default sglang-0.5.23) without compiled modules in the state directory DIRECTORY (default: a new one below
TMPDIR; 25 GB): first, then with a comment of a CUTLASS header changed in a copy of the patches, then with nothing changed. Each
build is the command of users, with all checks. Prints a table with ratios of one run; asserts nothing.
docs/measurements/builds.md has figures.
"""

from __future__ import annotations

import hashlib
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATCH = "patches/cutlass/single-k-block-mainloop.patch"
COMMENT = "A single k-block has"


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "sglang-0.5.23"
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        data, state = Path(scratch, "data"), Path(sys.argv[2] if len(sys.argv) > 2 else Path(scratch, "state"))
        for name in ("recipes", "patches", "cutlass_overrides", "image_programs"):
            shutil.copytree(ROOT / name, data / name)
        environment = os.environ | {"SM120KIT_DATA": str(data), "SM120KIT_STATE": str(state)}
        build = ["build", recipe, "--kernels", "none"]
        print(f"{recipe}: {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        print(f"{'':20}{'seconds':>9}{'CPU-s':>9}{'of first':>10}{'new MB':>9}", flush=True)
        first = measure("first build", build, environment, state)
        change(data / PATCH, state / "checkouts")
        text = (data / "recipes" / "engines" / f"{recipe}.toml").read_text()
        flashinfer = re.findall(r'^flashinfer = "(.+)"', text, re.MULTILINE)
        for name in (*flashinfer, recipe):
            command(["recipe", "lock", name], environment)
        measure("a changed patch", build, environment, state, first)
        measure("nothing changed", build, environment, state, first)


def change(patch: Path, checkouts: Path) -> None:
    """Change a comment that the patch adds to headers, and the ids of these in the patch."""
    text, other = patch.read_text(), f"{COMMENT} (measured at {time.time():.0f})"
    for before in re.findall(r"^index [0-9a-f]{40}\.\.([0-9a-f]{40})", text, re.MULTILINE):
        for repository in checkouts.iterdir():
            done = subprocess.run(["git", "--git-dir", repository, "cat-file", "blob", before], capture_output=True)
            if done.returncode == 0:
                content = done.stdout.replace(COMMENT.encode(), other.encode())
                after = hashlib.sha1(b"blob %d\0%s" % (len(content), content)).hexdigest()
                text = text.replace(before, after)
                break
    patch.write_text(text.replace(COMMENT, other))


def command(arguments: list[str], environment: dict[str, str]) -> None:
    """Run sm120kit."""
    subprocess.run([sys.executable, "-m", "sm120kit", *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)


def measure(case: str, arguments: list[str], environment: dict[str, str], state: Path, first: float = 0) -> float:
    """Run a command, print what it took with all its programs, and return its seconds."""
    before, size, started = resource.getrusage(resource.RUSAGE_CHILDREN), blobs(state), time.monotonic()
    command(arguments, environment)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    ratio, added = seconds / (first or seconds), (blobs(state) - size) / 1e6
    print(f"{case:20}{seconds:9.1f}{cpu:9.1f}{ratio:10.3f}{added:9.1f}", flush=True)
    return seconds


def blobs(state: Path) -> int:
    """Bytes of the blobs of images."""
    return sum(path.stat().st_size for path in (state / "oci" / "blobs").rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
