"""Run ``sm120kit`` and write how often it opened each file and which programs it started.

    python tests/support/count_reads.py OUT ARGUMENT...

OUT is a JSON file: ``{"opened": {path: count}, "programs": [argv, ...]}``. Files that child processes open are not counted.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

OPENED: Counter[str] = Counter()
PROGRAMS: list[list[str]] = []
OPENING: list[str] = []
"""The path of the last event of ``open``: its ``opener`` raises the event again for the same opening, without a mode."""


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook of the interpreter (PEP 578)."""
    if event == "open" and isinstance(arguments[0], str | os.PathLike):
        path, within = os.path.realpath(arguments[0]), OPENING[:]
        OPENING[:] = [path] if arguments[1] else []
        if arguments[1] or [path] != within:
            OPENED[path] += 1
    elif event == "subprocess.Popen":
        PROGRAMS.append([str(argument) for argument in arguments[1]])


def main() -> None:
    """Run the command in this process, so that the hook sees it."""
    out, sys.argv = Path(sys.argv[1]), ["sm120kit", *sys.argv[2:]]
    from sm120kit.cli import main as run

    sys.addaudithook(audit)
    try:
        run()
    finally:
        counts, programs = dict(OPENED), list(PROGRAMS)
        out.write_text(json.dumps({"opened": counts, "programs": programs}))


if __name__ == "__main__":
    main()
