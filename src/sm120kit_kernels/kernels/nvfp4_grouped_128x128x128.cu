// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0

#include "sm120kit_kernels/grouped.cuh"

SM120KIT_GROUPED(nvfp4_grouped_128x128x128, Nvfp4, 128, 128, 128)
