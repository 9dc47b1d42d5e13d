// SPDX-License-Identifier: Apache-2.0
// The functions of the instances, by number: the same list as src/instances.cpp, from the same
// file.
#include <iterator>

#include "cuattn/fail.h"
#include "cuda/host/instance.h"

namespace cuattn {

// Declarations of the generated functions.
namespace instances {
#define CUATTN_INSTANCE(op, kernel, dtype, head_dim, head_dim_v, mask, score, archs, function) \
  void function(const void* params, cudaStream_t stream);
#define CUATTN_ABSENT_INSTANCE(...)
#include "instances.inc"
#undef CUATTN_ABSENT_INSTANCE
#undef CUATTN_INSTANCE
}  // namespace instances

namespace {

struct Function {
  Op op;
  void (*launch)(const void* params, cudaStream_t stream);  // nullptr: not in this build
};

constexpr Function kFunctions[] = {
#define CUATTN_INSTANCE(op, kernel, dtype, head_dim, head_dim_v, mask, score, archs, function) \
  {Op::op, instances::function},
#define CUATTN_ABSENT_INSTANCE(op, ...) {Op::op, nullptr},
#include "instances.inc"
#undef CUATTN_ABSENT_INSTANCE
#undef CUATTN_INSTANCE
};

}  // namespace

void launch_instance(Op op, int32_t number, const void* params, cudaStream_t stream) {
  CUATTN_ASSERT(number >= 0 && number < static_cast<int32_t>(std::size(kFunctions)) &&
                    kFunctions[number].op == op && kFunctions[number].launch != nullptr,
                "instance ", number, " is not of this op, or not in this build");
  kFunctions[number].launch(params, stream);
}

}  // namespace cuattn
