// SPDX-License-Identifier: Apache-2.0
// How q, k and v of e4m3 come to float8.cuh: boxes of the TMA in panels of 128 bytes a row. K comes
// in an order that spares the shuffles of P; values come by columns, as products of e4m3 want them.
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

#include "cuda/attention/sm90/schedule.cuh"
#include "cuda/host/tensor_maps.h"

namespace cuattn {

struct Float8Maps {
  device::TensorMap q, k, v;
  device::TensorMap fours[4];  // of k, from row 0 to 3 on: sequences begin anywhere
};

// Values as (keys, channels, heads, batch, 1): a box is 128 keys of all channels.
inline const device::TensorMap& column_map(const AttentionParams& p, int32_t channels) {
  bool ragged = p.cu_seqlens_kv != nullptr;
  int64_t tokens = ragged ? p.total_kv : p.seqlen_kv;
  const Strides& s = p.v_strides;
  return tensor_map(p.dtype, tokens == 0 ? p.q : p.v,
                    {tokens, p.head_dim_v, p.num_heads_kv, ragged ? 1 : p.batch, 1},
                    {p.v_channel_stride, s.head, s.batch, 0}, {128, channels, 1, 1, 1});
}

// Rows of K from `first` on as (columns, 4, fours, heads, batch): a box is two rows of as many fours
// as make half a tile.
inline const device::TensorMap& fours_map(const AttentionParams& p, int32_t first, int32_t rows) {
  bool ragged = p.cu_seqlens_kv != nullptr;
  int64_t tokens = ragged ? p.total_kv : p.seqlen_kv;
  const Strides& s = p.k_strides;
  return tensor_map(p.dtype, static_cast<const char*>(p.k) + first * s.seq,
                    {p.head_dim, 4, (tokens - first) / 4, p.num_heads_kv, ragged ? 1 : p.batch},
                    {s.seq, 4 * s.seq, s.head, s.batch}, {128, 2, rows / 4, 1, 1});
}

inline Float8Maps make_float8_maps(const AttentionParams& p, const Sm90Schedule& s, Tile tile,
                                   int32_t channels) {
  Float8Maps maps{query_map(p, s.packed, tile.m / s.packed),
                  key_map(p, p.k, p.k_strides, p.head_dim, tile.n),
                  column_map(p, channels),
                  {}};
  bool ragged = p.cu_seqlens_kv != nullptr, anywhere = ragged || p.kv_start != nullptr;
  bool has_fours = (ragged ? p.total_kv : p.seqlen_kv) > tile.n;  // else no tile is a second one
  for (int first = 0; first < 4; ++first) {
    maps.fours[first] =
        has_fours && (anywhere || first == 0) ? fours_map(p, first, tile.n) : maps.k;
  }
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

// -inf for keys that a thread's two rows do not see.
template <class Order, MaskKind kMask, int kCount>
__device__ __forceinline__ void mask_float8_scores(float (&scores)[kCount],
                                                   const KeyRange (&visible)[2], int32_t tile) {
  const int32_t first = Order::first_key(tile);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const KeyRange& keys = visible[i >> 1 & 1];
    const int column = Order::key_column(i);
    bool seen =
        column < keys.end - first && (kMask != MaskKind::window || column >= keys.begin - first);
    scores[i] = seen ? scores[i] : device::negative_infinity();
  }
}

// Values behind the last key may hold anything, and 0 x NaN is NaN: columns from `first` on of a tile
// (channel, 128 keys) become zeros. Each group of consumers for itself; what another one cleared
// before stays so.
template <int kChannels>
__device__ __forceinline__ void clear_columns(uint32_t v, int first, int group) {
  const int chunk0 = first / 16, chunks = 8 - chunk0;
  for (int i = threadIdx.x % 128; i < kChannels * chunks; i += 128) {
    int channel = i / chunks, chunk = chunk0 + i % chunks;
    uint32_t to = v + channel * 128 + ((chunk ^ (channel & 7)) << 4);
    uint32_t words[4] = {};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      int kept = first - chunk * 16 - word * 4;  // bytes
      if (kept <= 0) continue;
      words[word] = device::load_shared4(to + 4 * word);
      if (kept < 4) words[word] &= (1u << 8 * kept) - 1;
    }
    device::store_shared16(to, uint4{words[0], words[1], words[2], words[3]});
  }
  device::async_proxy_fence();
  device::named_barrier_sync(4 + group, 128);
}

}  // namespace cuattn
