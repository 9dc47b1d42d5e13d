// SPDX-License-Identifier: Apache-2.0
// attention, its backward pass and merge_states as XLA custom calls: JAX arrays reach the library inside the compiled
// program, on XLA's stream and in XLA's memory, the workspace included. Python face:
// python/cuattn/jax/attention.py, backward.py.
#include <string>

#include "bindings/xla/backward.h"
#include "bindings/xla/call.h"
#include "bindings/xla/ffi.h"
#include "bindings/xla/options.h"

namespace cuattn::bindings::xla {
namespace {

// Arguments q, k, v, then those of `present`.
void run_attention(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  std::string backend;
  cuattn_attention_options options;
  read_options(frame, options, backend);

  int64_t rank = integer(frame, "ragged") != 0 ? 3 : 4;
  int64_t rank_k = integer(frame, "paged") != 0 ? kOwnRank : rank;
  Arguments arguments(frame, place.device);
  const DLTensor *q = arguments.next(rank), *k = arguments.next(rank_k),
                 *v = arguments.next(rank_k);
  arguments.optional(integer(frame, "present"), options, kAttentionArrays,
                     &cuattn_attention_options::dropout_state);
  cuattn_attention_call call;
  check(cuattn_attention_prepare(q, k, v, &options, &call));
  AttentionResults(frame, place.device, rank).run(cuattn_attention_run, call, place.stream);
}

// Arguments dout, q, k, v, out, lse, those of `present`, dlse if there is one; results the gradients
// that are needed and the workspace.
void run_attention_backward(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  Arguments arguments(frame, place.device);
  BackwardInputs inputs(frame, arguments);
  cuattn_backward_call call;
  check(
      cuattn_attention_backward_prepare(&inputs.arrays, &inputs.options, &inputs.backward, &call));

  GradientResults(frame, place.device, inputs.backward.need).run(frame, place, call);
}

// Arguments out_a, lse_a, out_b, lse_b, or stacked outs, lses; results out, lse.
void run_merge(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  int32_t layout = integer32(frame, "layout");
  Tensor out, lse;
  out.set(*frame.results.items[0], place.device);
  lse.set(*frame.results.items[1], place.device);
  Arguments arguments(frame, place.device);
  const DLTensor *out_a = arguments.next(), *lse_a = arguments.next();
  if (frame.arguments.size == 2)
    return check(cuattn_merge_many(out_a, lse_a, &out.dl, &lse.dl, layout, place.stream));
  const DLTensor *out_b = arguments.next(), *lse_b = arguments.next();
  check(cuattn_merge_states(out_a, lse_a, out_b, lse_b, &out.dl, &lse.dl, layout, place.stream));
}

}  // namespace

const Handler kAttention = handler<run_attention>("cuattn_attention");
const Handler kAttentionBackward = handler<run_attention_backward>("cuattn_attention_backward");
const Handler kMergeStates = handler<run_merge>("cuattn_merge_states");

}  // namespace cuattn::bindings::xla
