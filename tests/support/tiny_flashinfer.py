"""A FlashInfer with one kernel of a few lines, that takes seconds to build: its sdist, recipe, patch series and overrides."""

from __future__ import annotations

import hashlib
from pathlib import Path

from small_engine import KERNELS, make_sdist

PATH = "csrc/scale.cu"
SOURCE = """\
#include "scale.cuh"
extern "C" __global__ void scale(float* values, float factor) {
  values[threadIdx.x] *= factor;
}
extern "C" int launches() { return LAUNCHES; }
"""
GENERATOR = '''\
import dataclasses, os, pathlib

TREE = pathlib.Path(__file__).parents[2]
NINJA = """\\
ninja_required_version = 1.3
name = {name}
cuda_home = {cuda}
cxx = {cxx}
nvcc = {nvcc}
cuda_cflags = --compiler-options=-fPIC -I{tree}/include -gencode=arch=compute_120f,code=sm_120f -O3
ldflags = -shared -L$cuda_home/lib64 -L$cuda_home/lib64/stubs -lcudart -Wl,-s -Wl,--build-id=none

rule cuda_compile
  command = $nvcc --generate-dependencies-with-compile --dependency-output $out.d $cuda_cflags -c $in -o $out $cuda_post_cflags
  depfile = $out.d
  deps = gcc

rule link
  command = $cxx $in $ldflags -o $out

build {output}/scale.cuda.o: cuda_compile {source}
build {output}/{name}.so: link {output}/scale.cuda.o
default {output}/{name}.so
"""


@dataclasses.dataclass(frozen=True)
class Spec:
    name: str
    sources: list

    @property
    def build_dir(self):
        return pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / self.name

    @property
    def ninja_path(self):
        return self.build_dir / "build.ninja"

    @property
    def jit_library_path(self):
        return self.build_dir / f"{self.name}.so"

    def write_ninja(self):
        names = {"cuda": os.environ["CUDA_HOME"], "cxx": os.environ["CXX"], "nvcc": os.environ["FLASHINFER_NVCC"]}
        paths = {"tree": TREE, "output": self.build_dir, "source": self.sources[0]}
        self.ninja_path.write_text(NINJA.format(name=self.name, **names, **paths))


def gen():
    return Spec("m", [TREE / "csrc" / "scale.cu"])
'''
FILES = {
    PATH: SOURCE,
    "include/scale.cuh": "#pragma once\n#define LAUNCHES 1\n",
    "flashinfer/__init__.py": "",
    "flashinfer/_build_meta.py": '__version__ = "1.0"\n',
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/m.py": GENERATOR,
    "pyproject.toml": (
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "flashinfer-python"\ndynamic = ["version"]\n'
        '[tool.setuptools]\npackages = ["flashinfer", "flashinfer.jit"]\n'
        '[tool.setuptools.dynamic]\nversion = {attr = "flashinfer._build_meta.__version__"}\n'
    ),
}
PATCH = """\
From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001
From: sm120kit developers <dev@sm120kit.invalid>
Date: Sat, 21 Nov 2026 09:00:00 +0000
Subject: scale: launch twice

For a change in the series.

Applies-To: flashinfer >=1.0,<1.1
Upstream-Status: Inappropriate [for a test]
Origin: tests/support/tiny_flashinfer.py
Matters-For: nobody
No-Effect-For: all
Evidence: tests/support/tiny_flashinfer.py
Drop-When: now

diff --git a/include/scale.cuh b/include/scale.cuh
index {before}..{after} 100644
--- a/include/scale.cuh
+++ b/include/scale.cuh
@@ -1,2 +1,2 @@
 #pragma once
-#define LAUNCHES 1
+#define LAUNCHES 2
"""


def blob(content: str) -> str:
    """The id of a file in git."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content.encode()).hexdigest()


def write(directory: Path) -> tuple[Path, Path]:
    """Write the data directory with recipe and series, and the mirror with the sdist; returns both."""
    data, mirror = directory / "data", directory / "mirror"
    for path in (mirror, data / "recipes" / "engines", data / "patches" / "flashinfer", data / "cutlass_overrides"):
        path.mkdir(parents=True)
    sha256 = make_sdist(mirror / "flashinfer_python-1.0.tar.gz", FILES)
    (data / "recipes" / "engines" / "flashinfer-1.0.toml").write_text(KERNELS.format(sha256=sha256))
    before = FILES["include/scale.cuh"]
    patch = PATCH.format(before=blob(before), after=blob(before.replace("1\n", "2\n")))
    (data / "patches" / "flashinfer" / "series").write_text("launch-twice\n")
    (data / "patches" / "flashinfer" / "launch-twice.patch").write_text(patch)
    return data, mirror
