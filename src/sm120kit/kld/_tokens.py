"""Token ids of a text, and whether two models read them by the same tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core.errors import BadInput, NotFound, RequirementMissing
from sm120kit.core.outside import parse_json, read_input_text

SAMPLE_CHARACTERS = 4000
"""Characters of the text that a server tokenizes, to compare its tokenizer."""


@dataclass(frozen=True)
class TokenizedText:
    """Token ids of a text, with what identifies the tokenizer: its vocabulary, and a sample of the text with its ids.

    The sample is empty and the vocabulary None if the ids were given without a tokenizer.
    """

    tokens: tuple[int, ...]
    vocabulary: Mapping[str, int] | None = None
    sample: str = ""
    sample_tokens: tuple[int, ...] = ()


def read_tokens(text: Path, tokenizer: Path | None) -> TokenizedText:
    """Token ids of a text, without special tokens. A ``.json`` file contains the ids themselves.

    Raises:
        NotFound: the text or the tokenizer directory does not exist.
        BadInput: there is no tokenizer in the directory, or the file is not a list of ids.
        RequirementMissing: Transformers is not installed.
    """
    try:
        content = read_input_text(text)
    except (OSError, UnicodeDecodeError) as error:
        raise NotFound(
            f"{text} cannot be read as text: {error}", "--text names a file of UTF-8 text, or of token ids as JSON"
        ) from error
    if text.suffix == ".json":
        try:
            ids = parse_json(content)
        except ValueError as error:
            raise BadInput(f"{text} is not JSON: {error}", "a list of token ids is expected") from error
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise BadInput(f"{text} is not a list of token ids", "a JSON list is expected: [1, 2, 3, ...]")
        return TokenizedText(tuple(ids), vocabulary(tokenizer) if tokenizer else None)
    assert tokenizer is not None
    loaded, sample = _tokenizer(tokenizer), content[:SAMPLE_CHARACTERS]
    ids, sample_ids = (loaded(part, add_special_tokens=False)["input_ids"] for part in (content, sample))
    return TokenizedText(tuple(ids), loaded.get_vocab(), sample, tuple(sample_ids))


def vocabulary(directory: Path) -> Mapping[str, int] | None:
    """The tokens of a directory's tokenizer with their ids; None without a tokenizer.

    Raises:
        NotFound: the directory does not exist.
        RequirementMissing: Transformers is not installed.
    """
    try:
        return dict(_tokenizer(directory).get_vocab())
    except BadInput:
        return None


def require_same_vocabulary(text: TokenizedText, name: str, other: Mapping[str, int] | None) -> None:
    """Compare the vocabulary of model ``name`` with that of the text. A token that only one has, such as an added one, may be.

    Raises:
        RequirementMissing: an id is another token.
    """
    if text.vocabulary is None or other is None:
        return
    tokens = {number: token for token, number in text.vocabulary.items()}
    different = [number for token, number in other.items() if tokens.get(number, token) != token]
    if different:
        first = min(different)
        token = next(token for token, number in other.items() if number == first)
        raise RequirementMissing(
            f"{name} has another tokenizer: {len(different):,} token ids differ; the first, {first:,}, is {token!r} and "
            f"{tokens[first]!r} in the reference",
            "the same token ids are compared position by position: compare models with the same tokenizer",
        )


def _tokenizer(directory: Path) -> Any:
    _, transformers = libraries()
    try:
        return transformers.AutoTokenizer.from_pretrained(existing(directory), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{directory} has no tokenizer: {error}", "--tokenizer names a directory that has one") from error


def existing(directory: Path) -> Path:
    """The directory.

    Raises:
        NotFound: it does not exist.
    """
    if not directory.is_dir():
        raise NotFound(f"no model directory {directory}", "download the checkpoint, or pass the URL of a server")
    return directory


def libraries() -> tuple[Any, Any]:
    """The modules ``torch`` and ``transformers``.

    Raises:
        RequirementMissing: one is not installed.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise RequirementMissing(f"{error.name} is not installed", "pip install 'sm120kit[kld]'") from error
    logging: Any = transformers.utils.logging  # untyped
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return torch, transformers
