// SPDX-License-Identifier: Apache-2.0
// What stands around attention, from C++: rotary embedding, norms, activations and sampling. All
// write the caller's arrays in the order of the stream; none allocates or waits. Names and meaning
// are those of the Python functions: docs/fused.md.
//
//   cuattn::RopeOptions options;
//   options.positions = &positions;
//   cuattn::apply_rope(q, cos, sin, q, options, stream);  // in place
//   cuattn::SampleOptions sampling;
//   sampling.seeds = &seeds;
//   sampling.top_p = 0.9;
//   cuattn::sample(logits, tokens, sampling, stream);
//
// They throw as attention() does; nothing was written then.
#pragma once

#include "cuattn/attention.h"
#include "cuattn/c_api_fused.h"
#include "cuattn/tensor.h"

namespace cuattn {

struct RopeOptions {
  bool interleaved = false, inverse = false;
  int64_t offset = 0;        // the first element that is turned
  bool heads_first = false;  // x is [batch, heads, seqlen, head_dim]
  // int64 [batch, seqlen] or [n]; else a token stands at its index in its sequence, plus by how
  // many tokens the keys of the sequence are more: where attention has its queries.
  const TensorView* positions = nullptr;
  int64_t seqlen_k = -1;                                              // -1: as many as tokens
  const TensorView *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;  // int32 [num_seqs + 1]
  const TensorView *seqused_q = nullptr, *seqused_k = nullptr;        // int32 [num_seqs]
};

struct NormOptions {
  double eps = 1e-6, weight_offset = 0.0;
  const TensorView* bias = nullptr;          // of layer_norm
  const TensorView* residual = nullptr;      // is added to x, and written ...
  const TensorView* residual_out = nullptr;  // ... unless this is given
};

enum class Act : int32_t {
  silu = CUATTN_ACT_SILU,
  gelu = CUATTN_ACT_GELU,
  gelu_tanh = CUATTN_ACT_GELU_TANH
};

// Numbers, or arrays with one for each row.
struct SampleOptions {
  double temperature = 1.0, top_p = 1.0, min_p = 0.0;
  int64_t top_k = 0;
  int64_t seed = -1, offset = 0;  // seed or seeds must be given
  bool joint = false;             // top_p of all the mass, not of what top_k leaves
  const TensorView *temperatures = nullptr, *top_ps = nullptr, *min_ps = nullptr;  // float32
  const TensorView* top_ks = nullptr;                                              // int32
  const TensorView *seeds = nullptr, *offsets = nullptr;                           // int64
};

namespace detail {

struct CNormOptions {
  DLTensor bias, residual, residual_out;
  cuattn_norm_options c;

  explicit CNormOptions(const NormOptions& o) {
    cuattn_norm_options_init(&c, sizeof c);
    c.eps = o.eps;
    c.weight_offset = o.weight_offset;
    c.bias = COptions::borrow(o.bias, bias);
    c.residual = COptions::borrow(o.residual, residual);
    c.residual_out = COptions::borrow(o.residual_out, residual_out);
    if (c.residual_out == nullptr) c.residual_out = c.residual;
  }
  CNormOptions(const CNormOptions&) = delete;
};

struct CSampleOptions {
  DLTensor temperatures, top_ps, min_ps, top_ks, seeds, offsets;
  cuattn_sample_options c;

  explicit CSampleOptions(const SampleOptions& o) {
    cuattn_sample_options_init(&c, sizeof c);
    c.temperature = o.temperature;
    c.top_p = o.top_p;
    c.min_p = o.min_p;
    c.top_k = o.top_k;
    c.seed = o.seed;
    c.offset = o.offset;
    c.joint = o.joint;
    c.temperatures = COptions::borrow(o.temperatures, temperatures);
    c.top_ps = COptions::borrow(o.top_ps, top_ps);
    c.min_ps = COptions::borrow(o.min_ps, min_ps);
    c.top_ks = COptions::borrow(o.top_ks, top_ks);
    c.seeds = COptions::borrow(o.seeds, seeds);
    c.offsets = COptions::borrow(o.offsets, offsets);
  }
  CSampleOptions(const CSampleOptions&) = delete;
};

}  // namespace detail

// x and out [n, heads, head_dim] or [batch, seqlen, heads, head_dim]; cos and sin float32
// [max_position, rotary_dim / 2]. out may be x.
inline void apply_rope(const TensorView& x, const TensorView& cos, const TensorView& sin,
                       const TensorView& out, const RopeOptions& options = {},
                       void* stream = nullptr) {
  cuattn_rope_options c;
  cuattn_rope_options_init(&c, sizeof c);
  DLTensor positions, cu_q, cu_k, used_q, used_k;
  DLTensor dx = x.dl(), dcos = cos.dl(), dsin = sin.dl(), dout = out.dl();
  c.interleaved = options.interleaved;
  c.inverse = options.inverse;
  c.offset = options.offset;
  c.layout = options.heads_first ? CUATTN_LAYOUT_BHSD : CUATTN_LAYOUT_BSHD;
  c.positions = detail::COptions::borrow(options.positions, positions);
  c.seqlen_k = options.seqlen_k;
  c.cu_seqlens_q = detail::COptions::borrow(options.cu_seqlens_q, cu_q);
  c.cu_seqlens_k = detail::COptions::borrow(options.cu_seqlens_k, cu_k);
  c.seqused_q = detail::COptions::borrow(options.seqused_q, used_q);
  c.seqused_k = detail::COptions::borrow(options.seqused_k, used_k);
  detail::check(cuattn_apply_rope(&dx, &dcos, &dsin, &c, &dout, stream));
}

// Over the last axis of x. out may be x.
inline void rms_norm(const TensorView& x, const TensorView& weight, const TensorView& out,
                     const NormOptions& options = {}, void* stream = nullptr) {
  detail::CNormOptions c(options);
  DLTensor dx = x.dl(), dw = weight.dl(), dout = out.dl();
  detail::check(cuattn_rms_norm(&dx, &dw, &c.c, &dout, stream));
}
inline void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& out,
                       const NormOptions& options = {}, void* stream = nullptr) {
  detail::CNormOptions c(options);
  DLTensor dx = x.dl(), dw = weight.dl(), dout = out.dl();
  detail::check(cuattn_layer_norm(&dx, &dw, &c.c, &dout, stream));
}

// out = x + residual, added in float32 and rounded once: what attention(residual=) of Python does
// with x, its result in float32. Axes [n, heads, head_dim] or [batch, seqlen, heads, head_dim], in
// any order before the last; x is float32 or of the dtype of the others. out may be x or residual.
inline void add_residual(const TensorView& x, const TensorView& residual, const TensorView& out,
                         void* stream = nullptr) {
  DLTensor dx = x.dl(), dr = residual.dl(), dout = out.dl();
  detail::check(cuattn_add_residual(&dx, &dr, &dout, stream));
}

// out [.., n] = act(a) * b, with a and b the halves of the last axis of x [.., 2 n].
inline void act_mul(const TensorView& x, const TensorView& out, Act act = Act::silu,
                    const TensorView* bias = nullptr, void* stream = nullptr) {
  DLTensor storage, dx = x.dl(), dout = out.dl();
  const DLTensor* db = detail::COptions::borrow(bias, storage);
  detail::check(cuattn_act_mul(&dx, db, static_cast<int32_t>(act), &dout, stream));
}
// out = act(x + bias). out may be x.
inline void bias_act(const TensorView& x, const TensorView& out, Act act = Act::gelu,
                     const TensorView* bias = nullptr, void* stream = nullptr) {
  DLTensor storage, dx = x.dl(), dout = out.dl();
  const DLTensor* db = detail::COptions::borrow(bias, storage);
  detail::check(cuattn_bias_act(&dx, db, static_cast<int32_t>(act), &dout, stream));
}

// logits [rows, vocabulary]; tokens int32 [rows], -1 for a row that cannot be drawn from.
inline void sample(const TensorView& logits, const TensorView& tokens, const SampleOptions& options,
                   void* stream = nullptr) {
  detail::CSampleOptions c(options);
  DLTensor dl = logits.dl(), dt = tokens.dl();
  detail::check(cuattn_sample(&dl, &c.c, &dt, stream));
}

// draft_probs float32 [rows, n, vocabulary], target_probs [rows, n + 1, vocabulary], draft_tokens
// int32 [rows, n]; tokens int32 [rows, n + 1], accepted int32 [rows]. Of the options seed and
// offset count.
inline void speculative_verify(const TensorView& draft_probs, const TensorView& target_probs,
                               const TensorView& draft_tokens, const TensorView& tokens,
                               const TensorView& accepted, const SampleOptions& options,
                               void* stream = nullptr) {
  detail::CSampleOptions c(options);
  DLTensor dd = draft_probs.dl(), dt = target_probs.dl(), dk = draft_tokens.dl();
  DLTensor out = tokens.dl(), count = accepted.dl();
  detail::check(cuattn_speculative_verify(&dd, &dt, &dk, &c.c, &out, &count, stream));
}

}  // namespace cuattn
