// SPDX-License-Identifier: Apache-2.0
// Quantisation to float8_e4m3fn for C++ programs, on the CPU and CUDA: codes and scales for attention() with
// AttentionOptions::q_scales and its like. A header over the C ABI; docs/fp8.md has the formulas.
// Next: attention.h (errors).
#pragma once

#include "cuattn/attention.h"
#include "cuattn/c_api_float8.h"

namespace cuattn {

// Tensor pointers are borrowed for the duration of the call.
struct QuantizeOptions {
  Layout layout = Layout::bshd;  // of four axes; three are [total, heads, dim]
  bool hadamard = false;         // rotate rows by the library's orthogonal matrix; of q and k alike
  bool channels = false;         // a scale of three axes is of channels, not of blocks of 128 rows
  bool is_given = false;         // the scale is read, not written
  bool mean_given = false;       // so is the mean
  const TensorView* mean = nullptr;  // float32 [batch, heads, dim], subtracted first
  const TensorView *shift = nullptr, *shift_mean = nullptr;  // as c_api_float8.h says
};

namespace detail {

struct CQuantizeOptions {
  DLTensor mean, shift, shift_mean;
  cuattn_quantize_options c;

  explicit CQuantizeOptions(const QuantizeOptions& o) {
    cuattn_quantize_options_init(&c, sizeof c);
    c.layout = static_cast<int32_t>(o.layout);
    c.hadamard = o.hadamard;
    c.channels = o.channels;
    c.is_given = o.is_given;
    c.mean_given = o.mean_given;
    c.mean = COptions::borrow(o.mean, mean);
    c.shift = COptions::borrow(o.shift, shift);
    c.shift_mean = COptions::borrow(o.shift_mean, shift_mean);
  }
  CQuantizeOptions(const CQuantizeOptions&) = delete;
};

}  // namespace detail

// out = round((x - mean) R / scale): x float32, float16 or bfloat16, out float8_e4m3fn or int8 of its
// shape, scale float32 of one element, [heads / n], [batch, heads / n], [batch,
// heads, ceil(rows / 128)] or [batch, heads, dim]; it is written first unless it is given.
inline void quantize(const TensorView& x, const TensorView& out, const TensorView& scale,
                     const QuantizeOptions& options = {}, void* stream = nullptr) {
  detail::CQuantizeOptions c(options);
  DLTensor d_x = x.dl(), d_out = out.dl(), d_scale = scale.dl();
  detail::check(cuattn_quantize(&d_x, &d_out, &d_scale, &c.c, stream));
}

// out = x * scale: x float8_e4m3fn or int8, out float32, float16 or bfloat16.
inline void dequantize(const TensorView& x, const TensorView& out, const TensorView& scale,
                       const QuantizeOptions& options = {}, void* stream = nullptr) {
  detail::CQuantizeOptions c(options);
  DLTensor d_x = x.dl(), d_out = out.dl(), d_scale = scale.dl();
  detail::check(cuattn_dequantize(&d_x, &d_out, &d_scale, &c.c, stream));
}

}  // namespace cuattn
