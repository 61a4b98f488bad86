"""What options of a configuration change: its server with and without each, started in turn, and compared start by start."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from sm120kit.bench.compare_results import Gain, gains
from sm120kit.bench.result_file import Result
from sm120kit.core.errors import Mismatch
from sm120kit.core.outside import parse_json
from sm120kit.images import backends
from sm120kit.recipes import arguments, reported
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.reported import Ablation
from sm120kit.serving import allreduce
from sm120kit.serving.derived_configuration import with_arguments

FIGURES = ("decode_tok_s", "total_tok_s", "prefill_tok_s")


def options(configuration: Configuration, names: Iterable[str]) -> tuple[Ablation, ...]:
    """The options of a configuration with these names, none of which its engine refuses.

    Raises:
        NotFound: the configuration has no such option.
        Mismatch: its engine refuses options.
    """
    found, refusals = reported.ablations_named(configuration, names), backends.refused_options(configuration)
    refused = [f"{each.name}: {refusals[each.name]}" for each in found if each.name in refusals]
    if refused:
        raise Mismatch(
            f"{configuration.engine} refuses options of {configuration.name}: {'; '.join(refused)}",
            f"leave them out; `sm120kit config show {configuration.name}` lists the others",
        )
    return found


def configured(configuration: Configuration, option: Ablation) -> Configuration:
    """The configuration with an option. A dotted argument is one more key of the JSON object that the option has.

    Raises:
        BadInput: the engine's parser refuses the arguments.
    """
    words = list(option.arguments)
    for index, word in enumerate(words[:-1]):
        name, _, key = word.partition(".")
        if key and word.startswith("--"):
            before = parse_json(configuration.option(name) or "{}")
            words[index : index + 2] = [name, json.dumps({**before, key: words[index + 1]})]
    changed = with_arguments(configuration, tuple(words), option.without)
    changed = changed.model_copy(update={"environment": {**changed.environment, **option.environment}})
    arguments.require_known(changed)
    return changed


def all_reduce(configuration: Configuration, options: Iterable[Ablation]) -> str:
    """The all-reduce of all variants: ``auto``, or the default where an option selects one, which `tune` may have found."""
    selecting = {name for each in configuration.served_by.all_reduces.values() for name in each.environment}
    return allreduce.DEFAULT if any(selecting & option.environment.keys() for option in options) else "auto"


@dataclass(frozen=True)
class AnswerChanges:
    """How many prompts have other answers with the option, and how many in another start without it, each of those compared.

    ``unknown`` is why no answers can be compared.
    """

    changed: int = 0
    compared: int = 0
    changed_without: int = 0
    compared_without: int = 0
    unknown: str = ""

    @property
    def text(self) -> str:
        """Whether the answers changed."""
        if self.unknown:
            return f"unknown whether answers changed: {self.unknown}"
        noise = f"{self.changed_without} of {self.compared_without} do between two starts without it"
        if not self.changed:
            return f"answers unchanged: 0 of {self.compared} differ with the option"
        more = self.changed * self.compared_without > self.changed_without * self.compared or not self.compared_without
        verdict = "answers changed" if more else "answers change no more than without the option"
        return f"{verdict}: {self.changed} of {self.compared} differ with the option; {noise}"


@dataclass(frozen=True)
class AblationEffect:
    """What an option changes: gains of all complete cases, and answers."""

    name: str
    option: str
    gains: tuple[Gain, ...]
    answers: AnswerChanges


def effect(option: Ablation, without: Result, having: Result) -> AblationEffect:
    """Compare the results of a configuration without and with an option, start by start."""
    return AblationEffect(option.name, option.text, gains(without, having, FIGURES), _answers(without, having))


Texts = Mapping[tuple[object, ...], frozenset[str]]
"""Case and prompt -> hashes of its answers."""


def _answers(without: Result, having: Result) -> AnswerChanges:
    if without.environment.temperature:
        return AnswerChanges(unknown=f"the workload has temperature {without.environment.temperature:g}")
    before, after = list(_texts(without)), list(_texts(having))
    changed, compared = _differing(zip(before, after, strict=False))
    if not compared:
        return AnswerChanges(unknown="no prompt was answered in both without random tokens before it")
    return AnswerChanges(changed, compared, *_differing(pairwise(before)))


def _texts(result: Result) -> Iterator[Texts]:
    """The answers of each start, in all complete cases whose prompts are equal in each of them."""
    for start in sorted({case.restart for case in result.cases}):
        found: dict[tuple[object, ...], set[str]] = {}
        for case in result.cases:
            if case.restart == start and case.complete and not case.context_tokens:
                for sample in case.samples:
                    if not sample.error:
                        found.setdefault((case.key, sample.prompt), set()).add(sample.text_sha256)
        yield {key: frozenset(texts) for key, texts in found.items()}


def _differing(pairs: Iterable[tuple[Texts, Texts]]) -> tuple[int, int]:
    """How many prompts have other answers, and how many were compared."""
    equal = [a[key] == b[key] for a, b in pairs for key in a.keys() & b.keys()]
    return equal.count(False), len(equal)
