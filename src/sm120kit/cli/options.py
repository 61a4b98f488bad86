"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Mirror = Annotated[str | None, typer.Option("--mirror", metavar="DIR|URL", help="Fetch sources from here, not the index.")]
Offline = Annotated[bool, typer.Option("--offline", help="Use what is fetched already, or a local mirror.")]
State = Annotated[Path | None, typer.Option("--state", help="State directory; default: SM120KIT_STATE or the user's.")]
