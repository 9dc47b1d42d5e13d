// SPDX-License-Identifier: Apache-2.0
// A validated and planned backward pass: what prepare() learns and run() needs. Lives inside
// cuattn_backward_call. Next: backward.cpp.
#pragma once

#include "src/attention/call.h"

namespace cuattn {

// The arrays of the forward call, what it gave, and the gradient of out.
struct BackwardArrays {
  const TensorView &dout, &q, &k, &v, &out, &lse;
};

// Results; nullptr: not needed.
struct Gradients {
  const TensorView *dq, *dk, *dv, *dbias, *dsinks, *dslopes;
};

struct BackwardCall {
  AttentionCall forward;  // of its params, out and lse are the forward pass's
  BackwardParams params;  // whose `forward` is filled by the run
  int32_t bias_ndim, slopes_ndim;
  int64_t out_shape[4], lse_shape[3];
  int32_t deterministic;  // 1, 0, or -1: where it costs nothing
  FlexGradient gradient;  // of what a user wrote; of a call with programs

  const char* function() const { return forward.function(); }
};
static_assert(sizeof(BackwardCall) < sizeof(cuattn_backward_call::state),
              "grow cuattn_backward_call::state");

// Validates as validate_attention does, and fills everything but the plan.
BackwardCall validate_backward(const BackwardArrays& arrays,
                               const cuattn_attention_options& options,
                               const cuattn_backward_options& backward_options, bool check_data,
                               CallKind kind = CallKind::backward);

// Borrows what lies in the call.
BackwardParams problem_of(const BackwardCall& call);
Plan plan_of(const BackwardCall& call, const DeviceInfo& device, const char* backend);

// Validates the results and launches.
void run_backward(BackwardCall& call, const Gradients& gradients, void* workspace,
                  size_t workspace_bytes, Stream stream);

}  // namespace cuattn
