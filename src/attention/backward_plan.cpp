// SPDX-License-Identifier: Apache-2.0
// The chooser of the backward pass: which kernel, how the keys are cut, how much workspace. Next:
// plan.cpp (the chooser of the forward pass).
#include <algorithm>
#include <cstring>
#include <iterator>

#include "cuattn/backward_tiles.h"
#include "cuattn/error.h"
#include "cuattn/instances.h"
#include "cuattn/plan.h"
#include "src/check/arrays.h"
#include "src/check/ladder.h"

namespace cuattn {
namespace {

struct Rung {
  Kernel kernel;
  bool on_cuda, automatic;
  const char* merit;
};

constexpr Rung kLadder[] = {
    {Kernel::cpu, false, true, "five products of tiles in vector registers, sums in float32"},
    {Kernel::cpu_naive, false, false, "the plain formula, probabilities in memory"},
    {Kernel::sm90, true, true, "Hopper: TMA feeds warpgroups of wgmma, 16-bit types; two passes"},
    {Kernel::sm80, true, true, "tensor cores: mma.sync, two passes, 16-bit types"},
    {Kernel::simt, true, true, "float32 on CUDA cores, two passes"},
    {Kernel::naive, true, true, "plain kernels, probabilities in memory; every type and option"},
};

// Without query heads every gradient is zeros, which tiles of no head would not write: what runs on
// CUDA instead of the rung chosen or named, after functions of a user, too.
constexpr Rung kZeros = {Kernel::naive, true, true, "no query head, plain kernels write zeros"};

// Which of the compiled kernels: the scored ones have dropout, too, and simt has no others.
ScoreKind score_of(Kernel kernel, const AttentionParams& f) {
  return kernel == Kernel::simt || f.dropout.is_on() ? ScoreKind::scored : f.scores.kind;
}

MaskKind mask_of(const AttentionParams& f) {
  return f.rows.begin != nullptr ? MaskKind::rows : f.mask.kind();
}

// The number of the compiled kernels that would run the call; a functor is compiled for the head
// dims of the scored ones.
int32_t instance_of(Kernel kernel, const AttentionParams& f) {
  if (f.flex != nullptr) {
    return find_instance(Op::attention_backward, kernel, f.dtype, {f.head_dim, f.head_dim_v},
                         MaskKind::window, ScoreKind::scored);
  }
  // That of simt serves row ranges, too.
  MaskKind mask = kernel == Kernel::simt ? MaskKind::window : mask_of(f);
  return find_instance(Op::attention_backward, kernel, f.dtype, {f.head_dim, f.head_dim_v}, mask,
                       score_of(kernel, f));
}

// What neither of the kernels on tensor cores does; else their instance is compiled.
const char* two_pass_refusal(Kernel kernel, const BackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (f.dtype == DType::f32) return "it takes float16 and bfloat16, not float32";
  if (instance_of(kernel, f) == kNoInstance)
    return "it is not compiled for this dtype, head_dim, mask and scores";
  return nullptr;
}

const char* sm90_refusal(const BackwardParams& p, const DeviceInfo& device) {
  if (p.forward.dropout.is_on() && p.forward.scores.scored())
    return "it has no dropout beside softcap, ALiBi, a bias or a scale up to 0, which sm80 has";
  if (p.needs(kNeedDslopes) &&
      (sm90_score_form(p.forward) != ScoreForm::smooth || p.forward.scores.softcap > 0.0f))
    return "it has no dslopes beside a softcap, a bias or such a scale, which sm80 has";
  if (p.needs(kNeedDbias) && sm90_score_form(p.forward) != ScoreForm::biased) {
    return "it has no dbias of such a bias, head_dim or beside such options, which sm80 has";
  }
  if (const char* why = two_pass_refusal(Kernel::sm90, p)) return why;
  if (device.major != 9 || device.minor != 0) return "it is for compute capability 9.0 alone";
  return device.native == 1 ? nullptr : "this build has no machine code for 9.0";
}

// The pass for dbias cuts the keys in use into tiles, dbias has a column for each key of the arrays.
const char* bias_refusal(const BackwardParams& p) {
  bool differ = p.needs(kNeedDbias) && p.forward.kv_start != nullptr;
  return differ ? "it makes no dbias of keys after kv_start, naive does" : nullptr;
}

const char* sm80_refusal(const BackwardParams& p, const DeviceInfo& device) {
  if (const char* why = two_pass_refusal(Kernel::sm80, p)) return why;
  if (const char* why = bias_refusal(p)) return why;
  bool is_functor = p.forward.flex != nullptr;
  ScoreKind score = is_functor ? ScoreKind::scored : score_of(Kernel::sm80, p.forward);
  HeadDims d = instance_at(instance_of(Kernel::sm80, p.forward)).dims;
  int32_t bytes = std::max({sm80_queries_smem_bytes(d, sm80_queries_tile(d, score)),
                            sm80_queries_smem_bytes(d, sm80_bias_tile(d)),
                            sm80_keys_smem_bytes(d, sm80_keys_tile(d, score))});
  return bytes <= device.smem_per_block_optin
             ? nullptr
             : "its tile needs more shared memory than a block gets here";
}

// What takes masks and scores of a user on CUDA.
Kernel kernel_of_functors(const AttentionParams& f) {
  return f.dtype == DType::f32 ? Kernel::simt : Kernel::sm80;
}

// nullptr where the rung can differentiate the call, else why not.
const char* refusal(Kernel kernel, const BackwardParams& p, const DeviceInfo& device) {
  if (device.is_cuda && p.forward.flex != nullptr && kernel != kernel_of_functors(p.forward)) {
    return p.forward.dtype == DType::f32
               ? "masks and scores of the user run in simt alone, in float32"
               : "masks and scores of the user run in sm80 alone";
  }
  switch (kernel) {
    case Kernel::cpu:
    case Kernel::cpu_naive:
    case Kernel::naive: return nullptr;
    case Kernel::sm90: return sm90_refusal(p, device);
    case Kernel::sm80: return sm80_refusal(p, device);
    case Kernel::simt:
      return p.forward.dtype == DType::f32 ? bias_refusal(p) : "it takes float32 only";
    default: return "it has no backward pass";
  }
}

constexpr const char* kFusedMerit =
    "Hopper: five products fused, dq summed in any order; deterministic=True gives it one";
constexpr const char* kFusedScoresMerit =
    "Hopper: five products fused, dq summed in any order; deterministic=True takes two passes";
constexpr const char* kOneBlockMerit = "Hopper: five products fused, all keys in one block";
constexpr const char* kOrderedMerit =
    "Hopper: five products fused, dq summed in the order of the keys, by tickets";

constexpr const char* kFunctorMerit =
    "tensor cores: mma.sync, two passes compiled for the functions by NVRTC";
constexpr const char* kFloatFunctorMerit =
    "float32 on CUDA cores, two passes compiled for the functions by NVRTC";

// Blocks of 128 keys from which on the fused kernel was measured ahead of two passes in spite of an
// order: fewer stand in one or two waves, and wait for each other from the start on. From so many, and
// so many rows, without a mask at 64 columns, it costs 0 to 2 %, elsewhere up to 17. Who
// names sm90 has an order whatever their number.
constexpr int64_t kLeastOrdered = 256, kLeastOrderedCausal = 512, kLeastFree = 1024;
constexpr int32_t kLeastFreeRows = 2048;
constexpr int32_t kLeastOrderedRows = 160;  // of fewer each block waits for all before it

bool takes_order(const BackwardParams& p, HeadDims d, SumOrder order, bool is_named) {
  const AttentionParams& f = p.forward;
  if (order == SumOrder::any || sm90_score_form(f) != ScoreForm::plain) return false;
  if (f.seqlen_q < kLeastOrderedRows) return false;
  const int64_t keys = sm90_fused_tile(d, ScoreForm::ordered).n;
  const int64_t blocks = (f.seqlen_kv + keys - 1) / keys * f.batch * f.num_heads_kv;
  const bool is_full = mask_of(f) == MaskKind::none;
  if (order == SumOrder::of_problem)
    return is_named || blocks >= (is_full ? kLeastOrdered : kLeastOrderedCausal);
  return is_full && d.qk <= 64 && f.seqlen_q >= kLeastFreeRows && blocks >= kLeastFree;
}

// Whether all keys of a sequence are one block of the fused kernel, so that dq needs no sums.
bool has_one_block(const AttentionParams& f, HeadDims d) {
  const ScoreForm form = sm90_score_form(f);
  return f.seqlen_kv > 0 && f.seqlen_kv <= sm90_fused_tile(d, form).n && sm90_stores_dq(d, form);
}

// Whether the fused kernel's fifth product, for which few blocks of keys may leave most of the chip
// idle, costs no more than the first of two passes, three products by tiles of queries, 64 keys at a
// time. Both are counted in products of 128 x 128 that a multiprocessor does one after another. Where
// dq needs no sums the fused kernel saves a launch, too.
bool fused_pays(const AttentionParams& f, HeadDims d, int32_t num_sms) {
  constexpr int64_t kTile = 128, kLaunch = 4;
  const int64_t row_tiles = (f.seqlen_q + kTile - 1) / kTile;
  const int64_t key_tiles = (f.seqlen_kv + kTile - 1) / kTile;
  const int64_t group = std::max(f.num_heads_q / std::max(f.num_heads_kv, 1), 1);
  auto rounds = [&](int64_t tiles, int64_t heads) {
    const int64_t blocks = tiles * heads * std::max(f.batch, 1);
    return (blocks + num_sms - 1) / num_sms;
  };
  const int64_t fifth = rounds(key_tiles, f.num_heads_kv) * row_tiles * group;
  const int64_t first = 3 * rounds(row_tiles, f.num_heads_q) * ((f.seqlen_kv + 63) / 64) / 2;
  return fifth <= first + (has_one_block(f, d) ? kLaunch : 0);
}

// The fused kernel of sm90, for all three gradients. It stores dq, or sums it in any order or in
// that of the keys.
bool takes_fused(const BackwardParams& p, HeadDims d, SumOrder order, bool in_order,
                 int32_t num_sms) {
  const AttentionParams& f = p.forward;
  constexpr uint32_t kAll = kNeedDq | kNeedDk | kNeedDv;
  const bool is_short = has_one_block(f, d);
  // The longest sequence of a batch decides here: bits of the others must not depend on it.
  if (order == SumOrder::of_sequence) return false;
  if (order == SumOrder::of_problem && !in_order && !is_short) return false;
  return sm90_has_fused(d, mask_of(f), sm90_score_form(f)) && !p.needs(kNeedDslopes) &&
         (p.need & kAll) == kAll &&
         (is_short || f.seqlen_kv > sm90_fused_tile(d, sm90_score_form(f)).n) &&
         fused_pays(f, d, num_sms);
}

// The keys of a call are cut for so many units of work, whatever number of threads there is: bits
// must not depend on it. Each part has a dq of its own.
constexpr int64_t kUnits = 32;
constexpr int64_t kLeastChunk = 512, kChunkStep = 256;  // keys
constexpr int64_t kMostFloats = int64_t{1} << 26;       // of the parts' dq together

void cut_keys(Plan& plan, const BackwardParams& p, bool batch_invariant) {
  const AttentionParams& f = p.forward;
  int64_t units = std::max<int64_t>(int64_t{f.batch} * f.num_heads_kv, 1);
  int64_t chunks = batch_invariant ? 1 : (kUnits + units - 1) / units;
  chunks = std::min(chunks, f.seqlen_kv / kLeastChunk);
  int64_t floats = p.needs(kNeedDq) ? f.total_q * f.num_heads_q * f.head_dim : 0;
  if (floats > 0) chunks = std::min(chunks, kMostFloats / floats);
  chunks = std::max<int64_t>(chunks, 1);
  int64_t keys = std::max<int64_t>(f.seqlen_kv, 1);
  int64_t chunk = ((keys + chunks - 1) / chunks + kChunkStep - 1) / kChunkStep * kChunkStep;
  plan.chunk_keys = static_cast<int32_t>(std::min<int64_t>(chunk, INT32_MAX));
  plan.num_chunks = static_cast<int32_t>((keys + chunk - 1) / chunk);
}

size_t workspace_bytes(const char* function, const Plan& plan, const BackwardParams& p) {
  const AttentionParams& f = p.forward;
  if (plan.kernel == Kernel::cpu_naive) {  // three numbers of each pair
    return checked_bytes(function,
                         {3 * sizeof(float), f.batch, f.num_heads_q, f.seqlen_q, f.seqlen_kv});
  }
  if (plan.kernel == Kernel::naive) {
    // Five planes at most: three of pairs, and two numbers a row.
    checked_bytes(function, {5 * sizeof(float), f.batch, f.num_heads_q, f.seqlen_q,
                             std::max(f.seqlen_kv, 1)});
    return checked_bytes(function, {sizeof(float), planes_of(p).total});
  }
  if (plan.kernel == Kernel::sm80 || plan.kernel == Kernel::simt) {
    checked_bytes(function, {3 * sizeof(float), f.total_q, f.num_heads_q});
    return checked_bytes(function, {sizeof(float), two_pass_layout_of(p).total});
  }
  if (plan.kernel == Kernel::sm90) {  // the same, each sequence from a multiple of rows on; sums
    int64_t floats = sm90_floats_of_head(f, plan.num_chunks > 1 ? plan.head_dim : 0);
    if (plan.in_order) floats += sm90_order_words_of_head(f);
    if (p.needs(kNeedDsinks)) floats += f.batch;
    if (p.needs(kNeedDslopes)) floats += f.total_q;
    size_t bytes = checked_bytes(function, {sizeof(float), floats, f.num_heads_q});
    const int64_t* extents = p.dbias.extents;
    int32_t parts = p.needs(kNeedDbias) ? sm90_bias_parts(p) : 1;
    if (parts == 1) return bytes;
    return bytes + checked_bytes(function, {sizeof(float), parts, extents[0], extents[1],
                                            extents[2], extents[3]});
  }
  checked_bytes(function, {sizeof(float), plan.num_chunks, f.total_q, f.num_heads_q, f.head_dim});
  const int64_t* extents = p.dbias.extents;
  if (p.needs(kNeedDbias)) {
    checked_bytes(function,
                  {sizeof(float), plan.num_chunks, extents[0], extents[1], extents[2], extents[3]});
  }
  return checked_bytes(function, {sizeof(float), layout_of(p, plan.num_chunks).total});
}

// Refuses masks and scores of a user that no kernel on CUDA has.
void require_functor(const char* function, const BackwardParams& p, bool ordered,
                     const DeviceInfo& device) {
  if (!device.is_cuda || p.forward.flex == nullptr) return;
  bool sums_arrays =
      p.flex != nullptr && std::any_of(std::begin(p.flex->arrays), std::end(p.flex->arrays),
                                       [](auto& array) { return array.data; });
  if (ordered && sums_arrays) {
    fail<NotImplemented>(function,
                         ": deterministic and batch_invariant must not be set on CUDA where "
                         "gradients of captured arrays are asked for, which are summed in any "
                         "order; leave both out, or move the arrays to the CPU");
  }
  const Kernel kernel = kernel_of_functors(p.forward);
  const char* why = p.forward.flex->functor == 0
                        ? "masks and scores of the user must be compiled for it first"
                        : refusal(kernel, p, device);
  if (why == nullptr) return;
  fail<NotImplemented>(function,
                       ": no kernel on CUDA has gradients of this mask or score function: ",
                       kernel_name(kernel), ": ", why, "; got ", dtype_name(p.forward.dtype),
                       ", head_dim ", p.forward.head_dim, ", head_dim_v ", p.forward.head_dim_v,
                       "; move the arrays to the CPU, or write the mask as causal, window or one "
                       "interval of keys a row, and the score as bias=");
}

// The fastest rung that serves the call.
const Rung& best_rung(const BackwardParams& p, const DeviceInfo& device) {
  auto serves = [&](const Rung& rung) {
    return rung.automatic && rung.on_cuda == device.is_cuda &&
           refusal(rung.kernel, p, device) == nullptr;
  };
  return *std::find_if(std::begin(kLadder), std::end(kLadder), serves);
}

// The rung that `backend` names; "naive" exists on both sides.
const Rung& named_rung(const char* function, const char* backend, const BackwardParams& p,
                       const DeviceInfo& device) {
  const Rung* found = nullptr;
  for (const Rung& rung : kLadder) {
    if (std::strcmp(backend, kernel_name(rung.kernel)) != 0) continue;
    if (found == nullptr || rung.on_cuda == device.is_cuda) found = &rung;
  }
  CUATTN_REQUIRE(found != nullptr, function,
                 ": backend must be 'auto', 'naive', 'simt', 'sm80', 'sm90' or 'cpu', got '",
                 backend, "'; use 'auto' for the fastest that serves the call");
  const char* why = wrong_side(found->on_cuda, device.is_cuda);
  if (why == nullptr) why = refusal(found->kernel, p, device);
  if (why != nullptr) refuse_backend(function, backend, why, best_rung(p, device).kernel);
  return *found;
}

}  // namespace

Plan select_backward(const char* function, const BackwardParams& p, SumOrder order,
                     const DeviceInfo& device, const char* backend) {
  require_supported(function, device);
  const bool ordered = order == SumOrder::of_problem || order == SumOrder::of_sequence;
  require_functor(function, p, ordered, device);
  const AttentionParams& f = p.forward;
  const Rung& asked =
      is_auto(backend) ? best_rung(p, device) : named_rung(function, backend, p, device);
  const Rung& rung = asked.on_cuda && f.num_heads_q == 0 ? kZeros : asked;
  Plan plan{};
  plan.kernel = rung.kernel;
  plan.reason = rung.merit;
  plan.num_splits = plan.packed_heads = 1;
  plan.head_dim = f.head_dim;
  plan.head_dim_v = f.head_dim_v;
  if (rung.on_cuda && plan.kernel != Kernel::naive) {
    plan.instance = instance_of(plan.kernel, f);
    HeadDims d = instance_at(plan.instance).dims;
    plan.head_dim = d.qk;
    plan.head_dim_v = d.v;
    ScoreKind score = f.flex != nullptr ? ScoreKind::scored : score_of(plan.kernel, f);
    if (f.flex != nullptr)
      plan.reason = plan.kernel == Kernel::simt ? kFloatFunctorMerit : kFunctorMerit;
    plan.tile = plan.kernel == Kernel::sm90   ? sm90_queries_tile(d, sm90_score_form(f))
                : plan.kernel == Kernel::sm80 ? sm80_queries_tile(d, score)
                                              : simt_backward_tile(d.qk, false);
    const bool in_order = takes_order(p, d, order, !is_auto(backend)) && !has_one_block(f, d);
    if (plan.kernel == Kernel::sm90 && takes_fused(p, d, order, in_order, device.num_sms)) {
      plan.in_order = in_order;
      const bool is_plain = sm90_score_form(f) == ScoreForm::plain;
      plan.reason = has_one_block(f, d) ? kOneBlockMerit
                    : plan.in_order     ? kOrderedMerit
                    : is_plain          ? kFusedMerit
                                        : kFusedScoresMerit;
      plan.tile = sm90_fused_tile(d, plan.in_order ? ScoreForm::ordered : sm90_score_form(f));
      plan.chunk_keys = plan.tile.n;
      plan.num_chunks = (f.seqlen_kv + plan.chunk_keys - 1) / plan.chunk_keys;
    }
  }
  if (!rung.on_cuda) cut_keys(plan, p, ordered);
  plan.workspace_bytes = workspace_bytes(function, plan, p);
  return plan;
}

std::string explain_backward(const Plan& plan, const BackwardParams& p, const DeviceInfo& device) {
  std::string text;
  for (const Rung& rung : kLadder) {
    if (rung.on_cuda != device.is_cuda) continue;
    bool chosen = rung.kernel == plan.kernel, cut = rung.kernel == Kernel::cpu;
    text +=
        rung_line(rung.kernel, chosen, chosen ? nullptr : refusal(rung.kernel, p, device),
                  rung.automatic ? "can: " : "by name only: ", chosen ? plan.reason : rung.merit,
                  chosen && cut ? concat("; keys in ", plan.num_chunks, " parts") : std::string());
  }
  return text;
}

}  // namespace cuattn
