// SPDX-License-Identifier: Apache-2.0
// The axes of q, k, v, out and lse in the layouts of attention.
#pragma once

#include "cuattn/c_api.h"
#include "src/check/arrays.h"

namespace cuattn {

// Where each axis of an array lies: dense bshd or bhsd, or ragged [total, heads, dim].
struct Axes {
  int32_t ndim, batch, seq, head;  // batch = -1: ragged
  const char* names;
};

inline Axes axes_of(bool ragged, int32_t layout) {
  if (ragged) return {3, -1, 0, 1, "[total, num_heads, head_dim]"};
  if (layout == CUATTN_LAYOUT_BSHD) return {4, 0, 1, 2, "[batch, seqlen, num_heads, head_dim]"};
  return {4, 0, 2, 1, "[batch, num_heads, seqlen, head_dim]"};
}

inline Strides strides_of(const TensorView& view, const Axes& axes) {
  return {axes.batch < 0 ? 0 : stride_of(view, axes.batch), stride_of(view, axes.seq),
          stride_of(view, axes.head)};
}

// The strides of lse [batch, num_heads_q, seqlen_q] or, ragged, [num_heads_q, total_q].
inline Strides lse_strides_of(const TensorView& view, bool ragged) {
  if (ragged) return {0, stride_of(view, 1), stride_of(view, 0)};
  return {stride_of(view, 0), stride_of(view, 2), stride_of(view, 1)};
}

}  // namespace cuattn
