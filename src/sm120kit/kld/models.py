"""Next-token distributions of a local checkpoint, or of a server that returns log-probabilities of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sm120kit.core.errors import CannotMeasure, NoModel, NotACheckpoint, ServerUnreachable, ToolchainMissing
from sm120kit.core.state import parse_json
from sm120kit.core.urls import Endpoint
from sm120kit.kld.divergence import TopLogProbabilities

if TYPE_CHECKING:
    from sm120kit.kld.divergence import LogProbabilities

NO_PROBABILITY = -9999.0
"""vLLM's value for a log-probability of minus infinity in its completions protocol; JSON has no infinities."""

_TIMEOUT_SECONDS = 600.0


class ComparedModel(Protocol):
    """A model to compare. ``name`` identifies it in the record."""

    name: str

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[LogProbabilities | TopLogProbabilities]:
        """For each window of token ids, the distributions after each of its tokens. All windows are one batch."""
        ...


class LocalModel:
    """A checkpoint directory, computed by Transformers in the checkpoint's precision; on a GPU if torch has one."""

    def __init__(self, directory: Path) -> None:
        """Load the checkpoint.

        Raises:
            NoModel: the directory does not exist.
            NotACheckpoint: Transformers cannot load it.
            ToolchainMissing: torch or Transformers is not installed.
        """
        torch, transformers = _libraries()
        self.name, self._torch = str(directory), torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(_existing(directory), dtype="auto", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise NotACheckpoint(f"{directory}: {error}", "Transformers must be able to load it") from error
        self._model = model.to(self._device).eval()

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[LogProbabilities]:
        """For each window, an array of float32 log-probabilities of shape (tokens, vocabulary)."""
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(window) for window in tokens], device=self._device)).logits
            return [torch.log_softmax(window.float(), dim=-1).cpu().numpy() for window in logits]


class ServedModel:
    """A model behind vLLM's ``/v1/completions`` with ``prompt_logprobs``: the ``top`` most likely tokens of each position.

    Source: ``prompt_logprobs`` of vLLM's OpenAI-compatible server. ``top`` = -1, all tokens, requires a server that was started
    with ``--max-logprobs -1``.
    """

    def __init__(self, server: Endpoint, model: str, top: int) -> None:
        """Store the endpoint; nothing is requested yet."""
        self.name, self._server, self._model, self._top = f"{model} at {server.url}", server, model, top

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[TopLogProbabilities]:
        """For each window, the distributions after all but its last token, which a server does not return.

        Raises:
            ServerUnreachable: the server does not respond.
            CannotMeasure: the server refuses the request, or returns no log-probabilities of prompts.
        """
        import httpx2

        body = {
            "model": self._model,
            "prompt": [list(window) for window in tokens],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._top,
        }
        try:
            url, headers = self._server.request_url("/v1/completions"), self._server.headers
            response = httpx2.post(url, headers=headers, json=body, timeout=_TIMEOUT_SECONDS, trust_env=False)
        except httpx2.HTTPError as error:
            reason = self._server.without_secrets(str(error)) or type(error).__name__
            raise ServerUnreachable(
                f"{self._server.url}/v1/completions does not respond: {reason}", "check that the server is running"
            ) from error
        if response.status_code != 200:
            message = self._server.without_secrets(response.text[:500])
            raise CannotMeasure(
                f"{self.name} refuses prompt_logprobs={self._top} (status {response.status_code}): {message}",
                "--top must be at most the server's --max-logprobs (vLLM's default is 20)",
            )
        try:
            choices = sorted(parse_json(response.content)["choices"], key=lambda choice: int(choice["index"]))
            return [
                _top_logprobs(choice["prompt_logprobs"], len(window)) for choice, window in zip(choices, tokens, strict=True)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CannotMeasure(
                f"{self.name} does not return the log-probabilities of its prompt ({type(error).__name__}: {error})",
                "use vLLM, which returns them (prompt_logprobs), or compare local checkpoints",
            ) from error


def _top_logprobs(prompt_logprobs: Any, count: int) -> TopLogProbabilities:
    if prompt_logprobs is None or len(prompt_logprobs) != count:
        raise ValueError(f"{0 if prompt_logprobs is None else len(prompt_logprobs)} positions for {count} tokens")
    # The entry of a token is the distribution before it; the first token has none.
    return TopLogProbabilities(
        [{int(token): _logprob(entry["logprob"]) for token, entry in position.items()} for position in prompt_logprobs[1:]]
    )


def _logprob(value: float | None) -> float:
    if value is None:  # NaN in JSON
        return math.nan
    return -math.inf if value <= NO_PROBABILITY else float(value)


def read_tokens(text: Path, tokenizer: Path) -> list[int]:
    """Token ids of a text, without special tokens. A ``.json`` file contains the ids themselves.

    Raises:
        NoModel: the text or the tokenizer directory does not exist.
        NotACheckpoint: there is no tokenizer in the directory, or the file is not a list of ids.
        ToolchainMissing: Transformers is not installed.
    """
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoModel(
            f"{text} cannot be read as text: {error}", "--text names a file of UTF-8 text, or of token ids as JSON"
        ) from error
    if text.suffix == ".json":
        try:
            ids = parse_json(content)
        except ValueError as error:
            raise NotACheckpoint(f"{text} is not JSON: {error}", "a list of token ids is expected") from error
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise NotACheckpoint(f"{text} is not a list of token ids", "a JSON list is expected: [1, 2, 3, ...]")
        return ids
    _, transformers = _libraries()
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(_existing(tokenizer), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise NotACheckpoint(f"{tokenizer} has no tokenizer: {error}", "--tokenizer names a directory that has one") from error
    return list(loaded(content, add_special_tokens=False)["input_ids"])


def _existing(directory: Path) -> Path:
    if not directory.is_dir():
        raise NoModel(f"no model directory {directory}", "download the checkpoint, or pass the URL of a server")
    return directory


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ToolchainMissing(f"{error.name} is not installed", "pip install 'sm120kit[kld]'") from error
    logging: Any = transformers.utils.logging  # untyped
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return torch, transformers
