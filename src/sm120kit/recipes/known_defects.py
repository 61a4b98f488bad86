"""Defects of models with an engine that others reported: the file ``recipes/known_defects.toml``."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet

from sm120kit.recipes import load_engine
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.load import read_entries
from sm120kit.recipes.schema import Name, Strict, Strings


class KnownDefect(Strict):
    """A ``symptom``, as its ``source`` reports it, and what it requires: see the head of the file."""

    model_types: Strings
    engine: Name
    versions: str
    symptom: str
    source: str
    quantization: str = ""
    methods: Strings = ()
    gpus: Strings = ()
    remedy: str = ""
    patch: str = ""

    def applies(self, configuration: Configuration, model_type: str, quantization: str) -> bool:
        """Whether a configuration has it, with a checkpoint of this type and quantization."""
        recipe, drafts = load_engine(configuration.engine), configuration.speculation
        return (
            model_type in self.model_types
            and recipe.engine == self.engine
            and SpecifierSet(self.versions).contains(recipe.version, prereleases=True)
            and self.quantization in quantization.lower()
            and (not self.methods or (drafts is not None and drafts.method in self.methods))
            and (not self.gpus or any(gpu in configuration.hardware.gpu for gpu in self.gpus))
        )

    @property
    def text(self) -> str:
        """The defect with its remedy and source."""
        mended = f"mended by the patch {self.patch} of the default image" if self.patch else ""
        return "; ".join(filter(None, (self.symptom, self.remedy, mended, self.source)))


def of(configuration: Configuration, model_type: str, quantization: str) -> tuple[KnownDefect, ...]:
    """The defects of a configuration with a checkpoint of this type and quantization."""
    return tuple(
        each
        for each in read_entries(KnownDefect, "known_defects", "defect")
        if each.applies(configuration, model_type, quantization)
    )
