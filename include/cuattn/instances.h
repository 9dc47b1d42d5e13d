// SPDX-License-Identifier: Apache-2.0
// The compiled kernels, as a planner chooses among them: an instance is one combination of a row of
// cuda/instances.cmake. A plan keeps the number of the instance it chose and the backend launches
// that, so no call can be planned for a kernel that does not exist. Builds for other devices have
// the same list. Next: src/instances.cpp (the list), cuda/backend/instances.cu (its functions).
#pragma once

#include <optional>
#include <vector>

#include "cuattn/backend.h"
#include "cuattn/plan.h"

namespace cuattn {

inline constexpr std::nullopt_t kAny = std::nullopt;  // of an axis: decided at run time

struct Instance {
  Op op;
  Kernel kernel;
  DType dtype;  // paged_attention: of the caches
  HeadDims dims;
  std::optional<MaskKind> mask;
  std::optional<ScoreKind> score;
  const char* archs;  // as "80,90,90-ptx"; "" where this build has none
};

// The number of the smallest instance that serves a call, or kNoInstance. Its mask may be a wider one.
int32_t find_instance(Op op, Kernel kernel, DType dtype, HeadDims dims, MaskKind mask,
                      ScoreKind score);
const Instance& instance_at(int32_t number);

// Appends the instances that this build has compiled.
void list_instances(std::vector<KernelInfo>& list);

}  // namespace cuattn
