"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ContextOnly = Annotated[bool, typer.Option("--context-only", help="Of an image: stop at the ready build context.")]
Jobs = Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="At most this many compiles at once; default: cores.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Memory = Annotated[
    float | None,
    typer.Option("--memory", min=0.1, metavar="GIB", help="Use at most this much memory; default: what is available."),
]
Mirror = Annotated[str | None, typer.Option("--mirror", metavar="DIR|URL", help="Fetch sources from here, not the index.")]
Network = Annotated[str, typer.Option("--network", help="The network of an image's build steps; they fetch nothing.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is fetched already, or a local mirror.")]
State = Annotated[Path | None, typer.Option("--state", help="State directory; default: SM120KIT_STATE or the user's.")]


def named_values(texts: list[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` as often as it was given."""
    import re

    found = {}
    for text in texts:
        if not re.fullmatch(r"[a-z][a-z0-9_.-]*=.+", text):
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint=option)
        name, _, value = text.partition("=")
        found[name] = value
    return found
