"""Block-scaled FP4 and FP8 matrix products for NVIDIA SM12x GPUs, as torch operators with a reference for the CPU.

``gemm`` and ``grouped_gemm`` run the compiled kernels on CUDA tensors and the reference on CPU tensors; both trace under
``torch.compile``. ``python -m sm120kit_kernels.bench`` compares them with the reference and, on an SM12x GPU, times them.
"""

from sm120kit_kernels.formats import swizzle_grouped_scales, swizzle_scales, unswizzle_scales
from sm120kit_kernels.library import archs, build_info, kernels
from sm120kit_kernels.operators import gemm, grouped_gemm
from sm120kit_kernels.quantization import dequantize, global_scale, quantize

__all__ = [
    "archs",
    "build_info",
    "dequantize",
    "gemm",
    "global_scale",
    "grouped_gemm",
    "kernels",
    "quantize",
    "swizzle_grouped_scales",
    "swizzle_scales",
    "unswizzle_scales",
]
