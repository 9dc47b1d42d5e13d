// SPDX-License-Identifier: Apache-2.0
// The ladder of paged attention: which kernel, and how the keys of a call are cut into splits.
// Next: work.cpp (its caller), attention/plan.cpp (the ladder of attention).
#include "cuattn/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "cuattn/error.h"
#include "cuattn/instances.h"
#include "cuattn/params/pages.h"
#include "src/check/ladder.h"

namespace cuattn {
namespace {

struct Rung {
  Kernel kernel;
  bool on_cuda;
  const char* merit;  // why it is chosen when it does not refuse
};

constexpr const char* kClusterMerit =
    "wgmma with keys as rows, pages through TMA, a cluster for the splits of a head";
constexpr const char* kPartsMerit =
    "wgmma with keys as rows, pages through TMA, parts of 128 keys merged in order";
constexpr const char* kClusterPartsMerit =
    "wgmma with keys as rows, pages through TMA, parts of 128 keys merged in order, by a cluster";

constexpr const char* kLatentMerit =
    "wgmma, 64 rows, half of the columns of O a warpgroup, blocks of 16 tokens through TMA";

constexpr Rung kLadder[] = {
    {Kernel::cpu, false, "online softmax in vector registers, keys gathered block by block"},
    {Kernel::sm90, true, "wgmma with keys as rows, pages through TMA"},
    {Kernel::sm80, true, "tensor cores: mma.sync and cp.async, the heads of a group together"},
    {Kernel::simt, true, "float32 on CUDA cores"},
};

const char* merit_of(const Rung& rung, const PagedRequest& r) {
  return r.latent && rung.kernel == Kernel::sm90 ? kLatentMerit : rung.merit;
}

// The number of the compiled kernel that would run the request: masks and scores are no axes here.
int32_t instance_of(Kernel kernel, const PagedRequest& r) {
  Op op = r.latent ? Op::mla_decode : Op::paged_attention;
  return find_instance(op, kernel, r.latent ? r.dtype : r.kv_dtype, {r.head_dim, r.head_dim},
                       MaskKind::none, ScoreKind::identity);
}

// Packed latents.
bool has_packed(const PagedRequest& r) { return r.latent && r.kv_dtype != r.dtype; }

// Of mla_decode on a device that has its machine code.
const char* sm90_latent_refusal(const PagedRequest& r) {
  if (r.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (r.head_dim != kMlaSm90Latent || r.rope_dim != kMlaSm90Rope)
    return "it takes latents of 512 columns and 64 rope columns";
  if (r.own_values) return "it takes values that are the latents of the keys";
  if (has_packed(r) && !r.has_pages && !r.has_lists)
    return "it takes packed latents in pages and lists of tokens, not in rows";
  return instance_of(Kernel::sm90, r) == kNoInstance ? "it is not compiled for this dtype"
                                                     : nullptr;
}

// nullptr when the rung can run the request, else why not.
const char* refusal(Kernel kernel, const PagedRequest& r, const DeviceInfo& device) {
  auto uncompiled = [&] {
    bool none = instance_of(kernel, r) == kNoInstance;
    return none ? "it is not compiled for this dtype and head_dim" : nullptr;
  };
  const char* no_hopper = device.major != 9 || device.minor != 0 || device.native != 1
                              ? "it runs on compute capability 9.0 alone, with its machine code in "
                                "the build"
                              : nullptr;
  if (r.latent) {
    if (kernel == Kernel::cpu) return nullptr;
    if (kernel == Kernel::sm90) return no_hopper != nullptr ? no_hopper : sm90_latent_refusal(r);
    if (kernel == Kernel::sm80 && r.dtype != DType::f32) {
      if (r.rope_dim > kMlaSm80Rope) return "it takes at most 64 rope columns";
      if (r.own_values) return "it takes values that are the latents of the keys";
    }
    return uncompiled();
  }
  switch (kernel) {
    case Kernel::cpu: return nullptr;
    case Kernel::sm90:
      if (no_hopper != nullptr) return no_hopper;
      if (r.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
      if (r.kv_dtype != r.dtype) return "it takes caches of 16 bits";
      if (r.kv_layout == KvLayout::vllm) return "it takes the layouts 'nhd' and 'hnd'";
      if (r.block_size % 8 != 0) return "block_size is no multiple of 8";
      return r.head_dim < 64 ? "head_dim is less than 64" : uncompiled();
    case Kernel::sm80:
      return r.dtype == DType::f32 ? "it takes float16 and bfloat16, not float32" : uncompiled();
    case Kernel::simt: return r.dtype == DType::f32 ? uncompiled() : "it takes float32 only";
    default: return "it is not in this build";
  }
}

int32_t rows_of(const PagedRequest& r) {
  return r.num_heads_kv == 0 ? 0 : r.q_len * (r.num_heads_q / r.num_heads_kv);
}

// Copies of 8 tokens through the TMA reach 0.7 of the speed of memory, cp.async 0.9. Of packed latents
// 16 rows wait for the codes, which sm80 has on their way two stages ahead.
bool pays(Kernel kernel, const PagedRequest& r) {
  if (kernel != Kernel::sm90) return true;
  if (r.latent) return !has_packed(r) || rows_of(r) > 16;
  return r.block_size % 16 == 0;
}

constexpr int32_t kCpuSplit = 2048;  // keys: enough work for a thread to be woken for
constexpr int32_t kCpuWorkers = 16;  // of a deal: whatever the machine, the same sums

// `head_dim`: of the instance.
PagedTile tile_of(Kernel kernel, int32_t head_dim, const PagedRequest& r) {
  if (r.latent && kernel == Kernel::sm90) return kMlaSm90Tile;
  if (r.latent && kernel == Kernel::sm80) return mla_sm80_tile(rows_of(r));
  if (r.latent && kernel == Kernel::simt) return mla_simt_tile(head_dim);
  switch (kernel) {
    case Kernel::sm90: return paged_sm90_tile(head_dim, rows_of(r));
    case Kernel::sm80:
      return paged_sm80_tile(head_dim, itemsize(r.kv_dtype), r.kv_layout, rows_of(r));
    case Kernel::simt: return kPagedSimtTile;
    default: return kPagedCpuTile;
  }
}

int32_t ceil_div(int32_t a, int32_t b) { return a <= 0 ? 0 : (a - 1) / b + 1; }

// Into how many tracks the head groups are dealt: as many as possible, so long as no more than a
// twentieth of the workers is left over.
int32_t tracks_of(int32_t num_workers, int32_t head_groups) {
  for (int32_t tracks = std::min(num_workers, head_groups); tracks > 1; --tracks) {
    if (head_groups % tracks == 0 && num_workers % tracks <= num_workers / 20) return tracks;
  }
  return 1;
}

constexpr int32_t kMaxGridAxis = 65535;  // of z, where the sequences of clusters stand

// Whether a cluster may merge `splits` of each unit. Its blocks have 64 KB on their way, which is
// too little for many keys.
bool can_cluster(const Plan& plan, const PagedRequest& r, int32_t splits, int32_t tiles) {
  constexpr int32_t kMostKeys = 1024;  // of a block
  return plan.kernel == Kernel::sm90 && paged_sm90_clusters(plan.head_dim, plan.tile.m) &&
         r.num_seqs <= kMaxGridAxis && splits > 1 && splits <= kPagedMaxCluster &&
         ceil_div(tiles, splits) * plan.tile.n <= kMostKeys;
}

// Splits of `units` alike, of `tiles` each, which take least by what an H200 was measured to take, in
// microseconds: a block at least its tiles one after another, all of them what memory needs, and more
// where some multiprocessors have a block more than others; splits besides their second kernel and
// what it reads.
int32_t alike_splits(const Plan& plan, const PagedRequest& r, int64_t units, int32_t tiles) {
  constexpr double kBytes = 32e3, kUneven = 0.3, kMerge = 3.5, kPart = 0.25;  // kBytes: a worker's
  constexpr double kMostRounds = 5;
  const double tile = plan.head_dim <= 64 ? 0.33 : plan.head_dim <= 128 ? 0.41 : 0.8;
  const double speed = kBytes * plan.num_workers;
  const double read = 4.0 * units * tiles * plan.tile.n * plan.head_dim / speed;  // 16 bits
  const double part = 8.0 * units * rows_of(r) * (plan.head_dim + 1) / speed;  // float, both ways
  int32_t best = 1;
  double least = 0;
  for (int32_t splits = 1; splits <= std::min(tiles, kMaxSplits); ++splits) {
    double rounds = 1.0 * units * splits / plan.num_workers;
    if (splits > 1 && rounds > kMostRounds) break;
    double uneven = rounds > 1 ? kUneven * (std::ceil(rounds) / rounds - 1) : 0;
    double cost = std::max(read * (1 + uneven), ceil_div(tiles, splits) * tile);
    if (splits > 1) cost += kMerge + (kPart + part) * splits;
    if (splits == 1 || cost < least) best = splits, least = cost;
  }
  return best;
}

// Few units: their keys are cut evenly, without a deal. One sequence always; several where they are
// rows of a batch, or the splits of a unit make a cluster and none is long, however unequal the contexts
// are. A cluster spares a second kernel, 1 to 2 microseconds: as long as a block takes for two tiles
// more.
void cut_evenly(Plan& plan, const PagedRequest& r, int32_t head_groups, int32_t tiles) {
  constexpr int32_t kUnequalKeys = 512;  // of a block at most, with several sequences
  int64_t units = int64_t{std::max(r.num_seqs, 1)} * std::max(head_groups, 1);
  int32_t room = static_cast<int32_t>(plan.num_workers / units);
  int32_t splits = std::clamp(room, 1, std::min(tiles, kMaxSplits));
  // Rows of latents are wide: beyond 64 parts another costs as much as six tiles of all.
  if (r.latent) splits = std::min(splits, std::max(64, ceil_div(tiles, 6)));
  int32_t few = std::min(splits, kPagedMaxCluster);
  int32_t most = ceil_div(tiles, few);  // tiles of a block
  bool is_short = most - ceil_div(tiles, splits) <= 2 &&
                  (r.num_seqs <= 1 || most * plan.tile.n <= kUnequalKeys);
  plan.cluster = is_short && can_cluster(plan, r, few, tiles) ? few : 1;
  plan.num_splits = r.num_seqs <= 1 ? splits : 0;
  if (r.are_rows && r.num_seqs > 1 && plan.kernel == Kernel::sm90) {
    plan.num_splits = alike_splits(plan, r, units, tiles);
    // A long sequence may be alone.
    if (!r.are_alike) plan.num_splits = std::max(plan.num_splits, splits);
  }
  if (plan.cluster > 1) plan.num_splits = 1;
}

// The sums of a sequence do not depend on its batch. Parts of 128 keys are weighed one by one and
// merged in order, up to 1024 keys at a time: by one thread block, or, where those would be too
// few, by a cluster with the same arithmetic. Kernels without clusters take 512 keys at once, or as
// many tiles as fit.
void cut_invariantly(Plan& plan, const PagedRequest& r, int32_t head_groups) {
  const int32_t keys = 512 / plan.tile.n * plan.tile.n;
  plan.in_parts = plan.kernel == Kernel::sm90 && paged_sm90_clusters(plan.head_dim, plan.tile.m);
  plan.split_keys = plan.in_parts ? kPagedMaxCluster * kPagedPartKeys : keys;
  plan.num_splits = std::max(ceil_div(r.capacity, plan.split_keys), 1);
  if (!plan.in_parts || r.num_seqs > kMaxGridAxis) return;
  int32_t cluster = 1;  // blocks, of 128 keys at most
  while (cluster < kPagedMaxCluster && cluster * kPagedPartKeys < r.capacity) cluster *= 2;
  double units = 1.0 * std::max(r.num_seqs, 1) * std::max(head_groups, 1);
  // Two of them share a multiprocessor without loss.
  if (units * plan.num_splits * cluster <= 2.0 * plan.num_workers) plan.cluster = cluster;
}

// The ways of PagedWork, in the order in which a call may ask for them.
void cut_keys(Plan& plan, const PagedRequest& r, const DeviceInfo& device, int32_t ctas_per_sm) {
  plan.cluster = 1;
  plan.num_workers = device.is_cuda ? device.num_sms * ctas_per_sm : kCpuWorkers;
  int32_t head_groups = r.num_heads_kv * ceil_div(rows_of(r), plan.tile.m);
  plan.tracks = tracks_of(plan.num_workers, head_groups);
  int32_t tiles = std::max(ceil_div(r.capacity, plan.tile.n), 1);
  auto split_at = [&](int32_t keys) {
    plan.split_keys = keys;
    plan.num_splits = std::max(ceil_div(r.capacity, keys), 1);
  };
  if (r.one_pass) {
    plan.num_splits = 1;
  } else if (r.partition_size > 0) {
    split_at(r.partition_size);
  } else if (r.batch_invariant) {
    cut_invariantly(plan, r, head_groups);
  } else if (r.num_splits > 0) {
    // Splits of all units are counted in 32 bits.
    int64_t units = std::max(int64_t{r.num_seqs} * head_groups, int64_t{1});
    auto countable = static_cast<int32_t>(std::max(INT32_MAX / units, int64_t{1}));
    plan.num_splits = std::min({r.num_splits, tiles, countable});
    if (can_cluster(plan, r, plan.num_splits, tiles)) std::swap(plan.cluster, plan.num_splits);
  } else if (r.has_deal) {
    plan.num_splits = 0;
  } else if (!device.is_cuda) {
    split_at(kCpuSplit);
  } else {
    cut_evenly(plan, r, head_groups, tiles);
  }
}

// Tiles that a block of sm90 has on their way.
int32_t sm90_stages(const Plan& plan, const PagedRequest& r) {
  double head_groups = 1.0 * r.num_heads_kv * ceil_div(rows_of(r), plan.tile.m);
  double blocks = r.num_seqs * head_groups * plan.num_splits;  // 0 with a deal: the workers
  bool alone = blocks <= plan.num_workers;
  // Splits of a fixed length, V2's too, are short, and those of rows where a third block of
  // a multiprocessor finds work. The registers of parts with more than 8 rows leave no room for it.
  constexpr int32_t kShort = 1024;  // keys
  bool is_short = plan.split_keys > 0 && !alone && !(plan.in_parts && plan.tile.m > 8);
  is_short = is_short || (r.are_rows && blocks > 2.0 * plan.num_workers &&
                          r.capacity <= double{kShort} * plan.num_splits);
  return plan.cluster > 1 || is_short ? paged_sm90_short_stages(plan.head_dim, plan.tile)
                                      : paged_sm90_stages(plan.head_dim, plan.tile, alone);
}

Plan make_plan(const Rung& rung, const PagedRequest& r, const DeviceInfo& device) {
  Plan plan{};
  plan.kernel = rung.kernel;
  plan.reason = merit_of(rung, r);
  plan.instance = instance_of(rung.kernel, r);
  plan.head_dim = plan.head_dim_v =
      plan.instance == kNoInstance ? r.head_dim : instance_at(plan.instance).dims.qk;
  PagedTile tile = tile_of(rung.kernel, plan.head_dim, r);
  plan.tile = tile.tile;
  cut_keys(plan, r, device, tile.ctas_per_sm);
  if (rung.kernel == Kernel::sm90 && !r.latent) {
    plan.tile.stages = sm90_stages(plan, r);
    if (plan.cluster > 1) plan.reason = kClusterMerit;
    if (plan.in_parts) plan.reason = plan.cluster > 1 ? kClusterPartsMerit : kPartsMerit;
  }
  return plan;  // workspace_bytes is known once PagedWork is: work.cpp
}

const Rung& named_rung(const char* function, const char* backend) {
  for (const Rung& rung : kLadder) {
    if (std::strcmp(backend, kernel_name(rung.kernel)) == 0) return rung;
  }
  fail<InvalidArgument>(function,
                        ": backend must be 'auto', 'cpu', 'simt', 'sm80' or 'sm90', got '", backend,
                        "'; use 'auto' for the fastest that serves the call");
}

const Rung* first_that_runs(const PagedRequest& r, const DeviceInfo& device) {
  for (const Rung& rung : kLadder) {
    bool runs = rung.on_cuda == device.is_cuda && refusal(rung.kernel, r, device) == nullptr;
    if (runs && pays(rung.kernel, r)) return &rung;
  }
  return nullptr;
}

}  // namespace

Plan select_paged(const char* function, const PagedRequest& request, const DeviceInfo& device,
                  const char* backend) {
  require_supported(function, device);
  const Rung* first = first_that_runs(request, device);
  CUATTN_ASSERT(first != nullptr, "a rung serves every valid request");
  if (is_auto(backend)) return make_plan(*first, request, device);
  const Rung& rung = named_rung(function, backend);
  const char* why = wrong_side(rung.on_cuda, device.is_cuda);
  if (why == nullptr) why = refusal(rung.kernel, request, device);
  if (why != nullptr) refuse_backend(function, backend, why, first->kernel);
  return make_plan(rung, request, device);
}

std::string explain_paged(const PagedRequest& request, const DeviceInfo& device, Kernel chosen) {
  std::string text;
  for (const Rung& rung : kLadder) {
    if (rung.on_cuda != device.is_cuda) continue;
    const char* why = refusal(rung.kernel, request, device);
    bool runs = why == nullptr && rung.kernel == chosen;
    text += rung_line(rung.kernel, runs, why, "can: ", merit_of(rung, request));
  }
  return text;
}

}  // namespace cuattn
