"""Run the checks of an image inside its container, using only the image's Python. Prints one JSON line per check to stdout.

Usage: ``run.py expected.json SUITE...``. Each function ``check_*`` of ``SUITE/checks_SUITE.py`` takes the content of
expected.json and returns the facts that it established, as a mapping of texts. It fails by raising; a warning of any kind is a
failure as well. Other output of the checks is printed to stderr, except what ``SUITE/allowed.toml`` exempts with a reason,
which is reported as a fact.

Checks in ``BESIDE`` of their suite run in a process with a home directory of its own beside the others, as they only start
programs or take long, and their lines are printed last: ``run.py expected.json SUITE... --beside=SUITE``.

Without a CUDA driver the checks run with a stub of its library, see ``driver_stub.py``. If ``quick`` in expected.json is set,
only checks in ``QUICK`` of their suite are run; it is the reason why the others are not.
"""

import contextlib
import ctypes
import fnmatch
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from pathlib import Path

import driver_stub

STUB_VARIABLE = "SM120KIT_DRIVER_STUB"
"""Environment variable that is set while the checks run with a stub: the names in it."""


class NotRun(Exception):
    """Raised by a check that cannot be run in this container, with the reason."""


def is_left_out(expected, name, file, key="leave_out"):
    """Whether the recipe leaves out a file of a distribution, or has another ``key`` for it; ``file`` as in RECORD."""
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in expected.get(key, {}).get(name, ()))


def load_suite(directory):
    """Load a suite's module, ``checks_<name>``, which later suites can import."""
    name = f"checks_{directory.name}"
    spec = importlib.util.spec_from_file_location(name, directory / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module.NotRun, module.is_left_out = NotRun, is_left_out
    spec.loader.exec_module(module)
    return module


def load_exemptions(directories):
    """Messages of all suites that are exempt, by pattern, each with its reason."""
    exemptions = []
    for directory in directories:
        with contextlib.suppress(FileNotFoundError):
            exemptions += tomllib.loads((directory / "allowed.toml").read_text()).get("messages", ())
    return exemptions


@contextlib.contextmanager
def captured_output():
    """Capture stdout and stderr of this process and its children. The yielded list has the lines when the context ends."""
    lines = []
    with tempfile.TemporaryFile("w+", errors="replace") as capture:
        originals = [os.dup(1), os.dup(2)]
        for number in (1, 2):
            os.dup2(capture.fileno(), number)
        try:
            yield lines
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in enumerate(originals, 1):
                os.dup2(original, number)
                os.close(original)
        capture.seek(0)
        lines += [text for text in capture.read().splitlines() if text.strip()]


def split_messages(lines, exemptions):
    """Split lines into a list of unexpected lines and a count of exempt lines by reason. A pattern must match a whole line."""
    unexpected, exempt = [], Counter()
    for line in lines:
        reason = next((entry["reason"] for entry in exemptions if re.fullmatch(entry["pattern"], line, re.DOTALL)), None)
        if reason is None:
            unexpected.append(line)
        else:
            exempt[reason] += 1
    return unexpected, exempt


def reason_not_to_run(name, suite, expected):
    """Why a check is not run; empty if it is."""
    return "" if name in getattr(suite, "QUICK", ()) else expected.get("quick", "")


def run(suite, check, expected):
    """Run a check. Returns its JSON line and its unexpected messages."""
    line = {"suite": suite, "name": check.__name__.removeprefix("check_"), "verdict": "passed", "detail": "", "facts": {}}
    caught, started = [], time.monotonic()
    with captured_output() as output:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if reason := reason_not_to_run(line["name"], sys.modules[check.__module__], expected):
                    raise NotRun(reason)
                line["facts"] = check(expected) or {}
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
    line["seconds"] = round(time.monotonic() - started, 1)
    exemptions = expected["allowed"]
    origins = {f"{w.category.__name__}: {w.message}": f"{w.filename}:{w.lineno}" for w in caught}
    unexpected, exempt = split_messages(origins, exemptions)
    if unexpected and line["verdict"] == "passed":
        line["verdict"] = "failed"
        line["detail"] = "; ".join(f"{text} ({origins[text]})" for text in unexpected[:3])
    unexpected, more = split_messages(output, exemptions)
    if exempt := exempt + more:
        line["facts"][f"exempt in {suite}/{line['name']}"] = "; ".join(
            f"{count} x {reason}" for reason, count in exempt.items()
        )
    return line, unexpected


def require_driver(expected):
    """Return if a CUDA driver's library can be loaded; otherwise restart this program with a stub last in the loader's path."""
    try:
        ctypes.CDLL(driver_stub.SONAME)
        return
    except OSError:
        if STUB_VARIABLE in os.environ:
            raise
    directory = tempfile.mkdtemp()
    libraries = (path for path in Path(sys.prefix).rglob("*.so*") if path.is_file())
    names = expected.get("driver_stub") or sorted(driver_stub.imported_names(libraries))
    Path(directory, driver_stub.SONAME).write_bytes(driver_stub.library(names))
    paths = [os.environ.get("LD_LIBRARY_PATH", ""), directory]
    os.environ |= {"LD_LIBRARY_PATH": ":".join(filter(None, paths)), STUB_VARIABLE: ", ".join(names)}
    os.execv(sys.executable, [sys.executable, "-B", *sys.argv])


def run_beside(path, names, suite):
    """Start this program for a suite's checks in ``BESIDE``. Only ``compiles_at_run_time`` of these lets FlashInfer compile."""
    argv = [sys.executable, "-B", __file__, path, *names, f"--beside={suite}"]
    environment = {**os.environ, "HOME": tempfile.mkdtemp(), "FLASHINFER_DISABLE_JIT": "1"}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def main():
    """Run all checks of the suites in the arguments, parents first."""
    _, path, *names = sys.argv
    gc.disable()  # it would take a fifth of the time of imports
    only = names.pop().partition("=")[2] if names[-1].startswith("--beside=") else ""
    expected = json.loads(Path(path).read_text())
    require_driver(expected)
    directories = [Path(__file__).parent / name for name in names]
    expected["allowed"] = load_exemptions(directories)
    checks, in_beside = [], {}
    for directory in directories:
        module, suite = load_suite(directory), directory.name
        names_of_checks = [name.removeprefix("check_") for name in vars(module) if name.startswith("check_")]
        for name in names_of_checks:
            beside = name in getattr(module, "BESIDE", ()) and not reason_not_to_run(name, module, expected)
            (in_beside.setdefault(suite, []) if beside else checks).append((suite, vars(module)[f"check_{name}"]))
    children = [] if only else [run_beside(path, names, suite) for suite in in_beside]
    for suite, check in in_beside[only] if only else checks:
        line, unexpected = run(suite, check, expected)
        print(json.dumps(line), flush=True)
        for message in unexpected:
            print(f"{suite}/{line['name']}: {message}", file=sys.stderr, flush=True)
    code = 0
    for child in children:
        for stream, content in zip((sys.stdout, sys.stderr), child.communicate(), strict=True):
            stream.buffer.write(content)
            stream.flush()
        code = code or child.returncode
    os._exit(code)  # messages of extension modules at interpreter shutdown belong to no check


if __name__ == "__main__":
    main()
