"""Load cubins and launch their kernels through the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sm120kit.core.errors import CheckFailed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words = NDArray[np.uint32]


class CubinLauncher:
    """A cubin on the first GPU. Kernels have the parameters (in, out) and one warp a block."""

    def __init__(self, library: ctypes.CDLL, module: ctypes.c_void_p) -> None:
        self.library, self.module = library, module

    def run(self, kernel: str, inputs: Words, results: int) -> Words:
        """Launch a block for each case of ``inputs[case, lane, word]``; returns ``[case, lane, results]``.

        Raises:
            CheckFailed: a call of the driver fails, such as a kernel that faults.
        """
        import numpy as np

        inputs = np.ascontiguousarray(inputs, np.uint32)
        outputs = np.full((*inputs.shape[:2], results), 0xDEADBEEF, np.uint32)
        function, source, target = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
        call = self._call
        call("cuModuleGetFunction", ctypes.byref(function), self.module, kernel.encode())
        call("cuMemAlloc_v2", ctypes.byref(source), ctypes.c_size_t(inputs.nbytes))
        call("cuMemAlloc_v2", ctypes.byref(target), ctypes.c_size_t(outputs.nbytes))
        try:
            call("cuMemcpyHtoD_v2", source, inputs.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(inputs.nbytes))
            call("cuMemcpyHtoD_v2", target, outputs.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(outputs.nbytes))
            pointers = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in (source, target)))
            call("cuLaunchKernel", function, len(inputs), 1, 1, 32, 1, 1, 0, None, pointers, None)
            call("cuCtxSynchronize")
            call("cuMemcpyDtoH_v2", outputs.ctypes.data_as(ctypes.c_void_p), target, ctypes.c_size_t(outputs.nbytes))
        finally:
            self.library.cuMemFree_v2(source)
            self.library.cuMemFree_v2(target)
        return outputs

    def _call(self, name: str, *arguments: object) -> None:
        _checked(self.library, name, *arguments)


@contextmanager
def loaded(cubin: bytes) -> Iterator[CubinLauncher]:
    """Load a cubin on the first GPU that CUDA programs see.

    Raises:
        CheckFailed: the driver rejects it.
    """
    library = ctypes.CDLL("libcuda.so.1")
    device, context, module = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _checked(library, "cuInit", 0)
    _checked(library, "cuDeviceGet", ctypes.byref(device), 0)
    _checked(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        _checked(library, "cuCtxSetCurrent", context)
        _checked(library, "cuModuleLoadData", ctypes.byref(module), cubin)
        yield CubinLauncher(library, module)
        library.cuModuleUnload(module)
    finally:
        library.cuDevicePrimaryCtxRelease_v2(device)


def _checked(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    status = getattr(library, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        library.cuGetErrorString(status, ctypes.byref(text))
        raise CheckFailed(
            f"{name} failed with {status}: {(text.value or b'unknown error').decode()}", "check the driver with nvidia-smi"
        )
