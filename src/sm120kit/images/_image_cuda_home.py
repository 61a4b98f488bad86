"""The CUDA home of an engine's image: links to NVIDIA's wheels and a stub of the driver."""

from __future__ import annotations

from collections.abc import Iterable

from sm120kit.images._layers import LayerWriter

_HOME = "opt/cuda"


def write_cuda_home(layer: LayerWriter, wheels: str, libraries: Iterable[str], stub: bytes) -> None:
    """Write ``/opt/cuda``: links to the directory ``wheels`` of the image, whose ``lib`` has the files ``libraries``.

    Compilers look for libraries in ``lib64`` and without versions. ``lib``, which is on the library path, has those of CUDA 13.
    """
    for name in ("bin", "include", "nvvm"):
        layer.symlink(f"{_HOME}/{name}", f"/{wheels}/{name}")
    lib, lib64 = {}, {}
    for name in sorted(libraries):
        target = f"/{wheels}/lib/{name}"
        lib64[name] = target
        if ".so.13" in name:
            lib[name] = target
        if ".so." in name:
            lib64[name.partition(".so.")[0] + ".so"] = name
    layer.directory(f"{_HOME}/lib")
    for directory, links in (("lib", lib), ("lib64", lib64)):
        for name, target in sorted(links.items()):
            layer.symlink(f"{_HOME}/{directory}/{name}", target)
    layer.file(f"{_HOME}/lib64/stubs/libcuda.so", [stub], len(stub), mode=0o755)
