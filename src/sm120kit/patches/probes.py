"""Parse ``Probe`` trailers: the small kernels that show what a patch changes."""

from __future__ import annotations

import difflib
import re

from sm120kit.patches.patch_records import Probe

DTYPES = ("nvfp4", "mxfp4", "mxfp8", "fp8xmxfp4")
GENERATED = "generated"
"""Instead of a tile: every tile of that family and dtype that the engine generates."""

_FORMS = {
    "collective": "collective FAMILY DTYPE MxNxK|generated [numbers] [code] [-DNAME[=VALUE]]...",
    "launcher": "launcher FAMILY DTYPE MxNxK [finalize] [swap] [code]",
    "flags": "flags MODULE",
}
_KEYWORDS = {"collective": ("numbers", "code"), "launcher": ("finalize", "swap", "code")}
_SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([1-9]\d{0,3})")
_DEFINITION = re.compile(r"-D[A-Za-z_]\w*(=\w*)?")


class BadProbe(ValueError):
    """The text is not a probe; the message has the reason."""


def parse(text: str) -> Probe:
    """Parse the value of a ``Probe`` trailer (patches/README.md).

    Raises:
        BadProbe: the text has none of the forms of a probe.
    """
    kind, *arguments = text.split() or [""]
    if kind not in _FORMS:
        raise BadProbe(f"a probe starts with {_not_among(kind, tuple(_FORMS))}")
    form = f"expected: {_FORMS[kind]}"
    if kind == "flags":
        if len(arguments) != 1 or not re.fullmatch(r"\w+", arguments[0]):
            raise BadProbe(form)
        return Probe(text=f"flags {arguments[0]}", kind=kind, module=arguments[0])
    if len(arguments) < 3:
        raise BadProbe(form)
    family, dtype, shape, *options = arguments
    if family not in ("grouped", "dense"):
        raise BadProbe(f"the family is {_not_among(family, ('grouped', 'dense'))}; {form}")
    if dtype not in DTYPES:
        raise BadProbe(f"the dtype is {_not_among(dtype, DTYPES)}; {form}")
    extents = _SHAPE.fullmatch(shape)
    if not extents and not (shape == GENERATED and kind == "collective"):
        raise BadProbe(f"{shape!r} is not a tile MxNxK; {form}")
    definitions = tuple(sorted(option for option in options if _DEFINITION.fullmatch(option)))
    keywords = [option for option in options if option not in definitions]
    for keyword in keywords:
        if keyword not in _KEYWORDS[kind] or keywords.count(keyword) > 1:
            raise BadProbe(f"{keyword!r} is unknown or repeated; {form}")
    if definitions and kind != "collective":
        raise BadProbe(f"a launcher has the definitions of its engine; {form}")
    m, n, k = (int(extent) for extent in extents.groups()) if extents else (0, 0, 0)
    ordered = [keyword for keyword in _KEYWORDS[kind] if keyword in keywords]
    return Probe(
        text=" ".join([kind, family, dtype, shape, *ordered, *definitions]),
        kind=kind,
        family=family,
        dtype=dtype,
        m=m,
        n=n,
        k=k,
        epilogue="finalize" if "finalize" in keywords else "none",
        swap="swap" in keywords,
        numbers="numbers" in keywords,
        code="code" in keywords,
        definitions=definitions,
    )


def _not_among(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"one of {', '.join(known)}, not {word!r}" + (f"; did you mean {near[0]}?" if near else "")
