"""Records of device code in a file: images and their kernels."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernel:
    """A kernel in a cubin, according to the cubin.

    ``stack_bytes`` is the local memory per thread, including spills; ``shared_bytes`` is static shared memory only, because
    dynamic shared memory is chosen at launch and is not in a cubin. ``fp4_mma`` is the number of FP4 tensor core
    instructions of SM12x (``OMMA``) in the code.
    """

    name: str
    arch: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    text_bytes: int
    text_sha256: str
    fp4_mma: int = 0


@dataclass(frozen=True)
class Cubin:
    """A device image in a file. ``where`` is the file and the image's number in it."""

    where: str
    arch: str
    bytes: int
    kernels: tuple[Kernel, ...]
