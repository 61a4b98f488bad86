"""A module's name states its reason: none occurs twice in sm120kit and the laboratory, and docstrings name those that exist."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src"
SUITES = ROOT / "sm120kit" / "images" / "checks" / "suites"
"""Copied into containers: one folder a kind of image, with files of the same names, which the runner finds by them."""

EXCEPTED = ("__init__.py", "__main__.py", "commands.py")
"""The last is the table of commands of a distribution, which its entry point names."""


def test_no_two_modules_share_a_name() -> None:
    places = defaultdict(list)
    for package in ("sm120kit", "sm12x_lab"):
        for path in (ROOT / package).rglob("*.py"):
            if path.name not in EXCEPTED and not path.is_relative_to(SUITES):
                places[path.name].append(str(path.relative_to(ROOT)))
    assert len(places) > 200 and {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_docstrings_refer_to_modules_that_exist() -> None:
    """Of ``:mod:`.name```, ``:func:`module.name``` and the like, what precedes the last name, and of ``:mod:`` all."""
    files = [path for package in ("sm120kit", "sm12x_lab") for path in (ROOT / package).rglob("*.py")]
    modules = {path.relative_to(ROOT).with_suffix("").as_posix().removesuffix("/__init__") for path in files}
    known = {"/".join(name.split("/")[at:]) for name in modules for at in range(name.count("/") + 1)}
    referred = [
        (path, role == "mod", name.lstrip("~.").split("."))
        for path in files
        for role, name in re.findall(r":(mod|func|class|data|attr|meth):`(~?\.?[\w.]+)`", path.read_text())
    ]
    wrong = [
        (path.name, ".".join(parts))
        for path, is_module, parts in referred
        for module in [parts if is_module else [part for part in parts[:-1] if part.islower()]]
        if module and module[0] not in sys.stdlib_module_names and "/".join(module) not in known
    ]
    assert len(referred) > 200 and wrong == []
