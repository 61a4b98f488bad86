"""List the kernels that an engine instantiates for SM120, from its own generators, each as C++ text."""

import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm120kit.core import process
from sm120kit.core.errors import CheckFailed
from sm120kit.core.outside import parse_json
from sm120kit.core.sandbox import Sandbox, wrap
from sm120kit.kernels.kernel_records import Tile

GROUPED = "INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM"
ARGUMENTS = {
    GROUPED: "arch act weight output epilogue_schedule epilogue_tag fusion m n k cga_m cga_n cga_k mxfpx dynamic_cga bias swap",
    "INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER": "output m n k cga_m cga_n cga_k sm swap",
    "INSTANTIATE_MXFP8_GEMM_KERNEL_LAUNCHER_SM120": "output m n k swap",
}
"""The launcher macros whose kernels use CUTLASS's GemmUniversalAdapter, with the names of their arguments in order."""

DENSE_DTYPE = {"INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER": "nvfp4", "INSTANTIATE_MXFP8_GEMM_KERNEL_LAUNCHER_SM120": "mxfp8"}
GROUPED_DTYPE = {
    ("SafeFP4", "SafeFP4", "false"): "nvfp4",
    ("SafeFP4", "SafeFP4", "true"): "mxfp4",
    ("__nv_fp8_e4m3", "__nv_fp8_e4m3", "true"): "mxfp8",
    ("__nv_fp8_e4m3", "SafeFP4", "true"): "fp8xmxfp4",
}
OUTPUT = {"half": "f16", "__nv_bfloat16": "bf16"}

CANDIDATES = (
    ("grouped", "nvfp4", 128, 128, 64),
    ("grouped", "nvfp4", 256, 128, 64),
    ("grouped", "nvfp4", 128, 256, 64),
    ("grouped", "fp8xmxfp4", 128, 128, 64),
    ("dense", "nvfp4", 128, 128, 64),
)
"""Tiles that are measured even if the engine does not generate them: those of the K=64 question (patches/README.md)."""

PLAIN = Tile("grouped", "nvfp4", 128, 128, 128, "none", False, "bf16")
"""The tile whose call, in any shape, the candidates of :data:`MX_OPERANDS` are made of."""

LISTED_ONCE = "fp8xmxfp4"
"""The dtype whose candidates are listed once, with bf16 and without swap: each tile that does not compile takes seconds."""

MX_OPERANDS = ("SafeFP4", "__nv_fp8_e4m3")
"""Operand types of MXFP4 and MXFP8, whose grouped K=64 tiles are measured: the patch effective-block-sf makes them possible. No
engine generates these dtypes, so the calls are those of NVFP4 with other types."""
MX_SHAPES = ((128, 128, 64), (256, 128, 64), (128, 256, 64))

FUSED_MOE_GENERATOR = "gen_cutlass_fused_moe_sm120_module"
GROUPWISE_GENERATOR = "gen_gemm_sm120_module"
DENSE_GENERATORS = "gen_gemm_sm120_module_cutlass_"
"""Start of the names of the functions that generate dense kernels."""

GENERATORS = {"flashinfer/jit/fused_moe.py": FUSED_MOE_GENERATOR, "flashinfer/jit/gemm/core.py": GROUPWISE_GENERATOR}
"""The functions that every supported version has, by their files."""

INCLUDE = re.compile(r"^[ \t]*#[ \t]*include\b.*$", re.MULTILINE)

UNSUPPORTED = "sm120kit tiles does not support this engine version"


def generates_tiles(generator: str) -> bool:
    """Whether the modules of a generator, ``package.module:function``, consist of tiles that :func:`instantiations` lists."""
    package, _, function = generator.partition(":")
    if package == "flashinfer.jit.fused_moe":
        return function == FUSED_MOE_GENERATOR
    return package == "flashinfer.jit.gemm.core" and (function.startswith(DENSE_GENERATORS) or function == GROUPWISE_GENERATOR)


@dataclass(frozen=True)
class Instantiation:
    """A launcher macro call, or the text of whole source files.

    ``head`` and ``tail`` are the C++ text around it, common to the calls of a ``module``. ``tile`` is what a macro call names;
    of whole files it has the family only, and the probe describes their kernels.
    """

    tile: Tile
    module: str
    head: str
    call: str
    tail: str
    definitions: tuple[str, ...]
    generated: bool = True

    @property
    def whole_files(self) -> bool:
        """Whether it is the text of whole source files."""
        return not self.tile.m

    @property
    def name(self) -> str:
        """The macro call, or the name of the module that source files belong to."""
        return self.module if self.whole_files else self.call

    def is_in(self, modules: Collection[str]) -> bool:
        """Whether it is a part of one of these modules: gemm_sm120-0 of gemm_sm120, and fused_moe of fused_moe_120."""
        return any(name.startswith(self.module.partition("-")[0]) for name in modules)


def whole_files(module: str, family: str, texts: Sequence[str], definitions: tuple[str, ...]) -> Instantiation:
    """Source files with the same includes as one translation unit, in which kernels are launched as functions are called."""
    head = "\n".join(INCLUDE.findall(texts[0])) + "\n"
    text = "\n".join(re.sub(r"<<<[^<>]*>>>", "", INCLUDE.sub("", text)) for text in texts)
    tile = Tile(family, "", 0, 0, 0, "none", False, "")
    return Instantiation(tile, module, head, text, "", definitions)


def instantiations(tree: Path, sandbox: Sandbox | None = None) -> list[Instantiation]:
    """All calls that the engine generates for SM120, then the candidates that it does not generate.

    Raises:
        CheckFailed: the generators differ from those of the supported engine versions.
        CommandFailed: a generator fails.
    """
    for source, function in GENERATORS.items():
        if not (tree / source).is_file():
            raise CheckFailed(f"{tree} has no {source}", "sm120kit tiles supports FlashInfer source trees")
        if f"def {function}(" not in (tree / source).read_text():
            raise CheckFailed(f"{source} has no function {function}", UNSUPPORTED)
    try:
        generated = [call for generator, output in run(tree, sandbox).items() for call in _calls(generator, output)]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, KeyError) as error:
        raise CheckFailed(f"the generators of {tree} are malformed: {error}", UNSUPPORTED) from error
    tiles = {call.tile for call in generated}
    return generated + [call for call in _candidates(generated) if call.tile not in tiles]


def run(tree: Path, sandbox: Sandbox | None = None) -> dict[str, dict[str, Any]]:
    """The output of the generators for SM120 by their names: see ``_generate.py``.

    Raises:
        CommandFailed: a generator fails.
    """
    argv, env = wrap([sys.executable, "-I", Path(__file__).with_name("_generate.py"), tree], sandbox, read=[tree])
    printed = process.run(argv, env=env).stdout.splitlines()
    output: dict[str, dict[str, Any]] = parse_json(printed[-1] if printed else "")
    return output


def _calls(generator: str, output: Mapping[str, Any]) -> Iterator[Instantiation]:
    """The launcher calls in the files of a generator; of groupwise GEMMs, whole files with the same includes as one text."""
    definitions = tuple(sorted({flag for flag in output["flags"] if flag.startswith("-D")}))
    if generator != GROUPWISE_GENERATOR:
        for text in output["files"].values():
            yield from parse(text, output["module"], definitions)
        return
    by_includes: dict[str, list[str]] = {}
    for text in output["files"].values():
        by_includes.setdefault("\n".join(INCLUDE.findall(text)), []).append(text)
    for number, texts in enumerate(by_includes.values()):
        yield whole_files(f"{output['module']}-{number}", "groupwise", texts, definitions)


def parse(source: str, module: str, definitions: tuple[str, ...]) -> list[Instantiation]:
    """The launcher calls of one generated source file. Preprocessor conditions around them are assumed true."""
    source = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    source = re.sub(r"^#(if|endif)\b.*\n?", "", source, flags=re.MULTILINE)
    calls = list(re.finditer(r"\b(INSTANTIATE_\w+)\s*\(([^()]*)\)\s*;?", source))
    unknown = {call[1] for call in calls} - ARGUMENTS.keys()
    if unknown or not calls:
        problem = f"calls {', '.join(sorted(unknown))}" if unknown else "has no launcher call"
        raise CheckFailed(f"a generated source of {module} {problem}", UNSUPPORTED)
    head, tail = source[: calls[0].start()].strip() + "\n", source[calls[-1].end() :].strip() + "\n"
    return [
        Instantiation(_tile(call[1], call[2]), module, head, f"{call[1]}({_normalized(call[2])});", tail, definitions)
        for call in calls
    ]


def _normalized(arguments: str) -> str:
    return ", ".join(argument.strip() for argument in arguments.split(","))


def _tile(macro: str, arguments: str) -> Tile:
    values = dict(zip(ARGUMENTS[macro].split(), _normalized(arguments).split(", "), strict=False))
    kind = (values.get("act", ""), values.get("weight", ""), values.get("mxfpx", ""))
    return Tile(
        family="grouped" if macro == GROUPED else "dense",
        dtype=DENSE_DTYPE.get(macro) or GROUPED_DTYPE.get(kind) or "x".join(kind[:2]),
        m=int(values["m"]),
        n=int(values["n"]),
        k=int(values["k"]),
        epilogue=values.get("fusion", "none").lower(),
        swap=values.get("swap") == "true",
        output=OUTPUT.get(values["output"], values["output"]),
    )


def _candidates(generated: list[Instantiation]) -> Iterator[Instantiation]:
    """The candidate tiles: the engine's calls for a family and dtype, with another tile shape."""
    listed = set()
    for family, dtype, m, n, k in CANDIDATES:
        for call in generated:
            tile = replace(call.tile, m=m, n=n, k=k)
            required = dtype != LISTED_ONCE or (tile.output, tile.swap) == ("bf16", False)
            if (tile.family, tile.dtype) == (family, dtype) and required and tile not in listed:
                listed.add(tile)
                yield _changed(call, m=m, n=n, k=k)
    plain = [call for call in generated if call.tile == replace(PLAIN, m=call.tile.m, n=call.tile.n, k=call.tile.k)]
    for call in plain[:1]:
        for operand in MX_OPERANDS:
            for m, n, k in MX_SHAPES:
                yield _changed(call, act=operand, weight=operand, mxfpx="true", m=m, n=n, k=k)


def _changed(call: Instantiation, **values: object) -> Instantiation:
    """A call that the engine does not generate: one of its calls with other arguments."""
    macro, text = call.call.removesuffix(");").split("(", 1)
    names, arguments = ARGUMENTS[macro].split(), text.split(", ")
    for name, value in values.items():
        arguments[names.index(name)] = str(value)
    text = ", ".join(arguments)
    return replace(call, tile=_tile(macro, text), call=f"{macro}({text});", generated=False)
