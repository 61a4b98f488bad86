"""Draft models in repositories of their own, for speculation with another model: the file ``recipes/drafters.toml``."""

from __future__ import annotations

import re
from typing import Annotated

from packaging.specifiers import SpecifierSet
from pydantic import Field

from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.recipes.load import read_entries
from sm120kit.recipes.schema import EngineRecipe, Strict


class Drafter(Strict):
    """A draft model: ``method`` and most ``draft_tokens`` of a step, and the ``versions`` of engines that load it."""

    repository: str
    models: str
    method: str
    draft_tokens: Annotated[int, Field(gt=0)]
    versions: dict[str, str]
    source: str

    def drafts_for(self, repository: str, recipe: EngineRecipe) -> bool:
        """Whether it drafts for a model with an engine."""
        versions = self.versions.get(recipe.engine)
        suits = re.search(self.models, repository.partition("/")[2]) is not None
        return suits and versions is not None and SpecifierSet(versions).contains(recipe.version, prereleases=True)

    @property
    def text(self) -> str:
        """The drafter with its source."""
        return f"{self.repository}: {self.method}, {self.draft_tokens} draft tokens; {self.source}"


def of(repository: str, recipe: EngineRecipe) -> tuple[Drafter, ...]:
    """The drafters for a model with an engine."""
    return tuple(each for each in read_entries(Drafter, "drafters", "drafter") if each.drafts_for(repository, recipe))


def named(drafter: str, repository: str, recipe: EngineRecipe) -> Drafter:
    """The drafter with a name.

    Raises:
        NotFound: none of that name drafts for the model with the engine.
    """
    known = {each.repository: each for each in of(repository, recipe)}
    if drafter in known:
        return known[drafter]
    option = recipe.served_by.draft_arguments("METHOD", "REPO", 3)
    raise NotFound(
        f"{drafter!r} is no known drafter of {repository} with {recipe.name}{did_you_mean(drafter, known)}",
        f"known: {', '.join(known) or 'none'}; for another one, give the engine's own option: -- {' '.join(option)}",
    )
