"""The laboratory's operators as a test imports them: afresh, on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import sm12x_lab

OPERATORS = Path(sm12x_lab.__file__).parent / "operators"


def program(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of that directory; the others that it imports are new as well."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(OPERATORS)
    for path in OPERATORS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    monkeypatch.setattr(importlib.import_module("reference"), "DEVICE", "cpu")
    torch.manual_seed(0)
    return importlib.import_module(name)


def runner() -> Callable[[list[str]], int]:
    """``main`` of that directory, which runs a program."""
    spec = importlib.util.spec_from_file_location("operators_main", OPERATORS / "__main__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["operators_main"] = module  # where its dataclass looks for its module
    spec.loader.exec_module(module)
    return module.main  # type: ignore[no-any-return]
