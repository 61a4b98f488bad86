"""Which code of a program's modules runs under ``verify run``: ``modules.py LIBRARY TARGET=ARCH ...``.

``modules.py --build LIBRARY`` compiles modules.cu for each target of ``TARGETS``. Exit code 0: each ran code for ARCH, which is
negative for the status of a launch.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS = {
    "both": ("arch=compute_90,code=sm_90", "arch=compute_120a,code=[sm_120a,compute_120a]"),
    "code": ("arch=compute_90,code=sm_90", "arch=compute_120a,code=sm_120a"),
    "hopper": ("arch=compute_90a,code=[sm_90a,compute_90a]",),
    "sm120": ("arch=compute_120a,code=compute_120a",),
}
"""PTX for SM12x beside code for Hopper; machine code beside it; code for Hopper alone; PTX for SM12x alone."""


def build(library: str, nvcc: str = "nvcc") -> None:
    source = Path(__file__).with_name("modules.cu")
    with tempfile.TemporaryDirectory() as directory:
        objects = []
        for target, generated in TARGETS.items():
            objects.append(f"{directory}/{target}.o")
            codes = [word for each in generated for word in ("-gencode", each)]
            words = [nvcc, "-c", "-Xcompiler", "-fPIC", f"-DTARGET={target}", *codes, str(source), "-o", objects[-1]]
            subprocess.run(words, check=True)
        subprocess.run([nvcc, "-shared", *objects, "-o", library], check=True)


def main() -> int:
    if sys.argv[1] == "--build":
        build(*sys.argv[2:])
        return 0
    library, wrong = ctypes.CDLL(sys.argv[1]), 0
    for word in sys.argv[2:]:
        target, expected = word.split("=")
        arch = getattr(library, f"run_{target}")()
        print(target, arch)
        wrong += arch != int(expected)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
