"""Which GPU a CUDA program would get here: asked of the driver itself, which also obeys CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import StrEnum

from sm120kit.errors import NoGpu, WrongGpu

OTHER_WAY = "without a GPU, `sm120kit tiles ENGINE --emulate` runs the mainloops on the CPU"


class Device(StrEnum):
    """How the kernels are run: with the missing instructions in software on Hopper, or as they are on SM12x."""

    EMULATE = "emulate"
    NATIVE = "native"


NEEDS = {Device.EMULATE: "a GPU of compute capability 9.0 (Hopper: H100, H200, GH200)", Device.NATIVE: "an SM12x GPU"}
"""Only Hopper has TMA, mbarriers and setmaxnreg in the form in which SM12x has them, and no TMEM."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it. ``cuda`` is the newest CUDA that the driver runs."""

    name: str
    capability: tuple[int, int]
    driver: str
    cuda: str


def probe(cuda: str = "libcuda.so.1", management: str = "libnvidia-ml.so.1") -> Gpu | None:
    """The first GPU that CUDA programs see, or None: no driver, no device, or none that answers."""
    try:
        library = ctypes.CDLL(cuda)
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    major, minor, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    answered = (
        library.cuInit(0) == 0
        and library.cuDeviceGet(ctypes.byref(device), 0) == 0
        and library.cuDeviceGetName(name, len(name), device) == 0
        and library.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device) == 0
        and library.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device) == 0
        and library.cuDriverGetVersion(ctypes.byref(version)) == 0
    )
    if not answered:
        return None
    release = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value), _driver(management), release)


_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


def _driver(management: str) -> str:
    """The driver's version, as only the management library tells it."""
    text = ctypes.create_string_buffer(80)
    try:
        library = ctypes.CDLL(management)
        known = library.nvmlInit_v2() == 0 and library.nvmlSystemGetDriverVersion(text, len(text)) == 0
    except (OSError, AttributeError):
        return "unknown"
    return text.value.decode(errors="replace") if known else "unknown"


def require(found: Gpu | None, device: Device) -> Gpu:
    """The GPU, when it can do what ``device`` asks.

    Raises:
        NoGpu: there is none.
        WrongGpu: it cannot.
    """
    if found is None:
        raise NoGpu(f"verify kernels --device {device} needs {NEEDS[device]}; CUDA programs see no GPU here", OTHER_WAY)
    major, minor = found.capability
    if (major, minor) == (9, 0) if device is Device.EMULATE else major == 12:
        return found
    other = Device.NATIVE if major == 12 else Device.EMULATE if (major, minor) == (9, 0) else None
    hint = f"use --device {other}" if other else f"choose another GPU with CUDA_VISIBLE_DEVICES; {OTHER_WAY}"
    raise WrongGpu(
        f"verify kernels --device {device} needs {NEEDS[device]}; this is {found.name}, compute capability {major}.{minor}",
        hint,
    )


def arch(device: Device, found: Gpu | None) -> str:
    """The nvcc target, such as ``sm_90a``; without a GPU the first that ``device`` stands for."""
    if device is Device.EMULATE:
        return "sm_90a"
    return f"sm_12{found.capability[1]}a" if found else "sm_120a"
