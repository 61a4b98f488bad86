"""Kernels of b12x that are compiled without a GPU, into an image as entries of b12x's cache.

The image of all other layers runs ``compile.py``, so that the entries have the key that b12x computes in it: bytes of b12x,
versions of Python, torch, the DSL and cuda-bindings, and variables such as ``CUDA_HOME`` and ``CUTE_DSL_ARCH`` (0.8.3:
``b12x/cute/runtime_patches.py``, 1.5.1: ``b12x/_lib/compiler.py``). The entrypoint, beside them, copies them to b12x's cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sm120kit.images._compiled_ahead import Compiler
from sm120kit.kernels.cubin.cubin_records import Kernel
from sm120kit.kernels.kernel_records import SMEM_CAPACITY_BYTES

PROGRAM, OF_1_5, REQUEST = "b12x/compile.py", "b12x/compile_1_5.py", "b12x/request.json"
"""Programs of an image, below ``/opt/sm120kit``: the program, what it has for b12x 1.5.1, and the recipe's table."""

DIRECTORY = "opt/sm120kit/b12x"
"""Where an image has both, the entries, and ``kernels.json`` with the call, sha256 and launches of each."""

ARCH = "sm_120a"
WITHOUT_MMA = "MoEMicroKernelSilu"
"""Of b12x 1.5.1, the class of experts for less than eight tokens, which multiplies without tensor cores."""
NAME = "b12x"
"""The distribution, its package, and the project of its patch series."""


@dataclass(frozen=True)
class Launch:
    """A launch in the host code of an entry, by the DSL's object of the kernel.

    ``kernel`` is its class; ``tile`` is ``MxNxK`` in elements, ``k_blocks`` the MMA steps along K in one tile; ``shared_bytes``
    is the dynamic shared memory that the launch requests. Of b12x 1.5.1, only that and the class are known.
    """

    kernel: str
    shared_bytes: int
    tile: str = ""
    stages: int = 0
    k_blocks: int = 0


@dataclass(frozen=True)
class Entry:
    """A compiled kernel: the call that it was compiled for, its sha256, and the launches of its host code, at least one."""

    call: str
    sha256: str
    launches: tuple[Launch, ...]

    def __post_init__(self) -> None:
        if not self.launches:
            raise ValueError(f"no launch of the kernel for {self.call} is recorded")

    def too_big(self, kernels: Sequence[Kernel]) -> str:
        """Why SM120 cannot launch this entry; empty if it can. Of its ``kernels``, the most static shared memory counts."""
        static = max((kernel.shared_bytes for kernel in kernels), default=0)
        return "; ".join(
            f"{launch.kernel} for {self.call} requests {size:,} bytes of shared memory, SM120 has {SMEM_CAPACITY_BYTES:,}"
            for launch in self.launches
            if (size := static + launch.shared_bytes) > SMEM_CAPACITY_BYTES
        )


def _listed(result: dict[str, Any], contents: Mapping[str, bytes]) -> dict[str, Any]:
    """The :class:`Entry` of each kernel; b12x 1.5.1 has a manifest of each, without which it finds none."""
    calls = {kernel["path"]: kernel for kernel in reversed(result["kernels"])}
    manifests = {path for path in contents if path.endswith(".json")}
    if {*calls} != {*contents} - manifests or manifests not in (set(), {f"{path[:-1]}json" for path in calls}):
        raise ValueError("its entries are not those of its kernels")
    return {
        path: asdict(
            Entry(
                kernel["call"],
                hashlib.sha256(contents[path]).hexdigest(),
                tuple(Launch(**launch) for launch in kernel["launches"]),
            )
        )
        for path, kernel in sorted(calls.items())
    }


COMPILER = Compiler(
    NAME,
    DIRECTORY,
    (f"/{DIRECTORY}/compile.py", f"/{DIRECTORY}/request.json"),
    re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}\.(o|json)"),
    _listed,
    "`b12x` in the recipe lists them; its locked b12x and CuTe DSL must belong together",
)
