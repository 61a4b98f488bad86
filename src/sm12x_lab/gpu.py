"""The GPU that CUDA programs use by default, as the driver reports it; ``CUDA_VISIBLE_DEVICES`` applies."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import StrEnum

from sm120kit.core.errors import ResourceUnavailable

WITHOUT_GPU = "without a GPU, `sm120kit tiles RECIPE --emulate` runs the mainloops on the CPU"


class Backend(StrEnum):
    """Where kernels run: on Hopper, compiled with a header that replaces the missing instructions, or as PTX for SM120 that is
    rewritten; or natively on SM12x."""

    EMULATE = "emulate"
    REWRITTEN = "rewritten"
    NATIVE = "native"


_HOPPER = "a GPU of compute capability 9.0 (Hopper: H100, H200, GH200)"
REQUIRED_GPU = {Backend.EMULATE: _HOPPER, Backend.REWRITTEN: _HOPPER, Backend.NATIVE: "an SM12x GPU"}
"""Emulation needs Hopper: only it has TMA, mbarriers and setmaxnreg in the form of SM12x, and no TMEM."""


@dataclass(frozen=True)
class CudaDevice:
    """A GPU as the driver describes it. ``cuda`` is the newest CUDA version that the driver supports."""

    name: str
    capability: tuple[int, int]
    driver: str
    cuda: str


def probe(cuda: str = "libcuda.so.1", management: str = "libnvidia-ml.so.1") -> CudaDevice | None:
    """The first GPU that CUDA programs see; None without a driver, without a device, or when a driver call fails."""
    try:
        library = ctypes.CDLL(cuda)
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    complete = (
        library.cuInit(0) == 0
        and library.cuDeviceGet(ctypes.byref(device), 0) == 0
        and library.cuDeviceGetName(name, len(name), device) == 0
        and library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device) == 0
        and library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device) == 0
        and library.cuDriverGetVersion(ctypes.byref(version)) == 0
    )
    if not complete:
        return None
    release = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return CudaDevice(name.value.decode(errors="replace"), (major.value, minor.value), _driver(management), release)


_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def _driver(management: str) -> str:
    """The driver's version; only the management library (NVML) has it."""
    text = ctypes.create_string_buffer(80)
    try:
        library = ctypes.CDLL(management)
        available = library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, len(text)) == 0
    except (OSError, AttributeError):
        return "unknown"
    return text.value.decode(errors="replace") if available else "unknown"


def require(gpu: CudaDevice | None, backend: Backend, command: str = "", without_gpu: str = WITHOUT_GPU) -> CudaDevice:
    """``gpu``, if it can run ``backend``: that of ``verify kernels``, or the only one of another ``command``.

    ``without_gpu`` is the hint for machines without a suitable GPU.

    Raises:
        ResourceUnavailable: ``gpu`` is None.
        ResourceUnavailable: its compute capability does not fit.
    """
    needs = f"{command or f'verify kernels --device {backend}'} needs {REQUIRED_GPU[backend]}"
    if gpu is None:
        raise ResourceUnavailable(f"{needs}; CUDA programs see no GPU here", without_gpu)
    major, minor = gpu.capability
    if major == 12 if backend is Backend.NATIVE else (major, minor) == (9, 0):
        return gpu
    other = Backend.NATIVE if major == 12 else Backend.EMULATE if (major, minor) == (9, 0) else None
    hint = f"use --device {other}" if other and not command else f"choose another GPU with CUDA_VISIBLE_DEVICES; {without_gpu}"
    raise ResourceUnavailable(f"{needs}; this is {gpu.name}, compute capability {major}.{minor}", hint)


def arch(backend: Backend, gpu: CudaDevice | None) -> str:
    """The nvcc target for ``backend``: machine code such as ``sm_90a``, or PTX; without a GPU, ``native`` is ``sm_120a``."""
    if backend is Backend.EMULATE:
        return "sm_90a"
    if backend is Backend.REWRITTEN:
        return "compute_120a"
    return f"sm_12{gpu.capability[1]}a" if gpu else "sm_120a"
