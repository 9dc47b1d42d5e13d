// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, norms, activations and sampling: what is checked before a backend runs them.
#pragma once

#include "cuattn/backend.h"
#include "cuattn/c_api_fused.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"

namespace cuattn {

// rope.cpp
void apply_rope(const TensorView& x, const TensorView& cos, const TensorView& sin,
                const cuattn_rope_options& options, const TensorView& out, Stream stream);
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
