// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0
//
// Scale factor blocks that neighbouring k tiles share.
//
// In memory the scale factors of block-scaled operands come in blocks that cannot be divided: 128 rows (or columns) of
// 4 scale factors each, the 4 of one row side by side in 32 bits. TMA cannot fetch half of a block, since that would be a
// column of 2 bytes in rows 4 bytes apart. A k tile that needs fewer than 4 scale factors in a row (K = 64 with one scale
// factor per 32 elements needs 2) therefore loads the whole block and uses its part of it; the k tiles beside it load the
// same block again and use the other parts.
//
// Words used here: the scale factor tile is what one pipeline stage holds of SFA or SFB; a part is the share of one k tile
// in it. Tiles with 4 or more scale factors in a row have one part, and everything below is then the identity.

#pragma once

#include "cute/config.hpp"
#include "cute/int_tuple.hpp"
#include "cute/layout.hpp"

namespace sm120kit {

/// K extent, in elements of A and B, of the scale factor tile that goes with a k tile of TileK elements.
/// BlockK: elements that one block covers along K, which is 4 times the scale vector size.
template <int TileK, int BlockK>
using SfTileK = cute::Int<(TileK > BlockK ? TileK : BlockK)>;

/// TileShape (M,N,K) with K widened to that of the scale factor tile, which is read off its shared memory layout.
template <class TileShape, class SmemLayoutAtomSF>
using SfTileShape =
    decltype(cute::replace<2>(TileShape{}, cute::Int<int(cute::size<1>(SmemLayoutAtomSF{}))>{}));

/// Keeps step with the k tiles of one work tile and knows which part of the scale factor tile belongs to the current one.
/// A work tile must begin with k tile 0, or at least with the first part of a block: so do all tiles of grouped and
/// batched GEMM, and those of stream-K and split-K do not.
template <class TileShape, class TileShapeSF>
class SfBlockCursor {
  static constexpr int TileK = cute::size<2>(TileShape{});
  static constexpr int TileSfK = cute::size<2>(TileShapeSF{});
  static_assert(TileSfK % TileK == 0, "A scale factor tile has to cover a whole number of k tiles.");
  static constexpr int Parts = TileSfK / TileK;

  int part_ = 0;

 public:
  /// Index of the scale factor tile in global memory that k tile `k_tile` reads.
  template <class KTile>
  CUTE_HOST_DEVICE static constexpr auto sf_tile(KTile const& k_tile) {
    if constexpr (Parts == 1) {
      return k_tile;
    } else {
      return k_tile / Parts;
    }
  }

  /// MMA k block of the scale factor tile that goes with `k_block` of the current k tile, which has `k_blocks` of them.
  template <class KBlock, class KBlocks>
  CUTE_HOST_DEVICE constexpr auto k_block(KBlock const& k_block, KBlocks const& k_blocks) const {
    if constexpr (Parts == 1) {
      return k_block;
    } else {
      return k_block + part_ * k_blocks;
    }
  }

  /// Go on to the next k tile.
  CUTE_HOST_DEVICE constexpr void operator++() {
    if constexpr (Parts > 1) {
      part_ = part_ + 1 == Parts ? 0 : part_ + 1;
    }
  }
};

}  // namespace sm120kit
