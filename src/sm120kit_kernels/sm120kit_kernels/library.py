"""The compiled kernels: their names, the GPUs that can run them, and how to launch them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).resolve().parent
_LIBRARY = "sm120kit_kernels.so"


def build_info() -> dict[str, Any]:
    """The version of this package."""
    info: dict[str, Any] = json.loads((_HERE / "build_info.json").read_text())
    return info


@functools.cache
def load() -> Any:
    """The compiled library.

    Raises:
        RuntimeError: this package has no compiled kernels.
    """
    path = _HERE / _LIBRARY
    if not is_compiled():
        raise RuntimeError(
            f"this package has no compiled kernels ({path} does not exist), only the reference for CPU tensors; "
            "docs/build.md of sm120kit has the commands that build a wheel with them"
        )
    import tvm_ffi

    return tvm_ffi.load_module(str(path))


def is_compiled() -> bool:
    """Whether this package has compiled kernels; without them it contains the reference only."""
    return (_HERE / _LIBRARY).is_file()


@functools.cache
def kernels() -> tuple[str, ...]:
    """Names of the kernels in the library, such as ``nvfp4_dense_128x128x128``."""
    return tuple(map(str, load().names())) if is_compiled() else ()


@functools.cache
def archs() -> tuple[str, ...]:
    """CUDA targets that the library was compiled for; ``sm_120f`` runs on SM120 and SM121."""
    return tuple(f"sm_{arch.removesuffix('-real')}" for arch in str(load().archs()).split(",")) if is_compiled() else ()


def runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for an arch runs on a GPU of this compute capability.

    ``a`` code runs on this capability only, ``f`` code on the same major version from this minor version on (CUDA C++
    Programming Guide, section "Feature-Specific Compute Targets"); plain code also runs on later minor versions.
    """
    digits = arch.removeprefix("sm_").rstrip("af")
    major, minor = int(digits[:-1]), int(digits[-1])
    if arch.endswith("a"):
        return capability == (major, minor)
    return capability[0] == major and capability[1] >= minor


@functools.cache
def multiprocessors(index: int) -> int:
    """The number of SMs of a CUDA device.

    Raises:
        RuntimeError: the device cannot run the library.
    """
    capability = torch.cuda.get_device_capability(index)
    if not any(runs_on(arch, capability) for arch in archs()):
        raise RuntimeError(
            f"cuda:{index} is {torch.cuda.get_device_name(index)} (compute capability {capability[0]}.{capability[1]}); "
            f"these kernels were compiled for {', '.join(archs())}"
        )
    return int(load().multiprocessors(index))


def choose(format: str, family: str, tile: str) -> str:
    """The name of the kernel for a format and family, with ``tile`` or, if it is empty, the tile with the largest extents.

    Raises:
        RuntimeError: the package has no kernel for format and family.
        ValueError: no kernel has that tile.
    """
    names = [name for name in kernels() if name.startswith(f"{format}_{family}_")]
    tiles = sorted((name.rsplit("_", 1)[1] for name in names), key=lambda each: [-int(size) for size in each.split("x")])
    if not tiles:
        load()
        raise RuntimeError(f"no {family} {format} kernel was compiled into this package; it has: {', '.join(kernels())}")
    if tile and tile not in tiles:
        raise ValueError(f"no {family} {format} kernel has tile={tile!r}; tiles: {', '.join(tiles)}")
    return f"{format}_{family}_{tile or tiles[0]}"


def launch(
    name: str,
    a: Tensor,
    b: Tensor,
    a_scales: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    offsets: Tensor,
    d: Tensor,
    k: int,
    groups: int,
) -> None:
    """Launch a kernel on the current stream of the tensors' device.

    Its workspace comes from torch's allocator, which reuses it in stream order.
    """
    library, device = load(), d.device
    processors = multiprocessors(device.index)
    with torch.cuda.device(device):
        size = library.workspace_bytes(name, *d.shape, k, groups, processors)
        workspace = torch.empty(max(int(size), 1), dtype=torch.uint8, device=device)
        plain = (tensor.view(torch.uint8) for tensor in (a, b, a_scales, b_scales))
        library.launch(name, *plain, alpha, offsets, d, workspace, k, groups, processors)
