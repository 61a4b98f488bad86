"""The table of seeded faults and healthy servers of docs/verify-server.md, with models of random weights and with SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from answer_faults import ANSWER_FAULTS
from fault_proxy import CACHE_FAULTS, OTHER, REQUEST_FAULTS, fault_proxy
from small_models import probe_tokenizer, smollm2, tiny_model, word_ids
from small_server import ENGINE_FAULTS, MODEL, MODEL_FAULTS, Options, SmallEngine, faulty, small_server

from sm120kit import probes
from sm120kit.core.urls import Endpoint
from sm120kit.probes import ProbeVerdict, ServerVerification
from sm120kit.probes.answer_text import COMMON

STRUCTURE = [
    "log-probabilities",
    "counts of tokens",
    "repeated requests",
    "decoding against prefill",
    "cached prefixes",
    "needles",
    "tool calls and JSON",
]
"""Probes that need no trained model."""
OF_TEXT = ("nan", "marker-in-text", "open-thought", "broken-characters", "other-script", "one-piece", "unseen-characters")
"""Faults that are seen in the text only. For these, random weights generate common words alone, as prose has them."""
OF_ENGINES = {"proxy-penalty", "proxy-no-template"}
"""Faults of a proxy that ask for what the small server does not have; its own faults have these names."""
NEED_TRAINING = {"positions-end"}
"""Faults that are the same every time, and that only a trained model shows."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads for matrices of this size only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return probe_tokenizer()


def verified(
    model: Any, tokenizer: Any, options: Options, names: list[str], reference: Any = None, words: bool = True
) -> ServerVerification:
    ends = frozenset[int]() if words else frozenset([int(tokenizer.eos_token_id)])
    ids = word_ids(tokenizer) if words else None
    if ids and names == ["text"]:
        ids = [each for each in ids if tokenizer.decode([each]).strip() in COMMON]
    engine = SmallEngine(model, ids, ends, options)
    with small_server(engine, tokenizer) as url:
        server = probes.VerifiedServer(Endpoint.parse(url), MODEL, reference)
        return probes.verify(server, probes.selected(names), 900)


def finds(model: Any, tokenizer: Any, options: Options, names: list[str]) -> bool:
    """Whether one of the probes, each of a new server, finds something wrong; those after it are not run."""
    return any(verified(model, tokenizer, options, [name]).wrong for name in names)


@pytest.mark.parametrize("fault", sorted({*ENGINE_FAULTS, *ANSWER_FAULTS} - NEED_TRAINING))
def test_fault_is_found(fault: str, tokenizer: Any) -> None:
    options = Options(faults=frozenset({fault}), drafts=3 if "draft" in fault else 0)
    names = ["text"] if fault in OF_TEXT else STRUCTURE
    assert finds(tiny_model(len(tokenizer)), tokenizer, options, names)


def test_common_words_are_not_found_wrong(tokenizer: Any) -> None:
    (found,) = verified(tiny_model(len(tokenizer)), tokenizer, Options(), ["text"]).probes
    assert found.verdict is ProbeVerdict.OK, found.saw


@pytest.mark.parametrize("fault", sorted({*REQUEST_FAULTS, *CACHE_FAULTS, OTHER} - OF_ENGINES))
def test_fault_of_a_proxy_is_found(fault: str, tokenizer: Any) -> None:
    engine = SmallEngine(tiny_model(len(tokenizer)), word_ids(tokenizer), frozenset(), Options())
    with small_server(engine, tokenizer) as url, fault_proxy(url, fault) as proxy:
        server = probes.VerifiedServer(Endpoint.parse(proxy), MODEL, None)
        assert any(probes.verify(server, probes.selected([name]), 900).wrong for name in STRUCTURE)


@pytest.mark.parametrize("fault", sorted({*MODEL_FAULTS, *NEED_TRAINING}))
def test_fault_that_is_the_same_every_time_is_found_by_a_reference(fault: str, tokenizer: Any) -> None:
    model = tiny_model(len(tokenizer), experts=8 if "expert" in fault else 0)
    engine = SmallEngine(model, word_ids(tokenizer), frozenset(), Options())
    with small_server(engine, tokenizer) as url:
        options = Options(faults=frozenset({fault}))
        reference = (Endpoint.parse(url), MODEL)
        assert verified(faulty(model, fault), tokenizer, options, ["log-probabilities"], reference).wrong


@pytest.mark.parametrize(
    ("experts", "options", "dtype", "seed"),
    [
        (0, Options(), torch.float32, 0),
        (0, Options(), torch.bfloat16, 1),
        (0, Options(drafts=3), torch.float32, 1),
        (0, Options(drafts=3), torch.bfloat16, 0),
        (8, Options(batch=4, cache=False), torch.float32, 0),
        (8, Options(batch=4, cache=False), torch.bfloat16, 1),
    ],
)
def test_healthy_server_is_not_found_wrong(
    experts: int, options: Options, dtype: torch.dtype, seed: int, tokenizer: Any
) -> None:
    model = tiny_model(len(tokenizer), experts=experts, seed=seed, dtype=dtype)
    found = verified(model, tokenizer, options, STRUCTURE)
    assert not found.wrong, found.wrong


class TestTrained:
    @pytest.fixture(scope="class")
    def smol(self) -> tuple[Any, Any]:
        return smollm2()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_healthy_server_is_not_found_wrong(self, dtype: torch.dtype, smol: tuple[Any, Any]) -> None:
        model, tokenizer = smol
        found = verified(model.to(dtype), tokenizer, Options(), [], words=False)
        model.to(torch.float32)
        assert not found.wrong, found.wrong

    @pytest.mark.parametrize("fault", ["rope-base", "shifted-vocabulary", "double-scale-layer", "positions-end"])
    def test_fault_is_found_by_a_known_text(self, fault: str, smol: tuple[Any, Any]) -> None:
        model, tokenizer = smol
        options = Options(faults=frozenset({fault}))
        found = verified(faulty(model, fault), tokenizer, options, ["known text"], words=False)
        assert found.probes[0].verdict is ProbeVerdict.WRONG
