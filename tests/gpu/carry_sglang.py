"""Pack upstream wheels of SGLang, of its kernels and of what it needs for a Hopper machine without a network.

``python tests/gpu/carry_sglang.py DIR WHEEL [WHEEL ...]``: writes ``DIR/site.tar.gz``, to be unpacked into a folder on
PYTHONPATH. ``patches/sglang`` is applied, so that the choices b12x exist. Of the kernels' device code only that for sm_90 is
kept; FlashAttention, FlashMLA and DeepGEMM are left out, and modules without content stand for xgrammar, IPython and
soundfile, which SGLang imports at its start: 370 MB of wheels become 41.
"""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from carry_vllm import XGRAMMAR, slim

PATCHES = Path(__file__).resolve().parents[2] / "patches" / "sglang"
LEFT_OUT = (
    *("sgl_kernel/fl*.so", "sgl_kernel/sm100/*", "deep_gemm/*", "_mscclpp*", "lib/*", "lib64/*", "include/*", "*.pyi"),
    *("sglang/multimodal_gen/*", "sglang/test/*", "flashinfer/data/cutlass/t*", "flashinfer/data/cutlass/examples/*"),
)


def main(target: str, wheels: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = [name for name in archive.namelist() if not any(fnmatch.fnmatch(name, each) for each in LEFT_OUT)]
                archive.extractall(site, names)
        for library in site.glob("sgl_kernel/sm90/*.so"):
            library.write_bytes(slim(bytearray(library.read_bytes())))
        for name in (PATCHES / "series").read_text().split():
            subprocess.run(["patch", "-s", "-p1", "-d", site, "-i", PATCHES / f"{name}.patch"], check=True)
        for module in ("xgrammar", "IPython", "soundfile"):
            (site / module).mkdir()
            (site / module / "__init__.py").write_text(XGRAMMAR)
        (site / "IPython" / "display.py").write_text(XGRAMMAR)
        with tarfile.open(Path(target, "site.tar.gz"), "w:gz", compresslevel=6) as packed:
            packed.add(site, "site")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
