"""The rules of spelling of vLLM against the parser class in its wheel, of which only that file is read.

The class is the judge: of each command line it has to say what ``parser.rejection`` says from a record of its options.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import random
import re
import runpy
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import parser_probe
import pytest

from sm120kit.engines import parser
from sm120kit.sources import wheel_metadata
from sm120kit.sources.origin import Origin
from sm120kit.sources.releases import Releases

MEMBER = "vllm/utils/argparse_utils.py"
DECLARED: dict[tuple[str, ...], dict[str, Any]] = {
    ("model_tag",): {"nargs": "?"},
    ("--max-model-len",): {"type": int},
    ("--gpu-memory-utilization",): {"type": float},
    ("--kv-cache-dtype",): {"choices": ["auto", "fp8"]},
    ("--tensor-parallel-size", "-tp"): {"type": int},
    ("--trust-remote-code",): {"action": argparse.BooleanOptionalAction},
    ("--enable-prefix-caching",): {"action": argparse.BooleanOptionalAction},
    ("--enable-expert-parallel", "-ep"): {"action": argparse.BooleanOptionalAction},
    ("--disable-log-stats",): {"action": "store_true"},
    ("--speculative-config", "-sc"): {"type": json.loads},
    ("--compilation-config", "-cc"): {"type": json.loads},
    ("--optimization-level",): {},
    ("--allowed-origins",): {"nargs": "+"},
}
"""Options as vLLM declares them, one of each form."""
NAMES = [name for names in DECLARED for name in names if name.startswith("-")]
VALUES = ["1", "0.9", "fp8", "fp9", '{"a": 1}', "x,y", "-1", "-0.5", "a.b", "", "{", "--x", "-O", "3"]


def words(draw: random.Random) -> Iterator[str]:
    """One option in one of the forms in which people write them, right and wrong."""
    name = draw.choice(NAMES)
    bare = name.lstrip("-")
    name = draw.choice(
        (name, name, name.replace("-", "_").replace("__", "--", 1), f"--no-{bare}", f"--dis{bare[2:]}", name[:-2])
    )
    name += draw.choice(("", "", "", ".method", ".a.b", ".a_b", ".list+"))
    name = draw.choice((name, name, name, name, "-O3", "-O", "-O=2", "-tp2", "--no_such_option", "--disable-prefix-caching"))
    value = draw.choice(VALUES)
    yield from draw.choice(((name,), (name, value), (name, value), (f"{name}={value}",)))


def parser_class(version: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> type[argparse.ArgumentParser]:
    """``FlexibleArgumentParser`` of a release."""
    files = Releases(Origin()).files("vllm")
    location = next(file.location for file in files if file.version == version and file.filename.endswith("x86_64.whl"))
    with wheel_metadata.opened(location, Origin()) as wheel, zipfile.ZipFile(wheel) as archive:
        (directory / "argparse_utils.py").write_bytes(archive.read(MEMBER))
    logger = types.ModuleType("vllm.logger")
    vars(logger)["init_logger"] = logging.getLogger
    monkeypatch.setattr(logging.Logger, "warning_once", logging.Logger.debug, raising=False)
    for name, module in (("vllm", types.ModuleType("vllm")), ("vllm.logger", logger), ("regex", re)):
        monkeypatch.setitem(sys.modules, name, module)
    found: type[argparse.ArgumentParser] = runpy.run_path(str(directory / "argparse_utils.py"))["FlexibleArgumentParser"]
    return found


def accepted(judge: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            judge.parse_args(list(argv))
    except (SystemExit, IndexError):
        return False
    return True


@pytest.mark.parametrize("version", ["0.19.1", "0.33.0"])
def test_rules_are_those_of_the_parser_in_the_wheel(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = parser_class(version, tmp_path, monkeypatch)(prog="vllm serve")
    for names, options in DECLARED.items():
        judge.add_argument(*names, **options)
    listed = [parser_probe.option(action) for action in judge._actions if not isinstance(action, argparse._HelpAction)]
    record = parser.ParserRecord(f"vllm-{version}", "", tuple(map(parser._option, listed)), {})
    draw = random.Random(version)
    counts = {True: 0, False: 0}
    for _ in range(4_000):
        argv = [word for _ in range(draw.randint(1, 3)) for word in words(draw)]
        if not any("-h" in word or word.startswith("--h") for word in argv):
            answer = accepted(judge, argv)
            assert (parser.rejection(record, argv) == "") == answer, argv
            counts[answer] += 1
    assert min(counts.values()) > 300, counts
