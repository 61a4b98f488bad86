// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0

#include "sm120kit_kernels/dense.cuh"

SM120KIT_DENSE(mxfp4_dense_128x128x128, Mxfp4, 128, 128, 128)
