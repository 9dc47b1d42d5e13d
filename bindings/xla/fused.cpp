// SPDX-License-Identifier: Apache-2.0
// Rotary embedding, norms, activations and sampling as XLA custom calls. Python face:
// python/cuattn/jax/fused.py, which passes arguments, results and attributes in these orders.
#include "bindings/xla/call.h"
#include "bindings/xla/ffi.h"
#include "cuattn/c_api_fused.h"

namespace cuattn::bindings::xla {
namespace {

// Note: a Tensor points into itself, so it is made where it stays.
struct Result : Tensor {
  Result(const CallFrame& frame, int64_t index, DLDevice device) {
    set(*frame.results.items[index], device);
  }
};

// x [n, num_heads, head_dim], cos, sin, positions [n].
void run_rope(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_rope_options options;
  cuattn_rope_options_init(&options, sizeof options);
  options.interleaved = integer32(frame, "interleaved");
  options.inverse = integer32(frame, "inverse");
  options.offset = integer(frame, "offset");
  Arguments arguments(frame, place.device);
  const DLTensor *x = arguments.next(), *cos = arguments.next(), *sin = arguments.next();
  options.positions = arguments.next_int64();
  Result out(frame, 0, place.device);
  check(cuattn_apply_rope(x, cos, sin, &options, &out.dl, place.stream));
}

constexpr const DLTensor* cuattn_norm_options::* kNormArrays[] = {&cuattn_norm_options::bias,
                                                                  &cuattn_norm_options::residual};

// x, weight, then those of `present`; the sum is a second result where there is a residual.
void run_norm(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_norm_options options;
  cuattn_norm_options_init(&options, sizeof options);
  options.eps = number(frame, "eps");
  options.weight_offset = number(frame, "weight_offset");
  Arguments arguments(frame, place.device);
  const DLTensor *x = arguments.next(), *weight = arguments.next();
  arguments.optional(integer(frame, "present"), options, kNormArrays);
  Result out(frame, 0, place.device), sum(frame, options.residual != nullptr, place.device);
  if (options.residual != nullptr) options.residual_out = &sum.dl;
  auto run = integer(frame, "centred") != 0 ? cuattn_layer_norm : cuattn_rms_norm;
  check(run(x, weight, &options, &out.dl, place.stream));
}

// x, and the bias where it is present.
void run_activation(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  Arguments arguments(frame, place.device);
  const DLTensor* x = arguments.next();
  const DLTensor* bias = integer(frame, "present") != 0 ? arguments.next() : nullptr;
  Result out(frame, 0, place.device);
  auto run = integer(frame, "gated") != 0 ? cuattn_act_mul : cuattn_bias_act;
  check(run(x, bias, integer32(frame, "act"), &out.dl, place.stream));
}

constexpr const DLTensor* cuattn_sample_options::* kSampleArrays[] = {
    &cuattn_sample_options::temperatures, &cuattn_sample_options::top_ks,
    &cuattn_sample_options::top_ps, &cuattn_sample_options::min_ps};

// The seeds and offsets of bits 4 and 5 of `present`, and what is a number.
void read_random(const CallFrame& frame, Arguments& arguments, cuattn_sample_options& options) {
  int64_t present = integer(frame, "present");
  options.seed = integer(frame, "seed");
  options.offset = integer(frame, "offset");
  if ((present & 16) != 0) options.seeds = arguments.next_int64();
  if ((present & 32) != 0) options.offsets = arguments.next_int64();
}

// logits, then those of `present`.
void run_sample(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_sample_options options;
  cuattn_sample_options_init(&options, sizeof options);
  options.temperature = number(frame, "temperature");
  options.top_k = integer(frame, "top_k");
  options.top_p = number(frame, "top_p");
  options.min_p = number(frame, "min_p");
  options.joint = integer32(frame, "joint");
  Arguments arguments(frame, place.device);
  const DLTensor* logits = arguments.next();
  arguments.optional(integer(frame, "present"), options, kSampleArrays);
  read_random(frame, arguments, options);
  Result out(frame, 0, place.device);
  check(cuattn_sample(logits, &options, &out.dl, place.stream));
}

// draft_probs, target_probs, draft_tokens, then seeds and offsets.
void run_verify(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_sample_options options;
  cuattn_sample_options_init(&options, sizeof options);
  Arguments arguments(frame, place.device);
  const DLTensor *draft = arguments.next(), *target = arguments.next(), *given = arguments.next();
  read_random(frame, arguments, options);
  Result tokens(frame, 0, place.device), accepted(frame, 1, place.device);
  check(cuattn_speculative_verify(draft, target, given, &options, &tokens.dl, &accepted.dl,
                                  place.stream));
}

}  // namespace

const Handler kApplyRope = handler<run_rope>("cuattn_apply_rope");
const Handler kNorm = handler<run_norm>("cuattn_norm");
const Handler kActivation = handler<run_activation>("cuattn_activation");
const Handler kSample = handler<run_sample>("cuattn_sample");
const Handler kVerify = handler<run_verify>("cuattn_speculative_verify");

}  // namespace cuattn::bindings::xla
