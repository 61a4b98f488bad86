"""Where next-token distributions come from: a local checkpoint, or a server that gives log-probabilities of a prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sm120kit.errors import CannotMeasure, NoModel, NotACheckpoint, ServerUnreachable, ToolchainMissing
from sm120kit.kld.divergence import Listed

if TYPE_CHECKING:
    from sm120kit.kld.divergence import Whole

NO_PROBABILITY = -9999.0
"""What vLLM writes for a log-probability of minus infinity (in its completions protocol); JSON has no infinities."""

_PATIENCE_SECONDS = 600.0


class Side(Protocol):
    """One of the models that are compared. ``name`` is how a receipt calls it."""

    name: str

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[Whole | Listed]:
        """For each window of token ids the distributions after its tokens, in one batch."""
        ...


class Checkpoint:
    """A model folder, computed by Transformers in the precision that it is stored in; on a GPU where torch has one."""

    def __init__(self, folder: Path) -> None:
        """Load it.

        Raises:
            NoModel: there is no such folder.
            NotACheckpoint: Transformers cannot load it.
            ToolchainMissing: torch or Transformers are not installed.
        """
        torch, transformers = _libraries()
        self.name, self._torch = str(folder), torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(_existing(folder), dtype="auto", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise NotACheckpoint(f"{folder}: {error}", "Transformers must be able to load it") from error
        self._model = model.to(self._device).eval()

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[Whole]:
        """For each window an array of shape (tokens, vocabulary): log-probabilities in float32."""
        torch = self._torch
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(window) for window in tokens], device=self._device)).logits
            return [torch.log_softmax(one.float(), dim=-1).cpu().numpy() for one in logits]


class Served:
    """A model behind vLLM's ``/v1/completions`` with ``prompt_logprobs``: the ``top`` likeliest tokens of each position.

    Source: ``prompt_logprobs`` of vLLM's OpenAI-compatible server. For ``top`` = -1, all tokens, the server must have been
    started with ``--max-logprobs -1``.
    """

    def __init__(self, url: str, model: str, top: int) -> None:
        """Nothing is asked yet."""
        self.name, self._url, self._model, self._top = f"{model} at {url}", url, model, top

    def windows(self, tokens: Sequence[Sequence[int]]) -> Sequence[Listed]:
        """For each window the distributions after all but its last token, of which a server says nothing.

        Raises:
            ServerUnreachable: it does not answer.
            CannotMeasure: it refuses, or gives no log-probabilities of prompts.
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
            answer = httpx2.post(f"{self._url}/v1/completions", json=body, timeout=_PATIENCE_SECONDS, trust_env=False)
        except httpx2.HTTPError as error:
            raise ServerUnreachable(
                f"{self._url}/v1/completions does not answer: {error or type(error).__name__}", "is the server still there?"
            ) from error
        if answer.status_code != 200:
            raise CannotMeasure(
                f"{self.name} refuses prompt_logprobs={self._top} (status {answer.status_code}): {answer.text[:500]}",
                "--top must be at most the server's --max-logprobs (vLLM's default is 20)",
            )
        try:
            choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
            return [_listed(choice["prompt_logprobs"], len(window)) for choice, window in zip(choices, tokens, strict=True)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CannotMeasure(
                f"{self.name} answers without the log-probabilities of its prompt ({type(error).__name__}: {error})",
                "vLLM gives them (prompt_logprobs); compare local checkpoints otherwise",
            ) from error


def _listed(given: Any, count: int) -> Listed:
    if given is None or len(given) != count:
        raise ValueError(f"{0 if given is None else len(given)} positions for {count} tokens")
    # What stands at a token is the distribution before it; before the first there is none.
    return Listed([{int(token): _logprob(entry["logprob"]) for token, entry in position.items()} for position in given[1:]])


def _logprob(value: float | None) -> float:
    if value is None:  # NaN in JSON
        return math.nan
    return -math.inf if value <= NO_PROBABILITY else float(value)


def tokens_of(text: Path, tokenizer: Path) -> list[int]:
    """A text as token ids, without special tokens; a ``.json`` file holds the ids themselves.

    Raises:
        NoModel: there is no such text or tokenizer folder.
        NotACheckpoint: it is not one, or not a list of ids.
        ToolchainMissing: Transformers is not installed.
    """
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NoModel(
            f"{text} cannot be read as text: {error}", "--text names a file of UTF-8 text, or of token ids as JSON"
        ) from error
    if text.suffix == ".json":
        try:
            ids = json.loads(words)
        except ValueError as error:
            raise NotACheckpoint(f"{text} is not JSON: {error}", "a list of token ids is expected") from error
        if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
            raise NotACheckpoint(f"{text} is not a list of token ids", "[1, 2, 3, ...]")
        return ids
    _, transformers = _libraries()
    try:
        made = transformers.AutoTokenizer.from_pretrained(_existing(tokenizer), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise NotACheckpoint(f"{tokenizer} has no tokenizer: {error}", "--tokenizer names a folder that has one") from error
    return list(made(words, add_special_tokens=False)["input_ids"])


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise NoModel(f"there is no model folder {folder}", "download the checkpoint, or name a server by its URL")
    return folder


def _libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise ToolchainMissing(f"{error.name} is not installed", "pip install 'sm120kit[kld]'") from error
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return torch, transformers
