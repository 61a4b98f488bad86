// Tensor maps and the bulk tensor copy, from the documentation of cuTensorMapEncodeTiled (CUDA driver API, cuda.h 13.0) and of
// cp.async.bulk.tensor (PTX ISA). The descriptor is ours: the real one is opaque, and CUTLASS only carries its 128 bytes.
#pragma once

#include "machine.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

namespace emulate {

struct TensorMap {
  std::uint64_t address;
  std::uint64_t stride[4];  // bytes, of dimensions 1..4
  std::uint32_t dim[5];
  std::uint16_t box[5];
  std::uint8_t type, rank, swizzle, rejected;
  std::uint32_t magic;
  static constexpr std::uint32_t expected_magic = 0x534d3132;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

inline bool unpacks(int type) { return type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B; }
inline bool is_4bit(int type) { return type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B || unpacks(type); }
/// Bits that an element takes in global memory; 0 for a type that is not emulated.
inline int bits_of(int type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return 8;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return 16;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
      return 32;
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B:
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B:
      return 4;
    default:
      return 0;
  }
}
inline char const* name_of_type(int type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      return "UINT8";
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
      return "UINT16";
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return "BFLOAT16";
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B:
      return "16U4_ALIGN8B";
    case CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B:
      return "16U4_ALIGN16B";
    default:
      return "another type";
  }
}

inline std::string describe(TensorMap const& map) {
  return format("%s dim (%u,%u,%u,%u,%u) strides (%llu,%llu,%llu,%llu) B box (%u,%u,%u,%u,%u) swizzle %d",
                name_of_type(map.type), map.dim[0], map.dim[1], map.dim[2], map.dim[3], map.dim[4],
                (unsigned long long)map.stride[0], (unsigned long long)map.stride[1], (unsigned long long)map.stride[2],
                (unsigned long long)map.stride[3], map.box[0], map.box[1], map.box[2], map.box[3], map.box[4], map.swizzle);
}

/// Called with each map that the host encodes, before it is judged: a place to plant a fault.
inline std::function<void(TensorMap&)>& on_encode() {
  static std::function<void(TensorMap&)> the;
  return the;
}

/// Check every documented rule; each broken one becomes a finding. The grouped kernel's host side encodes placeholders that the
/// device replaces before use; the driver judges those too.
inline bool obeys_rules(TensorMap const& map) {
  bool good = true;
  auto refuse = [&](std::string const& rule) {
    good = false;
    report().add("rejected tensor map", rule + ": " + describe(map));
  };
  int const bits = bits_of(map.type);
  if (bits == 0) return refuse("element type is not emulated"), false;
  std::uint64_t const inner_bits = std::uint64_t(map.box[0]) * bits;
  if (inner_bits % 128 != 0)
    refuse(format("boxDim[0] is %llu bytes, must be a multiple of 16", (unsigned long long)(inner_bits / 8)));
  for (int i = 0; i < map.rank; ++i) {
    if (map.box[i] == 0 || map.box[i] > 256) refuse(format("boxDim[%d] = %u, must be 1 to 256", i, map.box[i]));
  }
  std::uint64_t const inner_smem = unpacks(map.type) ? map.box[0] : inner_bits / 8;
  std::uint64_t const span = map.swizzle == CU_TENSOR_MAP_SWIZZLE_32B   ? 32
                             : map.swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64
                                                                        : 128;
  if (map.swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && inner_smem > span) {
    refuse(format("the box's inner dimension is %llu bytes, more than its swizzle span of %llu", (unsigned long long)inner_smem,
                  (unsigned long long)span));
  }
  if (map.swizzle > CU_TENSOR_MAP_SWIZZLE_128B) refuse("swizzle mode is not emulated");
  if (unpacks(map.type)) {
    if (map.box[0] != 128) refuse(format("boxDim[0] = %u, must be 128 for 16U4_ALIGN16B", map.box[0]));
    if (map.swizzle != CU_TENSOR_MAP_SWIZZLE_NONE && map.swizzle != CU_TENSOR_MAP_SWIZZLE_128B)
      refuse("16U4_ALIGN16B allows no swizzle or 128 bytes");
  }
  std::uint64_t const align = unpacks(map.type) ? 32 : 16;
  if (map.address % align != 0)
    refuse(format("globalAddress ends in %llu, must be a multiple of %llu", (unsigned long long)(map.address % 64),
                  (unsigned long long)align));
  for (int i = 0; i < map.rank; ++i) {
    if (map.dim[i] == 0) refuse(format("globalDim[%d] is 0", i));
  }
  for (int i = 0; i + 1 < map.rank; ++i) {
    if (map.stride[i] % align != 0)
      refuse(format("globalStrides[%d] = %llu, must be a multiple of %llu", i, (unsigned long long)map.stride[i],
                    (unsigned long long)align));
    if (map.stride[i] >= (std::uint64_t{1} << 40))
      refuse(format("globalStrides[%d] = %llu, must be less than 2^40", i, (unsigned long long)map.stride[i]));
  }
  if (unpacks(map.type) && map.dim[0] % 128 != 0)
    refuse(format("globalDim[0] = %u, must be a multiple of 128 for 16U4_ALIGN16B", map.dim[0]));
  if (is_4bit(map.type) && map.dim[0] % 2 != 0)
    refuse(format("globalDim[0] = %u, must be a multiple of 2 for 4-bit types", map.dim[0]));
  return good;
}

inline TensorMap load_map(void const* where) {
  TensorMap map;
  std::memcpy(&map, where, sizeof map);
  return map;
}
inline void store_map(void* where, TensorMap const& map) { std::memcpy(where, &map, sizeof map); }

/// Global memory that copies may read, or also write: everything else is out of bounds.
struct GlobalMemory {
  struct Range {
    std::uint64_t begin, end;
    bool writable;
  };
  std::vector<Range> ranges;
  void allow(void const* begin, std::size_t bytes, bool writable = false) {
    auto const at = reinterpret_cast<std::uint64_t>(begin);
    ranges.push_back({at, at + bytes, writable});
  }
  bool holds(std::uint64_t address, std::size_t bytes, bool to_write = false) const {
    return std::any_of(ranges.begin(), ranges.end(), [&](Range const& r) {
      return address >= r.begin && address + bytes <= r.end && (r.writable || !to_write);
    });
  }
};
inline GlobalMemory& global_memory() {
  static GlobalMemory the;
  return the;
}

inline std::uint32_t swizzled(std::uint32_t address, int swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B:
      return address ^ ((address >> 3) & 0x10);
    case CU_TENSOR_MAP_SWIZZLE_64B:
      return address ^ ((address >> 3) & 0x30);
    case CU_TENSOR_MAP_SWIZZLE_128B:
      return address ^ ((address >> 3) & 0x70);
    default:
      return address;
  }
}

/// What both directions of a bulk tensor copy have to obey; false when there is nothing to go on with.
inline bool can_copy(TensorMap const& map, std::uint32_t shared, std::array<std::int32_t, 5> const& coordinate) {
  if (map.magic != TensorMap::expected_magic) {
    report().add("rejected tensor map", "a copy uses 128 bytes that are no tensor map");
    return false;
  }
  if (map.rejected) report().add("copy with rejected tensor map", describe(map));
  if (shared % 128 != 0) report().add("misaligned copy", format("shared memory address %u is not a multiple of 128", shared));
  if (unpacks(map.type) && coordinate[0] % 128 != 0)
    report().add("misaligned copy", format("coordinate %d of a 16U4_ALIGN16B copy is not a multiple of 128", coordinate[0]));
  return bits_of(map.type) != 0;
}

/// The box of a bulk tensor copy, in chunks of at most 16 bytes of shared memory, the unit of swizzling:
/// `move(address in shared memory, source, bytes)`, where source(b) is the global address of the chunk's byte b, or 0 when that
/// lies outside of the tensor.
template <class Move>
void for_each_chunk(TensorMap const& map, std::uint32_t shared, std::array<std::int32_t, 5> const& coordinate, Move move) {
  int const bits = bits_of(map.type);
  std::uint32_t const row_global = map.box[0] * bits / 8;
  std::uint32_t const row_shared = unpacks(map.type) ? map.box[0] : row_global;
  std::uint32_t const chunk_shared = 16, chunk_global = unpacks(map.type) ? 8 : 16;
  std::uint32_t offset = 0;
  std::array<std::uint32_t, 5> i{};
  for (i[4] = 0; i[4] < map.box[4]; ++i[4])
    for (i[3] = 0; i[3] < map.box[3]; ++i[3])
      for (i[2] = 0; i[2] < map.box[2]; ++i[2])
        for (i[1] = 0; i[1] < map.box[1]; ++i[1], offset += row_shared) {
          bool inside = true;
          std::uint64_t row = map.address;
          for (int d = 1; d < 5; ++d) {
            std::int64_t const c = std::int64_t(coordinate[d]) + i[d];
            if (c < 0 || c >= map.dim[d])
              inside = false;
            else
              row += std::uint64_t(c) * map.stride[d - 1];
          }
          for (std::uint32_t at = 0, to = 0; at < row_global; at += chunk_global, to += chunk_shared) {
            auto source = [&](std::uint32_t b) -> std::uint64_t {
              std::int64_t const bit = std::int64_t(coordinate[0]) * bits + (at + b) * 8;
              return !inside || bit < 0 || bit / bits >= map.dim[0] ? 0 : row + bit / 8;
            };
            move(swizzled(shared + offset + to, map.swizzle), source, std::min(chunk_global, row_global - at));
          }
        }
}

/// cp.async.bulk.tensor global -> shared, tiled mode, with complete_tx on `barrier`. Elements outside the tensor arrive as zero
/// and count as delivered; gaps of 16U4_ALIGN16B are neither written nor counted (as CUTLASS's stage bytes imply).
inline void bulk_copy(TensorMap const& map, std::uint32_t destination, std::uint32_t barrier, int stage,
                      std::array<std::int32_t, 5> const& coordinate) {
  auto& m = machine();
  if (!can_copy(map, destination, coordinate)) return;
  std::uint32_t const phase = m.barrier_phase(barrier);
  std::uint32_t delivered = 0;
  for_each_chunk(map, destination, coordinate, [&](std::uint32_t address, auto source, std::uint32_t bytes) {
    unsigned char chunk[16] = {};
    for (std::uint32_t b = 0; b < bytes; ++b) {
      std::uint64_t const from = source(b);
      if (from == 0) continue;
      if (global_memory().holds(from, 1))
        chunk[b] = *reinterpret_cast<unsigned char const*>(from);
      else
        report().add("global memory out of bounds", describe(map));
    }
    if (m.shared.holds(address, bytes))
      m.shared.deliver(address, chunk, bytes, stage, phase);
    else
      report().add("shared memory out of bounds",
                   format("a copy writes %u bytes at %u of %zu", bytes, address, m.shared.size()));
    delivered += bytes;
  });
  m.barrier_complete(barrier, delivered);
}

/// cp.async.bulk.tensor shared -> global, tiled mode. Elements outside the tensor are not written. The map is read when the
/// engine gets to it, so that one who changes it too early is seen.
inline void bulk_store(void const* map_address, std::uint32_t from, std::array<std::int32_t, 5> const& coordinate) {
  machine().store([=] {
    auto& m = machine();
    TensorMap const map = load_map(map_address);
    if (!can_copy(map, from, coordinate)) return;
    for_each_chunk(map, from, coordinate, [&](std::uint32_t address, auto target, std::uint32_t bytes) {
      if (!m.shared.holds(address, bytes)) {
        report().add("shared memory out of bounds",
                     format("a copy reads %u bytes at %u of %zu", bytes, address, m.shared.size()));
        return;
      }
      for (std::uint32_t b = 0; b < bytes; ++b) {
        std::uint64_t const to = target(b);
        if (to == 0) continue;
        if (global_memory().holds(to, 1, true))
          *reinterpret_cast<unsigned char*>(to) = m.shared.base()[address + b];
        else
          report().add("global memory out of bounds", "written: " + describe(map));
      }
    });
  });
}

}  // namespace emulate

/// The driver's function, by its documentation. Called by CUTLASS on the host (CUTLASS_ENABLE_DIRECT_CUDA_DRIVER_CALL).
extern "C" inline CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* tensorMap, CUtensorMapDataType type, cuuint32_t rank,
                                                          void* address, cuuint64_t const* dim, cuuint64_t const* strides,
                                                          cuuint32_t const* box, cuuint32_t const* elementStrides,
                                                          CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                          CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  emulate::TensorMap map{};
  map.magic = emulate::TensorMap::expected_magic;
  map.type = static_cast<std::uint8_t>(type);
  map.rank = static_cast<std::uint8_t>(rank);
  map.swizzle = static_cast<std::uint8_t>(swizzle);
  map.address = reinterpret_cast<std::uint64_t>(address);
  for (int i = 0; i < 5; ++i) {
    map.dim[i] = i < int(rank) ? static_cast<std::uint32_t>(dim[i]) : 1;
    map.box[i] = i < int(rank) ? static_cast<std::uint16_t>(std::min<cuuint32_t>(box[i], 0xffff)) : 1;
    if (i < int(rank) && elementStrides[i] != 1) emulate::report().add("not emulated", "an element stride other than 1");
  }
  for (int i = 0; i + 1 < int(rank); ++i) map.stride[i] = strides[i];
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) emulate::report().add("not emulated", "interleaved tensor maps");
  if (emulate::on_encode()) emulate::on_encode()(map);
  map.rejected = !emulate::obeys_rules(map);
  emulate::store_map(tensorMap, map);
  return CUDA_SUCCESS;  // a refusal is a finding; going on shows what else is wrong
}

/// CUTLASS 4.5 and newer flip a bit of the opaque descriptor for drivers up to 13.1: report a newer one.
extern "C" inline cudaError_t CUDARTAPI cudaDriverGetVersion(int* version) {
  *version = 99000;
  return cudaSuccess;
}
