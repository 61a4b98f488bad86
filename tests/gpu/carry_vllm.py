"""Pack an upstream wheel of vLLM, and wheels of what it needs, for a Hopper machine without a network.

``python tests/gpu/carry_vllm.py DIR WHEEL [WHEEL ...]``: writes ``DIR/site.tar.xz``, to be unpacked into a folder on
PYTHONPATH. Of the wheels' device code that for sm_90 is kept, and PTX where there is none: vLLM 0.33.0 has 336 MB, the file 61.
FlashAttention 2, DeepGEMM, FlashMLA and the server in Rust are left out. ``sm120kit`` needs pydantic and httptools there.
``python tests/gpu/carry_vllm.py DIR --flashinfer WHEEL [WHEEL ...]``: writes ``DIR/flashinfer.tar.xz`` with the Python of
FlashInfer, other wheels, and the sources of its all-reduce by PCIe-IPC and of ``trtllm_utils``, which it compiles there.
"""

from __future__ import annotations

import fnmatch
import re
import struct
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa2*.so",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/_flashmla*.so",
    "vllm/_deepselect*.so",
    "vllm/_qutlass*.so",
    "vllm/vllm-rs",
    "pycountry/locales/*",
    "mistral_common/data/*",
    "*/tests/*",
)
DATA = "flashinfer/data"
UTILITIES = (
    "tensorrt_llm/kernels/delayStream.cu",
    *(f"cpp/common/{name}.cpp" for name in ("envUtils", "logger", "stringUtils")),
)
SOURCES = ("pcie_ipc_all_reduce.cu", *(f"nv_internal/{name}" for name in (*UTILITIES, "cpp/common/tllmException.cpp")))
"""What FlashInfer compiles, in ``csrc``; beside the folder of a file, headers are in these."""
HEADERS = ("csrc", "include", "csrc/nv_internal", "csrc/nv_internal/include")
MAGIC = b"\x50\xed\x55\xba"
PTX, CUBIN, HOPPER = 1, 2, 90


def slim(data: bytearray) -> bytearray:
    """The library with fatbins whose entries for other GPUs than Hopper are zeros after those for Hopper."""
    at = data.find(MAGIC)
    while at >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        begin, end = at + header, at + header + size
        if version != 1 or header != 16 or end > len(data):
            at = data.find(MAGIC, at + 4)
            continue
        kept = b"".join(bytes(entry) for entry in entries(data[begin:end]))
        data[begin:end] = kept + bytes(size - len(kept))
        struct.pack_into("<Q", data, at + 8, len(kept))
        at = data.find(MAGIC, end)
    return data


def entries(fatbin: bytearray) -> list[bytearray]:
    """Those with machine code for Hopper, else the PTX that the driver compiles for it."""
    found: dict[tuple[int, int], list[bytearray]] = {}
    at = 0
    while at < len(fatbin):
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, at)
        (arch,) = struct.unpack_from("<I", fatbin, at + 28)
        found.setdefault((kind, arch), []).append(fatbin[at : at + header + size])
        at += header + size
    if machine_code := found.get((CUBIN, HOPPER)):
        return machine_code
    older = [arch for kind, arch in found if kind == PTX and arch <= HOPPER]
    return found[PTX, max(older)] if older else []


def unpack(site: Path, wheel: str, left_out: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not any(fnmatch.fnmatch(name, each) for each in left_out)]
        archive.extractall(site, names)


def pack(target: Path, site: Path) -> None:
    with tarfile.open(target, "w:xz") as packed:
        packed.add(site, site.name)


def vllm(target: Path, wheels: list[str]) -> None:
    """Write ``site.tar.xz``."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        for wheel in wheels:
            unpack(site, wheel, LEFT_OUT)
        for library in site.glob("vllm/**/*.so"):
            library.write_bytes(slim(bytearray(library.read_bytes())))
        pack(target / "site.tar.xz", site)


def included(data: Path) -> set[Path]:
    """The sources with all headers that they include; those of other packages are not among them."""
    found: set[Path] = set()
    waiting = [data / "csrc" / name for name in SOURCES]
    while waiting:
        file = waiting.pop().resolve()
        if file in found:
            continue
        found.add(file)
        for name in re.findall(r'^ *# *include *[<"]([^>"]+)[>"]', file.read_text(), re.MULTILINE):
            places = (file.parent / name, *(data / folder / name for folder in HEADERS))
            waiting += [next(place for place in places if place.exists())] if any(place.exists() for place in places) else []
    return found


def flashinfer(target: Path, wheels: list[str]) -> None:
    """Write ``flashinfer.tar.xz``."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "flashinfer-site")
        for wheel in wheels:
            unpack(site, wheel, ())
        needed = included((site / DATA).resolve())
        for file in (site / DATA).rglob("*"):
            if file.is_file() and file.resolve() not in needed:
                file.unlink()
        pack(target / "flashinfer.tar.xz", site)


if __name__ == "__main__":
    if sys.argv[2] == "--flashinfer":
        flashinfer(Path(sys.argv[1]), sys.argv[3:])
    else:
        vllm(Path(sys.argv[1]), sys.argv[2:])
