// Ampere grouped GEMM: launches kernels in nvcc syntax, and no SM120 kernel uses it.
#pragma once
