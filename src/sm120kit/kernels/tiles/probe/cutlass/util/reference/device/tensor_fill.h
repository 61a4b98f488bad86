// CUTLASS test helper: launches kernels in nvcc syntax, and no launcher uses it.
#pragma once
