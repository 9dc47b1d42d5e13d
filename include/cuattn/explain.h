// SPDX-License-Identifier: Apache-2.0
// Which kernel a call would run and why, from C++: the arguments of the call, whose data pointers
// are not read and may be null, and a device that need not be here. Refuses what the call would.
// What is compiled, and what is here: cuattn_kernel_at and cuattn_info_json of c_api.h.
//
//   std::puts(cuattn::attention_explain(q, k, v, options).ladder);
#pragma once

#include <cstdint>

#include "cuattn/attention.h"
#include "cuattn/c_api.h"
#include "cuattn/tensor.h"

namespace cuattn {

namespace detail {

inline cuattn_plan explain(const TensorView& q, const TensorView& k, const TensorView& v,
                           const COptions& options, const cuattn_device* device) {
  cuattn_plan plan;
  DLTensor dq = q.dl(), dk = k.dl(), dv = v.dl();
  check(cuattn_attention_explain(&dq, &dk, &dv, &options.c, device, &plan));
  return plan;
}

}  // namespace detail

// device: a GPU, real or made up; nullptr: that of the arrays.
inline cuattn_plan attention_explain(const TensorView& q, const TensorView& k, const TensorView& v,
                                     const AttentionOptions& options = {},
                                     const cuattn_device* device = nullptr) {
  return detail::explain(q, k, v, detail::COptions(options), device);
}

inline cuattn_plan attention_varlen_explain(const TensorView& q, const TensorView& k,
                                            const TensorView& v, const TensorView& cu_seqlens_q,
                                            const TensorView& cu_seqlens_k, int64_t max_seqlen_q,
                                            int64_t max_seqlen_k,
                                            const AttentionOptions& options = {},
                                            const cuattn_device* device = nullptr) {
  detail::COptions c(options);
  c.set_lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k);
  return detail::explain(q, k, v, c, device);
}

// options.version makes it V1 or V2.
inline cuattn_plan paged_attention_explain(const TensorView& q, const TensorView& k_cache,
                                           const TensorView& v_cache,
                                           const TensorView& block_tables,
                                           const TensorView& context_lens,
                                           const PagedOptions& options = {},
                                           const cuattn_device* device = nullptr) {
  detail::CPagedOptions c(options);
  cuattn_plan plan;
  DLTensor dq = q.dl(), dk = k_cache.dl(), dv = v_cache.dl(), dt = block_tables.dl(),
           dl = context_lens.dl();
  detail::check(cuattn_paged_explain(&dq, &dk, &dv, &dt, &dl, &c.c, device, &plan));
  return plan;
}

}  // namespace cuattn
