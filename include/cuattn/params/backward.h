// SPDX-License-Identifier: Apache-2.0
// The problem of attention's backward pass as every kernel receives it: the forward problem whole,
// what it gave, the gradients that come in and those that are asked for. Next: cpu/backward.cpp
// (the mathematics in plain loops).
#pragma once

#include "cuattn/params/attention.h"

namespace cuattn {

// Which gradients are asked for, or-ed.
enum Need : uint32_t {
  kNeedDq = 1,
  kNeedDk = 2,
  kNeedDv = 4,
  kNeedDbias = 8,
  kNeedDsinks = 16,
  kNeedDslopes = 32
};

// The gradient of an additive bias, of the bias's dtype. Axes: batch, query head, query, key.
struct BiasGradient {
  void* data;
  int64_t extents[4];  // 1 where the bias is broadcast: ds is summed over that axis
  int64_t strides[4];  // 0 there
};

struct BackwardParams {
  AttentionParams forward;  // out and lse are read
  uint32_t need;
  const void* dout;   // like out
  const float* dlse;  // like lse, or nullptr: 0
  Strides dout_strides, dlse_strides;
  void *dq, *dk, *dv;  // like q, k and v; nullptr: not asked for
  Strides dq_strides, dk_strides, dv_strides;
  DType dk_dtype, dv_dtype;  // of q, or f32
  BiasGradient dbias;
  float* dsinks;   // [num_heads_q]
  float* dslopes;  // [num_heads_q], or [batch, num_heads_q]
  bool dslopes_per_batch;
  int64_t dsinks_stride, dslopes_stride_batch, dslopes_stride_head;
  const FlexGradient* flex;  // of a user's score, in host memory, or nullptr

  CUATTN_HOST_DEVICE bool needs(uint32_t gradients) const { return (need & gradients) != 0; }
};

// How the work is cut, by shapes alone, and the memory for it.
struct BackwardSchedule {
  int32_t chunk_keys;  // keys of a part of the work
  int32_t num_chunks;  // parts of the longest sequence
  void* workspace;     // as large as the plan says; contents undefined
  bool in_order;       // sm90: parts of dq are added in the order of the keys
};

// Whether more than one ds is summed into an element of dbias.
CUATTN_HOST_DEVICE bool sums_bias(const BackwardParams& p) {
  const int64_t* extents = p.dbias.extents;
  const AttentionParams& f = p.forward;
  return (extents[0] == 1 && f.batch > 1) || (extents[1] == 1 && f.num_heads_q > 1) ||
         (extents[2] == 1 && f.seqlen_q > 1) || (extents[3] == 1 && f.seqlen_kv > 1);
}

// The workspace of the CPU's kernel: where each array begins, in floats. A row is a query of a
// head: all of them count, used or not.
struct BackwardLayout {
  int64_t delta;       // [rows]
  int64_t dq;          // [num_chunks, rows, head_dim]; in dq itself where that is float32 and whole
  int64_t slope_sums;  // [num_chunks, rows], for dslopes
  int64_t dbias;       // [num_chunks, extents...], where ds are summed
  int64_t array_sums;  // double [array_parts, flex->num_sums]
  int64_t rows, dbias_size, array_parts, total;
  bool dq_in_place;
};

CUATTN_HOST_DEVICE BackwardLayout layout_of(const BackwardParams& p, int32_t num_chunks) {
  const AttentionParams& f = p.forward;
  BackwardLayout layout{};
  layout.rows = f.total_q * f.num_heads_q;
  auto take = [&layout](bool needed, int64_t floats) {
    int64_t begin = layout.total;
    if (needed) layout.total += (floats + 15) / 16 * 16;
    return begin;
  };
  layout.delta = take(true, layout.rows);
  layout.dq_in_place = num_chunks == 1 && f.dtype == DType::f32;
  bool has_dq = p.needs(kNeedDq) && !layout.dq_in_place;
  layout.dq = take(has_dq, num_chunks * layout.rows * f.head_dim);
  layout.slope_sums = take(p.needs(kNeedDslopes), num_chunks * layout.rows);
  const int64_t* extents = p.dbias.extents;
  layout.dbias_size = extents[0] * extents[1] * extents[2] * extents[3];
  bool sums = p.needs(kNeedDbias) && sums_bias(p);
  layout.dbias = take(sums, num_chunks * layout.dbias_size);
  if (p.flex == nullptr) return layout;
  layout.array_parts = p.flex->parts(int64_t{num_chunks} * f.batch * f.num_heads_kv);
  layout.array_sums = take(true, 2 * layout.array_parts * p.flex->num_sums);
  return layout;
}

// The pass that makes dbias on CUDA: a block owns a tile of it and walks what is summed there, in so
// many parts, which a last kernel adds up in order: enough blocks to fill a GPU for each sequence. By
// shapes alone. The tile is that of sm80 and simt; sm90 has its own (backward_tiles.h).
CUATTN_HOST_DEVICE int32_t bias_parts(const BackwardParams& p, int64_t tile = 64,
                                      int64_t wanted = 512) {
  const int64_t* extents = p.dbias.extents;
  const AttentionParams& f = p.forward;
  int64_t all[4] = {f.batch, f.num_heads_q, (f.seqlen_q + tile - 1) / tile,
                    (f.seqlen_kv + tile - 1) / tile};
  int64_t blocks = 1, steps = 1;
  for (int axis = 0; axis < 4; ++axis) {
    if (extents[axis] == 1) {
      steps *= all[axis];
    } else if (axis > 0) {
      blocks *= all[axis];
    }
  }
  int64_t parts = blocks < wanted ? (wanted + blocks - 1) / (blocks > 0 ? blocks : 1) : 1;
  parts = parts < steps ? parts : steps;
  return static_cast<int32_t>(parts > 1 ? parts : 1);
}

// The workspace of sm80 and simt: where each array begins, in floats. A row is a query of a head,
// [num_heads_q, total_q]; first comes its state, two floats.
struct TwoPassLayout {
  int64_t slope_terms;  // [rows], for dslopes
  int64_t bias_parts;   // [parts, extents...], for dbias where there are several parts
  int64_t total;
};

CUATTN_HOST_DEVICE TwoPassLayout two_pass_layout_of(const BackwardParams& p) {
  const int64_t* extents = p.dbias.extents;
  int64_t rows = p.forward.total_q * p.forward.num_heads_q, parts = bias_parts(p);
  bool has_parts = p.needs(kNeedDbias) && parts > 1;
  TwoPassLayout layout{};
  layout.slope_terms = 2 * rows;
  layout.bias_parts = layout.slope_terms + (p.needs(kNeedDslopes) ? rows : 0);
  layout.total = layout.bias_parts +
                 (has_parts ? parts * extents[0] * extents[1] * extents[2] * extents[3] : 0);
  return layout;
}

// The workspace of CUDA's naive kernel: where each array begins, in floats. A plane is [batch,
// num_heads_q, seqlen_q, seqlen_kv], a number for each pair of a query and a key.
struct PlanesLayout {
  int64_t weights;      // plane of P Z
  int64_t ds;           // plane
  int64_t dx;           // plane; that of ds where it is the same, or nobody asks for ds
  int64_t sink_terms;   // [batch, num_heads_q, seqlen_q], for dsinks
  int64_t slope_terms;  // the same, for dslopes
  int64_t total;
};

CUATTN_HOST_DEVICE PlanesLayout planes_of(const BackwardParams& p) {
  const AttentionParams& f = p.forward;
  int64_t rows = int64_t{f.batch} * f.num_heads_q * f.seqlen_q, plane = rows * f.seqlen_kv;
  bool keeps_ds = f.scores.softcap > 0.0f && p.needs(kNeedDbias);
  PlanesLayout layout{};
  layout.ds = plane;
  layout.dx = keeps_ds ? 2 * plane : plane;
  layout.sink_terms = layout.dx + plane;
  layout.slope_terms = layout.sink_terms + (p.needs(kNeedDsinks) ? rows : 0);
  layout.total = layout.slope_terms + (p.needs(kNeedDslopes) ? rows : 0);
  return layout;
}

}  // namespace cuattn
