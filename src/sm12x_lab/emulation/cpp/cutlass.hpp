// The headers that the emulation of every tile needs: the machine below CUTLASS, and CUTLASS. Included once, before tile.hpp.
#pragma once

#include "hooks.hpp"

#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler_params.h>
#include <cutlass/trace.h>
#include <cutlass/workspace.h>

#define __CUDA_ARCH__ 900  // the scheduler has a block index only in device code
#include <cutlass/gemm/kernel/sm90_tile_scheduler_group.hpp>
#undef __CUDA_ARCH__
#define __CUDA_ARCH_FEAT_SM90_ALL 1  // else operator() is empty
#include <cutlass/gemm/kernel/sm90_gemm_array_tma_warpspecialized_cooperative.hpp>
#undef __CUDA_ARCH_FEAT_SM90_ALL

#include "problem.hpp"

// Called only if the arguments do not give the number of CTAs, which those of the driver do.
extern "C" inline cudaError_t CUDARTAPI cudaGetDevice(int*) { return cudaErrorNoDevice; }
extern "C" inline cudaError_t CUDARTAPI cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorNoDevice; }
