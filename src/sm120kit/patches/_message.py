"""Commit messages of patches: the rest of one that lacks trailers.

What a person must write is a placeholder, a text that starts with ``TODO``. ``patch check`` reports it; all other commands
accept it.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sm120kit.patches.diff import Problem
from sm120kit.patches.format import OPTIONAL, PLACEHOLDER, RELATIONS, REQUIRED, TRAILER, Patch

SUBJECT = f"{PLACEHOLDER}: area and change, such as builder: count scale factors per tile"
BODY = f"{PLACEHOLDER}: the defect, who is affected, what changes"
AUTHOR = f"{PLACEHOLDER} <name@address.invalid>"

_VALUES = {
    "Upstream-Status": "Submitted [URL], Backport [URL or 40-digit commit], Inappropriate [reason] or Pending",
    "Origin": "where the defect was reported, or how it was found",
    "Matters-For": "for which dtypes, tiles or hardware the patch changes something",
    "No-Effect-For": "for which dtypes, tiles or hardware it changes nothing",
    "Evidence": "the proof that `sm120kit patch prove {name} --write` writes, or tests",
    "Drop-When": "the condition for removing the patch",
}
_DEFAULTS = {
    "Upstream-Status": "Pending",
    "Matters-For": "not stated",
    "No-Effect-For": "not stated",
    "Evidence": "none",
    "Drop-When": "upstream has the change",
}
"""Values for the placeholders in a user's own patch: what upstream would need, reason and origin, is left to fill in."""

_ORDER = (*REQUIRED[:2], "Fixed-In", *RELATIONS, *REQUIRED[2:5], "Probe", *REQUIRED[5:], "Signed-off-by")
_TO_FILL_IN = re.compile(rf"(?:([A-Z][A-Za-z-]*): )?{PLACEHOLDER}\b:? ?(.*)")


def complete(body: str, name: str, version: str) -> str:
    """The body of a commit message with all required trailers: those that it has, and placeholders for the others.

    Lines of its last paragraph that are no trailer of a patch, such as ``Reviewed-by``, become a paragraph of prose.
    """
    project = name.partition("/")[0]
    *paragraphs, last = re.split(r"\n{2,}", "\n".join(line.rstrip() for line in body.splitlines()).strip("\n"))
    own: dict[str, list[str]] = {}
    prose: list[str] = []
    chunk = prose
    for line in last.split("\n"):
        trailer = TRAILER.fullmatch(line)
        if trailer and trailer[1] in REQUIRED + OPTIONAL:
            chunk = own.setdefault(trailer[1], [])
        elif trailer or not line.startswith(" "):
            chunk = prose
        chunk.append(line)
    values = {trailer: f"{PLACEHOLDER}: {text.format(name=name)}" for trailer, text in _VALUES.items()}
    values["Applies-To"] = f"{project} =={version}"
    missing = {trailer: [f"{trailer}: {value}"] for trailer, value in values.items()}
    trailers = [(missing | own).get(trailer, []) for trailer in _ORDER]
    text = "\n\n".join(filter(None, [*paragraphs, "\n".join(prose)])) or BODY
    return f"{text}\n\n" + "\n".join(line for chunk in trailers for line in chunk)


def is_complete(body: str) -> bool:
    """Whether a message has all required trailers."""
    return all(re.search(rf"^{trailer}:", body, re.MULTILINE) for trailer in REQUIRED)


def with_defaults(patch: Patch) -> Patch:
    """A user's own patch without placeholders where a default will do."""
    placeholder = re.compile(rf"^({'|'.join(_DEFAULTS)}): {PLACEHOLDER}\b.*(?:\n[ \t].*)*", re.MULTILINE)
    return replace(patch, body=placeholder.sub(lambda line: f"{line[1]}: {_DEFAULTS[line[1]]}", patch.body))


def to_fill_in(patch: Patch, file: Path) -> Iterator[Problem]:
    """The placeholders in the header and the message of a patch."""
    head = patch.content.removesuffix(patch.diff).decode(errors="replace")
    for number, line in enumerate(head.split("\n"), 1):
        if match := _TO_FILL_IN.match(line):
            yield Problem(file, number, f"{match[1] or 'the message'} is to be filled in: {match[2]}".rstrip(": "))
