// SPDX-License-Identifier: Apache-2.0
// The state of a query row, from what the forward pass gave: lse in base 2 and Delta = dout . out -
// dlse, with dropout Delta / Z. Used by queries.cuh and fused.cuh, which work on the rows of a tile.
#pragma once

#include "cuda/backward/sm90/tiles.cuh"

namespace cuattn::backward {

// A sequence and head.
struct RowsOfHead {
  int32_t batch, head;
  Span queries;
};

// dout . out of a row, by the four lanes of a quad: each gets a part of the sum.
template <DType kType>
__device__ __forceinline__ float part_of_dot(const BackwardParams& p, const RowsOfHead& rows,
                                             int32_t row) {
  const AttentionParams& f = p.forward;
  auto place = [&](const void* data, const Strides& s) {
    return static_cast<const char*>(data) +
           2 * (rows.batch * s.batch + rows.head * s.head + (rows.queries.start + row) * s.seq);
  };
  const char *dout = place(p.dout, p.dout_strides), *out = place(f.out, f.out_strides);
  struct alignas(16) Chunk {
    device::Element<kType> x[8];
  };
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t chunk = threadIdx.x % 4; chunk * 8 < f.head_dim_v; chunk += 4) {
    const Chunk a = reinterpret_cast<const Chunk*>(dout)[chunk];
    const Chunk b = reinterpret_cast<const Chunk*>(out)[chunk];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(device::to_float(a.x[i]), device::to_float(b.x[i]), sum);
  }
  return sum;
}

// Whole quads call it: {lse, Delta} of a row, also left in the workspace. A row that takes no part,
// or sees no key, has lse = +inf, so that P is 0.
template <DType kType>
__device__ __forceinline__ float2 make_row_state(const BackwardParams& p, const RowStates& states,
                                                 const RowsOfHead& rows, int32_t row) {
  const AttentionParams& f = p.forward;
  const bool used = row < rows.queries.used;
  const int64_t stored = rows.queries.start + row;
  auto value = [&](const float* data, const Strides& s) {
    return data[rows.batch * s.batch + rows.head * s.head + stored * s.seq];
  };
  const float dot = device::quad_sum(used ? part_of_dot<kType>(p, rows, row) : 0.0f);
  float lse = device::negative_infinity(), dlse = 0.0f;
  if (used) {
    lse = value(f.lse, f.lse_strides);
    if (p.dlse != nullptr) dlse = value(p.dlse, p.dlse_strides);
  }
  const bool dead = lse == device::negative_infinity();
  const float2 state = {dead ? positive_infinity() : lse * device::kLog2e,
                        dead ? 0.0f : (dot - dlse) * f.dropout.kept_share()};
  if (threadIdx.x % 4 == 0) {
    const int64_t place = states.place(f, rows.queries, rows.batch, rows.head) + row;
    states.lse[place] = state.x;
    states.delta[place] = state.y;
  }
  return state;
}

}  // namespace cuattn::backward
