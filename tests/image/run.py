"""Run an image's checks inside a container of it, with nothing but its own Python. One JSON line per check on stdout.

``run.py expected.json SUITE...``: every function ``check_*`` of ``SUITE/checks.py`` gets what is expected and returns what it
found, as a mapping of words. It fails by raising; a warning of any kind is a failure too.
"""

import importlib.util
import json
import sys
import traceback
import warnings
from pathlib import Path


class NotRun(Exception):
    """Raised by a check that cannot be run here, with the reason."""


def suite(path):
    """A suite's module, loaded from its file."""
    spec = importlib.util.spec_from_file_location(f"checks_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    module.NotRun = NotRun
    spec.loader.exec_module(module)
    return module


def run(name, check, expected):
    """One check's line."""
    line = {"suite": name, "name": check.__name__.removeprefix("check_"), "verdict": "passed", "detail": "", "said": {}}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            line["said"] = check(expected) or {}
        if warned:
            line["verdict"] = "failed"
            line["detail"] = "; ".join(f"{w.category.__name__}: {w.message} ({w.filename}:{w.lineno})" for w in warned[:3])
    except NotRun as reason:
        line["verdict"], line["detail"] = "not run", str(reason)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        line["verdict"] = "failed"
        line["detail"] = (
            f"{error or type(error).__name__}"
            if isinstance(error, AssertionError)
            else (f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
        )
    return line


def main():
    """All checks of the suites that are named, parents first."""
    here = Path(__file__).parent
    expected = json.loads(Path(sys.argv[1]).read_text())
    for name in sys.argv[2:]:
        module = suite(here / name / "checks.py")
        for function in [value for key, value in vars(module).items() if key.startswith("check_")]:
            print(json.dumps(run(name, function, expected)), flush=True)


main()
