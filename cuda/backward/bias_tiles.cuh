// SPDX-License-Identifier: Apache-2.0
// The work of the pass that makes dbias, of sm90, sm80 and simt. A block owns a tile of dbias and walks,
// in order, the tiles of ds that are summed into it: those of all batches, heads, rows or keys over
// which the bias is broadcast. So every sum has one block, or one part a block. Used by
// sm90/bias.cuh, sm80/bias.cuh and simt/passes.cuh.
#pragma once

#include "cuattn/device/convert.cuh"
#include "cuattn/device/mask.cuh"
#include "cuattn/params/backward.h"
#include "cuattn/tiles.h"

namespace cuattn::backward {

// Axes: batch, query head, tile of rows, tile of keys.
struct BiasWork {
  int32_t item[4];    // the tile of dbias; 0 where the axis is summed
  int32_t step[4];    // the tile of ds that comes; 0 where it is not
  int32_t counts[4];  // of steps
  int64_t left;       // steps to come
  int32_t part;

  static CUATTN_HOST_DEVICE void count(const BackwardParams& p, Tile tile, int32_t (&items)[4],
                                       int32_t (&steps)[4]) {
    const AttentionParams& f = p.forward;
    int32_t all[4] = {f.batch, f.num_heads_q, (f.seqlen_q + tile.m - 1) / tile.m,
                      (f.seqlen_kv + tile.n - 1) / tile.n};
    for (int axis = 0; axis < 4; ++axis) {
      bool is_summed = p.dbias.extents[axis] == 1;
      items[axis] = is_summed ? 1 : all[axis];
      steps[axis] = is_summed ? all[axis] : 1;
    }
  }

  __device__ BiasWork(const BackwardParams& p, Tile tile, int32_t parts) : step{} {
    int32_t items[4];
    count(p, tile, items, counts);
    uint32_t index = blockIdx.x;
    part = index % parts;
    index /= parts;
    int64_t steps = 1;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      item[axis] = index % items[axis];
      index /= items[axis];
      steps *= counts[axis];
    }
    int64_t a_part = (steps + parts - 1) / parts, first = part * a_part;
    left = first < steps ? min(a_part, steps - first) : 0;
#pragma unroll
    for (int axis = 3; axis >= 0 && left > 0; --axis) {
      step[axis] = first % counts[axis];
      first /= counts[axis];
    }
  }

  // The tile of ds.
  __device__ int32_t at(int axis) const { return item[axis] + step[axis]; }

  __device__ void advance() {
    --left;
#pragma unroll
    for (int axis = 3; axis >= 0; --axis) {
      if (++step[axis] < counts[axis]) return;
      step[axis] = 0;
    }
  }
};

// A tile of ds that is summed into it, and what its rows see.
template <int kRows, int kKeys>
struct BiasStep {
  int32_t batch, head, row0, key0;
  Span queries, keys;
  device::TileRange range;  // of keys

  __device__ __forceinline__ BiasStep(const AttentionParams& f, const BiasWork& bias)
      : batch(bias.at(0)),
        head(bias.at(1)),
        row0(bias.at(2) * kRows),
        key0(bias.at(3) * kKeys),
        queries(query_span(f, batch)),
        keys(key_span(f, batch)),
        range(device::tile_range<kKeys>(f.mask.left, f.mask.right, row0,
                                        min(row0 + kRows, queries.used), queries.used, keys.used)) {
  }
  __device__ __forceinline__ int32_t tile() const { return key0 / kKeys; }
  __device__ __forceinline__ bool is_seen() const {
    return tile() >= range.begin && tile() < range.end;
  }
};

// Blocks of the pass.
inline int64_t bias_blocks(const BackwardParams& p, Tile tile, int32_t parts) {
  int32_t items[4], steps[4];
  BiasWork::count(p, tile, items, steps);
  return int64_t{items[0]} * items[1] * items[2] * items[3] * parts;
}

inline int64_t bias_blocks(const BackwardParams& p, Tile tile) {
  return bias_blocks(p, tile, bias_parts(p));
}

__device__ __forceinline__ void store_dbias(const BackwardParams& p, int64_t at, float value) {
  using namespace device;
  switch (p.forward.scores.bias_dtype) {
    case DType::f32: static_cast<float*>(p.dbias.data)[at] = value; return;
    case DType::f16: static_cast<Half*>(p.dbias.data)[at] = from_float<Half>(value); return;
    default: static_cast<Bfloat16*>(p.dbias.data)[at] = from_float<Bfloat16>(value);
  }
}

// The block's tile [kRows, kKeys] of float32 sums in shared memory goes to dbias, or to the parts;
// before, it is added up over rows and keys as far as the bias is broadcast over them.
template <int kThreads, int kRows, int kKeys>
__device__ void store_bias_tile(const BackwardParams& p, const BiasWork& work, float* tile,
                                float* part_sums) {
  const BiasGradient& bias = p.dbias;
  const bool sums_rows = bias.extents[2] == 1, sums_keys = bias.extents[3] == 1;
  __syncthreads();  // the tile is whole
  if (sums_keys) {
    static_assert(kThreads >= kRows, "a thread has a row");
    float* row = tile + threadIdx.x * kKeys;
    if (threadIdx.x < kRows) {
      for (int key = 1; key < kKeys; ++key) row[0] += row[key];
    }
    __syncthreads();
  }
  const int rows = sums_rows ? 1 : kRows, keys = sums_keys ? 1 : kKeys;
  for (int index = threadIdx.x; index < rows * keys; index += kThreads) {
    int row = index / keys, key = index % keys;
    float sum = tile[row * kKeys + key];
    for (int other = 1; sums_rows && other < kRows; ++other) sum += tile[other * kKeys + key];
    int64_t to_row = work.item[2] * int64_t{kRows} + row;
    int64_t to_key = work.item[3] * int64_t{kKeys} + key;
    if (to_row >= bias.extents[2] || to_key >= bias.extents[3]) continue;
    if (part_sums == nullptr) {
      store_dbias(p,
                  work.item[0] * bias.strides[0] + work.item[1] * bias.strides[1] +
                      to_row * bias.strides[2] + to_key * bias.strides[3],
                  sum);
    } else {
      int64_t plane = (int64_t{work.part} * bias.extents[0] + work.item[0]) * bias.extents[1];
      part_sums[((plane + work.item[1]) * bias.extents[2] + to_row) * bias.extents[3] + to_key] =
          sum;
    }
  }
}

}  // namespace cuattn::backward
