// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, norms, activations and sampling: what is checked before a backend runs them.
#pragma once

#include "cuattn/backend.h"
#include "cuattn/c_api_fused.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"
#include "src/check/axes.h"
#include "src/check/overlap.h"

namespace cuattn {

// rope.cpp
void apply_rope(const TensorView& x, const TensorView& cos, const TensorView& sin,
                const cuattn_rope_options& options, const TensorView& out, Stream stream);
// How the rows of x are turned, whose arrays stay out of the result; o.layout is not looked at.
RotateParams read_rope(const char* fn, const TensorView& x, const Axes& axes, const TensorView& cos,
                       const TensorView& sin, const cuattn_rope_options& o);
// On the CPU, and under CUATTN_CHECK=1: the positions are rows of the tables.
void check_positions(const char* fn, const RotateParams& p, const cuattn_rope_options& o,
                     const Backend& backend, DLDevice device, Stream stream);
// The arrays of a rotation among those of a call.
void read_rope_memory(const char* fn, const TensorView& cos, const TensorView& sin,
                      const cuattn_rope_options& o, CallMemory& memory);
// add.cpp. check_residual writes nothing; lse_out and workspace are written before the sum.
void add_residual(const TensorView& x, const TensorView& residual, const TensorView& out,
                  Stream stream);
void check_residual(const char* function, const TensorView& x, const TensorView& residual,
                    const TensorView& out, const TensorView* lse_out, const TensorView* workspace);
// norm.cpp. `centred`: layer_norm, else rms_norm; `gated`: act_mul, else bias_act.
void norm(const TensorView& x, const TensorView& weight, const cuattn_norm_options& options,
          bool centred, const TensorView& out, Stream stream);
void activate(const TensorView& x, const TensorView* bias, int32_t activation, bool gated,
              const TensorView& out, Stream stream);
// sample.cpp
void sample(const TensorView& logits, const cuattn_sample_options& options, const TensorView& out,
            Stream stream);
void verify(const TensorView& draft, const TensorView& target, const TensorView& draft_tokens,
            const cuattn_sample_options& options, const TensorView& tokens,
            const TensorView& accepted, Stream stream);

}  // namespace cuattn
