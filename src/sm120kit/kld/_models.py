"""Next-token distributions of a local checkpoint, or of a server that returns log-probabilities of a prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sm120kit import engines
from sm120kit.core.errors import BadInput, RequirementMissing, ServerFailed
from sm120kit.core.outside import parse_json, read_found
from sm120kit.core.server_requests import request
from sm120kit.core.urls import Endpoint
from sm120kit.engines import Engine
from sm120kit.kld._tokens import TokenizedText, existing, libraries, require_same_vocabulary, vocabulary
from sm120kit.kld.divergence import FullDistributions, TopLogProbabilities

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_PROBABILITY = -9999.0
"""vLLM's value for a log-probability of minus infinity in its completions protocol; JSON has no infinities."""

MAX_RESPONSE_BYTES = 256 * 2**20
"""Limit of a response with log-probabilities, which takes several times as much memory as text."""

_TIMEOUT_SECONDS = 600.0


class ComparedModel(Protocol):
    """A model to compare. ``name`` identifies it in the record."""

    name: str

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[FullDistributions | TopLogProbabilities]:
        """For each window of token ids, the distributions after each of its tokens. All windows are one batch."""
        ...


class LocalModel:
    """A checkpoint directory, computed by Transformers in the checkpoint's precision; on a GPU if torch has one."""

    def __init__(self, directory: Path) -> None:
        """Load the checkpoint.

        Raises:
            NotFound: the directory does not exist.
            BadInput: Transformers cannot load it.
            RequirementMissing: torch or Transformers is not installed.
        """
        torch, transformers = libraries()
        self.name, self._torch = str(directory), torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(existing(directory), dtype="auto", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise BadInput(f"{directory}: {error}", "Transformers must be able to load it") from error
        self._model = model.to(self._device).eval()

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[FullDistributions]:
        """For each window, its logits of shape (tokens, vocabulary), of which only the requested rows are computed."""
        torch = self._torch
        with torch.inference_mode():
            batch = torch.tensor([list(window) for window in tokens], device=self._device)
            states = self._model.base_model(input_ids=batch, use_cache=False)
        return [_Logits(self._model, type(states), window) for window in states.last_hidden_state]


class _Logits:
    """Logits of a window, computed from the states of its last layer a block of rows at a time.

    All logits of 2,048 tokens and a vocabulary of 152,000 are 1.2 GB in float32.
    """

    def __init__(self, model: Any, output: type, states: Any) -> None:
        self._model, self._output, self._states = model, output, states
        self.shape: tuple[int, ...] = (len(states), int(model.config.get_text_config().vocab_size))

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        import torch

        states = self._output(last_hidden_state=self._states[None, rows])
        body = self._model.base_model
        body.forward = lambda *arguments, **options: states  # what follows it may scale or cap the logits
        try:
            with torch.inference_mode():
                logits = self._model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self._states.device)).logits
        finally:
            del body.forward
        block: NDArray[Any] = logits[0].float().cpu().numpy()
        return block


def require_window(directory: Path, tokens: int) -> None:
    """Check before a checkpoint is loaded that a window is not longer than its longest context.

    Raises:
        NotFound: the directory does not exist.
        RequirementMissing: the window is longer.
    """
    try:
        config = parse_json(read_found(existing(directory) / "config.json"), lenient=True)
        longest = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    except (OSError, ValueError, AttributeError):
        return  # loading reports a directory that is no checkpoint
    if isinstance(longest, int) and tokens > longest:
        raise RequirementMissing(
            f"{directory}: a window of {tokens:,} tokens is longer than max_position_embeddings {longest:,}",
            f"use --window {longest} or less",
        )


def require_same_tokenizer(directory: Path, text: TokenizedText) -> None:
    """Check before a checkpoint is loaded that its tokenizer is that of the text.

    Raises:
        RequirementMissing: it has another tokenizer.
        Sm120kitError: see :func:`sm120kit.kld._tokens.vocabulary`.
    """
    if text.vocabulary is not None:
        require_same_vocabulary(text, str(directory), vocabulary(directory))


class ServedModel:
    """A model behind a server that returns log-probabilities of prompts: the ``top`` most likely tokens of each position.

    ``top`` = -1, all tokens, requires a vLLM that was started with ``--max-logprobs -1``.
    """

    def __init__(
        self, server: Endpoint, model: str, top: int, timeout_seconds: float = _TIMEOUT_SECONDS, deadline: float = math.inf
    ) -> None:
        """Store the endpoint; nothing is requested yet. A request ends at ``deadline``, a time of ``time.monotonic``."""
        self.name, self._server, self._model, self._top = f"{model} at {server.url}", server, model, top
        self._timeout_seconds, self._deadline = timeout_seconds, deadline
        self._engine: Engine | None = None

    def require(self, window: int, text: TokenizedText) -> None:
        """Check the server's longest context and its tokenizer, as far as it has ``max_model_len`` and ``/tokenize``.

        Raises:
            RequirementMissing: a window is too long, or the tokenizer is not that of the text.
        """
        longest = self._longest()
        if longest is not None and window + 1 > longest:  # one token is generated
            raise RequirementMissing(
                f"{self.name}: a window of {window:,} tokens and one more are longer than max_model_len {longest:,}",
                f"use --window {longest - 1} or less",
            )
        tokens = self.token_ids(text.sample) if text.sample else None
        if tokens is not None and tokens != text.sample_tokens:
            raise RequirementMissing(
                f"{self.name} has another tokenizer: the first {len(text.sample):,} characters of the text are other token ids",
                "the same token ids are compared position by position: compare models with the same tokenizer",
            )

    def token_ids(self, text: str) -> tuple[int, ...] | None:
        """The token ids of a text, without special tokens; None if the server has no ``/tokenize``, or lists too many.

        Raises:
            ServerFailed: the server does not respond.
        """
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        status, content = self._request("POST", "/tokenize", body)
        try:
            tokens = parse_json(content)["tokens"] if status == 200 else None
        except (ValueError, KeyError, TypeError):
            return None
        listed: list[Any] = tokens if isinstance(tokens, list) and len(tokens) <= 4 * len(text) + 64 else [None]
        return tuple(listed) if all(type(token) is int for token in listed) else None

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[TopLogProbabilities]:
        """For each window, the distributions after all but its last token, which a server does not return.

        Raises:
            ServerFailed: the server does not respond.
            RequirementMissing: the server refuses the request, or returns no log-probabilities of prompts.
        """
        self._engine = engine = self._engine or self._serving()
        try:
            path, body = engine.prompt_request(self._model, tokens, self._top)
        except ValueError as error:
            raise RequirementMissing(f"{self.name} is {engine.title}, which {error}", "use --top 20 or more") from error
        status, content = self._request("POST", path, body)
        if status != 200:
            message = self._server.without_secrets(content.decode("utf-8", "replace"))[:500]
            raise RequirementMissing(
                f"{self.name} refuses the {self._top} most likely tokens of a prompt (status {status}): {message}",
                "--top must be at most the server's --max-logprobs (vLLM's default is 20)",
            )
        try:
            listed = [
                TopLogProbabilities([{int(token): _logprob(value) for token, value in place} for place in places])
                for places in engine.prompt_positions(parse_json(content))
            ]
            for window, positions in zip(tokens, listed, strict=True):
                if len(positions.positions) != len(window) - 1:
                    raise ValueError(f"{len(positions.positions) + 1} positions for {len(window)} tokens")
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise RequirementMissing(
                f"{self.name} does not return the log-probabilities of its prompt ({type(error).__name__}: {error})",
                "use vLLM or SGLang, which return them, or compare local checkpoints",
            ) from error
        return listed

    def _serving(self) -> Engine:
        """The engine of the server; of a server that none has information from, the first."""
        known = engines.all_engines()
        return next((engine for engine in known if self._request("GET", engine.info_path)[0] == 200), known[0])

    def _longest(self) -> int | None:
        status, content = self._request("GET", "/v1/models")
        try:
            listed = parse_json(content)["data"] if status == 200 else []
            longest = next(model.get("max_model_len") for model in listed if model["id"] == self._model)
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration):
            return None
        return longest if isinstance(longest, int) else None

    def _request(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status and content of the response."""
        import httpx2

        seconds = min(self._timeout_seconds, max(0.1, self._deadline - time.monotonic()))
        try:
            response = request(self._server, method, path, body, seconds=seconds, limit=MAX_RESPONSE_BYTES)
        except httpx2.HTTPError as error:
            reason = self._server.without_secrets(str(error)) or type(error).__name__
            hint = "check that the server is running; of a long response, use a smaller --window or --top"
            raise ServerFailed(f"{self._server.url}{path} does not respond: {reason}", hint) from error
        return response.status_code, response.content


def _logprob(value: float | None) -> float:
    if value is None:  # NaN in JSON
        return math.nan
    return -math.inf if value <= NO_PROBABILITY else float(value)
