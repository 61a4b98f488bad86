"""Run an image's checks inside a container of it, with nothing but its own Python. One JSON line per check on stdout.

``run.py expected.json SUITE...``: every function ``check_*`` of ``SUITE/checks.py`` gets what is expected and returns what it
found, as a mapping of words. It fails by raising; a warning of any kind is a failure too. Whatever else is written to stdout or
stderr goes to stderr. Exempt is what ``SUITE/allowed.toml`` names, with a reason; the report shows it.

Where there is no CUDA driver the checks run with a stand-in for its library, see ``standin.py``.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import sys
import tempfile
import tomllib
import traceback
import warnings
from collections import Counter
from pathlib import Path

import standin

STAND_IN = "SM120KIT_STANDIN"
"""Set in the environment of checks that run with a stand-in: the directory in which it lies."""


class NotRun(Exception):
    """Raised by a check that cannot be run here, with the reason."""


def suite(path):
    """A suite's module, loaded from its file. Suites that come later can import it as ``checks_<name>``."""
    name = f"checks_{path.parent.name}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module.NotRun = NotRun
    spec.loader.exec_module(module)
    return module


def allowed(folders):
    """What the suites exempt: ``tools`` by path and ``words`` by pattern, each with its reason."""
    found = {"tools": [], "words": []}
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            for key, entries in tomllib.loads((folder / "allowed.toml").read_text()).items():
                found[key] += entries
    return found


@contextlib.contextmanager
def overheard():
    """Everything that is written to stdout and stderr meanwhile, by this process and its children."""
    lines = []
    with tempfile.TemporaryFile("w+", errors="replace") as heard:
        kept = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(heard.fileno(), number)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, file in enumerate(kept, 1):
                os.dup2(file, number)
                os.close(file)
        heard.seek(0)
        lines += [text for text in heard.read().splitlines() if text.strip()]


def sorted_out(lines, words):
    """Lines that no pattern matches as a whole, and how many each reason exempts."""
    strange, exempt = [], Counter()
    for line in lines:
        reason = next((entry["reason"] for entry in words if re.fullmatch(entry["pattern"], line, re.DOTALL)), None)
        if reason is None:
            strange.append(line)
        else:
            exempt[reason] += 1
    return strange, exempt


def run(name, check, expected):
    """One check's line, and the words that it should not have said."""
    line = {"suite": name, "name": check.__name__.removeprefix("check_"), "verdict": "passed", "detail": "", "said": {}}
    warned = []
    with overheard() as heard:
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                line["said"] = check(expected) or {}
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
    words = expected["allowed"]["words"]
    places = {f"{w.category.__name__}: {w.message}": f"{w.filename}:{w.lineno}" for w in warned}
    strange, exempt = sorted_out(places, words)
    if strange and line["verdict"] == "passed":
        line["verdict"] = "failed"
        line["detail"] = "; ".join(f"{text} ({places[text]})" for text in strange[:3])
    strange, more = sorted_out(heard, words)
    if exempt := exempt + more:
        line["said"][f"exempt in {name}/{line['name']}"] = "; ".join(f"{count} x {reason}" for reason, count in exempt.items())
    return line, strange


def with_driver():
    """Have a CUDA driver's library. Without one this program starts again, with a stand-in where the loader looks last."""
    try:
        ctypes.CDLL(standin.SONAME)
        return
    except OSError:
        if STAND_IN in os.environ:
            raise
    folder = tempfile.mkdtemp()
    libraries = (path for path in Path(sys.prefix).rglob("*.so*") if path.is_file())
    Path(folder, standin.SONAME).write_bytes(standin.library(standin.imported(libraries)))
    places = [os.environ.get("LD_LIBRARY_PATH", ""), folder]
    os.environ |= {"LD_LIBRARY_PATH": ":".join(filter(None, places)), STAND_IN: folder}
    os.execv(sys.executable, [sys.executable, "-B", *sys.argv])


def main():
    """All checks of the suites that are named, parents first."""
    with_driver()
    here = Path(__file__).parent
    expected = json.loads(Path(sys.argv[1]).read_text())
    folders = [here / name for name in sys.argv[2:]]
    expected["allowed"] = allowed(folders)
    for folder in folders:
        module = suite(folder / "checks.py")
        for function in [value for key, value in vars(module).items() if key.startswith("check_")]:
            line, strange = run(folder.name, function, expected)
            print(json.dumps(line), flush=True)
            for words in strange:
                print(f"{folder.name}/{line['name']}: {words}", file=sys.stderr, flush=True)
    os._exit(0)  # while Python takes itself down, extension modules complain of what belongs to no check


if __name__ == "__main__":
    main()
