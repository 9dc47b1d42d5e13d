// SPDX-License-Identifier: Apache-2.0
// The gradients of attention from C++: attention_backward and attention_varlen_backward, thin
// wrappers over the C ABI as those of attention.h are. Source: FlashAttention-2, arXiv:2307.08691,
// section 3.1.2.
//
//   cuattn::attention(q, k, v, out, options);  // with options.lse
//   cuattn::attention_backward({dout, q, k, v, out, lse}, {&dq, &dk, &dv}, options);
#pragma once

#include "cuattn/attention.h"

namespace cuattn {

// Of the forward call, and the gradient of out: dout and out like q with head_dim_v, lse float32
// [batch, num_heads_q, seqlen_q] or, ragged, [num_heads_q, total_q].
struct BackwardInputs {
  const TensorView &dout, &q, &k, &v, &out, &lse;
};

// The gradients that are wanted, each of the shape and dtype of what it is the gradient of; dk and
// dv may be float32. What is nullptr is not computed.
struct BackwardResults {
  const TensorView *dq = nullptr, *dk = nullptr, *dv = nullptr;
  const TensorView* dbias = nullptr;    // of a bias that is not bool
  const TensorView* dsinks = nullptr;   // float32
  const TensorView* dslopes = nullptr;  // float32
};

// Beside the options of the forward call, of which lse and num_splits are not read.
struct BackwardOptions {
  const TensorView* dlse = nullptr;  // gradient of lse, float32; nullptr: 0
  int32_t deterministic = -1;  // 1: the same bits each time, 0: need not be, -1: where it is cheap
};

namespace detail {

struct CBackward {
  DLTensor arrays[6], results[6], dlse;
  cuattn_backward_arrays given;
  cuattn_gradients gradients;
  cuattn_backward_options c;

  CBackward(const BackwardInputs& in, const BackwardResults& out, const BackwardOptions& o) {
    given = {COptions::borrow(&in.dout, arrays[0]), COptions::borrow(&in.q, arrays[1]),
             COptions::borrow(&in.k, arrays[2]),    COptions::borrow(&in.v, arrays[3]),
             COptions::borrow(&in.out, arrays[4]),  COptions::borrow(&in.lse, arrays[5])};
    const TensorView* wanted[6] = {out.dq, out.dk, out.dv, out.dbias, out.dsinks, out.dslopes};
    const DLTensor* borrowed[6];
    cuattn_backward_options_init(&c, sizeof c);
    c.need = 0;
    for (int32_t i = 0; i < 6; ++i) {
      borrowed[i] = COptions::borrow(wanted[i], results[i]);
      if (wanted[i] != nullptr) c.need |= 1 << i;  // CUATTN_NEED_* in this order
    }
    gradients = {borrowed[0], borrowed[1], borrowed[2], borrowed[3], borrowed[4], borrowed[5]};
    c.dlse = COptions::borrow(o.dlse, dlse);
    c.deterministic = o.deterministic;
  }
  CBackward(const CBackward&) = delete;

  cuattn_backward_call prepare(const COptions& options) const {
    cuattn_backward_call call;
    check(cuattn_attention_backward_prepare(&given, &options.c, &c, &call));
    return call;
  }
  void run(const COptions& options, Workspace workspace, void* stream) const {
    cuattn_backward_call call = prepare(options);
    check(
        cuattn_attention_backward_run(&call, &gradients, workspace.data, workspace.bytes, stream));
  }
};

}  // namespace detail

// Bytes of workspace that attention_backward() needs for these arguments.
inline size_t attention_backward_workspace_bytes(const BackwardInputs& inputs,
                                                 const BackwardResults& results,
                                                 const AttentionOptions& options = {},
                                                 const BackwardOptions& backward_options = {}) {
  detail::COptions c(options);
  return detail::CBackward(inputs, results, backward_options).prepare(c).workspace_bytes;
}

// Gradients of sum(dout * out) + sum(dlse * lse) for a call of attention() with these options.
// Throws as it does.
inline void attention_backward(const BackwardInputs& inputs, const BackwardResults& results,
                               const AttentionOptions& options = {},
                               const BackwardOptions& backward_options = {},
                               Workspace workspace = {}, void* stream = nullptr) {
  detail::COptions c(options);
  detail::CBackward(inputs, results, backward_options).run(c, workspace, stream);
}

// Bytes of workspace that attention_varlen_backward() needs for these arguments.
inline size_t attention_varlen_backward_workspace_bytes(
    const BackwardInputs& inputs, const BackwardResults& results, const TensorView& cu_seqlens_q,
    const TensorView& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const AttentionOptions& options = {}, const BackwardOptions& backward_options = {}) {
  detail::COptions c(options);
  c.set_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  return detail::CBackward(inputs, results, backward_options).prepare(c).workspace_bytes;
}

// The same for attention_varlen(); rows of no sequence get 0.
inline void attention_varlen_backward(const BackwardInputs& inputs, const BackwardResults& results,
                                      const TensorView& cu_seqlens_q,
                                      const TensorView& cu_seqlens_k, int64_t max_seqlen_q,
                                      int64_t max_seqlen_k, const AttentionOptions& options = {},
                                      const BackwardOptions& backward_options = {},
                                      Workspace workspace = {}, void* stream = nullptr) {
  detail::COptions c(options);
  c.set_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  detail::CBackward(inputs, results, backward_options).run(c, workspace, stream);
}

}  // namespace cuattn
