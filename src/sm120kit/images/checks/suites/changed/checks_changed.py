"""Quick checks of an image that differs from a checked one in Python files only."""

import json
import subprocess
import sys

BESIDE = ("imports",)
"""Checks that run in a process of their own beside the others."""

QUICK = BESIDE

IMPORT = """
import gc, importlib, json, os, sys
gc.disable()
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed), flush=True)
os._exit(0)
"""
"""Imports modules. Collecting garbage, and freeing everything at the end, would take half as long again."""


def check_imports(expected):
    """Every changed module can be imported, or fails as it does in the other image."""
    modules = expected["changed_modules"]
    done = subprocess.run([sys.executable, "-c", IMPORT, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {' | '.join(done.stderr.strip().splitlines()[-3:])}"
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not failed, "; ".join(f"{name}: {error}" for name, error in sorted(failed.items()))
    return {"imported changed modules": ", ".join(modules) or "none"}
