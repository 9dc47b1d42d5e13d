// SPDX-License-Identifier: Apache-2.0
// The C ABI of paged attention. Next: paged/call.h, guarded.h.
#include <new>
#include <optional>

#include "cuattn/c_api.h"
#include "src/abi/plan_log.h"
#include "src/abi/prepared.h"
#include "src/check/arrays.h"
#include "src/check/ladder.h"
#include "src/guarded.h"
#include "src/options.h"
#include "src/paged/call.h"

namespace cuattn {
namespace {

// The options as this library knows them; `room` is for those of another size.
const cuattn_paged_options& options_of(const cuattn_paged_options* given,
                                       cuattn_paged_options& room) {
  const cuattn_paged_options& o = known_options("paged_attention", given, room);
  CUATTN_REQUIRE(o.version >= 0 && o.version <= 2,
                 "paged_attention: version must be 0, 1 or 2, got ", o.version,
                 "; 1 and 2 are PagedAttention V1 and V2");
  return o;
}

constexpr const char* kPrepares = "cuattn_paged_prepare or cuattn_mla_decode_prepare";

PagedCall& state_of(cuattn_attention_call& call) {
  return *reinterpret_cast<PagedCall*>(call.state);
}

PagedArrays arrays_of(const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache,
                      const DLTensor* block_tables, const DLTensor* context_lens) {
  const char* fn = "paged_attention";
  return {view_of(fn, "q", q), view_of(fn, "k_cache", k_cache), view_of(fn, "v_cache", v_cache),
          view_of(fn, "block_tables", block_tables), view_of(fn, "context_lens", context_lens)};
}

DeviceInfo device_info_of(const PagedCall& call) {
  return backend_of(call.function, call.device).device_info(call.device.device_id, false);
}

// Every rung with its verdict, and the pass over codes of q.
std::string ladder_of(const PagedCall& call, const DeviceInfo& device) {
  std::string ladder = explain_paged(call.request, device, call.plan.kernel);
  return call.has_codes ? ladder + kQueriesFirst : ladder;
}

void fill_shapes(const TensorView& q, cuattn_attention_call& c) {
  const PagedCall& call = state_of(c);
  c.device = call.device;
  c.out_dtype = dl_dtype(call.params.dtype);
  c.out_ndim = q.ndim;
  for (int32_t axis = 0; axis < q.ndim; ++axis) c.out_shape[axis] = q.shape[axis];
  c.lse_ndim = q.ndim - 1;
  c.lse_shape[0] = call.params.work.num_seqs;
  c.lse_shape[1] = call.params.num_heads_q;
  c.lse_shape[2] = call.params.work.q_len;
  c.workspace_bytes = call.plan.workspace_bytes;
  c.nothing_to_do = q.size() == 0;
}

}  // namespace
}  // namespace cuattn

using namespace cuattn;

extern "C" {

void cuattn_paged_options_init(cuattn_paged_options* options, size_t struct_size) {
  init_options("paged_attention", options, struct_size);
}

cuattn_status cuattn_paged_prepare(const DLTensor* q, const DLTensor* k_cache,
                                   const DLTensor* v_cache, const DLTensor* block_tables,
                                   const DLTensor* context_lens,
                                   const cuattn_paged_options* options,
                                   cuattn_attention_call* call) {
  return guarded([&] {
    require_given("paged_attention", "call", call);
    mark(*call, Prepared::nothing);
    cuattn_paged_options room;
    const cuattn_paged_options& o = options_of(options, room);
    PagedArrays arrays = arrays_of(q, k_cache, v_cache, block_tables, context_lens);
    PagedCall& state = *new (call->state) PagedCall(validate_paged(arrays, o, true));
    plan_paged(state, o, device_info_of(state));
    if (logs_plans()) log_plan(state);
    fill_shapes(arrays.q, *call);
    mark(*call, Prepared::paged);
  });
}

cuattn_status cuattn_paged_run(cuattn_attention_call* call, const DLTensor* out,
                               const DLTensor* lse, void* workspace, size_t workspace_bytes,
                               void* stream) {
  return guarded([&] {
    require_given("paged_attention", "call", call);
    require_prepared("paged_attention", *call, Prepared::paged, kPrepares);
    PagedCall& state = state_of(*call);
    const char* fn = state.function;
    std::optional<TensorView> lse_view;
    run_paged(state, view_of(fn, "out", out), optional_view(fn, "lse_out", lse, lse_view),
              workspace, workspace_bytes, stream);
  });
}

cuattn_status cuattn_paged_check(const cuattn_attention_call* call, const DLTensor* out,
                                 const DLTensor* lse, const void* workspace, size_t workspace_bytes,
                                 void* stream) {
  return guarded([&] {
    require_given("paged_attention", "call", call);
    require_prepared("paged_attention", *call, Prepared::paged, kPrepares);
    const PagedCall& state = *reinterpret_cast<const PagedCall*>(call->state);
    std::optional<TensorView> lse_view;
    check_paged(state, view_of(state.function, "out", out),
                optional_view(state.function, "lse_out", lse, lse_view), workspace, workspace_bytes,
                stream);
  });
}

cuattn_status cuattn_paged_plan_prepare(const DLTensor* block_tables, const DLTensor* context_lens,
                                        const cuattn_paged_shape* shape,
                                        const cuattn_paged_options* options,
                                        cuattn_attention_call* call) {
  return guarded([&] {
    const char* fn = "paged_plan";
    require_given(fn, "call", call);
    mark(*call, Prepared::nothing);
    cuattn_paged_options room;
    cuattn_paged_options o = options_of(options, room);
    require_given(fn, "shape", shape);
    o.version = o.num_splits = o.batch_invariant = 0;  // these have no part in a plan
    o.plan = nullptr;
    PagedCall& state = *new (call->state) PagedCall(
        validate_paged_plan(view_of(fn, "block_tables", block_tables),
                            view_of(fn, "context_lens", context_lens), *shape, o));
    plan_paged(state, o, device_info_of(state));
    call->device = state.device;
    call->out_dtype = dl_dtype(DType::i32);
    call->out_ndim = 1;
    call->out_shape[0] = PagedDeal::size(state.params.work);
    call->lse_ndim = 0;
    call->workspace_bytes = 0;
    call->nothing_to_do = 0;
    mark(*call, Prepared::plan);
  });
}

cuattn_status cuattn_paged_plan_run(cuattn_attention_call* call, const DLTensor* plan,
                                    void* stream) {
  return guarded([&] {
    require_given("paged_plan", "call", call);
    require_prepared("paged_plan", *call, Prepared::plan, "cuattn_paged_plan_prepare");
    run_paged_plan(state_of(*call), view_of("paged_plan", "out", plan), stream);
  });
}

cuattn_status cuattn_paged_explain(const DLTensor* q, const DLTensor* k_cache,
                                   const DLTensor* v_cache, const DLTensor* block_tables,
                                   const DLTensor* context_lens,
                                   const cuattn_paged_options* options, const cuattn_device* device,
                                   cuattn_plan* result) {
  return guarded([&] {
    cuattn_paged_options room;
    const cuattn_paged_options& o = options_of(options, room);
    require_given("paged_attention", "plan", result);
    PagedCall call =
        validate_paged(arrays_of(q, k_cache, v_cache, block_tables, context_lens), o, false);
    DeviceInfo info =
        device != nullptr ? made_up_device("paged_attention", device) : device_info_of(call);
    plan_paged(call, o, info);
    fill_plan(call.plan, call.params.work.mask.kind(), call.params.scores.kind,
              ladder_of(call, info), *result);
  });
}

}  // extern "C"
