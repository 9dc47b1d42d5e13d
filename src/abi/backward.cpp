// SPDX-License-Identifier: Apache-2.0
// The C ABI of the backward pass. Next: attention/backward.h, guarded.h.
#include "src/attention/backward.h"

#include <new>
#include <optional>

#include "cuattn/c_api.h"
#include "src/abi/plan_log.h"
#include "src/abi/prepared.h"
#include "src/attention/flex.h"
#include "src/check/arrays.h"
#include "src/guarded.h"
#include "src/options.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "attention_backward";

// Programs allocate these: they keep their size.
static_assert(sizeof(cuattn_backward_call) == 4112 && sizeof(cuattn_backward_arrays) == 48 &&
              sizeof(cuattn_gradients) == 48);

// The options of both structs as this library knows them.
struct Options {
  cuattn_attention_options attention_room;
  cuattn_backward_options backward_room;
  const cuattn_attention_options& attention;
  const cuattn_backward_options& backward;

  Options(const cuattn_attention_options* options, const cuattn_backward_options* backward_options)
      : attention(known_options(kFunction, options, attention_room)),
        backward(known_options(kFunction, backward_options, backward_room)) {}
};

BackwardCall validated(const cuattn_backward_arrays* arrays, const Options& options,
                       bool check_data, CallKind kind = CallKind::backward) {
  require_given(kFunction, "arrays", arrays);
  auto view = [](const char* name, const DLTensor* tensor) {
    return view_of(kFunction, name, tensor);
  };
  TensorView dout = view("dout", arrays->dout), q = view("q", arrays->q), k = view("k", arrays->k),
             v = view("v", arrays->v), out = view("out", arrays->out),
             lse = view("lse", arrays->lse);
  return validate_backward({dout, q, k, v, out, lse}, options.attention, options.backward,
                           check_data, kind);
}

BackwardCall& state_of(cuattn_backward_call& call) {
  return *reinterpret_cast<BackwardCall*>(call.state);
}

DeviceInfo device_info_of(const BackwardCall& call) {
  DLDevice device = call.forward.device;
  return backend_of(call.function(), device).device_info(device.device_id, false);
}

}  // namespace
}  // namespace cuattn

using namespace cuattn;

extern "C" {

void cuattn_backward_options_init(cuattn_backward_options* options, size_t struct_size) {
  init_options(kFunction, options, struct_size);
}

cuattn_status cuattn_attention_backward_prepare(const cuattn_backward_arrays* arrays,
                                                const cuattn_attention_options* options,
                                                const cuattn_backward_options* backward_options,
                                                cuattn_backward_call* call) {
  return guarded([&] {
    require_given(kFunction, "call", call);
    mark(*call, Prepared::nothing);
    Options known(options, backward_options);
    BackwardCall& state = *new (call->state) BackwardCall(validated(arrays, known, true));
    new (&state.forward.plan) Plan(plan_of(state, device_info_of(state), known.attention.backend));
    if (logs_plans()) log_plan(state);
    call->device = state.forward.device;
    call->workspace_bytes = state.forward.plan.workspace_bytes;
    mark(*call, Prepared::backward);
  });
}

cuattn_status cuattn_flex_backward_prepare(const cuattn_backward_arrays* arrays,
                                           const cuattn_attention_options* options,
                                           const cuattn_backward_options* backward_options,
                                           const cuattn_flex_options* flex_options,
                                           cuattn_backward_call* call) {
  return guarded([&] {
    const char* fn = "flex_attention_backward";
    require_given(fn, "call", call);
    mark(*call, Prepared::nothing);
    Options known(options, backward_options);
    cuattn_flex_options room;
    const cuattn_flex_options& flex = known_options(fn, flex_options, room);
    BackwardCall& state = *new (call->state) BackwardCall(
        validated(arrays, known, /*check_data=*/true, CallKind::flex_backward));
    read_flex(state.forward, flex, /*check_data=*/true);
    read_flex_gradient(state, flex, /*check_data=*/true);
    new (&state.forward.plan) Plan(plan_of(state, device_info_of(state), known.attention.backend));
    if (logs_plans()) log_plan(state);
    call->device = state.forward.device;
    call->workspace_bytes = state.forward.plan.workspace_bytes;
    mark(*call, Prepared::backward);
  });
}

cuattn_status cuattn_attention_backward_run(cuattn_backward_call* call,
                                            const cuattn_gradients* gradients, void* workspace,
                                            size_t workspace_bytes, void* stream) {
  return guarded([&] {
    require_given(kFunction, "call", call);
    require_given(kFunction, "gradients", gradients);
    const char* by = "cuattn_attention_backward_prepare or cuattn_flex_backward_prepare";
    require_prepared(kFunction, *call, Prepared::backward, by);
    BackwardCall& state = state_of(*call);
    std::optional<TensorView> views[6];
    auto view = [&, next = 0](const char* name, const DLTensor* tensor) mutable {
      return optional_view(state.function(), name, tensor, views[next++]);
    };
    const TensorView* dq = view("dq", gradients->dq);
    const TensorView* dk = view("dk", gradients->dk);
    const TensorView* dv = view("dv", gradients->dv);
    const TensorView* dbias = view("dbias", gradients->dbias);
    const TensorView* dsinks = view("dsinks", gradients->dsinks);
    const TensorView* dslopes = view("dslopes", gradients->dslopes);
    run_backward(state, {dq, dk, dv, dbias, dsinks, dslopes}, workspace, workspace_bytes, stream);
  });
}

cuattn_status cuattn_attention_backward_explain(const cuattn_backward_arrays* arrays,
                                                const cuattn_attention_options* options,
                                                const cuattn_backward_options* backward_options,
                                                const cuattn_device* device, cuattn_plan* result) {
  return guarded([&] {
    Options known(options, backward_options);
    require_given(kFunction, "plan", result);
    BackwardCall call = validated(arrays, known, false);
    DeviceInfo info = device != nullptr ? made_up_device(kFunction, device) : device_info_of(call);
    Plan plan = plan_of(call, info, known.attention.backend);
    const AttentionParams& p = call.forward.params;
    fill_plan(plan, p.mask.kind(), p.scores.kind, explain_backward(plan, problem_of(call), info),
              *result);
  });
}

}  // extern "C"
