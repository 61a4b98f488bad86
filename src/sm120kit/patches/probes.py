"""Parse ``Probe`` trailers: the small kernels that show what a patch changes."""

import re

from sm120kit.patches.patch_records import Probe

DTYPES = ("nvfp4", "mxfp4", "mxfp8", "fp8xmxfp4")

_KERNEL = rf"(?P<family>grouped|dense) (?P<dtype>{'|'.join(DTYPES)})"
_TILE = r"(?P<m>[1-9]\d{0,3})x(?P<n>[1-9]\d{0,3})x(?P<k>[1-9]\d{0,3})"
_FORMS = {
    "collective FAMILY DTYPE MxNxK|generated [numbers] [code] [-DNAME[=VALUE]]...": (
        rf"(?P<kind>collective) {_KERNEL} (?:{_TILE}|generated)(?P<numbers> numbers)?(?P<code> code)?"
        r"(?P<definitions>(?: -D[A-Za-z_]\w*(?:=\w*)?)*)"
    ),
    "launcher FAMILY DTYPE MxNxK [finalize] [swap] [code]": (
        rf"(?P<kind>launcher) {_KERNEL} {_TILE}(?P<finalize> finalize)?(?P<swap> swap)?(?P<code> code)?"
    ),
    "flags MODULE": r"(?P<kind>flags) (?P<module>\w+)",
}


class BadProbe(ValueError):
    """The text is not a probe; the message has the forms of one."""


def parse(text: str) -> Probe:
    """Parse the value of a ``Probe`` trailer (patches/README.md).

    Raises:
        BadProbe: the text has none of the forms of a probe.
    """
    text = " ".join(text.split())
    found = next((match.groupdict() for form in _FORMS.values() if (match := re.fullmatch(form, text, re.ASCII))), None)
    if found is None:
        raise BadProbe(f"expected {' or '.join(_FORMS)}; FAMILY is grouped or dense, DTYPE one of {', '.join(DTYPES)}")
    return Probe(
        text=text,
        kind=found["kind"],
        family=found.get("family") or "",
        dtype=found.get("dtype") or "",
        m=int(found.get("m") or 0),
        n=int(found.get("n") or 0),
        k=int(found.get("k") or 0),
        epilogue="finalize" if found.get("finalize") else "none",
        swap=bool(found.get("swap")),
        module=found.get("module") or "",
        numbers=bool(found.get("numbers")),
        code=bool(found.get("code")),
        definitions=tuple((found.get("definitions") or "").split()),
    )
