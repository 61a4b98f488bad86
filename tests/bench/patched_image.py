"""CPU time from a changed Python patch to a checked image, beside that of all checks of the image.

Usage: ``patched_image.py RECIPE PATCH [OPTION...]`` with options of ``sm120kit build``. An image of the recipe without it
must have been checked in the same state directory. Wall time depends on what else the machine does, CPU time much less.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time


def run(*arguments: str) -> tuple[str, float, float]:
    """The output of a command of sm120kit, its CPU seconds with its programs, and its wall seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run([sys.executable, "-m", "sm120kit", *arguments], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout + done.stderr, cpu, time.monotonic() - began


def main() -> None:
    recipe, patch, *options = sys.argv[1:]
    output, cpu, wall = run("build", recipe, "--patch", patch, *options)
    (image,) = re.findall(r"^sm120kit/\S+-local\.\S+$", output, re.MULTILINE)
    taken = re.search(r"(\d+) results are taken over[^;]*; run for this one: (.*)", output)
    _, everything, wall_of_all = run("verify", "image", image)
    print(
        f"{image}: {cpu:.1f} CPU-s, {wall:.1f} s; taken over: {taken[1] if taken else 0}; run: {taken[2] if taken else 'all'}"
    )
    print(f"all checks: {everything:.1f} CPU-s, {wall_of_all:.1f} s; ratio {everything / cpu:.1f}")


if __name__ == "__main__":
    main()
