"""``sm120kit init``: make a repository for the user's own recipes, patches and configurations."""

from pathlib import Path
from typing import Annotated

from sm120kit.cli.options import argument
from sm120kit.core import console
from sm120kit.recipes import new_repository


def init(directory: Annotated[Path, argument("DIR", "New or empty directory.")]) -> None:
    """Make a repository for your own recipes, patches and configurations.

    Commands that run in it read it before the data that is built in, and write only there. An upgrade of sm120kit never changes
    it.
    """
    made = new_repository.make(directory)
    console.data(f"made {made}")
    console.info(f"work in it: cd {directory}; or name it: sm120kit -C {directory} recipe list")
