// Stands in for the headers of torch that an engine's launchers include: what they call to check arguments, to allocate
// workspaces and to register operators. No type of a kernel depends on it, and nothing here is ever run or linked.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#define STD_TORCH_CHECK(...) if (false) {}
#define TORCH_CHECK(...) if (false) {}
#define TORCH_CHECK_NOT_IMPLEMENTED(...) if (false) {}
#define TORCH_ERROR_CODE_CHECK(call) ((void)(call))
#define TORCH_BOX(function) function
#define STABLE_TORCH_LIBRARY_IMPL(library, key, name) static void register_##library##_##key(torch::stable::Library& name)

int aoti_torch_get_current_cuda_stream(int device, void** stream);

namespace torch {
namespace headeronly {
enum class ScalarType { Byte, Char, Short, Int, Long, Half, Float, Double, Bool, BFloat16, Float8_e4m3fn, Float8_e5m2 };
}

namespace stable {
struct Device {
  int index() const;
};

struct Tensor {
  void* data_ptr() const;
  template <class T>
  T* data_ptr() const;
  template <class T>
  T* mutable_data_ptr() const;
  template <class T>
  T const* const_data_ptr() const;
  void* mutable_data_ptr() const;
  void const* const_data_ptr() const;
  int64_t size(int64_t) const;
  int64_t stride(int64_t) const;
  std::vector<int64_t> sizes() const;
  int64_t dim() const;
  int64_t numel() const;
  int64_t element_size() const;
  bool defined() const;
  bool is_cuda() const;
  bool is_contiguous() const;
  int get_device_index() const;
  int get_device() const;
  Device device() const;
  headeronly::ScalarType scalar_type() const;
  headeronly::ScalarType dtype() const;
};

struct Library {
  template <class Function>
  void impl(char const*, Function);
};

Device device_of(Tensor const&);
template <class... Options>
Tensor empty(int64_t size, Options&&...);
template <class... Options>
Tensor empty(std::initializer_list<int64_t> sizes, Options&&...);

namespace accelerator {
struct DeviceGuard {
  explicit DeviceGuard(int device);
};
}  // namespace accelerator
}  // namespace stable
}  // namespace torch

// The same under the names of torch's own C++ API, which older launchers use.
#define TORCH_LIBRARY_IMPL(library, key, name) static void register_##library##_##key(torch::stable::Library& name)

namespace torch {
using stable::Device;
using stable::empty;
using stable::Tensor;
constexpr auto kByte = headeronly::ScalarType::Byte, kUInt8 = kByte;
constexpr auto kInt32 = headeronly::ScalarType::Int, kInt64 = headeronly::ScalarType::Long;
constexpr auto kFloat16 = headeronly::ScalarType::Half, kBFloat16 = headeronly::ScalarType::BFloat16;
constexpr auto kFloat32 = headeronly::ScalarType::Float, kFloat8_e4m3fn = headeronly::ScalarType::Float8_e4m3fn;
struct TensorOptions {
  TensorOptions dtype(headeronly::ScalarType) const;
  TensorOptions device(Device) const;
};
}  // namespace torch

namespace at {
using torch::Tensor;
using torch::headeronly::ScalarType;
namespace cuda {
cudaStream_t getCurrentCUDAStream(int device = -1);
struct OptionalCUDAGuard {
  explicit OptionalCUDAGuard(torch::Device device);
};
}  // namespace cuda
}  // namespace at
