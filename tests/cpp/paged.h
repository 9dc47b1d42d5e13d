// SPDX-License-Identifier: Apache-2.0
// Paged problems, shared by the CPU tests (test_paged.cpp) and the CUDA tests
// (test_paged_cuda.cpp).
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace cuattn::test {

struct PagedProblem {
  DType dtype = DType::f16;
  bool e4m3 = false;  // the caches
  KvLayout layout = KvLayout::nhd;
  int block_size = 16, heads_q = 4, heads_kv = 2, head_dim = 64, q_len = 1;
  std::vector<int> lens;  // of the contexts
  int window_left = -1, num_splits = 0;
  bool alibi = false, sinks = false, batch_invariant = false, planned = false;
  bool packed = false;  // prefill: attention_varlen over the same blocks

  Array q, k, v, tables, context_lens, ends, alibi_slopes, sink_logits, plan, out, lse;

  void fill(Random& random);  // makes the arrays but plan; slots that nobody owns hold NaN
  std::vector<Array*> inputs() {
    return {&q, &k, &v, &tables, &context_lens, &ends, &alibi_slopes, &sink_logits};
  }
  int64_t place(bool is_k, int block, int token, int head, int d) const;  // in a cache
  int64_t lse_place(int b, int query, int head) const;
  float stored(bool is_k, int block, int token, int head, int d) const;
  std::string text() const;
};

// A problem's arrays at their addresses, as the functions take them.
class PagedCall {
 public:
  PagedCall(PagedProblem& problem, DLDevice device, const Arguments::Address& address,
            const char* backend);
  PagedCall(const PagedCall&) = delete;

  int64_t plan_size() const;
  size_t workspace_bytes() const;
  void make_plan(void* plan, void* stream);  // of plan_size() entries; run() then uses it
  void run(Workspace workspace, void* stream) const;

 private:
  PagedShape shape_;
  TensorView q_, k_, v_, tables_, context_lens_, alibi_, sinks_, plan_, out_, lse_;
  TensorView packed_q_, ends_, packed_out_;
  PagedOptions options_;
  AttentionOptions prefill_;
  bool packed_;
  int64_t longest_q_, longest_kv_;
};

// One small problem for each way in which a kernel can run: splits, plans, masks, queries.
std::vector<PagedProblem> paged_problems(DType dtype, bool e4m3, KvLayout layout, int head_dim);
std::vector<PagedProblem> prefill_problems(DType dtype, KvLayout layout, int head_dim);
std::string judge_paged(const PagedProblem& problem);  // empty when right

}  // namespace cuattn::test
