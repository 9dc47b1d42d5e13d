// SPDX-License-Identifier: Apache-2.0
// Merge problems, shared by the CPU tests (test_merge.cpp) and the CUDA tests (test_cuda.cpp).
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace cuattn::test {

struct MergeProblem {
  DType dtype;
  Layout layout;
  int num_parts, head_dim;
  Array outs, lses;  // parts stacked on the first axis
  Array out, lse;
};

// Random problems over dtypes, layouts and numbers of parts; a quarter of the lse are -inf, some
// are extreme.
std::vector<MergeProblem> merge_problems(uint64_t seed);
// stacked: all parts in one array; else the two-part call on the first two parts.
void run_merge(MergeProblem& problem, bool stacked, DLDevice device,
               const Arguments::Address& address, void* stream);
std::string judge_merge(const MergeProblem& problem);  // empty when right

}  // namespace cuattn::test
