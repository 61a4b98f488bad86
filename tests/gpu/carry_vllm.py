"""Pack an upstream wheel of vLLM, and wheels of what it needs, for a Hopper machine without a network.

``python tests/gpu/carry_vllm.py DIR WHEEL``: downloads :data:`WHEELS` for Python 3.12 and writes ``DIR/site.tar.xz`` with them
and with vLLM's WHEEL, to be unpacked into a folder on PYTHONPATH of a machine with PyTorch 2.11 and transformers 5.17. Of the
device code that for sm_90 is kept, and PTX where there is none: vLLM 0.33.0 has 336 MB, the file 55. FlashAttention,
DeepGEMM, FlashMLA and the server in Rust are left out.
``python tests/gpu/carry_vllm.py DIR --flashinfer WHEEL``: writes ``DIR/flashinfer.tar.xz`` with the Python of FlashInfer and
the sources of its all-reduce by PCIe-IPC and of ``trtllm_utils``, which it compiles there.
``python tests/gpu/carry_vllm.py DIR --nccl WHEEL``: writes ``DIR/libnccl.so.2.xz`` for ``one_gpu.py``.
"""

from __future__ import annotations

import fnmatch
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

WHEELS = """
annotated-types==0.8.0 anthropic==2.14.0 apache-tvm-ffi==0.1.11 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 docstring-parser==0.18.0 fastapi==0.136.3 httpcore2==2.16.2
httptools==0.9.0 httpx2==2.16.2 ijson==3.6.0 jiter==0.19.0 jmespath==1.1.0 jsonschema-specifications==2025.9.1
jsonschema==4.26.0 lark==1.2.2 llguidance==1.7.6 loguru==0.7.3 mcp-types==2.3.0 mcp==2.3.0 mistral-common==1.13.1
model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai==3.57.0 orjson==3.13.0 oss-harmony==0.0.11
outlines-core==0.2.14 partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1
pycountry==26.2.16 pydantic-core==2.50.5 pydantic-extra-types==2.11.1 pydantic-settings==2.16.3 pydantic==2.14.4
python-dotenv==1.2.4 python-json-logger==4.2.0 python-multipart==0.0.34 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1
setproctitle==1.3.8 sniffio==1.3.1 sse-starlette==3.7.0 starlette==1.10.0 supervisor==4.3.0 truststore==0.10.5
typing-inspection==0.4.5 uvicorn==0.54.0 watchfiles==1.3.0 xgrammar==0.2.8
"""
"""What such a machine lacks for the server of vLLM 0.33.0, for ``sm120kit`` and for FlashInfer."""
PLATFORMS = (
    "manylinux_2_35",
    "manylinux_2_34",
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_24",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux1",
)
LEFT_OUT = (
    "vllm/vllm_flash_attn/_vllm_fa*.so",
    "vllm/_flashkda*.so",
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
STAND_INS = tuple(f"vllm/vllm_flash_attn/_vllm_fa{version}_C.py" for version in (2, 3))
"""vLLM imports one of them also where Triton's attention is chosen."""
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


def download(wheels: str, folder: Path) -> list[Path]:
    """Wheels for Python 3.12 on x86-64."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "-d", str(folder)]
    options += [word for each in PLATFORMS for word in ("--platform", f"{each}_x86_64")]
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", *options, *wheels.split()], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(site: Path, wheel: str, left_out: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not any(fnmatch.fnmatch(name, each) for each in left_out)]
        archive.extractall(site, names)


def pack(target: Path, site: Path) -> None:
    with tarfile.open(target, "w:xz") as packed:
        packed.add(site, site.name)


def vllm(target: Path, wheel: str) -> None:
    """Write ``site.tar.xz``."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        for each in (wheel, *download(WHEELS, Path(folder, "wheels"))):
            unpack(site, str(each), LEFT_OUT)
        for name in STAND_INS:
            (site / name).touch()
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


def flashinfer(target: Path, wheel: str) -> None:
    """Write ``flashinfer.tar.xz``."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "flashinfer-site")
        unpack(site, wheel, ())
        needed = included((site / DATA).resolve())
        for file in (site / DATA).rglob("*"):
            if file.is_file() and file.resolve() not in needed:
                file.unlink()
        pack(target / "flashinfer.tar.xz", site)


def nccl(target: Path, wheel: str) -> None:
    """Write ``libnccl.so.2.xz``."""
    with zipfile.ZipFile(wheel) as archive, lzma.open(target / "libnccl.so.2.xz", "wb", preset=3) as packed:
        packed.write(slim(bytearray(archive.read("nvidia/nccl/lib/libnccl.so.2"))))


if __name__ == "__main__":
    pieces = {"--flashinfer": flashinfer, "--nccl": nccl}
    pieces.get(sys.argv[2], vllm)(Path(sys.argv[1]), sys.argv[-1])
