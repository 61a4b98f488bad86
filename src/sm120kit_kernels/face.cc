// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0
//
// The kernels as tvm-ffi functions. They take tensors of any framework that speaks DLPack, and run on the stream that the
// caller's framework has set for the tensors' device. Shapes and layouts are the Python side's to check.

#include <cuda_runtime_api.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "sm120kit_kernels/kernels.hpp"

namespace sm120kit_kernels {
namespace {

namespace ffi = tvm::ffi;

Kernel const& find(ffi::String const& name) {
  auto const found = registry().find(name);
  if (found == registry().end()) {
    TVM_FFI_THROW(ValueError) << "no kernel " << name << " was compiled into this library";
  }
  return found->second;
}

/// Their names, in order.
ffi::Array<ffi::String> names() {
  ffi::Array<ffi::String> all;
  for (auto const& [name, kernel] : registry()) {
    all.push_back(name);
  }
  return all;
}

/// What it was compiled for, in CMake's words: 120f-real.
ffi::String archs() { return SM120KIT_ARCHS; }

/// Dynamic shared memory of a CTA in bytes.
std::int64_t shared_bytes(ffi::String name) { return find(name).shared_bytes; }

/// SMs of a device; an error with CUDA's own words where there is none.
std::int64_t multiprocessors(std::int64_t device) {
  int count = 0;
  cudaError_t const error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, static_cast<int>(device));
  if (error != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << "CUDA device " << device << ": " << cudaGetErrorString(error);
  }
  return count;
}

std::int64_t workspace_bytes(ffi::String name, std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t groups,
                             std::int64_t processors) {
  Problem problem{};
  problem.m = static_cast<int>(m), problem.n = static_cast<int>(n), problem.k = static_cast<int>(k);
  problem.groups = static_cast<int>(groups);
  return static_cast<std::int64_t>(find(name).workspace_bytes(problem, static_cast<int>(processors)));
}

/// `offsets` is ignored by dense kernels. `d` has n columns; k counts elements.
void launch(ffi::String name, ffi::TensorView a, ffi::TensorView b, ffi::TensorView a_scales, ffi::TensorView b_scales,
            ffi::TensorView alpha, ffi::TensorView offsets, ffi::TensorView d, ffi::TensorView workspace, std::int64_t k,
            std::int64_t groups, std::int64_t processors) {
  DLDevice const device = d.device();
  for (auto const& tensor : {a, b, a_scales, b_scales, alpha, offsets, d, workspace}) {
    if (tensor.device().device_type != kDLCUDA || tensor.device().device_id != device.device_id) {
      TVM_FFI_THROW(ValueError) << "all tensors must be on one CUDA device; one has device type "
                                << tensor.device().device_type << " and index " << tensor.device().device_id;
    }
  }
  Problem problem{};
  problem.a = a.data_ptr(), problem.b = b.data_ptr();
  problem.a_scales = a_scales.data_ptr(), problem.b_scales = b_scales.data_ptr();
  problem.alpha = static_cast<float const*>(alpha.data_ptr());
  problem.offsets = static_cast<std::int32_t const*>(offsets.data_ptr());
  problem.d = d.data_ptr();
  problem.m = static_cast<int>(d.size(0)), problem.n = static_cast<int>(d.size(1)), problem.k = static_cast<int>(k);
  problem.groups = static_cast<int>(groups), problem.a_scale_rows = a_scales.size(0);
  auto const stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  char const* const refused = find(name).launch(problem, static_cast<int>(processors), workspace.data_ptr(), stream);
  if (refused != nullptr) {
    TVM_FFI_THROW(RuntimeError) << name << " was not launched: " << refused << " (m=" << problem.m << ", n=" << problem.n
                                << ", k=" << k << ", groups=" << groups << ")";
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(names, names);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(archs, archs);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(shared_bytes, shared_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(multiprocessors, multiprocessors);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(workspace_bytes, workspace_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(launch, launch);

}  // namespace
}  // namespace sm120kit_kernels
