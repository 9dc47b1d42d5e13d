// SPDX-License-Identifier: Apache-2.0
// The chooser: one ladder, read from top to bottom; the first rung that does not refuse the request
// runs it. Every refusal is a sentence, so that explain() and NotImplementedError can say why.
// Next: step.cpp (its caller).
#include "cuattn/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuattn/error.h"
#include "cuattn/instances.h"
#include "src/attention/numbers.h"
#include "src/attention/sm90_tile.h"
#include "src/check/arrays.h"
#include "src/check/ladder.h"
#include "src/info.h"

namespace cuattn {
namespace {

// `automatic` rungs are tried by backend="auto"; the others exist to be measured, to teach and to
// check against, and naive for what no automatic rung serves.
struct Rung {
  Kernel kernel;
  bool on_cuda, automatic;
  const char* merit;  // why it is chosen when it does not refuse
};

constexpr Rung kLadder[] = {
    {Kernel::cpu, false, true, "tiled online softmax in vector registers"},
    {Kernel::cpu_naive, false, false, "the plain formula, scores in memory"},
    {Kernel::sm90, true, true, "Hopper: TMA feeds warpgroups of wgmma, 16-bit types and float8"},
    {Kernel::sm80, true, true, "tensor cores: mma.sync, cp.async and ldmatrix, 16-bit types"},
    {Kernel::simt, true, true, "float32 flash attention on CUDA cores"},
    {Kernel::tiled, true, false, "shared-memory tiles, online softmax"},
    {Kernel::cublas, true, false, "batched GEMM, softmax, batched GEMM; scores in memory"},
    {Kernel::naive, true, false, "three plain kernels, scores in memory; every type and option"},
};

// Who asks, as the caller knows it.
const char* function_of(const AttentionRequest& r) {
  return r.is_flex ? "flex_attention" : r.ragged ? "attention_varlen" : "attention";
}

// Which of the compiled kernels: the scored ones have dropout, too, but those of sm90, which has some
// for it alone.
ScoreKind score_of(Kernel kernel, const AttentionRequest& r) {
  const bool is_sm90 = kernel == Kernel::sm90;
  if (r.has_dropout) return is_sm90 ? ScoreKind::dropped : ScoreKind::scored;
  if (!is_sm90 || !is_code(r.dtype) || r.score != ScoreKind::identity) return r.score;
  const bool has_parts = r.has_part_scales || r.dtype == DType::i8;  // int8 has no other kernels
  return has_parts ? ScoreKind::parts : r.is_fast ? ScoreKind::fast : ScoreKind::identity;
}

// The number of the compiled kernel that would run the request.
int32_t instance_of(Kernel kernel, const AttentionRequest& r) {
  HeadDims d = {r.head_dim, r.head_dim_v};
  // Of these one kernel of a dtype serves every call but row ranges, which a functor brings itself.
  bool wide = std::max(d.qk, d.v) > kMostHeadDim && (!r.has_rows || r.has_functor);
  return find_instance(Op::attention, kernel, r.dtype, d, wide ? MaskKind::window : r.mask,
                       wide ? ScoreKind::scored : score_of(kernel, r));
}

constexpr const char* kNotCompiled = "it is not compiled for this dtype, head_dim, mask and scores";

const char* sm80_refusal(const AttentionRequest& r, const DeviceInfo& device) {
  if (r.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  int32_t instance = instance_of(Kernel::sm80, r);
  if (instance == kNoInstance) return kNotCompiled;
  HeadDims d = instance_at(instance).dims;
  bool fits =
      sm80_smem_bytes(d, sm80_tile(d, score_of(Kernel::sm80, r))) <= device.smem_per_block_optin;
  return fits ? nullptr : "its tile needs more shared memory than a block gets here";
}

// Parts of the keys for `items` tiles of work of `key_tiles` steps each, none shorter than two steps,
// where `slots` of them run at a time: the number that is soonest done, in steps. A part begins and ends
// (1.5 steps; O of a tile takes 0.02 to the workspace and back, shared by all), and parts take one
// launch more (2): what an H200 takes beside a step of sm90 of 1.5 us. Those of its small tiles are
// 0.9 us, three side by side; steps of other kernels are longer. Tried are the most parts that fit 1, 2,
// ... waves, fewer where they are no longer for it; of one wave, whose merge may cost more than its
// keys, also longer ones. The fewest parts win a tie.
int32_t choose_splits(int64_t items, int32_t key_tiles, int32_t slots, bool is_small) {
  if (items == 0 || items * 5 >= int64_t{slots} * 4 || key_tiles <= 4) return 1;
  const double ends = is_small ? 1.8 : 1.5, launch = is_small ? 3.3 : 2.0;
  const double part = is_small ? 0.011 : 0.02;
  auto steps = [&](int32_t splits) {
    int32_t waves = ceil_div(items * splits, slots);
    double merge = splits > 1 ? launch + part * static_cast<double>(items) * splits : 0.0;
    return waves * (ceil_div(key_tiles, splits) + ends) + merge;
  };
  constexpr int32_t kMostWaves = 16, kLonger = 2;
  const int64_t most = std::min({key_tiles / 2, slots, kMaxSplits});
  int32_t best = 1;
  double fewest = steps(best);
  for (int32_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t fit = std::min(int64_t{waves} * slots / items, most);
    for (int32_t longer = waves == 1 ? kLonger : 0; longer >= 0; --longer) {
      const int32_t splits = ceil_div(key_tiles, ceil_div(key_tiles, fit) + longer);
      const double taken = steps(splits);
      if (taken < fewest) {
        best = splits;
        fewest = taken;
      }
    }
    if (fit == most) break;
  }
  return best;
}

// Where the keys of a sequence are cut whatever the batch: into parts of `tiles` or more, as many as
// `most`, by the number of its own keys. most == 1: nowhere. `items`: its query tiles times its
// heads. Nothing else may count. From half a wave on, items fill half of the chip uncut; no more
// parts than fill it bound the workspace, too.
struct FixedSplits {
  int32_t tiles, most;
};

FixedSplits fixed_splits(int64_t items, int32_t n) {
  constexpr int32_t kWave = 128;  // Hoppers have 114 or 132 multiprocessors
  constexpr int32_t kFewest =
      1024;  // with fewer keys, a part takes longer to write than to compute
  if (items == 0 || items * 2 >= kWave) return {0, 1};
  return {ceil_div(kFewest, n), kWave / static_cast<int32_t>(items)};
}

// Keys that the rows of one tile see, at most: a window leaves them few.
int64_t seen_keys(const AttentionRequest& r, int64_t rows) {
  if (r.window_left == kUnlimited) return r.seqlen_kv;
  // The last query stands at the last key, so that none has more to its right than queries follow.
  int64_t right = r.window_right == kUnlimited ? r.seqlen_q : r.window_right + rows;
  return std::min(int64_t{r.seqlen_kv}, r.window_left + int64_t{1} + right);
}

// Parts of the keys, as asked for or as many as pay where `slots` items run at a time.
int32_t splits_of(const AttentionRequest& r, const Plan& plan, int32_t slots) {
  const auto [m, n, stages, warps] = plan.tile;
  if (r.num_splits > 0) return std::min(r.num_splits, std::max(ceil_div(r.seqlen_kv, n), 1));
  if (r.batch_invariant) return 1;
  const int32_t tiles = ceil_div(seen_keys(r, m / plan.packed_heads), n);
  return choose_splits(items_of(r, m, plan.packed_heads), tiles, slots, has_small_tiles(plan));
}

// O and lse of each part, float32 (cuda/host/parts.h).
size_t parts_bytes(const AttentionRequest& r, int32_t splits) {
  if (splits == 1) return 0;
  return checked_bytes(function_of(r),
                       {sizeof(float), splits, r.num_heads_q, r.total_q, r.head_dim_v + 1});
}

// sm80 and simt: the second axis of the grid counts the parts. Row ranges and what a user wrote are not
// cut.
void plan_parts(Plan& plan, const AttentionRequest& r, const DeviceInfo& device) {
  if (r.has_functor || r.has_rows) return;
  const int32_t slots = 2 * device.num_sms;  // 128 threads leave registers to two blocks
  plan.num_splits = std::min(splits_of(r, plan, slots), 65535);
  plan.workspace_bytes = parts_bytes(r, plan.num_splits);
}

// Whether sm90's second tile is sooner done: small ones where rows or keys are few, but not in place of
// parts of the keys; longer ones where keys come in blocks, by many boxes.
bool other_tile_pays(const AttentionRequest& r, Tile tile, Tile other, ScoreKind score,
                     bool in_blocks, const DeviceInfo& device) {
  if (other.m == tile.m) return in_blocks && r.seqlen_kv > 2048;
  const int32_t packed = packed_heads_of(r, tile.m, score);
  const int32_t key_tiles = ceil_div(seen_keys(r, tile.m / packed), tile.n);
  if (int64_t{r.seqlen_q} * packed > other.m &&
      choose_splits(items_of(r, tile.m, packed), key_tiles, device.num_sms, false) > 1)
    return false;
  return small_tile_pays(r, tile, other, score, device.num_sms);
}

// How sm90 cuts its work: rows of a group packed where tiles would stay half empty, keys split
// where tiles are few, and persistent CTAs.
void plan_sm90(Plan& plan, HeadDims d, const AttentionRequest& r, const DeviceInfo& device) {
  const bool float8 = is_code(r.dtype);
  const ScoreKind score = score_of(Kernel::sm90, r);
  const MaskKind mask = *instance_at(plan.instance).mask;
  plan.tile = float8          ? sm90_float8_tile(d, score)
              : r.has_functor ? sm90_functor_tile(d)
                              : sm90_tile(d, mask, score);
  Tile other = float8 || r.has_functor ? Tile{} : sm90_other_tile(d, mask, score);
  // Not with dropout, which the warps draw that would load them.
  auto in_blocks = [&](Tile tile) {
    return r.paged && !r.has_float8_pages && (!r.has_functor || r.functor.reads_blocks) &&
           !r.has_rows && score != ScoreKind::dropped && r.kv_layout != KvLayout::vllm &&
           sm90_page_rows(r.block_size, tile) >= kMinPageRows;
  };
  if (other.m > 0 && !r.batch_invariant &&
      other_tile_pays(r, plan.tile, other, score, in_blocks(other), device))
    plan.tile = other;
  const int32_t m = plan.tile.m, slots = device.num_sms * sm90_ctas_per_sm(plan.tile);
  plan.packed_heads = packed_heads_of(r, m, score);
  int64_t tiles = ceil_div(int64_t{r.seqlen_q} * plan.packed_heads, m);
  int64_t items = items_of(r, m, plan.packed_heads);
  plan.num_splits = splits_of(r, plan, slots);
  if (r.batch_invariant && r.num_splits == 0 && !r.ragged && r.batch > 0) {
    FixedSplits fixed = fixed_splits(items / r.batch, plan.tile.n);
    plan.split_keys = fixed.tiles * plan.tile.n;
    plan.most_splits = fixed.most;
    if (fixed.most > 1) {
      const int32_t key_tiles = ceil_div(r.seqlen_kv, plan.tile.n);
      plan.num_splits = std::clamp(ceil_div(key_tiles, fixed.tiles), 1, fixed.most);
    }
  }
  if (in_blocks(plan.tile)) plan.keys = KeyAccess::in_blocks;
  if (r.has_bias) {
    bool serves = sm90_stages_bias(d, score) && plan.keys != KeyAccess::in_blocks;
    plan.bias = !serves          ? BiasAccess::direct
                : r.has_bias_map ? BiasAccess::tma
                                 : BiasAccess::unmapped;
  }
  plan.num_ctas = slots;
  bool differ = r.ragged || (r.mask != MaskKind::none && tiles > 1);  // in weight
  plan.draws_tiles = differ && items > slots && plan.num_splits == 1;
  plan.workspace_bytes = plan.draws_tiles ? 256 : parts_bytes(r, plan.num_splits);
  plan.turns_values = float8 && !r.has_columns && score != ScoreKind::parts;
}

// Why sm90 does not take float8 or int8 arrays, which naive does.
const char* float8_refusal(const AttentionRequest& r) {
  if (r.score == ScoreKind::scored)
    return "over float8 it has no softcap, ALiBi, bias or negative scale yet";
  if (r.has_dropout) return "over float8 it has no dropout";
  if (r.batch_invariant && r.has_columns && (r.ragged || r.has_kv_start))
    return "over values by columns bits depend on where in its array a sequence begins, by 16 keys";
  if (!r.has_part_scales && r.dtype == DType::e4m3) return nullptr;
  if (r.paged) return "over pages it has no scales of 128 rows or of query heads, but of key heads";
  if (r.ragged || r.has_kv_start)
    return "with scales of 128 rows, or int8, sequences begin where their array does";
  if (!r.has_columns && r.seqlen_kv > 0 && r.batch > 0)
    return "with scales of 128 rows, or int8, it takes values by columns alone";
  if (std::max(r.head_dim, r.head_dim_v) <= 64)
    return "with scales of 128 rows, or int8, numbers are as fast at head_dim 64";
  return nullptr;
}

// nullptr when the rung can run the request, else why not.
const char* refusal(Kernel kernel, const AttentionRequest& r, const DeviceInfo& device) {
  auto uncompiled = [&](const char* why) {
    return instance_of(kernel, r) == kNoInstance ? why : nullptr;
  };
  bool is_cpu = kernel == Kernel::cpu || kernel == Kernel::cpu_naive;
  bool drops = kernel != Kernel::tiled && kernel != Kernel::cublas;
  if (is_code(r.dtype) && !is_cpu && kernel != Kernel::naive && kernel != Kernel::sm90)
    return r.dtype == DType::i8 ? "it does not take int8 q and k"
                                : "it does not take float8_e4m3fn";
  if (r.has_dropout && !drops) return "it has no dropout, which sm90, sm80, simt and naive have";
  if (r.has_programs && !is_cpu) {
    if (!r.has_functor) return "masks and scores of the user must be compiled for it first";
    if (kernel != Kernel::sm90 && kernel != Kernel::sm80 && kernel != Kernel::simt)
      return "it has no masks and scores written by the user yet";
  }
  if (r.has_rows && kernel == Kernel::tiled) return "it has no row ranges yet";
  switch (kernel) {
    case Kernel::cpu:
    case Kernel::cpu_naive:
    case Kernel::naive: return nullptr;
    case Kernel::sm90:
      if (r.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
      if (device.major != 9 || device.minor != 0) return "it is for compute capability 9.0 alone";
      if (device.native != 1) return "this build has no machine code for 9.0";
      if (const char* why = is_code(r.dtype) ? float8_refusal(r) : nullptr) return why;
      if (r.has_dropout && r.score == ScoreKind::scored)
        return "it has no dropout beside softcap, ALiBi, a bias or a scale up to 0, which sm80 has";
      if (r.has_functor && (r.has_dropout || r.has_score_options))
        return "it has no dropout, softcap, ALiBi, bias or scale up to 0 beside functions of a "
               "user";
      return uncompiled(kNotCompiled);
    case Kernel::sm80: return sm80_refusal(r, device);
    case Kernel::simt:
      return r.dtype == DType::f32 ? uncompiled(kNotCompiled) : "it takes float32 only";
    case Kernel::tiled:
      if (r.score == ScoreKind::scored) return "it has no softcap, ALiBi, bias or negative scale";
      if (r.has_sinks) return "it has no sinks";
      return uncompiled("it takes head_dim and head_dim_v up to 128");
    case Kernel::cublas:
      if (r.ragged || r.uses_seqused)
        return "it takes dense batches only, without cu_seqlens, seqused and kv_start";
      if (r.batch_invariant) return "its order of summation may change with the batch";
      if (!device.has_cublas)
        return "the cuBLAS library was not found; install nvidia-cublas or set CUATTN_CUBLAS_PATH";
      return nullptr;
  }
  return "unknown kernel";
}

// Float32 scores of every head; cublas adds the probabilities in the dtype of V and its own
// scratch.
size_t workspace_bytes(Kernel kernel, const AttentionRequest& r) {
  auto scores = [&](int64_t item_bytes) {
    return checked_bytes(function_of(r),
                         {item_bytes, r.batch, r.num_heads_q, r.seqlen_q, r.seqlen_kv});
  };
  switch (kernel) {
    case Kernel::cpu_naive:
    case Kernel::naive: return scores(sizeof(float));
    case Kernel::cublas: {
      size_t probabilities = r.dtype == DType::f32 ? 0 : whole_pieces(scores(2));
      return whole_pieces(scores(sizeof(float))) + probabilities + kCublasBytes;
    }
    default: return 0;
  }
}

Plan make_plan(const Rung& rung, const AttentionRequest& r, const DeviceInfo& device) {
  Plan plan{};
  plan.kernel = rung.kernel;
  plan.reason = rung.merit;
  plan.num_splits = plan.packed_heads = 1;
  HeadDims d = {r.head_dim, r.head_dim_v};
  plan.instance = instance_of(rung.kernel, r);
  if (plan.instance != kNoInstance) d = instance_at(plan.instance).dims;
  plan.head_dim = d.qk;
  plan.head_dim_v = d.v;
  plan.keys = r.paged ? KeyAccess::gathered : KeyAccess::rows;
  plan.makes_numbers = r.has_float8_pages && r.dtype != DType::e4m3;
  plan.workspace_bytes = workspace_bytes(rung.kernel, r);
  switch (rung.kernel) {
    case Kernel::sm90: plan_sm90(plan, d, r, device); break;
    case Kernel::sm80:
      plan.tile = sm80_tile(d, score_of(Kernel::sm80, r));
      plan_parts(plan, r, device);
      break;
    case Kernel::simt:
      plan.tile = simt_tile(d.qk);
      plan_parts(plan, r, device);
      break;
    case Kernel::tiled: plan.tile = kTiledTile; break;
    default: break;
  }
  return plan;
}

// The rung that `backend` names; "naive" exists on both sides.
const Rung& named_rung(const char* function, const char* backend, bool is_cuda) {
  const Rung* found = nullptr;
  for (const Rung& rung : kLadder) {
    if (std::strcmp(backend, kernel_name(rung.kernel)) != 0) continue;
    if (found == nullptr || rung.on_cuda == is_cuda) found = &rung;
  }
  CUATTN_REQUIRE(found != nullptr, function,
                 ": backend must be 'auto', 'naive', 'cublas', 'tiled', 'simt', 'sm80', "
                 "'sm90' or 'cpu', got '",
                 backend, "'; use 'auto' for the fastest that serves the call");
  return *found;
}

// The fastest that serves the call; naive, which serves all, where no automatic rung does.
const Rung& best_rung(const AttentionRequest& r, const DeviceInfo& device) {
  for (const Rung& rung : kLadder) {
    // What NVRTC has compiled is for one kernel: sm80, unless who had it compiled names sm90.
    if (r.has_functor && rung.kernel == Kernel::sm90) continue;
    if (rung.on_cuda == device.is_cuda && rung.automatic &&
        refusal(rung.kernel, r, device) == nullptr)
      return rung;
  }
  const Rung& naive = named_rung(function_of(r), "naive", device.is_cuda);
  if (const char* why = refusal(naive.kernel, r, device)) {
    fail<NotImplemented>(function_of(r), ": no kernel of this device serves the call: ", why,
                         "; a mask that is causal, a window or a bias runs everywhere, and on the "
                         "CPU all do");
  }
  return naive;
}

// The fastest that serves the call. A pass over codes costs less than scores in memory.
Plan best_plan(const Rung& best, const AttentionRequest& r, const DeviceInfo& device) {
  if (best.kernel == Kernel::naive && may_become_numbers(r, device)) {
    const Rung& other = best_rung(as_numbers(r), device);
    if (other.kernel != Kernel::naive) {
      Plan plan = make_plan(other, as_numbers(r), device);
      plan.numbers_bytes = numbers_bytes(function_of(r), r);
      plan.workspace_bytes = whole_pieces(plan.workspace_bytes) + plan.numbers_bytes;
      return plan;
    }
  }
  return make_plan(best, r, device);
}

}  // namespace

bool is_auto(const char* backend) {
  return backend == nullptr || std::strcmp(backend, "auto") == 0;
}

void require_supported(const char* function, const DeviceInfo& device) {
  constexpr int32_t kOldest = 8;  // major compute capability that the kernels are written for
  if (!device.is_cuda || (device.native >= 0 && device.major >= kOldest)) return;
  fail<UnsupportedDevice>(function, ": device cuda:", device.id, " (", device.name,
                          ", compute capability ", device.major, ".", device.minor,
                          ") is not supported by this build, which has code for ",
                          compiled_archs()[0] != '\0' ? compiled_archs() : "the CPU only",
                          "; rebuild with CUATTN_CUDA_ARCHS, or move the arrays to the CPU");
}

Plan select_attention(const AttentionRequest& request, const DeviceInfo& device,
                      const char* backend) {
  const char* function = function_of(request);
  require_supported(function, device);
  const Rung& best = best_rung(request, device);
  if (is_auto(backend)) return best_plan(best, request, device);
  const Rung& rung = named_rung(function, backend, device.is_cuda);
  const char* why = wrong_side(rung.on_cuda, device.is_cuda);
  if (why == nullptr) why = refusal(rung.kernel, request, device);
  if (why != nullptr) refuse_backend(function, backend, why, best.kernel);
  return make_plan(rung, request, device);
}

std::string explain_attention(const AttentionRequest& request, const DeviceInfo& device,
                              const char* backend) {
  Plan plan = select_attention(request, device, backend);
  AttentionRequest numbers = as_numbers(request);
  std::string text;
  for (const Rung& rung : kLadder) {
    if (rung.on_cuda != device.is_cuda) continue;
    bool of_numbers = plan.numbers_bytes > 0 && rung.kernel == plan.kernel;
    const char* why = refusal(rung.kernel, of_numbers ? numbers : request, device);
    bool chosen = rung.kernel == plan.kernel;
    text +=
        rung_line(rung.kernel, chosen, why, rung.automatic ? "can: " : "by name only: ", rung.merit,
                  chosen ? access_clause(plan) : std::string());
  }
  return text;
}

namespace {

const char* key_access_clause(KeyAccess keys) {
  switch (keys) {
    case KeyAccess::in_blocks: return "; keys are read in their blocks";
    case KeyAccess::gathered: return "; keys are gathered from their blocks first";
    case KeyAccess::by_step: return "; few queries a sequence: a kernel of paged_attention";
    case KeyAccess::rows_by_step:
      return "; few queries over many keys: a kernel of paged_attention";
    default: return "";
  }
}

const char* bias_access_clause(BiasAccess bias) {
  switch (bias) {
    case BiasAccess::tma: return "; the TMA brings the bias";
    case BiasAccess::direct: return "; threads read the bias";
    case BiasAccess::unmapped:
      return "; threads read the bias: its dtype, strides or alignment do not suit the TMA";
    default: return "";
  }
}

}  // namespace

std::string access_clause(const Plan& plan) {
  bool over_pages = plan.num_workers > 0;
  std::string cut;
  bool float8 = plan.kernel == Kernel::sm90 && plan.instance != kNoInstance &&
                instance_at(plan.instance).op == Op::attention &&
                is_code(instance_at(plan.instance).dtype);
  if (float8) {
    bool is_fast = instance_at(plan.instance).score == ScoreKind::fast;
    cut = concat("; probabilities are rounded to float8, sums have ",
                 is_fast ? "one level" : "two levels");
  }
  if (plan.numbers_bytes > 0)
    cut += over_pages || plan.keys != KeyAccess::rows ? "; q's codes become numbers"
                                                      : "; codes become numbers of 16 bits first";
  if (plan.turns_values) cut += "; values are turned into columns as they come";
  if (plan.split_keys > 0 && !over_pages)
    cut += concat("; keys in parts of ", plan.split_keys, " or more, at most ", plan.most_splits);
  const char* as_numbers = plan.makes_numbers ? ", as numbers of q's dtype" : "";
  const char* apart =
      plan.decodes_apart ? "; single queries go by a kernel of paged_attention" : "";
  return concat(key_access_clause(plan.keys), as_numbers, apart, bias_access_clause(plan.bias),
                cut);
}

}  // namespace cuattn
