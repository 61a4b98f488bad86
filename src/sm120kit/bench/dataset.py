"""Datasets of conversations, which replace the prompts of a workload.

JSON Lines, or a JSON list, of ``{"prompt": TEXT}``, ``{"messages": [{"role": ..., "content": ...}]}`` (OpenAI) or
``{"conversations": [{"from": "human", "value": ...}]}`` (ShareGPT).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_input_text

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Roles of ShareGPT and OpenAI -> roles of OpenAI. Messages of other roles, such as tools, are not supported."""


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["system", "user", "assistant"]
    content: str


Conversation = tuple[Message, ...]


def read(path: Path) -> tuple[Conversation, ...]:
    """Read a dataset: conversations with at least one message of a user.

    Raises:
        BadInput: the file cannot be read, or an entry is of no known form; the message names its number.
    """
    conversations = []
    for number, entry in _entries(path):
        try:
            messages = tuple(_messages(entry))
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path}: entry {number} is no conversation ({_reason(error)})",
                'an entry has "prompt", "messages" with role and content, or "conversations" with from and value',
            ) from error
        if any(message.role == "user" for message in messages):
            conversations.append(messages)
    if not conversations:
        raise BadInput(f"{path} has no conversation with a message of a user", "name a dataset with prompts")
    return tuple(conversations)


def turns(conversation: Conversation) -> Iterator[Conversation]:
    """The messages of each request: up to each message of the user, with the conversation's own answers between them."""
    for number, message in enumerate(conversation):
        if message.role == "user":
            yield conversation[: number + 1]


def _entries(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = read_input_text(path)
        if text.lstrip().startswith("["):
            yield from enumerate(parse_json(text), 1)
            return
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: {getattr(error, 'strerror', None) or error}", "name a JSON or JSON Lines file") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise BadInput(f"{path}: line {number} is not JSON: {error}", "one JSON object per line") from error


def _messages(entry: Any) -> Iterator[Message]:
    if isinstance(entry, dict) and isinstance(entry.get("prompt"), str):
        yield Message(role="user", content=entry["prompt"])
    elif isinstance(entry, dict) and "messages" in entry:
        for message in entry["messages"]:
            yield Message(role=message["role"], content=message["content"])
    else:
        for message in entry["conversations"]:
            yield Message.model_validate({"role": ROLES[message["from"]], "content": message["value"]})


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return f"{'.'.join(map(str, error.errors()[0]['loc']))}: {error.errors()[0]['msg']}"
    return f"{type(error).__name__}: {error}"


def as_text(conversations: tuple[Conversation, ...]) -> tuple[str, ...]:
    """A text for each conversation, by which a result identifies the dataset."""
    return tuple(json.dumps([message.model_dump() for message in conversation]) for conversation in conversations)
