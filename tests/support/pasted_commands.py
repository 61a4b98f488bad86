"""Commands in the code blocks of pages, as a reader pastes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"^ *(```|~~~)(\w*)\n(.*?)^ *\1$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> Iterator[str]:
    """Code blocks of a shell in which sm120kit runs."""
    for _, language, block in _BLOCK.findall(page.read_text()):
        if language in ("", "sh", "bash") and re.match(r"\s*(sudo (-E )?)?sm120kit ", block):
            yield block


def of_blocks(page: Path) -> Iterator[str]:
    """Lines that run sm120kit, of several joined by ``&&`` or ``|`` each, without comments, prompt and sudo."""
    for _, _, block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line):
                if command := re.match(r"\s*(?:\$ )?(?:sudo (?:-E )?)?(sm120kit .*)", part):
                    yield re.split(r"\s{2,}|\s#", command[1])[0].strip()
