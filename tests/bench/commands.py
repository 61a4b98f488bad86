"""What the commands cost: start-up, a build with nothing to do, the tile table cold and warm.

    python tests/bench/commands.py [RECIPE]

Needs a finished ``sm120kit build RECIPE`` in the state directory for the second row. Prints a table; asserts nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time


def seconds(*words: str, state: str | None = None) -> float:
    env = {**os.environ, **({"SM120KIT_STATE": state} if state else {})}
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "sm120kit", *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True
    )
    return time.monotonic() - started


def main() -> None:
    recipe = sys.argv[1] if len(sys.argv) > 1 else "flashinfer@0.6.6"
    typer = [sys.executable, "-c", "import typer"]
    started = time.monotonic()
    subprocess.run(typer, check=True)
    rows = [("python -c 'import typer' (floor)", time.monotonic() - started, "")]
    rows.append(("sm120kit --help, best of 5", min(seconds("--help") for _ in range(5)), "0.2"))
    rows.append(
        (
            f"sm120kit build {recipe}, nothing to do",
            min(seconds("build", recipe, "-o", tempfile.gettempdir()) for _ in range(3)),
            "1",
        )
    )
    with tempfile.TemporaryDirectory() as state:
        seconds("build", recipe, "--to", "patch", state=state)
        rows.append((f"sm120kit tiles {recipe}, cold", seconds("tiles", recipe, state=state), "180"))
        rows.append((f"sm120kit tiles {recipe}, warm", seconds("tiles", recipe, state=state), "2"))
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}")
    for name, took, target in rows:
        print(f"{took:8.2f} s  {name}{f' (target {target} s)' if target else ''}")


if __name__ == "__main__":
    main()
