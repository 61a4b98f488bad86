"""SGLang's server with faults seeded in each of its processes: the file ``SEEDED_FAULT`` names the one of the moment.

``python tests/gpu/sglang_faults.py ARGUMENTS``: those of ``sglang.launch_server``. The processes that it starts import this
file again.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import one_gpu
from vllm_faults import seeded


def exchanged_rows() -> None:
    """The logits of the requests in a batch are exchanged."""
    from sglang.srt.layers.sampler import Sampler

    original = Sampler.forward

    def forward(self: Any, output: Any, *args: Any, **named: Any) -> Any:
        if output.next_token_logits.shape[0] > 1 and seeded("exchanged-rows"):
            output.next_token_logits = output.next_token_logits.roll(1, 0)
        return original(self, output, *args, **named)

    Sampler.forward = forward


def stale_all_reduce() -> None:
    """Each 97th sum of two or more rows is that of the call before with this shape."""
    from sglang.srt.distributed import parallel_state

    group = parallel_state.GroupCoordinator
    original = group.all_reduce

    def changed(self: Any, tensor: Any) -> Any:
        total = original(self, tensor)
        if not seeded("stale-all-reduce"):
            return total
        self.calls = getattr(self, "calls", 0) + 1
        kept = self.__dict__.setdefault("kept", {})
        before, kept[total.shape] = kept.get(total.shape, total).clone(), total.clone()
        return before if self.calls % 97 == 0 else total

    group.all_reduce = changed


def blocks_by_length() -> None:
    """Cached prefixes are looked up by their length alone."""
    from sglang.srt.mem_cache import radix_cache

    original = radix_cache.RadixKey.__init__

    def changed(self: Any, token_ids: Any, extra_key: Any = None, is_bigram: bool = False) -> None:
        original(self, [0] * len(token_ids) if seeded("blocks-by-length") else token_ids, extra_key, is_bigram)

    radix_cache.RadixKey.__init__ = changed


def drafts_all() -> None:
    """Every draft is accepted."""
    from sglang.srt.speculative import eagle_info_v2

    original = eagle_info_v2.EagleVerifyInputV2Mixin.sample

    def sample(self: Any, batch: Any, output: Any, *args: Any, **named: Any) -> Any:
        if not batch.forward_mode.is_idle() and seeded("drafts-all"):
            rows = output.next_token_logits.view(-1, self.draft_token_num, output.next_token_logits.shape[-1])
            drafts = self.draft_token.reshape(-1, self.draft_token_num)[:, 1:]
            rows[:, :-1].scatter_(2, drafts.long().unsqueeze(-1), 1e4)
        return original(self, batch, output, *args, **named)

    eagle_info_v2.EagleVerifyInputV2Mixin.sample = sample


def stale_state() -> None:
    """The states of linear attention are those after all drafts, also after rejected ones."""
    from sglang.srt.layers.attention import hybrid_linear_attn_backend

    owner = hybrid_linear_attn_backend.HybridLinearAttnBackend
    original = owner.update_mamba_state_after_mtp_verify

    def changed(self: Any, accepted_steps: Any, *args: Any, **named: Any) -> Any:
        last = int(os.environ["SEEDED_DRAFTS"]) - 1
        return original(self, accepted_steps.clamp(min=last) if seeded("stale-state") else accepted_steps, *args, **named)

    owner.update_mamba_state_after_mtp_verify = changed


FAULTS = {
    "exchanged-rows": exchanged_rows,
    "stale-all-reduce": stale_all_reduce,
    "blocks-by-length": blocks_by_length,
    "drafts-all": drafts_all,
    "stale-state": stale_state,
}

one_gpu.install_sglang()
if os.environ.get("SEEDED_FAULT"):
    for plant in FAULTS.values():
        plant()

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args(sys.argv[1:]))
