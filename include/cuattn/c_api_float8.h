/* SPDX-License-Identifier: Apache-2.0
 * The C ABI of quantisation to float8_e4m3fn. Rules of arrays, streams, options and errors: c_api.h.
 * Formulas: docs/fp8.md. C++ users include float8.h instead. On the CPU and CUDA. */
#pragma once

#include "cuattn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Initialise with cuattn_quantize_options_init. Tensors may be NULL. */
typedef struct {
  size_t struct_size;
  int32_t layout;     /* CUATTN_LAYOUT_BSHD or _BHSD; x of three axes is [total, heads, dim] */
  int32_t hadamard;   /* rows are rotated: signs and Hadamard matrices, an orthogonal matrix */
  int32_t channels;   /* a scale of three axes is of channels, not of blocks of 128 rows */
  int32_t is_given;   /* the scale is read, not written */
  int32_t mean_given; /* so is the mean */
  /* float32 [batch, heads, dim], subtracted from the rows before they are rotated. */
  const DLTensor* mean;
  /* Both or none. shift float32 [batch, heads, rows] is written: each row of x, as it is given,
   * times shift_mean float32 [batch, heads / n, dim] of its group of n heads. */
  const DLTensor *shift, *shift_mean;
} cuattn_quantize_options;

CUATTN_API void cuattn_quantize_options_init(cuattn_quantize_options* options, size_t struct_size);

/* out = round((x - mean) R / scale), to nearest even, sizes above 448 become 448, NaN stays NaN. x
 * float32, float16 or bfloat16 of any strides; out float8_e4m3fn or uint8 of its shape, or int8 (up
 * to 127, NaN 0), with up to 15 rows more, which become 0. scale float32: one element,
 * [heads / n], [batch, heads / n] or [batch, heads, ceil(rows / 128) or dim]; by default written:
 * the largest finite size / 448 (int8: 127). Means and sizes leave out what is not finite. A scale
 * that is read may be a number of no axes in the host's memory. */
CUATTN_API cuattn_status cuattn_quantize(const DLTensor* x, const DLTensor* out,
                                         const DLTensor* scale,
                                         const cuattn_quantize_options* options, void* stream);

/* out = x * scale: x float8_e4m3fn, uint8 or int8, out float32, float16 or bfloat16. Of the
 * options layout and channels count. */
CUATTN_API cuattn_status cuattn_dequantize(const DLTensor* x, const DLTensor* out,
                                           const DLTensor* scale,
                                           const cuattn_quantize_options* options, void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
