// SPDX-License-Identifier: Apache-2.0
// The C ABI of mla_decode, whose run is cuattn_paged_run. Next: mla/decode.cpp.
#include <algorithm>
#include <new>
#include <optional>

#include "src/abi/plan_log.h"
#include "src/abi/prepared.h"
#include "src/check/arrays.h"
#include "src/guarded.h"
#include "src/options.h"
#include "src/paged/call.h"

namespace cuattn {
namespace {

constexpr const char* kName = "mla_decode";

// The arrays that were given; the optional ones live here.
struct Views {
  std::optional<TensorView> q_pe, kpe_cache, v_cache, block_tables, context_lens, indices,
      topk_lens;
  LatentArrays arrays;

  explicit Views(const cuattn_mla_arrays& given)
      : arrays{view_of(kName, "q_nope", given.q_nope),
               view_of(kName, "ckv_cache", given.ckv_cache),
               optional_view(kName, "q_pe", given.q_pe, q_pe),
               optional_view(kName, "kpe_cache", given.kpe_cache, kpe_cache),
               optional_view(kName, "v_cache", given.v_cache, v_cache),
               optional_view(kName, "block_tables", given.block_tables, block_tables),
               optional_view(kName, "context_lens", given.context_lens, context_lens),
               optional_view(kName, "indices", given.indices, indices),
               optional_view(kName, "topk_lens", given.topk_lens, topk_lens)} {}
};

DeviceInfo device_info_of(const PagedCall& call) {
  return backend_of(kName, call.device).device_info(call.device.device_id, false);
}

}  // namespace
}  // namespace cuattn

using namespace cuattn;

cuattn_status cuattn_mla_decode_prepare(const cuattn_mla_arrays* arrays,
                                        const cuattn_paged_options* options,
                                        cuattn_attention_call* call) {
  return guarded([&] {
    require_given(kName, "call", call);
    mark(*call, Prepared::nothing);
    require_given(kName, "arrays", arrays);
    cuattn_paged_options room;
    const cuattn_paged_options& o = known_options(kName, options, room);
    Views views(*arrays);
    PagedCall& state = *new (call->state) PagedCall(validate_latent(views.arrays, o, true));
    plan_paged(state, o, device_info_of(state));
    if (logs_plans()) log_plan(state);
    const TensorView& q = views.arrays.q_nope;
    call->device = state.device;
    call->out_dtype = dl_dtype(state.params.dtype);
    call->out_ndim = q.ndim;
    std::copy_n(q.shape.begin(), q.ndim, call->out_shape);
    call->lse_ndim = q.ndim - 1;
    call->lse_shape[0] = q.shape[0];
    call->lse_shape[1] = state.params.num_heads_q;
    call->lse_shape[2] = q.ndim == 3 ? 1 : q.shape[1];
    call->workspace_bytes = state.plan.workspace_bytes;
    call->nothing_to_do = q.size() == 0;
    mark(*call, Prepared::paged);
  });
}

cuattn_status cuattn_mla_decode_explain(const cuattn_mla_arrays* arrays,
                                        const cuattn_paged_options* options,
                                        const cuattn_device* device, cuattn_plan* result) {
  return guarded([&] {
    require_given(kName, "arrays", arrays);
    require_given(kName, "plan", result);
    cuattn_paged_options room;
    const cuattn_paged_options& o = known_options(kName, options, room);
    Views views(*arrays);
    PagedCall call = validate_latent(views.arrays, o, false);
    DeviceInfo info = device != nullptr ? made_up_device(kName, device) : device_info_of(call);
    plan_paged(call, o, info);
    fill_plan(call.plan, call.params.work.mask.kind(), call.params.scores.kind,
              explain_paged(call.request, info, call.plan.kernel), *result);
  });
}
