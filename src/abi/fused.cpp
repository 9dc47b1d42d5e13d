// SPDX-License-Identifier: Apache-2.0
// The C ABI of rotary embedding, norms, activations and sampling. Next: fused/fused.h, guarded.h.
#include "src/fused/fused.h"

#include <optional>

#include "cuattn/c_api_fused.h"
#include "src/check/arrays.h"
#include "src/guarded.h"
#include "src/options.h"

using namespace cuattn;

namespace {

cuattn_status run_norm(const char* fn, const DLTensor* x, const DLTensor* weight,
                       const cuattn_norm_options* options, bool centred, const DLTensor* out,
                       void* stream) {
  return guarded([&] {
    cuattn_norm_options room;
    norm(view_of(fn, "x", x), view_of(fn, "weight", weight), known_options(fn, options, room),
         centred, view_of(fn, "out", out), stream);
  });
}

cuattn_status run_activation(const char* fn, const DLTensor* x, const DLTensor* bias, int32_t act,
                             bool gated, const DLTensor* out, void* stream) {
  return guarded([&] {
    std::optional<TensorView> storage;
    activate(view_of(fn, "x", x), optional_view(fn, "bias", bias, storage), act, gated,
             view_of(fn, "out", out), stream);
  });
}

}  // namespace

extern "C" {

void cuattn_rope_options_init(cuattn_rope_options* options, size_t struct_size) {
  init_options("apply_rope", options, struct_size);
}
void cuattn_norm_options_init(cuattn_norm_options* options, size_t struct_size) {
  init_options("rms_norm", options, struct_size);
}
void cuattn_sample_options_init(cuattn_sample_options* options, size_t struct_size) {
  init_options("sample", options, struct_size);
}

cuattn_status cuattn_apply_rope(const DLTensor* x, const DLTensor* cos, const DLTensor* sin,
                                const cuattn_rope_options* options, const DLTensor* out,
                                void* stream) {
  return guarded([&] {
    const char* fn = "apply_rope";
    cuattn_rope_options room;
    apply_rope(view_of(fn, "x", x), view_of(fn, "cos", cos), view_of(fn, "sin", sin),
               known_options(fn, options, room), view_of(fn, "out", out), stream);
  });
}

cuattn_status cuattn_rms_norm(const DLTensor* x, const DLTensor* weight,
                              const cuattn_norm_options* options, const DLTensor* out,
                              void* stream) {
  return run_norm("rms_norm", x, weight, options, false, out, stream);
}
cuattn_status cuattn_layer_norm(const DLTensor* x, const DLTensor* weight,
                                const cuattn_norm_options* options, const DLTensor* out,
                                void* stream) {
  return run_norm("layer_norm", x, weight, options, true, out, stream);
}

cuattn_status cuattn_add_residual(const DLTensor* x, const DLTensor* residual, const DLTensor* out,
                                  void* stream) {
  const char* fn = "add_residual";
  return guarded([&] {
    add_residual(view_of(fn, "x", x), view_of(fn, "residual", residual), view_of(fn, "out", out),
                 stream);
  });
}
cuattn_status cuattn_check_residual(const char* function, const DLTensor* x,
                                    const DLTensor* residual, const DLTensor* out,
                                    const DLTensor* lse_out, const DLTensor* workspace) {
  return guarded([&] {
    const char* fn = function != nullptr ? function : "check_residual";
    require_given(fn, "function", function);
    std::optional<TensorView> lse, memory;
    check_residual(fn, view_of(fn, "x", x), view_of(fn, "residual", residual),
                   view_of(fn, "out", out), optional_view(fn, "lse_out", lse_out, lse),
                   optional_view(fn, "workspace", workspace, memory));
  });
}

cuattn_status cuattn_act_mul(const DLTensor* x, const DLTensor* bias, int32_t act,
                             const DLTensor* out, void* stream) {
  return run_activation("act_mul", x, bias, act, true, out, stream);
}
cuattn_status cuattn_bias_act(const DLTensor* x, const DLTensor* bias, int32_t act,
                              const DLTensor* out, void* stream) {
  return run_activation("bias_act", x, bias, act, false, out, stream);
}

cuattn_status cuattn_sample(const DLTensor* logits, const cuattn_sample_options* options,
                            const DLTensor* out, void* stream) {
  return guarded([&] {
    cuattn_sample_options room;
    sample(view_of("sample", "logits", logits), known_options("sample", options, room),
           view_of("sample", "out", out), stream);
  });
}

cuattn_status cuattn_speculative_verify(const DLTensor* draft_probs, const DLTensor* target_probs,
                                        const DLTensor* draft_tokens,
                                        const cuattn_sample_options* options,
                                        const DLTensor* tokens, const DLTensor* accepted,
                                        void* stream) {
  return guarded([&] {
    const char* fn = "speculative_verify";
    cuattn_sample_options room;
    verify(view_of(fn, "draft_probs", draft_probs), view_of(fn, "target_probs", target_probs),
           view_of(fn, "draft_tokens", draft_tokens), known_options(fn, options, room),
           view_of(fn, "out", tokens), view_of(fn, "accepted_out", accepted), stream);
  });
}

}  // extern "C"
