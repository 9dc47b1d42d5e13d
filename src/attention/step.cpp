// SPDX-License-Identifier: Apache-2.0
// The choice for attention and attention_varlen: a kernel of the ladder, or, where sequences have
// few queries, one of paged_attention, for the whole call or for its single queries. Next: plan.cpp
// (the ladder), src/paged/plan.cpp (how a decode step is cut).
#include <algorithm>

#include "cuattn/error.h"
#include "src/attention/call.h"
#include "src/attention/numbers.h"
#include "src/attention/pages.h"
#include "src/attention/sm90_tile.h"
#include "src/check/ladder.h"

namespace cuattn {
namespace {

// Few queries a sequence are a decode step: the keys are read once, in their blocks and in parts,
// as long as a few passes over them serve all the rows that share a kv head.
constexpr int32_t kMaxStepRows = 64, kMaxStepPasses = 4;

// Whether `step` may be one, of as many queries a sequence as it has; then how.
bool plans_step(const AttentionCall& call, const PagedCall& step, const DeviceInfo& device,
                Plan& plan) {
  const AttentionParams& p = call.params;
  if (p.head_dim != p.head_dim_v || p.total_q == 0 || p.num_heads_q == 0 || p.batch == 0)
    return false;
  int64_t rows = int64_t{step.params.work.q_len} * step.params.work.group;
  if (rows > kMaxStepRows) return false;
  plan = plan_step(step, call.num_splits, call.batch_invariant, device);
  plan.keys = KeyAccess::by_step;
  return rows <= int64_t{kMaxStepPasses} * plan.tile.m;
}

// A sequence with one query, and no other, as a step whoever is beside it. Where nobody may have
// more, all are.
bool plans_decodes(const AttentionCall& call, const DeviceInfo& device, Plan& plan) {
  return device.is_cuda && call.num_splits == 0 &&
         plans_step(call, decodes_of(call, nullptr).step, device, plan);
}

// What one multiprocessor of many does in a nanosecond: bytes that it reads, operations of its
// products. Rates that the figures reach (docs/figures.md): 2.8 TB/s and 600 TFLOP/s of 132, 460 in
// small tiles; 1.65 and 190 of the 108 of an A100, 12 in float32.
struct Rates {
  double bytes, flops;
};
Rates rates_of(const Plan& plan) {
  if (plan.kernel == Kernel::sm90) return {21.0, has_small_tiles(plan) ? 3460.0 : 4500.0};
  return {15.0, plan.kernel == Kernel::sm80 ? 1800.0 : 110.0};
}

// Nanoseconds of a multiprocessor for one key of a sequence in all heads.
struct KeyCosts {
  double read;      // of K and V, once, as they are stored
  double rows;      // the same as `plan` reads them
  double multiply;  // by `plan`, with a tile of query rows for each head, or each packed group
  double gather;    // out of the blocks and back into memory
  double by_tile() const { return std::max(rows, multiply) + gather; }
};
KeyCosts key_costs(const AttentionParams& p, const Plan& plan) {
  Rates rates = rates_of(plan);
  double columns = p.head_dim + p.head_dim_v;
  double rows = p.num_heads_kv * columns * itemsize(p.dtype) / rates.bytes;
  double read = plan.makes_numbers ? rows / itemsize(p.dtype) : rows;
  int32_t tiles = p.num_heads_q / std::max(plan.packed_heads, 1);
  double multiply = tiles * 2.0 * plan.tile.m * columns / rates.flops;
  return {read, rows, multiply, plan.keys == KeyAccess::gathered ? read + rows : 0.0};
}

// Sequences with one query: as many as there can be if the others have as many as they may.
int32_t expected_decodes(const AttentionParams& p) {
  if (p.seqlen_q <= 1) return p.batch;
  int64_t more = std::max(p.total_q - p.batch, int64_t{0}), each = p.seqlen_q - 1;
  int64_t others = std::max((more + each - 1) / each, int64_t{1});
  return static_cast<int32_t>(std::max(p.batch - others, int64_t{0}));
}

bool has_rates(const Plan& plan, const DeviceInfo& device) {
  bool is_known =
      plan.kernel == Kernel::sm90 || plan.kernel == Kernel::sm80 || plan.kernel == Kernel::simt;
  return is_known && device.num_sms > 0;
}

// That a query of the longest sequence sees.
double longest_keys(const AttentionParams& p) {
  double keys = p.seqlen_kv;
  return p.mask.left >= 0 ? std::min(keys, p.mask.left + double{1} * p.seqlen_q) : keys;
}

// Whether a step is worth its launches where it takes `nanoseconds` less without them; how much. On
// an H100 about half of what is expected came, and 15 us of 400 were 30 lost: a step must promise
// twice what its launches take.
bool saves(Plan& step, double nanoseconds) {
  constexpr double kLaunches = 10000.0;  // lengths, deal, decode and merge
  double saved = nanoseconds - kLaunches;
  step.saved_us = static_cast<int32_t>(std::clamp(saved / 1000.0, 0.0, 1e9));
  return saved >= 2.0 * kLaunches;
}

// Whether single queries gain by `step`, a kernel of their own beside that of the plan. It
// reads their keys once for all heads of a group, in parts, where the plan gives a tile of query rows
// to each head, or gathers the keys first. How many there are, and how long, the host can only
// guess: a wrong guess costs the launches, in a call that takes long itself.
bool decodes_pay(const AttentionCall& call, const DeviceInfo& device, Plan& step) {
  const Plan& plan = call.plan;
  if (!has_rates(plan, device)) return false;
  const AttentionParams& p = call.params;
  int32_t decodes = expected_decodes(p);
  KeyCosts costs = key_costs(p, plan);
  double saved = (costs.by_tile() - costs.read) * longest_keys(p) * decodes / device.num_sms;
  step.num_decodes = decodes;
  return saves(step, saved);
}

int64_t num_keys(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  return call.ragged ? p.total_kv : int64_t{p.batch} * p.seqlen_kv;
}

// Whether rows under few queries gain by `step`. The kernel of the plan gives each tile of queries, and
// each part of split keys, one multiprocessor, which a small tile by itself uses half: what the longest
// sequence takes is the least.
bool rows_pay(const AttentionCall& call, const DeviceInfo& device, Plan& step) {
  constexpr int32_t kFewKeys = 256, kFewRows = 16;
  const Plan& plan = call.plan;
  if (!has_rates(plan, device)) return false;
  const AttentionParams& p = call.params;
  auto parts = [](int32_t rows, int32_t m) { return (rows + m - 1) / m; };
  int32_t packed = std::max(plan.packed_heads, 1), tiles = parts(p.seqlen_q * packed, plan.tile.m);
  int32_t passes = parts(p.seqlen_q * (p.num_heads_q / p.num_heads_kv), step.tile.m);
  KeyCosts costs = key_costs(p, plan);
  double longest = longest_keys(p);
  double keys = std::min(double{1} * num_keys(call), longest * p.batch) / device.num_sms;
  double alone = longest * costs.multiply * packed / p.num_heads_q / std::max(plan.num_splits, 1);
  if (has_small_tiles(plan)) alone *= 2;
  double whole = std::max(alone, keys * std::max(costs.read, costs.multiply * tiles));
  bool saved = saves(step, whole - keys * costs.read * passes);
  // Dense rows cost it no more launches: by measurement it gains with up to 16 rows, at head_dim
  // 64 with a few rounds of blocks.
  if (call.ragged || step.kernel != Kernel::sm90) return saved;
  bool are_few = p.head_dim > 64 || p.batch * p.num_heads_kv <= 4 * device.num_sms;
  return passes == 1 && step.tile.m <= kFewRows && longest >= kFewKeys && are_few;
}

// Rows as a step.
bool plans_rows(const AttentionCall& call, const DeviceInfo& device, Plan& plan) {
  const AttentionParams& p = call.params;
  int64_t most = call.ragged ? p.total_kv : p.seqlen_kv;
  bool serves = device.is_cuda && call.num_splits == 0 && !call.batch_invariant &&
                !is_code(p.dtype) && p.head_dim <= kMostHeadDim && most > 0 &&
                most < kMostPackedRows && p.num_heads_kv > 0;
  if (!serves) return false;
  try {
    if (!plans_step(call, step_of(call, nullptr), device, plan)) return false;
  } catch (const InvalidArgument&) {  // more splits or tiles than a step counts
    return false;
  }
  plan.keys = KeyAccess::rows_by_step;
  plan.workspace_bytes += packed_lengths_bytes(call);
  return true;
}

// Queries of codes over pages, as queries of 16 bits: where these go to a kernel of paged_attention, which
// reads the codes, or where naive alone would multiply codes.
bool plans_numbers(AttentionCall& call, const DeviceInfo& device) {
  if (!may_become_numbers(call, device)) return false;
  AttentionCall numbers = as_numbers(call);
  plan_attention(numbers, device, nullptr);
  if (numbers.plan.kernel == Kernel::naive) return false;
  bool steps = numbers.plan.keys == KeyAccess::by_step || numbers.plan.decodes_apart;
  if (!steps && select_attention(request_of(call), device, nullptr).kernel != Kernel::naive)
    return false;
  call.plan = numbers.plan;
  call.decodes = numbers.decodes;
  call.plan.numbers_bytes = numbers_bytes(call);
  call.plan.workspace_bytes = whole_pieces(call.plan.workspace_bytes) + call.plan.numbers_bytes;
  return true;
}

// What a step is said to be worth.
std::string expectation(const Plan& step) { return concat("about ", step.saved_us, " us sooner"); }

}  // namespace

void plan_attention(AttentionCall& call, const DeviceInfo& device, const char* backend) {
  require_dropout_key(call, device);
  if (is_auto(backend) && plans_numbers(call, device)) return;
  bool may_step = call.may_step && is_auto(backend) && !is_code(call.params.dtype);
  bool over_pages = may_step && call.paged;
  call.plan = call.decodes = Plan{};
  if (over_pages && !call.batch_invariant &&
      plans_step(call, step_of(call, nullptr), device, call.plan))
    return;
  bool has_decodes = over_pages && plans_decodes(call, device, call.decodes);
  if (has_decodes && call.batch_invariant && call.params.seqlen_q == 1) {
    call.plan = call.decodes;
    return;
  }
  Plan &plan = call.plan, rows{};
  plan = select_attention(request_of(call), device, backend);
  if (may_step && !call.paged && plans_rows(call, device, rows) && rows_pay(call, device, rows)) {
    plan = rows;
    return;
  }
  if (plan.keys == KeyAccess::gathered) plan.workspace_bytes += gathered_bytes(call);
  plan.decodes_apart =
      has_decodes && (call.batch_invariant || decodes_pay(call, device, call.decodes));
  if (plan.decodes_apart) plan.workspace_bytes += decode_bytes(call, call.decodes);
}

std::string ladder_of(const AttentionCall& call, const DeviceInfo& device, const char* backend) {
  const Plan &plan = call.plan, &decodes = call.decodes;
  if (plan.numbers_bytes > 0 && call.paged && is_code(call.params.dtype))
    return ladder_of(as_numbers(call), device, backend) + kQueriesFirst;
  bool has_rows = plan.keys == KeyAccess::rows_by_step;
  if (plan.keys == KeyAccess::by_step || has_rows) {
    std::string ladder = ladder_of_step(step_of(call, nullptr), device, plan);
    if (!has_rows || !call.ragged) return ladder;
    return concat(ladder, expectation(plan), " than a kernel of attention\n");
  }
  std::string ladder = explain_attention(request_of(call), device, backend);
  if (!plan.decodes_apart) return ladder;
  std::string why = decodes.num_decodes > 0
                        ? concat(expectation(decodes), " with ", decodes.num_decodes, " of them")
                        : "their bits do not depend on the batch";
  return concat(ladder, "* ", kernel_name(decodes.kernel),
                " of paged_attention: runs: single queries, ", why, "\n");
}

}  // namespace cuattn
