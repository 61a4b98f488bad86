"""``BuildPlan -> Artifacts``: drive the engine's generators, ninja and its wheel backend; ask the results what they are.

Everything is compiled in one work directory per recipe and arch list, which stays between builds so that ninja's depfiles can
save work. Commands there use relative paths only, so that the same inputs give the same bytes in every directory.
"""

from sm120kit.build.compiling import Progress, compile_units
from sm120kit.build.finishing import check, finish
from sm120kit.build.generate import generate
from sm120kit.build.kernels import compile_kernels, finish_kernels, source_files, source_version

__all__ = [
    "Progress",
    "check",
    "compile_kernels",
    "compile_units",
    "finish",
    "finish_kernels",
    "generate",
    "source_files",
    "source_version",
]
