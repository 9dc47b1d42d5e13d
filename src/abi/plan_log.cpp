// SPDX-License-Identifier: Apache-2.0
#include "src/abi/plan_log.h"

#include <cstdio>
#include <mutex>
#include <string>
#include <unordered_set>

#include "cuattn/error.h"
#include "src/attention/backward.h"
#include "src/check/text.h"
#include "src/paged/call.h"

namespace cuattn {
namespace {

constexpr size_t kMostLines = 1000;  // a server sees new lengths for ever

// Prints a line that was not printed before.
void print_once(const std::string& line) {
  static std::mutex mutex;
  static auto* printed = new std::unordered_set<std::string>();  // never destroyed: threads log on
  std::lock_guard<std::mutex> lock(mutex);
  if (printed->size() >= kMostLines || !printed->insert(line).second) return;
  bool is_last = printed->size() == kMostLines;
  std::fprintf(stderr, "cuattn: %s\n%s", line.c_str(),
               is_last ? "cuattn: CUATTN_LOG has printed 1000 plans and prints no more\n" : "");
}

std::string plan_text(const Plan& plan, const std::string& clause = {}) {
  std::string tile = plan.tile.m > 0 ? concat(", tile ", plan.tile.m, " x ", plan.tile.n) : "";
  std::string splits = plan.num_splits > 1 ? concat(", splits ", plan.num_splits) : "";
  std::string workspace =
      plan.workspace_bytes > 0 ? concat(", workspace ", plan.workspace_bytes, " bytes") : "";
  return concat(" -> ", kernel_name(plan.kernel), tile, splits, workspace, ": ", plan.reason,
                clause);
}

std::string call_text(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  const char* up_to = call.ragged ? "up to " : "";
  std::string dims =
      p.head_dim == p.head_dim_v ? concat(p.head_dim) : concat(p.head_dim, " / ", p.head_dim_v);
  return concat(call.function(), " ", dtype_name(p.dtype), " on ", text(call.device), ": batch ",
                p.batch, ", queries ", up_to, p.seqlen_q, ", keys ", up_to, p.seqlen_kv, ", heads ",
                p.num_heads_q, " / ", p.num_heads_kv, ", head_dim ", dims, ", mask ",
                mask_name(p.mask.kind()), ", scores ", score_name(p.scores.kind));
}

}  // namespace

void log_plan(const AttentionCall& call) {
  print_once(call_text(call) + plan_text(call.plan, access_clause(call.plan)));
}

void log_plan(const BackwardCall& call) {
  print_once(call_text(call.forward) + plan_text(call.forward.plan));
}

void log_plan(const PagedCall& call) {
  const PagedParams& p = call.params;
  const PagedWork& w = p.work;
  DType dtype = call.has_codes ? DType::e4m3 : p.dtype;
  print_once(concat(call.function, " ", dtype_name(dtype), " over ", dtype_name(p.kv_dtype), " on ",
                    text(call.device), ": sequences ", w.num_seqs, ", queries ", w.q_len,
                    ", keys up to ", w.capacity, ", blocks of ", p.pages.block_size, ", heads ",
                    p.num_heads_q, " / ", w.num_heads_kv, ", head_dim ", p.head_dim, ", mask ",
                    mask_name(w.mask.kind()), ", scores ", score_name(p.scores.kind)) +
             plan_text(call.plan, access_clause(call.plan)));
}

}  // namespace cuattn
