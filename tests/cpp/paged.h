// SPDX-License-Identifier: Apache-2.0
// Paged problems, shared by the CPU tests (test_paged.cpp) and the CUDA tests
// (test_paged_cuda.cpp).
#pragma once

#include <string>
#include <vector>

#include "problem.h"

namespace cuattn::test {

constexpr int kPartition = 256;  // of V2: the smallest

float e4m3_value(uint8_t bits);

// A cache of NaN, and the offset of an element of it.
Array paged_cache(DType dtype, KvLayout layout, bool is_k, int64_t blocks, int64_t block_size,
                  int64_t heads, int64_t head_dim);
int64_t cache_place(const Array& cache, KvLayout layout, bool is_k, int64_t block, int64_t token,
                    int64_t head, int64_t d);

struct PagedProblem {
  DType dtype = DType::f16;
  bool e4m3 = false;  // the caches
  KvLayout layout = KvLayout::nhd;
  int block_size = 16, heads_q = 4, heads_kv = 2, head_dim = 64, q_len = 1;
  std::vector<int> lens;  // of the contexts
  int window_left = -1, num_splits = 0;
  bool alibi = false, sinks = false, batch_invariant = false, planned = false;
  bool packed = false;  // prefill: attention_varlen over the same blocks
  int version = 0;      // 1, 2: PagedAttention V1, V2
  bool wrong = false;   // ids and lengths out of range, which the device clamps

  Array q, k, v, tables, context_lens, ends, alibi_slopes, sink_logits, plan, out, lse;
  Array exp_sums, max_logits, tmp_out;  // of V2

  // Makes the arrays but plan; slots that nobody owns hold NaN, but for `wrong`.
  void fill(Random& random);
  std::vector<Array*> inputs() {
    return {&q, &k, &v, &tables, &context_lens, &ends, &alibi_slopes, &sink_logits};
  }
  std::vector<Array*> outputs() {
    if (version != 2) return {&out, &lse};
    return {&out, &lse, &exp_sums, &max_logits, &tmp_out};
  }
  int width() const { return static_cast<int>(tables.shape()[1]); }
  int context(int b) const;                                               // as clamped
  int block(int b, int key) const;                                        // the same
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
  cuattn_plan explain(const cuattn_device* made_up) const;
  void make_plan(void* plan, void* stream);  // of plan_size() entries; run() then uses it
  void run(Workspace workspace, void* stream) const;

 private:
  PagedShape shape_;
  TensorView q_, k_, v_, tables_, context_lens_, alibi_, sinks_, plan_, out_, lse_;
  TensorView exp_sums_, max_logits_, tmp_out_;
  TensorView packed_q_, ends_, packed_out_;
  PagedOptions options_;
  AttentionOptions prefill_;
  bool packed_;
  int64_t longest_q_, longest_kv_;
};

// One small problem for each way in which a kernel can run: splits, plans, masks, queries.
std::vector<PagedProblem> paged_problems(DType dtype, bool e4m3, KvLayout layout, int head_dim);
// V1 and V2, and all three versions over wrong ids and lengths.
std::vector<PagedProblem> version_problems(DType dtype, bool e4m3, KvLayout layout, int head_dim);
std::vector<PagedProblem> prefill_problems(DType dtype, KvLayout layout, int head_dim);
std::string judge_paged(const PagedProblem& problem);  // empty when right

}  // namespace cuattn::test
