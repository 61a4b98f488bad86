"""Pack upstream wheels of SGLang, of its kernels and of what it needs for a Hopper machine without a network.

``python tests/gpu/carry_sglang.py DIR`` downloads :data:`WHEELS` for Python 3.12 and writes ``DIR/site.tar.gz``, to be
unpacked into a folder on PYTHONPATH of a machine with PyTorch 2.11 and libnuma. ``patches/sglang`` is applied, so that the
choices b12x exist; files as released are beside the patched ones, by the suffix ``.released``. Of the kernels' device code
only that for sm_90 is kept; FlashAttention, FlashMLA and DeepGEMM are left out, and modules without content stand for
xgrammar, IPython and soundfile, which SGLang imports at its start: 370 MB of wheels become 41.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from carry_vllm import download, slim, unpack

WHEELS = """
annotated-types==0.7.0 apache-tvm-ffi==0.1.11 compressed-tensors==0.15.0.1 decorator==5.2.1 dill==0.4.1 distro==1.9.0
docstring-parser==0.18.0 easydict==1.13 fastapi==0.136.1 flashinfer-python==0.6.8.post1 gguf==0.19.0 httpcore2==2.16.2
httptools==0.9.0 httpx2==2.16.2 huggingface-hub==1.14.0 jiter==0.14.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1
loguru==0.7.3 msgspec==0.21.1 nest-asyncio==1.6.0 openai==2.6.1 orjson==3.11.9 partial-json-parser==0.2.1.1.post7
pybase64==1.4.3 pydantic==2.13.4 pydantic-core==2.46.4 pydantic-extra-types==2.11.1 python-multipart==0.0.27
pyzmq==27.1.0 referencing==0.37.0 rpds-py==0.30.0 sentencepiece==0.2.1 setproctitle==1.3.7 sglang==0.5.11
sglang-kernel==0.4.2 sniffio==1.3.1 starlette==1.0.0 tabulate==0.10.0 tokenizers==0.22.2 tomlkit==0.14.0
torchao==0.17.0 transformers==5.6.0 truststore==0.10.5 typing-inspection==0.4.2 uvicorn==0.46.0 watchfiles==1.1.1
"""
"""What such a machine lacks: the closure of sglang-0.5.11-b12x, without what its server does not import."""
STAND_IN = "def __getattr__(name):\n    if name.startswith('__'):\n        raise AttributeError(name)\n    return object\n"
PATCHES = Path(__file__).resolve().parents[2] / "patches" / "sglang"
LEFT_OUT = (
    *("sgl_kernel/fl*.so", "sgl_kernel/sm100/*", "deep_gemm/*", "_mscclpp*", "lib/*", "lib64/*", "include/*", "*.pyi"),
    *("sglang/multimodal_gen/*", "sglang/test/*", "flashinfer/data/cutlass/t*", "flashinfer/data/cutlass/examples/*"),
)


def main(target: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        for wheel in download(WHEELS, Path(folder, "wheels")):
            unpack(site, str(wheel), LEFT_OUT)
        for library in site.glob("sgl_kernel/sm90/*.so"):
            library.write_bytes(slim(bytearray(library.read_bytes())))
        for name in (PATCHES / "series").read_text().split():
            if "Applies-To: sglang ==0.5.11" in (PATCHES / f"{name}.patch").read_text():
                subprocess.run(
                    ["patch", "-s", "-b", "-z", ".released", "-p1", "-d", site, "-i", PATCHES / f"{name}.patch"], check=True
                )
        for module in ("xgrammar", "IPython", "soundfile"):
            (site / module).mkdir()
            (site / module / "__init__.py").write_text(STAND_IN)
        (site / "IPython" / "display.py").write_text(STAND_IN)
        with tarfile.open(Path(target, "site.tar.gz"), "w:gz", compresslevel=6) as packed:
            packed.add(site, "site")


if __name__ == "__main__":
    main(sys.argv[1])
