// SPDX-License-Identifier: Apache-2.0
// How the instances of all ops stand in one table: their functions take `const void*`, and what it
// points to follows from the op.
#pragma once

#include <cuda_runtime.h>

#include "cuattn/names.h"
#include "cuattn/params/paged.h"
#include "cuattn/schedule.h"

namespace cuattn {

template <Op kOp>
struct OpParams;
template <>
struct OpParams<Op::attention> {
  using Type = AttentionLaunch;
};
template <>
struct OpParams<Op::attention_backward> {
  using Type = BackwardLaunch;
};
template <>
struct OpParams<Op::paged_attention> {
  using Type = PagedParams;
};

template <>
struct OpParams<Op::mla_decode> {
  using Type = PagedParams;
};

template <Op kOp>
const typename OpParams<kOp>::Type& params_of(const void* params) {
  return *static_cast<const typename OpParams<kOp>::Type*>(params);
}

// backend/instances.cu
void launch_instance(Op op, int32_t number, const void* params, cudaStream_t stream);

template <Op kOp>
void launch_instance(const typename OpParams<kOp>::Type& params, int32_t number,
                     cudaStream_t stream) {
  launch_instance(kOp, number, &params, stream);
}

}  // namespace cuattn
