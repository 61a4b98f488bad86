"""What a patch names to be proven by: the value of one ``Probe`` trailer, read strictly."""

from __future__ import annotations

import difflib
import re

from sm120kit.records import Probe

DTYPES = ("nvfp4", "mxfp4", "mxfp8", "fp8xmxfp4")
GENERATED = "generated"
"""In the place of a shape: every tile of that family and dtype that the engine generates."""

_FORMS = {
    "collective": "collective FAMILY DTYPE MxNxK|generated [numbers] [code] [-DNAME[=VALUE]]...",
    "launcher": "launcher FAMILY DTYPE MxNxK [finalize] [swap] [code]",
    "flags": "flags MODULE",
}
_WORDS = {"collective": ("numbers", "code"), "launcher": ("finalize", "swap", "code")}
_SHAPE = re.compile(r"([1-9]\d{0,3})x([1-9]\d{0,3})x([1-9]\d{0,3})")
_DEFINITION = re.compile(r"-D[A-Za-z_]\w*(=\w*)?")


class BadProbe(ValueError):
    """The text is not that of a probe; says why."""


def parse(text: str) -> Probe:
    """Read a probe.

    Raises:
        BadProbe: it is of none of the forms.
    """
    kind, *words = text.split() or [""]
    if kind not in _FORMS:
        raise BadProbe(f"a probe starts with {_one_of(kind, tuple(_FORMS))}")
    form = f"expected: {_FORMS[kind]}"
    if kind == "flags":
        if len(words) != 1 or not re.fullmatch(r"\w+", words[0]):
            raise BadProbe(form)
        return Probe(text=f"flags {words[0]}", kind=kind, module=words[0])
    if len(words) < 3:
        raise BadProbe(form)
    family, dtype, shape, *options = words
    if family not in ("grouped", "dense"):
        raise BadProbe(f"the family is {_one_of(family, ('grouped', 'dense'))}; {form}")
    if dtype not in DTYPES:
        raise BadProbe(f"the dtype is {_one_of(dtype, DTYPES)}; {form}")
    extents = _SHAPE.fullmatch(shape)
    if not extents and not (shape == GENERATED and kind == "collective"):
        raise BadProbe(f"{shape!r} is no tile; {form}")
    definitions = tuple(sorted(word for word in options if _DEFINITION.fullmatch(word)))
    plain = [word for word in options if word not in definitions]
    for word in plain:
        if word not in _WORDS[kind] or plain.count(word) > 1:
            raise BadProbe(f"{word!r} is unknown or there twice; {form}")
    if definitions and kind != "collective":
        raise BadProbe(f"a launcher has the definitions of its engine; {form}")
    m, n, k = (int(extent) for extent in extents.groups()) if extents else (0, 0, 0)
    ordered = [word for word in _WORDS[kind] if word in plain]
    return Probe(
        text=" ".join([kind, family, dtype, shape, *ordered, *definitions]),
        kind=kind,
        family=family,
        dtype=dtype,
        m=m,
        n=n,
        k=k,
        epilogue="finalize" if "finalize" in plain else "none",
        swap="swap" in plain,
        numbers="numbers" in plain,
        code="code" in plain,
        definitions=definitions,
    )


def _one_of(word: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f"one of {', '.join(known)}, not {word!r}" + (f"; did you mean {near[0]}?" if near else "")
