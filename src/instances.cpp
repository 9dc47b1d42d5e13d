// SPDX-License-Identifier: Apache-2.0
// The list that cmake/instances.cmake writes from cuda/instances.cmake, and the search in it.
#include "cuattn/instances.h"

#include <iterator>

#include "cuattn/error.h"

namespace cuattn {
namespace {

constexpr Instance kInstances[] = {
#define CUATTN_INSTANCE(op, kernel, dtype, head_dim, head_dim_v, mask, score, archs, function) \
  {Op::op, Kernel::kernel, DType::dtype, {head_dim, head_dim_v}, mask, score, archs},
#define CUATTN_ABSENT_INSTANCE CUATTN_INSTANCE
#include "instances.inc"
#undef CUATTN_ABSENT_INSTANCE
#undef CUATTN_INSTANCE
};
constexpr int32_t kCount = static_cast<int32_t>(std::size(kInstances));

// The stretch of the list in which the instances of an op and kernel lie.
struct Stretch {
  int32_t first, end;
};

struct Stretches {
  static constexpr int kOps = 2, kKernels = 8;
  Stretch of[kOps][kKernels] = {};

  constexpr Stretches() {
    for (int32_t number = 0; number < kCount; ++number) {
      const Instance& instance = kInstances[number];
      Stretch& stretch = of[static_cast<int>(instance.op)][static_cast<int>(instance.kernel)];
      if (stretch.end == 0) stretch.first = number;
      stretch.end = number + 1;
    }
  }
};

const char* op_name(Op op) { return op == Op::attention ? "attention" : "paged_attention"; }

}  // namespace

int32_t find_instance(Op op, Kernel kernel, DType dtype, HeadDims dims, MaskKind mask,
                      ScoreKind score) {
  static constexpr Stretches kStretches;
  Stretch stretch = kStretches.of[static_cast<int>(op)][static_cast<int>(kernel)];
  int32_t found = kNoInstance, smallest = INT32_MAX;
  for (int32_t number = stretch.first; number < stretch.end; ++number) {
    const Instance& instance = kInstances[number];
    int32_t size = instance.dims.qk + instance.dims.v;
    if (size < smallest && instance.op == op && instance.kernel == kernel &&
        instance.serves(dtype, dims, mask, score)) {
      found = number;
      smallest = size;
    }
  }
  return found;
}

const Instance& instance_at(int32_t number) {
  CUATTN_ASSERT(number >= 0 && number < kCount, "instance ", number, " of ", kCount);
  return kInstances[number];
}

void list_instances(std::vector<KernelInfo>& list) {
  for (const Instance& i : kInstances) {
    if (i.archs[0] == '\0') continue;
    list.push_back({op_name(i.op), kernel_name(i.kernel), i.archs, dtype_name(i.dtype), i.dims.qk,
                    i.dims.v, i.mask ? mask_name(*i.mask) : "any",
                    i.score ? score_name(*i.score) : "any"});
  }
}

}  // namespace cuattn
