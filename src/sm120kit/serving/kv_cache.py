"""What a model keeps of a sequence between steps: vectors of its tokens and states of constant size. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Vectors:
    """What one layer keeps of tokens: ``heads`` vectors of ``width`` elements, K and V together, for every ``tokens`` tokens.

    ``window`` is the number of tokens that are kept, None for all, and ``ring`` whether a step's own tokens go into the window.
    An element has the KV cache's data type, unless ``element`` has its bytes. ``latent`` are the elements of a latent vector
    of which ``width`` has the bytes with scales.
    """

    heads: int
    width: int
    window: int | None = None
    tokens: int = 1
    element: float | None = None
    ring: bool = False
    latent: int = 0

    def bytes(self, element: float, gpus: int = 1) -> float:
        """Bytes per token on each of ``gpus``, which divide the heads; fewer heads than GPUs are replicated."""
        return math.ceil(self.heads / gpus) * self.width * (self.element or element) / self.tokens


@dataclass(frozen=True)
class State:
    """A state of one layer: ``recurrent`` elements, and ``step`` elements for each of ``kernel`` - 1 steps of a convolution.

    ``element`` is the size of a recurrent element in bytes; an element of the convolution has 2. GPUs divide both, unless
    the state is ``replicated``.
    """

    recurrent: int
    step: int
    kernel: int
    element: float = 2
    replicated: bool = False

    def bytes(self, gpus: int = 1, drafts: int = 0) -> float:
        """Bytes of a sequence on each of ``gpus``; each draft token is one more step of the convolution."""
        size = self.recurrent * self.element + self.step * (self.kernel - 1 + drafts) * 2
        return size / (1 if self.replicated else gpus)


@dataclass(frozen=True)
class Split:
    """How a model is divided: ``gpus`` divide each layer, ``stages`` of a pipeline the layers."""

    gpus: int = 1
    stages: int = 1


@dataclass(frozen=True)
class KvCache:
    """What the layers of a model keep, each kind with its number of layers.

    ``stateful`` layers keep a state whose size ``config.json`` does not tell; it is not counted.
    """

    vectors: tuple[tuple[Vectors, int], ...]
    states: tuple[tuple[State, int], ...] = ()
    stateful: int = 0

    def token_bytes(self, element: float, split: Split = Split()) -> float:
        """Bytes per token on each GPU, in the layers that keep all tokens; of a pipeline, those of its longest stage."""
        return sum(bytes_of * layers for bytes_of, layers, _ in self._sized(element, split, windowed=False))

    def window_bytes(self, element: float, in_flight: int, split: Split = Split()) -> float:
        """Bytes of a long sequence on each GPU, in the layers that keep the latest tokens and ``in_flight`` more of a step."""
        sized = self._sized(element, split, windowed=True)
        return sum(size * layers * (each.window + in_flight * (not each.ring)) for size, layers, each in sized if each.window)

    def state_bytes(self, split: Split = Split(), drafts: int = 0) -> float:
        """Bytes of the states of one sequence on each GPU."""
        return sum(state.bytes(split.gpus, drafts) * math.ceil(layers / split.stages) for state, layers in self.states)

    def with_drafts(self, layers: int) -> KvCache:
        """The cache with layers of multi-token prediction, which keep what attention to all tokens does."""
        if not layers or not self.vectors:
            return self
        first, *others = sorted(self.vectors, key=lambda kept: kept[0].window is not None)
        return KvCache(((first[0], first[1] + layers), *others), self.states, self.stateful)

    def _sized(self, element: float, split: Split, *, windowed: bool) -> Iterator[tuple[float, int, Vectors]]:
        for each, layers in self.vectors:
            if (each.window is not None) == windowed:
                yield each.bytes(element, split.gpus), math.ceil(layers / split.stages), each
