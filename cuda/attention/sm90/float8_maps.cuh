// SPDX-License-Identifier: Apache-2.0
// How q, k and v of e4m3 come to float8.cuh: boxes of the TMA in panels of 128 bytes a row. Products of
// e4m3 want values by columns. Where they lie so, K comes in an order that spares the shuffles of P;
// where they lie by rows, they are turned (RowTurner), and K comes in its own order (TurnedOrder).
//
// The accumulator of S gives a thread keys 2q and 2q + 1 of each 8 columns (q = lane % 4), the A
// operand of P wants four neighbours, 4q to 4q + 3. So rows of K are seen as fours: the first box of a
// tile brings rows 0 and 1 of each four, the second rows 2 and 3:
//
//   column of S    0  1  2  3  4  5 ..| n/2     ..          column 8j + 2q + e, j < n / 16:
//   key            0  1  4  5  8  9 ..| 2  3  6  7 ..       key 16j + 4q + e, and + 2 from n / 2 on
//
// No four may reach past the rows of a sequence in memory: the last tile of an item, where that could
// be, comes in the natural order, and its P is shuffled.
#pragma once

#include "cuattn/device/mma_sm80.cuh"
#include "cuda/attention/sm90/host.cuh"
#include "cuda/host/tensor_maps.h"

namespace cuattn {

struct Float8Maps {
  device::TensorMap q, k, v, o;
  device::TensorMap fours;  // k, four rows at a time
};

constexpr int kTurnedRows = 32;  // rows of values that come and are turned together

// Tiles of values by columns begin at keys that are multiples of this in memory, up to 15 of which are not of the sequence:
// along their contiguous axis the TMA takes boxes on 16 bytes alone (else: illegal instruction).
constexpr int kFloat8KeyAlign = 16;

// Values as (keys, channels, heads, batch, 1): a box is 128 keys of all channels.
inline device::TensorMap column_map(const AttentionParams& p, int32_t channels) {
  bool ragged = p.cu_seqlens_kv != nullptr;
  int64_t tokens = ragged ? p.total_kv : p.seqlen_kv;
  const Strides& s = p.v_strides;
  return tensor_map(p.dtype, p.v, {tokens, p.head_dim_v, p.num_heads_kv, ragged ? 1 : p.batch, 1},
                    {p.v_channel_stride, s.head, s.batch, 0}, {128, channels, 1, 1, 1});
}

// K as (columns, 4, fours, heads, batch): a box is two rows of as many fours as make half a tile.
inline device::TensorMap fours_map(const AttentionParams& p, int32_t rows) {
  bool ragged = p.cu_seqlens_kv != nullptr;
  int64_t tokens = ragged ? p.total_kv : p.seqlen_kv;
  const Strides& s = p.k_strides;
  return tensor_map(p.dtype, p.k, {p.head_dim, 4, tokens / 4, p.num_heads_kv, ragged ? 1 : p.batch},
                    {s.seq, 4 * s.seq, s.head, s.batch}, {128, 2, rows / 4, 1, 1});
}

inline Float8Maps make_float8_maps(const AttentionParams& p, const Sm90Schedule& s, Tile tile,
                                   int32_t channels, bool through_smem, bool by_rows) {
  const device::TensorMap k = key_map(p, p.k, p.k_strides, p.head_dim, tile.n);
  int64_t keys = p.cu_seqlens_kv != nullptr ? p.total_kv : p.seqlen_kv;
  Float8Maps maps{query_map(p, s.packed, tile.m / s.packed), k, k, k, k};
  if (by_rows) {
    maps.v = key_map(p, p.v, p.v_strides, p.head_dim_v, kTurnedRows);
  } else {
    if (keys > 0) maps.v = column_map(p, channels);        // else nothing is read
    if (keys > tile.n) maps.fours = fours_map(p, tile.n);  // else no item has a second tile
  }
  if (through_smem && s.stores_boxes) maps.o = output_map(p);
  return maps;
}

// Key of a score: `first_key` of its thread plus `key_column`.
template <bool kNatural, int kKeys>
struct KeyOrder {
  static __device__ __forceinline__ int32_t first_key(int32_t tile) {
    return tile * kKeys + (kNatural ? 2 : 4) * static_cast<int32_t>(threadIdx.x % 4);
  }
  static __device__ __forceinline__ constexpr int key_column(int score) {
    int block = score >> 2, pair = score & 1;
    if (kNatural) return block * 8 + pair;
    return block % (kKeys / 16) * 16 + block / (kKeys / 16) * 2 + pair;
  }
  // The two blocks of 8 columns that hold a thread's share of the 16 keys of `group`.
  static __device__ __forceinline__ constexpr int low_block(int group) {
    return kNatural ? 2 * group : group;
  }
  static __device__ __forceinline__ constexpr int high_block(int group) {
    return kNatural ? 2 * group + 1 : group + kKeys / 16;
  }
  // A thread's four of a group, packed: of keys in their natural order two of the quad's lanes have
  // them, in the lower halves of their words or in the upper.
  static __device__ __forceinline__ uint32_t arrange(uint32_t word) {
    if (!kNatural) return word;
    const int q = threadIdx.x % 4, from = 2 * q % 4;
    uint32_t low = __shfl_sync(0xffffffffu, word, from, 4);
    uint32_t high = __shfl_sync(0xffffffffu, word, from + 1, 4);
    return __byte_perm(low, high, q < 2 ? 0x5410 : 0x7632);
  }
};

// Of values that RowTurner has turned: it puts keys 2q, 2q + 1, 2q + 8 and 2q + 9 of each 16 side by side,
// which are what a thread has of two blocks of S. So K comes in its natural order, and P needs no shuffles.
template <int kKeys>
struct TurnedOrder : KeyOrder<true, kKeys> {
  static __device__ __forceinline__ uint32_t arrange(uint32_t word) { return word; }
};

// -inf for keys that a thread's two rows do not see.
template <class Order, int kCount>
__device__ __forceinline__ void mask_float8_scores(float (&scores)[kCount],
                                                   const KeyRange (&visible)[2], int32_t tile) {
  const int32_t first = Order::first_key(tile);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const KeyRange& keys = visible[i >> 1 & 1];
    const int column = Order::key_column(i);
    bool seen = column < keys.end - first && column >= keys.begin - first;
    scores[i] = seen ? scores[i] : device::negative_infinity();
  }
}

// Values before the first key and behind the last may hold anything, and 0 x NaN is NaN: all columns
// but [begin, end) of a tile (panel, channel, 128 keys) become zeros. Each group of consumers for itself,
// and once a tile: all write the same, while two ranges one after the other would let a slow group
// write back what a fast one has cleared.
template <int kChannels, int kPanels, int kPanelBytes>
__device__ __forceinline__ void keep_columns(uint32_t v, int begin, int end, int group) {
  for (int i = threadIdx.x % 128; i < kPanels * kChannels * 8; i += 128) {
    int panel = i / 8 / kChannels, channel = i / 8 % kChannels, column = panel * 128 + i % 8 * 16;
    if (column >= begin && column + 16 <= end) continue;
    uint32_t to = v + panel * kPanelBytes + channel * 128 + (((i % 8) ^ (channel & 7)) << 4);
    uint4 x = device::load_shared16(to);
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int byte = 0; byte < 16; ++byte) {
      bool kept = column + byte >= begin && column + byte < end;
      if (!kept) words[byte / 4] &= ~(0xffu << byte % 4 * 8);
    }
    device::store_shared16(to, uint4{words[0], words[1], words[2], words[3]});
  }
  device::async_proxy_fence();
  device::named_barrier_sync(4 + group, 128);
}

// Values by rows become columns: a warp turns 16 of kTurnedRows rows of a stage (panels of 128 channels, which
// the TMA brought), the first of which is row `at` of a tile (panel, channel, 128 keys). Which 16: the parity of
// the warp. What is from row `end` of the kTurnedRows on becomes zeros.
//
// A matrix of 8 rows and 16 bytes, seen as 8 pairs of channels, comes transposed: lane 4i + q has pair i of
// rows 2q and 2q + 1. So of two matrices, rows 0 to 7 and 8 to 15, it has four keys of two channels, which
// become a word each. The words of even channels in lanes 0 to 15 and of odd ones in lanes 16 to 31 are stored
// together, then the others: no two rows of a store share a bank. What a lane needs is worked out once, and
// kAhead loads are under way at once: a warp alone would wait for each.
template <int kChannels>
struct RowTurner {
  uint32_t from, to;  // of this lane in the first stage and tile
  uint32_t early;     // the bytes of the words that it stores first

  __device__ __forceinline__ RowTurner(uint32_t stage, uint32_t tile) {
    const int thread = static_cast<int>(device::opaque(threadIdx.x));
    const int half = thread / 32 % 2, lane = thread % 32;
    const int matrix = lane / 8, i = lane % 8, row = half * 16 + matrix % 2 * 8 + i;
    const int channel = matrix / 2 * 16 + 2 * i + (matrix % 2 ^ i / 4);
    from = device::opaque(stage + row * 128 + ((matrix / 2 ^ i) << 4));
    to = device::opaque(tile + channel * 128 + ((half ^ channel % 8) << 4));
    early = lane < 16 ? 0x6420 : 0x7531;
  }

  template <bool kCut>
  __device__ __forceinline__ void turn(int stage_bytes, int tile_bytes, int at, int end) const {
    using namespace device;
    constexpr int kSteps = kChannels / 32, kAhead = kCut ? 1 : 2;
    const uint32_t lane_from = from + stage_bytes;
    const uint32_t lane_to = (to + tile_bytes) ^ at;  // 16 bytes a group of 16 rows
    const uint32_t late = opaque(early) ^ 0x1111;
    uint32_t kept = 0xffffffffu;
    if constexpr (kCut) {
      const int thread = static_cast<int>(opaque(threadIdx.x));
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        int key = thread / 32 % 2 * 16 + thread % 4 * 2 + byte % 2 + byte / 2 * 8;
        if (key >= end) kept &= ~(0xffu << 8 * byte);
      }
    }
#pragma unroll(kCut ? 1 : kSteps)
    for (int first = 0; first < kSteps; first += kAhead) {
      uint32_t r[kAhead][4];
#pragma unroll
      for (int c = 0; c < kAhead; ++c) {
        ldmatrix_x4_trans(
            r[c], (lane_from ^ ((first + c) % 4 * 32)) + (first + c) / 4 * kTurnedRows * 128);
      }
#pragma unroll
      for (int c = 0; c < kAhead; ++c) {
        uint32_t words[4];
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          words[2 * pair] = __byte_perm(r[c][2 * pair], r[c][2 * pair + 1], early);
          words[2 * pair + 1] = __byte_perm(r[c][2 * pair], r[c][2 * pair + 1], late);
        }
        if constexpr (kCut) {
          for (uint32_t& word : words) word &= kept;
        }
        stmatrix_x4(lane_to + (first + c) * 32 * 128, words[0], words[1], words[2], words[3]);
      }
    }
  }
};

}  // namespace cuattn
