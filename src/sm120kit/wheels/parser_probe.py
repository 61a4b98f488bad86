"""Print the options of an engine's argument parser and its answers to command lines; run by a Python that has the engine.

It takes ``vllm`` or ``sglang``, reads ``{name: [argument, ...]}`` from stdin, and writes ``{"options": [...], "answers": {name:
text}}`` to stdout. The text is the parser's error message, empty for a command line that it accepts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

Parse = Callable[[list[str]], object]
STAND_INS = ("torchvision", "sgl_kernel", "flashinfer")
"""Imported by SGLang with its parser but not used by it: code for GPUs, or built for a torch with CUDA."""


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import modules of ``STAND_INS`` that are not installed as mocks."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in STAND_INS:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return MagicMock(name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def vllm() -> tuple[argparse.ArgumentParser, Parse]:
    """The parser of ``vllm serve``, with the validation of its values that follows."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms._current_platform = CpuPlatform()  # no platform is detected without a GPU, and defaults need a platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    for package in ("common", "launchers", "openai"):  # of 0.33, of 0.32, before
        with contextlib.suppress(ModuleNotFoundError):
            cli_args = importlib.import_module(f"vllm.entrypoints.{package}.cli_args")
            break
    last = getattr(cli_args, "validate_api_server_args", None)
    if last is None:  # before 0.33
        last = importlib.import_module("vllm.entrypoints.openai.api_server").validate_api_server_args
    parser = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

    def parse(argv: list[str]) -> object:
        parsed = parser.parse_args(argv)
        cli_args.validate_parsed_serve_args(parsed)
        last(parsed)
        return parsed

    return parser, parse


def sglang() -> tuple[argparse.ArgumentParser, Parse]:
    """The parser of ``sglang.launch_server``."""
    sys.meta_path.append(StandIn())
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    ServerArgs.add_cli_args(parser)
    return parser, parser.parse_args


def option(action: argparse.Action) -> dict[str, Any]:
    """An option as JSON: its names and the values that it accepts."""
    kind = getattr(action.type, "__name__", "") if action.type else ""
    choices = None if action.choices is None else sorted(map(str, action.choices))
    return {"names": list(action.option_strings), "nargs": action.nargs, "type": kind, "choices": choices}


def main() -> None:
    engines = {"vllm": vllm, "sglang": sglang}
    lines = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        parser, parse = engines[sys.argv[1]]()
        answers = {name: answer(parse, argv) for name, argv in lines.items()}
    options = [option(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    json.dump({"options": options, "answers": answers}, sys.stdout)


def answer(parse: Parse, argv: list[str]) -> str:
    """The parser's error message for a command line; empty if it accepts."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            parse(argv)
    except SystemExit:
        return output.getvalue().strip().splitlines()[-1].partition("error: ")[2]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
