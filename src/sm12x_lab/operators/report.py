"""What a program printed and its receipt: rows, planted faults, versions, and the sources that made it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from reference import OperatorRow


class Unusable(Exception):
    """This Python or this GPU cannot run the program."""


def sources() -> dict[str, str]:
    """The sha256 of each file of this directory and the program's own that the program consists of."""
    folders = {
        Path(__file__).resolve().parent,
        Path(getattr(sys.modules.get("__main__"), "__file__", __file__)).resolve().parent,
    }
    files = {Path(str(module.__file__)) for module in list(sys.modules.values()) if getattr(module, "__file__", None)}
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files) if file.resolve().parent in folders
    }


def distribution_version(name: str) -> str:
    """The version of an installed distribution; empty if none has the name, as of a package that is a directory on the path."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


class OperatorReport:
    """Rows and planted faults, printed as they come; the record states the versions of ``packages``."""

    def __init__(self, kind: str, packages: Sequence[str]) -> None:
        self.kind, self.packages = kind, packages
        self.rows: list[OperatorRow] = []
        self.faults: dict[str, str] = {}
        self.started = time.monotonic()

    def add(self, row: OperatorRow) -> None:
        self.rows.append(row)
        figures = f"error/bound {row.error_over_bound:.3f}, rms {row.relative_rms:.2e}, cosine {row.cosine:.5f}"
        seconds = time.monotonic() - self.started
        print(f"{seconds:6.1f} s  {row.operator}: {row.case}: {row.verdict}: {row.why or figures}", flush=True)

    def fault(self, name: str, row: OperatorRow) -> None:
        self.faults[name] = "detected" if row.verdict == "WRONG" else "NOT DETECTED"
        print(f"planted: {name}: {self.faults[name]}, error/bound {row.error_over_bound:.1f} {row.why}", flush=True)

    @property
    def missed(self) -> list[str]:
        return [name for name, outcome in self.faults.items() if outcome == "NOT DETECTED"]

    def record(self) -> dict[str, Any]:
        modules = {name: sys.modules[name] for name in self.packages if name in sys.modules}
        return {
            "format": 1,
            "kind": self.kind,
            "gpu": torch.cuda.get_device_name(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability())),
            "versions": {
                name: str(getattr(module, "__version__", "") or distribution_version(name)) for name, module in modules.items()
            },
            "seconds": round(time.monotonic() - self.started, 1),
            "rows": [asdict(row) for row in self.rows],
            "faults": self.faults,
            "program": sources(),
        }

    def finish(self, receipt: Path | None) -> int:
        """Write the record, print the counts and return the exit code."""
        if receipt:
            receipt.write_text(json.dumps(self.record(), indent=1) + "\n")
        counts = {verdict: sum(row.verdict == verdict for row in self.rows) for verdict in ("right", "WRONG", "refused")}
        print(f"{counts}; planted faults detected: {len(self.faults) - len(self.missed)} of {len(self.faults)}")
        if not counts["right"] + counts["WRONG"]:
            print("nothing was compared: every call was refused, or --only matches none")
            return 2
        if defaults := [row.case for row in self.rows if row.verdict == "refused" and ", auto" in row.case]:
            print(f"what the engine selects by default was refused: {', '.join(defaults)}")
        if self.missed:
            return 51
        return 0 if counts["right"] and not counts["WRONG"] and not defaults else 1
