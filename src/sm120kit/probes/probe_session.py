"""What a probe is, and the requests of probes to a server, within a time limit, whose answers are recorded."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from sm120kit.bench import client
from sm120kit.bench.client import EndedRequest, StreamRequest
from sm120kit.core.errors import ServerFailed, Sm120kitError
from sm120kit.core.urls import Endpoint
from sm120kit.engines import find
from sm120kit.kld import ServedModel
from sm120kit.probes.probe_records import CannotBeJudged, ProbeExchange, ProbeJudgement, Recorded, RecordedAnswer
from sm120kit.probes.recorded_answer import answer_of

CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
REQUEST_SECONDS, REQUEST_BYTES = 40.0, 8 << 20
"""Limits of an answer."""
TOKENIZE_SECONDS = 10.0
TOP = 5
"""Most likely tokens that are requested at each position; the most that OpenAI's protocol for completions allows."""
LISTED = ("logprobs", "top_logprobs")
"""Keys of a chat request that ask for log-probabilities."""
SHORT, LONG = 16, 32
"""Tokens of an answer of a slow and of a fast server."""
PREFILL_SECONDS = 4.0
"""Time for which a long prompt may be processed."""
MOST_PROMPT = 8192
SENTENCE_TOKENS = 20
"""Tokens of a sentence of an inventory, about."""


@dataclass(frozen=True)
class Ask:
    """A request of a probe; ``label`` is unique in it."""

    label: str
    body: dict[str, Any]
    path: str = CHAT


@dataclass
class ProbeSession:
    """The requests to one server until ``deadline``, a time of ``time.monotonic``.

    ``lists`` is whether it lists log-probabilities; ``silent`` has the paths that do not answer, with the reason: they are not
    asked again. ``exchanges`` has those of the current probe; by ``seed`` the prompts of this run differ from those of any
    other, which a server may have in its prefix cache.
    """

    server: Endpoint
    model: str
    seed: str
    deadline: float
    reference: tuple[Endpoint, str] | None = None
    reported: dict[str, str] = field(default_factory=dict)
    exchanges: list[ProbeExchange] = field(default_factory=list)
    tokens_per_second: float = 0.0
    long_tokens: int = 512
    lists: bool = True
    silent: dict[str, str] = field(default_factory=dict)

    @property
    def salts_cache(self) -> bool:
        """Whether requests can be kept from finding their prefix in the cache."""
        engine = find(self.reported.get("owned_by", ""))
        return bool(engine and engine.salts_cache)

    @property
    def answer_tokens(self) -> int:
        """Tokens of an answer, by the measured speed of the server."""
        return LONG if self.tokens_per_second > LONG else SHORT

    @property
    def context(self) -> int:
        """The longest prompt in tokens; 4,096 if the server does not report its context."""
        try:
            return int(self.reported["max_model_len"]) - 256
        except (KeyError, ValueError):
            return 4096 - 256

    def served(self, top: int, seconds: float = REQUEST_SECONDS) -> ServedModel:
        """The server as a model whose distributions are compared; ``seconds`` limit each request."""
        return ServedModel(self.server, self.model, top, min(seconds, self.left()), self.deadline)

    def left(self) -> float:
        """Seconds until the time limit.

        Raises:
            CannotBeJudged: none are left.
        """
        if (left := self.deadline - time.monotonic()) <= 1:
            raise CannotBeJudged("the time limit was reached before all requests were answered")
        return left

    def chat(self, label: str, question: str, tokens: int = 0, *, listed: bool = True, **more: Any) -> Ask:
        """A question in a chat, answered greedily; ``listed`` asks for log-probabilities, if the server lists them."""
        asked = self.talk(label, [{"role": "user", "content": question}], tokens, **more)
        # llama.cpp refuses top_logprobs beside "logprobs": false.
        return asked if listed else replace(asked, body={k: v for k, v in asked.body.items() if k not in LISTED})

    def talk(self, label: str, messages: list[dict[str, Any]], tokens: int = 0, **more: Any) -> Ask:
        """A chat, continued greedily."""
        listed = {"logprobs": True, "top_logprobs": TOP} if self.lists else {}
        return Ask(label, {**self._greedy(tokens), **listed, "messages": messages, **more})

    def text(self, label: str, prompt: str, tokens: int = 0, **more: Any) -> Ask:
        """A text, continued greedily, without a chat template."""
        listed = {"logprobs": TOP} if self.lists else {}
        return Ask(label, {**self._greedy(tokens), **listed, "prompt": prompt, **more}, TEXT)

    def cold(self, salt: object) -> dict[str, str]:
        """An option with which a request finds no prefix in the cache but those of requests with the same salt.

        vLLM 0.32 refuses a salt with "/".
        """
        return {"cache_salt": f"{self.seed}.{salt}".replace("/", ".")} if self.salts_cache else {}

    def _greedy(self, tokens: int) -> dict[str, Any]:
        # A generation_config.json may have a repetition_penalty, with which the most likely token is not the one chosen.
        plain = {"repetition_penalty": 1.0} if self.salts_cache else {}
        greedy = {"temperature": 0, "seed": 0, "max_tokens": tokens or self.answer_tokens, **plain}
        return {"model": self.model, "stream": False, **greedy}

    def send(
        self, asked: Iterable[Ask], *, together: bool = False, to: tuple[Endpoint, str] | None = None
    ) -> list[RecordedAnswer]:
        """Send requests one after the other, or all at once; ``to`` another server than this one. Their answers, in order.

        Raises:
            CannotBeJudged: the time limit was reached.
        """
        asks = list(asked)
        if not together:
            return [answer for ask in asks for answer in self._send([ask], to)]
        return self._send(asks, to)

    def _send(self, asks: list[Ask], to: tuple[Endpoint, str] | None) -> list[RecordedAnswer]:
        limit = min(REQUEST_SECONDS, self.left())
        server, model = to or (self.server, self.model)
        if not to and (reason := next((self.silent[ask.path] for ask in asks if ask.path in self.silent), "")):
            return self._recorded(asks, [RecordedAnswer(error=reason)] * len(asks))
        requests = [
            StreamRequest(number, ask.path, {**ask.body, "model": model}, 0.0, limit, REQUEST_BYTES)
            for number, ask in enumerate(asks)
        ]
        ended, began = list[EndedRequest](), time.monotonic()
        client.stream_all(server, [[request] for request in requests], stall_seconds=limit, on_end=ended.append)
        answers = [answer_of(each) for each in sorted(ended, key=lambda each: each[1].prompt)]
        # Chats are asked again: a server that answers none is not probed, and one may have waited for others.
        if not to and time.monotonic() - began >= REQUEST_SECONDS and all(answer.error for answer in answers):
            self.silent |= {ask.path: f"{ask.path}: {answers[0].error}, before" for ask in asks if ask.path != CHAT}
        return self._recorded(asks, answers)

    def _recorded(self, asks: list[Ask], answers: list[RecordedAnswer]) -> list[RecordedAnswer]:
        self.exchanges += [
            ProbeExchange(ask.label, ask.path, ask.body, answer) for ask, answer in zip(asks, answers, strict=True)
        ]
        return answers

    def measure(self) -> None:
        """Note how fast the server is, after a first request that may compile kernels.

        ``long_tokens`` is the length of a long prompt: at most half of the context, and what is read in ``PREFILL_SECONDS``.

        A server without a chat template answers texts only.

        Raises:
            ServerFailed: the server answers neither chats nor texts.
        """
        answers = self._timed(self.chat)
        if error := answers[-1].error:
            self.silent[CHAT] = error
            self.lists, answers = True, self._timed(self.text)
        if answers[-1].error:
            raise ServerFailed(f"{self.server.url} does not answer: {error[:200]}", client.hint(error))
        produced = (answers[2].completion_tokens or SHORT) - 1
        self.tokens_per_second = produced / max(answers[2].seconds - answers[1].seconds, 1e-3)
        prompt = " ".join(map(str, range(100, 356)))
        (read,) = self.send([(self.text if error else self.chat)("long", prompt, 1)])
        fast = (read.prompt_tokens or 512) / max(read.seconds, 1e-3) * PREFILL_SECONDS
        self.long_tokens = int(max(256, min(self.context / 2, fast, MOST_PROMPT)))

    def _timed(self, asked: Callable[..., Ask]) -> list[RecordedAnswer]:
        """A short answer, one of one token, and a short one."""
        question = "Count from one to twenty in words."
        for _ in range(2):  # the first request of all may compile for longer than a request may take
            (first,) = self.send([asked("first", question, SHORT)])
        self.lists = not first.error  # some servers refuse log-probabilities
        return self.send(asked(label, question, tokens) for label, tokens in (("first", SHORT), ("one", 1), ("timed", SHORT)))

    def token_ids(self, text: str) -> tuple[int, ...] | None:
        """The token ids of a text; None if the server does not tell them."""
        try:
            return None if TOKENIZE in self.silent else self.served(1, TOKENIZE_SECONDS).token_ids(text)
        except Sm120kitError as error:
            self.silent[TOKENIZE] = error.message
            return None


@dataclass(frozen=True)
class ServerProbe:
    """A probe: ``ask`` sends requests, ``judge`` concludes from their answers alone.

    Both may raise ``CannotBeJudged``. ``cannot_see`` is a sentence on the faults that the probe does not find.
    """

    name: str
    ask: Callable[[ProbeSession], None]
    judge: Callable[[Recorded], ProbeJudgement]
    cannot_see: str
