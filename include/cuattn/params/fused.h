// SPDX-License-Identifier: Apache-2.0
// The plain structs of what stands around attention: rotary embedding, sums, norms and activations.
// Clean under NVRTC. Next: cpu/fused.cpp, cuda/fused/rope.cu, cuda/fused/norm.cu.
#pragma once

#include "cuattn/params/rows.h"

namespace cuattn {

// Where the tokens of x stand in the tables of cos and sin: positions, or, where there are none,
// the place of query `row` among the keys of its sequence, row + keys - queries. Rows of apply_rope
// are their own keys. Whatever lies in device memory, a row of the tables results.
struct TokenPlaces {
  const int64_t* positions;  // [batch, seqlen], ragged [total]; or nullptr
  int64_t stride_batch, stride_seq;
  int32_t queries, keys;  // of a sequence, at most
  int64_t total_q, total_k;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;  // [num_seqs + 1]; nullptr: not ragged
  const int32_t *seqused_q, *seqused_k;        // [num_seqs], or nullptr
  int32_t num_seqs;

  // The sequence of a row of a ragged array: the last that begins at or before it.
  CUATTN_HOST_DEVICE int32_t sequence_of(int64_t row) const {
    int32_t low = 0, high = num_seqs;
    while (high - low > 1) {
      int32_t middle = low + (high - low) / 2;
      (cu_seqlens_q[middle] <= row ? low : high) = middle;
    }
    return low;
  }
  CUATTN_HOST_DEVICE Span queries_of(int64_t b) const {
    return make_span(cu_seqlens_q, seqused_q, static_cast<int32_t>(b), queries, total_q);
  }
  CUATTN_HOST_DEVICE int64_t operator()(int64_t b, int64_t row) const {
    if (positions != nullptr) return positions[b * stride_batch + row * stride_seq];
    if (cu_seqlens_q != nullptr) b = sequence_of(row);
    Span q = queries_of(b);
    Span k = make_span(cu_seqlens_k, seqused_k, static_cast<int32_t>(b), keys, total_k);
    return row - q.start + k.used - q.used;
  }
  // Whether attention reads a row: none behind the queries in use, nor before the first sequence.
  CUATTN_HOST_DEVICE bool is_read(int64_t b, int64_t row) const {
    if (cu_seqlens_q != nullptr) b = sequence_of(row);
    Span q = queries_of(b);
    return row >= q.start && row - q.start < q.used;
  }
};

// apply_rope: of each row the elements from `offset` on are turned in pairs, (i, i + rotary_dim /
// 2), or (2 i, 2 i + 1) where interleaved: (a, b) becomes (a cos - b sin, b cos + a sin), and the
// other way where `inverse`. The rest of the row is copied. out is x, or lies apart.
struct RotateParams {
  const void* x;  // rows [batch, seqlen, num_heads] of head_dim elements
  void* out;
  Strides x_strides, out_strides;
  DType dtype;
  int64_t batch, seqlen;
  int32_t num_heads, head_dim, offset, rotary_dim;
  const float *cos, *sin;  // [max_position, rotary_dim / 2]
  int64_t cos_stride, sin_stride, max_position;
  TokenPlaces places;
  bool interleaved, inverse;

  CUATTN_HOST_DEVICE int64_t position(int64_t b, int64_t row) const {
    int64_t place = places(b, row);
    return place < 0 ? 0 : place < max_position ? place : max_position - 1;
  }
};

// add_residual: out = x + residual in float32, rounded once. out is x, or residual, or lies apart.
struct AddParams {
  const void *x, *residual;  // rows [batch, seqlen, num_heads] of head_dim elements
  void* out;
  Strides x_strides, residual_strides, out_strides;
  DType x_dtype, dtype;  // x_dtype: dtype, or f32
  int64_t batch, seqlen;
  int32_t num_heads, head_dim;
};

// rms_norm and layer_norm, row by row: h = x + residual, rounded to the dtype and stored as
// residual_out; out = (h - mean) / sqrt(var + eps) * (weight + weight_offset) + bias, where the
// mean of rms_norm is 0. out may be x, residual_out be residual.
struct NormParams {
  const void *x, *residual;  // [rows, columns]; residual: or nullptr
  void *out, *residual_out;
  int64_t x_stride, residual_stride, out_stride, residual_out_stride;  // between rows
  const void *weight, *bias;  // [columns]; bias: or nullptr
  DType dtype, weight_dtype;  // weight_dtype: dtype, or f32
  int64_t rows, columns;
  float eps, weight_offset;
  bool centred;  // layer_norm
};

enum class Activation : int32_t { silu, gelu, gelu_tanh };

// exp(z^2) erfc(z) / 2 = t (k0 + k1 t + k2 t^2 + ...) with t = 1 / (1 + z / 2), for z from 0 to 10 right
// to 5e-8 of itself, or with fewer terms, for 16 bits, to 1.4e-6: least squares, weighted anew until the
// largest error was least.
constexpr int kErfcxTerms = 9, kNarrowErfcxTerms = 7;
template <int kTerms>
CUATTN_HOST_DEVICE constexpr float half_erfcx_term(int i) {
  constexpr float kAll[kErfcxTerms] = {0.141043205f, 0.141187685f,  0.12155164f,
                                       0.10134446f,  -0.013315398f, 0.139037495f,
                                       -0.24360352f, 0.14228927f,   -0.029534858f};
  constexpr float kNarrow[kNarrowErfcxTerms] = {0.1411657035f, 0.138791084f, 0.140751809f,
                                                0.018945461f,  0.194612205f, -0.17836915f,
                                                0.044102203f};
  return kTerms == kErfcxTerms ? kAll[i] : kNarrow[i];
}
// gelu_tanh(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) = x logistic(kGeluTanh (...)).
constexpr float kGeluTanh = 1.5957691f, kGeluCube = 0.044715f;

// act_mul: out = act(a + bias_a) * (b + bias_b), with a and b the halves of a row of x;
// bias_act: out = act(x + bias). out of bias_act may be x.
struct ActivationParams {
  const void* x;  // [rows, columns], of act_mul [rows, 2 columns]
  const void* bias;
  void* out;  // [rows, columns]
  int64_t x_stride, out_stride;
  DType dtype;
  Activation activation;
  bool gated;  // act_mul
  int64_t rows, columns;
};

}  // namespace cuattn
