"""Pack an upstream wheel of vLLM, and wheels of what it needs, for a Hopper machine without a network.

``python tests/gpu/carry_vllm.py DIR WHEEL [WHEEL ...]``: writes ``DIR/site.tar.xz``, to be unpacked into a folder on
PYTHONPATH. Of the wheels' device code only that for sm_90 is kept; FlashAttention, DeepGEMM and FlashMLA are left out, and a
module without content stands for xgrammar, which vLLM imports at its start: 244 MB of vLLM and 46 of others become 38.
"""

from __future__ import annotations

import fnmatch
import struct
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LEFT_OUT = ("vllm/vllm_flash_attn/*.so", "vllm/third_party/deep_gemm/*", "vllm/_flash*.so", "pycountry/locales/*", "*/tests/*")
MAGIC = b"\x50\xed\x55\xba"
CUBIN, HOPPER = 2, 90
XGRAMMAR = "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return object\n"


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
    """Those with machine code for Hopper."""
    found, at = [], 0
    while at < len(fatbin):
        kind, _, header, size = struct.unpack_from("<HHIQ", fatbin, at)
        (arch,) = struct.unpack_from("<I", fatbin, at + 28)
        if (kind, arch) == (CUBIN, HOPPER):
            found.append(fatbin[at : at + header + size])
        at += header + size
    return found


def main(target: str, wheels: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if not any(fnmatch.fnmatch(name, each) for each in LEFT_OUT)]
                archive.extractall(site, names)
        for library in site.glob("vllm/*.so"):
            library.write_bytes(slim(bytearray(library.read_bytes())))
        attention = site / "vllm" / "vllm_flash_attn" / "__init__.py"
        attention.write_text(attention.read_text().replace("if not (FA2_AVAILABLE or FA3_AVAILABLE):", "if False:"))
        (site / "xgrammar").mkdir()
        (site / "xgrammar" / "__init__.py").write_text(XGRAMMAR)
        with tarfile.open(Path(target, "site.tar.xz"), "w:xz") as packed:
            packed.add(site, "site")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
