"""Run what SM120 refuses, under ``verify run``: ``limits.py PROGRAM`` with the program of limits.cu.

Exit code 0: everything is as on SM120. Each copy is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys

RIGHT, STOPPED = "status 0 right", "status 710"
"""710: a kernel's assertion failed; its message names the rule."""

COPIES = {
    ("load", 0, 0, 32): RIGHT,
    ("load", 0, 0, 33): STOPPED,
    ("load, padded", 0, 1, 128): RIGHT,
    ("load, padded", 0, 1, 64): STOPPED,
    ("prefetch", 1, 0, 64): RIGHT,
    ("prefetch, padded", 1, 1, 128): RIGHT,
    ("reduce", 2, 0, 32): STOPPED,
    ("reduce, padded", 2, 1, 128): STOPPED,
    ("to shared::cluster", 3, 0, 32): STOPPED,
    ("to shared::cluster, padded", 3, 1, 128): STOPPED,
    ("store", 4, 0, 32): RIGHT,
    ("store", 4, 0, 33): STOPPED,
    ("store, padded", 4, 1, 128): STOPPED,
}
"""Copies by what they do: the arguments way, padded and first coordinate."""

RESIDENCY = [
    "gpu 12.0 24 1536 102400 134217728",
    "1 KiB: 12 a multiprocessor, launches 0 720",
    "40 KiB: 2 a multiprocessor, launches 0 720",
    "60 KiB: 1 a multiprocessor, launches 0 720",
    "90 KiB: 1 a multiprocessor, launches 0 720",
    "ran 1",
    "binary 120 registers 1",
]


def main() -> int:
    program, failed = sys.argv[1], 0
    done = subprocess.run([program], capture_output=True, text=True)
    if done.stdout.splitlines() != RESIDENCY:
        print(f"residency: {done.stdout}{done.stderr}")
        failed += 1
    for (name, *arguments), expected in COPIES.items():
        copied = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
        named = expected == RIGHT or "Assertion `" in copied.stderr + copied.stdout
        print(f"{name} at {arguments[2]}: {copied.stdout.splitlines()[-1:]} {'' if named else 'no message'}")
        if copied.stdout.splitlines()[-1:] != [expected] or not named:
            print(f"  {copied.stdout}  {copied.stderr}")
            failed += 1
    print(f"{failed} of {1 + len(COPIES)} cases are not as on SM120")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
