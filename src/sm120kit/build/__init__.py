"""``BuildPlan -> Artifacts``: drive the engine's generators, ninja and its wheel backend; ask the results what they are.

Everything is compiled in one work directory per recipe and arch list, which stays between builds so that ninja's depfiles can
save work. Commands there use relative paths only, so that the same inputs give the same bytes in every directory.
"""

from sm120kit.build.compiling import Means, Progress, compile_units
from sm120kit.build.environment import cuda_home_of, find_python, install, isolation
from sm120kit.build.extension import SOURCE, Site, check_extensions, cmake_program, compile_extensions, finish_extensions
from sm120kit.build.finishing import check, finish
from sm120kit.build.generate import generate
from sm120kit.build.kernels import compile_kernels, finish_kernels, source_files, source_version
from sm120kit.build.overlay import finish_overlay, lay, overlaid

__all__ = [
    "SOURCE",
    "Means",
    "Progress",
    "Site",
    "check",
    "check_extensions",
    "cmake_program",
    "compile_extensions",
    "compile_kernels",
    "compile_units",
    "cuda_home_of",
    "find_python",
    "finish",
    "finish_extensions",
    "finish_kernels",
    "finish_overlay",
    "generate",
    "install",
    "isolation",
    "lay",
    "overlaid",
    "source_files",
    "source_version",
]
