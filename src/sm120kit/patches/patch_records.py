"""Records: patched trees, the projects in them, the status of a patch on a version, probes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sm120kit.sources.source_records import Checkout, Pin, VendoredProject


@dataclass(frozen=True)
class AppliedPatch:
    """A patch of a series as it was applied: ``sha256`` of its file, ``commit`` on top of the patches before it."""

    project: str
    slug: str
    sha256: str
    commit: str


@dataclass(frozen=True)
class PatchedTree:
    """A checkout with the overrides and every applicable patch on top, as a commit in the same repository.

    ``local`` are patches of the user above the series; the ``sha256`` of one is that of its diff.
    """

    checkout: Checkout
    inside: tuple[VendoredProject, ...]
    commit: str
    tree: str
    patches: tuple[AppliedPatch, ...]
    local: tuple[AppliedPatch, ...] = ()


@dataclass(frozen=True)
class TreeProject:
    """A project in a source tree with its version; ``path`` is its directory, empty for the project at the root."""

    project: str
    path: str
    version: str

    @property
    def prefix(self) -> str:
        """The prefix of its files' paths in the tree: empty, or a directory with a trailing slash."""
        return f"{self.path.strip('/')}/" if self.path else ""


def projects_in_tree(pin: Pin, inside: tuple[VendoredProject, ...]) -> list[TreeProject]:
    """The projects of a tree in the order in which they are patched: those inside first, the fetched project last."""
    nested = [TreeProject(project.project, project.path, project.version) for project in inside]
    return [*nested, TreeProject(pin.project, "", pin.version)]


def owner_of(path: str, projects: Sequence[TreeProject]) -> TreeProject | None:
    """The project that a file of a tree belongs to: of nested projects, the innermost; None if it belongs to none."""
    around = (project for project in projects if path.startswith(project.prefix))
    return max(around, key=lambda project: len(project.prefix), default=None)


class PatchState(StrEnum):
    """The result of trying a patch on one pinned version."""

    APPLIES = "applies"
    ALREADY_UPSTREAM = "already upstream"
    NOT_FOR_THIS_VERSION = "not for this version"
    CONFLICTS = "conflicts"


@dataclass(frozen=True)
class PatchStatus:
    """The state of a patch on one pin; ``detail`` has file, line and hunk of a conflict."""

    project: str
    slug: str
    version: str
    state: PatchState
    detail: str = ""


@dataclass(frozen=True)
class Probe:
    """A small instantiation that shows the effect of a patch: the value of a ``Probe`` trailer (patches/README.md).

    ``kind`` is ``collective`` (CUTLASS's own builder), ``launcher`` (the engine's launcher) or ``flags`` (the definitions that
    the engine's generator passes to nvcc for ``module``). ``m``, ``n``, ``k`` are the CTA tile in elements; 0x0x0 stands for
    every tile that the engine generates. ``numbers`` also runs the mainloop on the CPU, ``code`` also compares the code that
    nvcc generates. ``text`` is the probe in its normal form.
    """

    text: str
    kind: str
    family: str = ""
    dtype: str = ""
    m: int = 0
    n: int = 0
    k: int = 0
    epilogue: str = "none"
    swap: bool = False
    module: str = ""
    numbers: bool = False
    code: bool = False
    definitions: tuple[str, ...] = ()

    @property
    def shape(self) -> str:
        """The tile as ``MxNxK``; empty when there is none."""
        return f"{self.m}x{self.n}x{self.k}" if self.m else ""


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


def parse_probe(text: str) -> Probe:
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
