"""A small inference server on the CPU, with batches, a prefix cache, speculation, and faults that can be seeded.

The models are those of Transformers. The server keeps the KV cache of each request, decodes all requests in one batch, reuses
blocks of prefixes, and verifies drafts, as vLLM and SGLang do, whose protocol it speaks. A fault is a name in ``faults``: those
of :data:`ENGINE_FAULTS` and :data:`MODEL_FAULTS` change what is computed, those of ``answer_faults`` what is sent.
"""

from __future__ import annotations

import copy
import http.server
import json
import queue
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from answer_faults import ANSWER_FAULTS
from loopback import http_served
from transformers import DynamicCache

MODEL = "small"
BLOCK = 16
LONG = 200
"""Tokens from which faults of long prompts begin."""

ENGINE_FAULTS = {
    "swapped-token": "every 7th token is the second most likely one",
    "swapped-token-hidden": "every 7th token is the second most likely one, listed as the most likely",
    "neighbour-kv": "in a batch, a layer reads the KV cache of the next request",
    "neighbour-block": "in a batch, one block of the KV cache is that of the next request",
    "first-row-block": "in a batch, one block of the first request's KV cache is that of the next request",
    "dropped-middle": "decoding does not see the middle third of a long prompt",
    "truncated-prompt": "the middle third of a long prompt is left out before prefill",
    "block-of-other-prompt": "cached blocks are found by their position and first token alone",
    "shifted-block": "the values of cached blocks after the first are shifted by one position, the keys are not",
    "unfilled-block": "the last cached block has not been written yet",
    "stale-draft-kv": "the KV cache keeps the entries of rejected drafts",
    "drafts-top-3": "a draft is accepted if it is among the three most likely tokens",
    "drafts-all": "every draft is accepted",
    "position-off-by-one": "decoding uses positions that are one too large",
    "positions-end": "positions beyond 160 are 160",
    "window": "decoding sees the last 64 tokens only",
    "race": "one step of twelve reads a KV cache of which a part has not been written",
    "left-over-state": "a request after a long one begins with one block of its KV cache",
    "rows-after-four": "rows of a batch after the fourth have wrong numbers",
    "sampled": "temperature 0 is ignored",
    "penalty": "tokens of the prompt are penalized although nobody asks for it",
    "nan": "logits are NaN, and the first token of the vocabulary is chosen",
    "no-template": "a chat is joined without its template",
    "last-message": "of a chat only the last message is read",
}
MODEL_FAULTS = {
    "half-scale-layer": "the weights of a layer are half as large",
    "double-scale-layer": "the weights of a layer are twice as large",
    "half-scale-expert": "the weights of one expert are a quarter as large",
    "swapped-experts": "two experts are exchanged",
    "rope-base": "the base of the rotary embedding is 500 instead of the model's",
    "shifted-vocabulary": "tokens are decoded with ids that are one too large",
}


@dataclass
class Work:
    """A request in the engine. ``tokens`` get (id, log-probabilities of the vocabulary), and None at the end."""

    prompt: list[int]
    most: int
    salt: str = ""
    temperature: float = 0.0
    cached: int = 0
    produced: list[int] = field(default_factory=list)
    kv: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    tokens: queue.Queue[tuple[int, torch.Tensor] | None] = field(default_factory=queue.Queue)


@dataclass(frozen=True)
class Options:
    """Requests at once, whether prefixes are cached, drafts per step (0: no speculation), and faults."""

    batch: int = 16
    cache: bool = True
    drafts: int = 0
    faults: frozenset[str] = frozenset()
    seed: int = 0


class SmallEngine:
    """Batches of requests to a model. ``words`` are the ids that may be generated; None is all."""

    def __init__(self, model: Any, words: list[int] | None, ends: frozenset[int], options: Options) -> None:
        self.model, self.ends, self.faults = model, ends, options.faults
        self.batch, self.cache, self.drafts = options.batch, options.cache, options.drafts
        self.mask = None
        if words is not None:
            self.mask = torch.full((model.config.vocab_size,), float("-inf"))
            self.mask[words] = 0.0
        self.random = random.Random(options.seed)
        self.blocks: dict[tuple[Any, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.left_over: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.waiting: queue.Queue[Work | None] = queue.Queue()
        self.running: list[Work] = []
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def submit(self, work: Work) -> Iterator[tuple[int, torch.Tensor]]:
        """The tokens of a request as they are generated."""
        self.waiting.put(work)
        while (token := work.tokens.get()) is not None:
            yield token

    def close(self) -> None:
        self.waiting.put(None)
        self.thread.join()

    def _loop(self) -> None:
        with torch.inference_mode():
            while True:
                while len(self.running) < self.batch:
                    try:
                        work = self.waiting.get(block=not self.running)
                    except queue.Empty:
                        break
                    if work is None:
                        return
                    self._prefill(work)
                self._decode()

    def score(self, ids: list[int]) -> torch.Tensor:
        """The log-probabilities after each token of a prompt."""
        with torch.inference_mode():
            (logits,) = self._forward([[]], [ids], [0])[1]
            return torch.log_softmax(logits.float(), -1)

    def _forward(
        self, past: list[list[tuple[torch.Tensor, torch.Tensor]]], new: list[list[int]], start: list[int]
    ) -> tuple[list[list[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor]:
        """KV caches with the new tokens, as many in each row, and logits at these. ``start`` is their first position."""
        lengths, count = [row[0][0].shape[1] if row else 0 for row in past], len(new[0])
        longest, cache = max(lengths), DynamicCache()
        if longest:
            for layer in range(self.model.config.num_hidden_layers):
                sides = [
                    torch.stack(
                        [
                            torch.nn.functional.pad(row[layer][side], (0, 0, longest - length, 0))
                            for row, length in zip(past, lengths, strict=True)
                        ]
                    )
                    for side in (0, 1)
                ]
                cache.update(sides[0], sides[1], layer)
        mask = torch.tensor([[0] * (longest - length) + [1] * (length + count) for length in lengths])
        positions = torch.tensor([list(range(first, first + count)) for first in start])
        if "positions-end" in self.faults:
            positions = positions.clamp(max=160)
        output = self.model(
            input_ids=torch.tensor(new), attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        rows = []
        for number, row in enumerate(past):
            layers = [
                tuple(
                    torch.cat([row[layer][side], full[number, :, -count:]], 1) if row else full[number, :, -count:].clone()
                    for side, full in enumerate((each.keys, each.values))
                )
                for layer, each in enumerate(output.past_key_values.layers)
            ]
            rows.append(layers)
        return rows, output.logits  # type: ignore[return-value]

    def _keys(self, work: Work, ids: list[int]) -> list[tuple[Any, ...]]:
        """The keys of the full blocks of a prompt: all tokens until their end."""
        ends = range(BLOCK, len(ids) + 1, BLOCK)
        if "block-of-other-prompt" in self.faults:
            return [(work.salt, end, ids[end - BLOCK]) for end in ends]
        return [(work.salt, *ids[:end]) for end in ends]

    def _prefill(self, work: Work) -> None:
        ids = list(work.prompt)
        if "truncated-prompt" in self.faults and len(ids) > LONG:
            ids = ids[: len(ids) // 3] + ids[2 * len(ids) // 3 :]
        hits = []
        for key in self._keys(work, ids[:-1]) if self.cache else ():
            if key not in self.blocks:
                break
            hits.append(self.blocks[key])
        kv = _joined(hits)
        if hits and "shifted-block" in self.faults:
            kv = [(keys, torch.cat([values[:, :BLOCK], values[:, BLOCK:].roll(1, 1)], 1)) for keys, values in kv]
        if hits and "unfilled-block" in self.faults:
            kv = [tuple(torch.cat([side[:, :-BLOCK], torch.zeros_like(side[:, -BLOCK:])], 1) for side in layer) for layer in kv]
        if not hits and "left-over-state" in self.faults and self.left_over:
            kv, self.left_over = self.left_over, []
            new, logits = self._forward([kv], [ids], [0])
            kv = [tuple(side[:, BLOCK:] for side in layer) for layer in new[0]]
        else:
            work.cached = len(hits) * BLOCK
            new, logits = self._forward([kv], [ids[work.cached :]], [work.cached])
            kv = new[0]
        if len(ids) > LONG:
            self.left_over = [tuple(side[:, :BLOCK] for side in layer) for layer in kv]
        self._store(work, ids, kv)
        if "dropped-middle" in self.faults and len(ids) > LONG:
            a, b = len(ids) // 3, 2 * len(ids) // 3
            kv = [tuple(torch.cat([side[:, :a], side[:, b:]], 1) for side in layer) for layer in kv]
        work.kv = kv
        self.running.append(work)
        self._emit(work, logits[0, -1])

    def _store(self, work: Work, ids: list[int], kv: list[Any]) -> None:
        for number, key in enumerate(self._keys(work, ids) if self.cache else ()):
            part = slice(number * BLOCK, (number + 1) * BLOCK)
            self.blocks.setdefault(key, [tuple(side[:, part].clone() for side in layer) for layer in kv])

    def _past(self) -> list[Any]:
        """The KV caches of the running requests, as decoding reads them."""
        past: list[Any] = [work.kv for work in self.running]
        if "window" in self.faults:
            past = [[tuple(side[:, -64:] for side in layer) for layer in row] for row in past]
        if "race" in self.faults and self.random.random() < 1 / 12:
            past = [[tuple(torch.cat([side[:, :-6], 0 * side[:, -6:]], 1) for side in layer) for layer in row] for row in past]
        if len(past) > 1 and "neighbour-kv" in self.faults:
            middle = len(past[0]) // 2
            rolled = [past[(number + 1) % len(past)][middle] for number in range(len(past))]
            past = [
                [*row[:middle], tuple(_fitted(a, b) for a, b in zip(row[middle], other, strict=True)), *row[middle + 1 :]]
                for row, other in zip(past, rolled, strict=True)
            ]
        if len(past) > 1 and self.faults & {"neighbour-block", "first-row-block"}:
            wrong = len(past) if "neighbour-block" in self.faults else 1
            past = [
                [_first_block_of(other, own) for own, other in zip(row, past[(number + 1) % len(past)], strict=True)]
                if number < wrong
                else row
                for number, row in enumerate(past)
            ]
        return past

    def _decode(self) -> None:
        if not self.running:
            return
        rows = list(self.running)
        if self.drafts:
            for work in rows:
                self._speculate(work)
            return
        past = self._past()
        new, logits = self._forward(past, [[work.produced[-1]] for work in rows], [self._position(work) for work in rows])
        for number, work in enumerate(rows):
            if past[number] is work.kv:
                work.kv = new[number]
            else:
                work.kv = [
                    tuple(torch.cat([old, fresh[:, -1:]], 1) for old, fresh in zip(layer, other, strict=True))
                    for layer, other in zip(work.kv, new[number], strict=True)
                ]
            wrong = "rows-after-four" in self.faults and number >= 4
            self._emit(work, logits[number, -1].roll(1) if wrong else logits[number, -1])

    def _position(self, work: Work) -> int:
        return len(work.prompt) + len(work.produced) - 1 + ("position-off-by-one" in self.faults)

    def _speculate(self, work: Work) -> None:
        """Draft tokens, compute all in one step, keep those that are the most likely ones."""
        drafts, kv, last = [], work.kv, work.produced[-1]
        position = self._position(work)
        for step in range(self.drafts):  # drafts of the model itself, a third of them spoiled
            new, logits = self._forward([kv], [[last]], [position + step])
            ids = self._allowed(logits[0, -1]).topk(3).indices.tolist()
            kv, last = new[0], ids[self.random.choice((0, 0, 0, 0, 1, 2))]
            drafts.append(last)
        before = work.kv[0][0].shape[1]
        new, logits = self._forward([work.kv], [[work.produced[-1], *drafts]], [position])
        accepted = 0
        for draft, row in zip(drafts, logits[0], strict=False):
            ids = self._allowed(row).topk(3).indices.tolist()
            if draft == ids[0] or "drafts-all" in self.faults or ("drafts-top-3" in self.faults and draft in ids):
                accepted += 1
                if not self._emit(work, row, draft):
                    return
            else:
                break
        kept = before + 1 + (self.drafts if "stale-draft-kv" in self.faults else accepted)
        work.kv = [tuple(side[:, :kept] for side in layer) for layer in new[0]]
        self._emit(work, logits[0, accepted])

    def _allowed(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float() if self.mask is None else logits.float() + self.mask

    def _emit(self, work: Work, logits: torch.Tensor, draft: int | None = None) -> bool:
        """Send the next token; whether the request goes on."""
        logits = self._allowed(logits)
        chosen_by = logits
        if "penalty" in self.faults:
            chosen_by = logits.clone()
            seen = torch.tensor(sorted({*work.prompt, *work.produced}))
            chosen_by[seen] = torch.where(chosen_by[seen] > 0, chosen_by[seen] / 1.3, chosen_by[seen] * 1.3)
        token = int(chosen_by.argmax()) if draft is None else draft
        if (len(work.produced) + 1) % 7 == 0 and self.faults & {"swapped-token", "swapped-token-hidden"}:
            first, token = chosen_by.topk(2).indices.tolist()
            if "swapped-token-hidden" in self.faults:
                logits = logits.clone()
                logits[[first, token]] = logits[[token, first]]
        if "sampled" in self.faults or work.temperature:
            token = self.random.choices(range(len(logits)), torch.softmax(logits, -1).tolist())[0]
        if "nan" in self.faults:
            token = int(torch.nonzero(self.mask == 0)[0]) if self.mask is not None else 0
        work.produced.append(token)
        work.tokens.put((token, torch.log_softmax(logits, -1)))
        if len(work.produced) < work.most and token not in self.ends:
            return True
        ids = [*work.prompt, *work.produced[:-1]]
        if work.kv[0][0].shape[1] == len(ids):
            self._store(work, ids, work.kv)
        self.running.remove(work)
        work.tokens.put(None)
        return False


def _joined(blocks: list[Any]) -> list[Any]:
    if not blocks:
        return []
    return [tuple(torch.cat([block[layer][side] for block in blocks], 1) for side in (0, 1)) for layer in range(len(blocks[0]))]


def _fitted(own: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Another request's cache with the length of the own one, which is read where the other is shorter."""
    length = min(own.shape[1], other.shape[1])
    return torch.cat([own[:, : own.shape[1] - length], other[:, other.shape[1] - length :]], 1)


def _first_block_of(other: Any, own: Any) -> Any:
    """A layer's cache with the first block of another request's, if both have more than a block."""
    if min(own[0].shape[1], other[0].shape[1]) <= BLOCK:
        return own
    return tuple(torch.cat([b[:, :BLOCK], a[:, BLOCK:]], 1) for a, b in zip(own, other, strict=True))


def faulty(model: Any, fault: str) -> Any:
    """A copy of a model with a fault of :data:`MODEL_FAULTS`."""
    model = copy.deepcopy(model)
    layers = model.model.layers
    middle = layers[len(layers) // 2]
    with torch.no_grad():
        if fault in ("half-scale-layer", "double-scale-layer"):
            for weight in (middle.mlp.down_proj.weight, middle.self_attn.o_proj.weight, middle.mlp.up_proj.weight):
                weight *= 0.5 if fault == "half-scale-layer" else 2.0
        elif fault == "half-scale-expert":
            middle.mlp.experts.down_proj[0] *= 0.25
        elif fault == "swapped-experts":
            for weights in (middle.mlp.experts.down_proj, middle.mlp.experts.gate_up_proj):
                weights[[0, 1]] = weights[[1, 0]]
        elif fault == "rope-base":
            rotary = model.model.rotary_emb
            size = len(rotary.inv_freq)
            rotary.inv_freq.copy_(500.0 ** -(torch.arange(size) / size))
        elif fault == "shifted-vocabulary":
            head = model.lm_head.weight
            model.lm_head.weight = torch.nn.Parameter(head.detach().roll(1, 0))
    return model


class Protocol:
    """The protocol of an OpenAI-compatible server, with vLLM's additions."""

    def __init__(self, engine: SmallEngine, tokenizer: Any, context: int, owner: str = "vllm") -> None:
        self.engine, self.tokenizer, self.context, self.owner = engine, tokenizer, context, owner
        self.faults = engine.faults

    def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": MODEL, "owned_by": self.owner, "max_model_len": self.context}]}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, messages: list[dict[str, str]]) -> list[int]:
        if "no-template" in self.faults:
            return self.ids("\n".join(message["content"] for message in messages))
        if "last-message" in self.faults:
            messages = messages[-1:]
        return self.ids(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def prompt_logprobs(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = []
        for index, ids in enumerate(body["prompt"]):
            places: list[Any] = [None]
            scored = self.engine.score(ids)
            for values, token in zip(scored, ids[1:], strict=False):
                listed = {*values.topk(body["prompt_logprobs"]).indices.tolist(), token}
                places.append({str(each): {"logprob": float(values[each])} for each in listed})
            choices.append({"index": index, "text": "", "prompt_logprobs": places, "finish_reason": "length"})
        return {"choices": choices}

    def documents(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer; without ``stream`` they are joined."""
        chat = path.endswith("chat/completions")
        prompt = self.render(body["messages"]) if chat else self.ids(body["prompt"])
        work = Work(prompt, int(body.get("max_tokens", 16)), body.get("cache_salt", ""), body.get("temperature", 0.0))
        top = (body.get("top_logprobs", 0) if body.get("logprobs") else 0) if chat else body.get("logprobs") or 0
        produced: list[int] = []
        sent, finish = "", "length"
        form = "tool" if body.get("tools") else "json" if body.get("response_format") else ""
        for token, values in self.engine.submit(work):
            if token in self.engine.ends:
                finish = "stop"
            produced.append(token)
            text = self.tokenizer.decode(produced, skip_special_tokens=True)
            new = "" if text.endswith("\ufffd") else text[len(sent) :]
            sent += new
            if not form:
                yield self._event(chat, new, self._listed(chat, token, values, top))
        if form:
            yield from self._formed(form, sent)
            finish = "tool_calls" if form == "tool" else "stop"
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(work.produced),
            "total_tokens": len(prompt) + len(work.produced),
            "prompt_tokens_details": {"cached_tokens": work.cached},
        }
        yield {**self._event(chat, "", None), "usage": usage, "finish": finish}

    def _formed(self, form: str, text: str) -> Iterator[dict[str, Any]]:
        word = "".join(each for each in text if each.isalpha())[:12]
        if form == "json":
            yield self._event(True, json.dumps({"city": word, "inhabitants": 2000000}), None)
            return
        for part in (
            {"name": "get_weather", "arguments": ""},
            {"arguments": '{"city": '},
            {"arguments": json.dumps(word) + "}"},
        ):
            yield {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": part}]}}]}

    def _event(self, chat: bool, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, "logprobs": logprobs}
        return {"model": MODEL, "choices": [{**choice, **({"delta": {"content": text}} if chat else {"text": text})}]}

    def _listed(self, chat: bool, token: int, values: torch.Tensor, top: int) -> dict[str, Any] | None:
        if not top:
            return None
        ranked = values.topk(top).indices.tolist()
        if chat:
            entries = [self._entry(each, values) for each in ranked]
            return {"content": [{**self._entry(token, values), "top_logprobs": entries}]}
        listed = {self.tokenizer.decode([each]): float(values[each]) for each in ranked}
        return {"tokens": [self.tokenizer.decode([token])], "token_logprobs": [float(values[token])], "top_logprobs": [listed]}

    def _entry(self, token: int, values: torch.Tensor) -> dict[str, Any]:
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": float(values[token]), "bytes": [token] if "\ufffd" in text else list(text.encode())}


def joined(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer at once that a stream makes up."""
    first = documents[0]["choices"][0]
    chat = "delta" in first
    text = "".join(
        (each["choices"][0].get("delta") or each["choices"][0]).get("content" if chat else "text", "") for each in documents
    )
    calls: list[dict[str, str]] = []
    lists: dict[str, list[Any]] = {}
    for each in documents:
        choice = each["choices"][0]
        for name, values in (choice.get("logprobs") or {}).items():
            lists.setdefault(name, []).extend(values)
        for call in (choice.get("delta") or {}).get("tool_calls") or ():
            if "name" in call["function"]:
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[-1]["arguments"] += call["function"].get("arguments", "")
    message = {"role": "assistant", "content": text, "tool_calls": [{"function": call} for call in calls]}
    choice = {"index": 0, "finish_reason": documents[-1]["finish"], "logprobs": lists or None}
    return {
        "model": MODEL,
        "choices": [{**choice, **({"message": message} if chat else {"text": text})}],
        "usage": documents[-1]["usage"],
    }


@contextmanager
def small_server(engine: SmallEngine, tokenizer: Any, context: int = 2048, owner: str = "vllm") -> Iterator[str]:
    """The URL of a server of an engine while the block runs."""
    protocol = Protocol(engine, tokenizer, context, owner)
    damage = [ANSWER_FAULTS[fault] for fault in sorted(engine.faults) if fault in ANSWER_FAULTS]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each event of a stream waits 40 ms for the acknowledgement of the one before

        def log_message(self, *args: object) -> None:
            pass

        def reply(self, document: object, status: int = 200) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):  # the client has given up
                self.wfile.write(content)

        def do_GET(self) -> None:
            answers = {"/v1/models": protocol.models(), "/version": {"version": "0"}, "/health": {}}
            self.reply(answers.get(self.path, {}), 200 if self.path in answers else 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if any(each in body.get("cache_salt", "") for each in "@/\\\0"):  # as vLLM 0.32 does
                self.reply({"error": {"message": "Parameter 'cache_salt' must not contain these"}}, 400)
            elif self.path == "/tokenize":
                self.reply({"tokens": protocol.ids(body["prompt"])})
            elif "prompt_logprobs" in body:
                self.reply(protocol.prompt_logprobs(body))
            elif body.get("stream"):
                self.stream(body)
            else:
                document = joined(list(protocol.documents(self.path, body)))
                for change in damage:
                    document = change(document, False)
                self.reply(document)

        def stream(self, body: dict[str, Any]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number, document in enumerate(protocol.documents(self.path, body)):
                document["number"] = number
                if "finish" in document:
                    document["choices"][0]["finish_reason"] = document.pop("finish")
                for change in damage:
                    document = change(document, True)
                self.event(json.dumps(document).encode())
            self.event(b"[DONE]")
            with suppress(OSError):
                self.wfile.write(b"0\r\n\r\n")

        def event(self, content: bytes) -> None:
            line = b"data: " + content + b"\n\n"
            with suppress(OSError):
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    with http_served(Handler) as url:
        try:
            yield url
        finally:
            engine.close()
