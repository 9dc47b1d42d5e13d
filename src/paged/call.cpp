// SPDX-License-Identifier: Apache-2.0
// paged_attention, paged_attention_v1, paged_attention_v2 and paged_plan: validate (arrays and
// options to PagedParams), plan (kernel, splits, workspace), run. Next: attention/plan.cpp (the
// choice), cpu/paged.cpp (the mathematics).
#include "src/paged/call.h"

#include <algorithm>
#include <cmath>

#include "src/cache/checks.h"
#include "src/check/overlap.h"

namespace cuattn {
namespace {

// q [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, head_dim].
void read_queries(PagedCall& call, const TensorView& q, int32_t version, bool check_data) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  p.dtype = attention_dtype(fn, "q", q);
  call.is_decode = q.ndim == 3;
  if (version != 0) require_rank(fn, "q", q, 3, "[num_seqs, num_heads_q, head_dim]");
  CUATTN_REQUIRE(q.ndim == 3 || q.ndim == 4, fn,
                 ": q must have axes [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, "
                 "num_heads_q, head_dim], got ",
                 q.ndim, " with shape ", shape_text(q), "; reshape it");
  int32_t head = q.ndim - 2;
  p.work.num_seqs = checked_extent(fn, "q", "num_seqs", q.shape[0]);
  p.work.q_len = call.is_decode ? 1 : checked_length(fn, "q", "q_len", q.shape[1]);
  p.num_heads_q = checked_extent(fn, "q", "num_heads_q", q.shape[head]);
  p.head_dim = checked_extent(fn, "q", "head_dim", q.shape[head + 1]);
  require_rows(fn, "q", q, false, check_data);
  p.q = q.data;
  p.q_strides = {stride_of(q, 0), call.is_decode ? 0 : stride_of(q, 1), stride_of(q, head)};
}

// Rows are counted in 32 bits. Fills the group.
void check_rows(PagedCall& call) {
  const PagedParams& p = call.params;
  PagedWork& w = call.params.work;
  w.group = w.num_heads_kv == 0 ? 0 : p.num_heads_q / w.num_heads_kv;
  checked_extent(call.function, "q", "q_len * num_heads_q", int64_t{w.q_len} * p.num_heads_q);
}

// The dtype of the caches: q's, or e4m3, which may come as bytes.
void read_kv_dtype(PagedCall& call, TensorView& k, TensorView& v, int32_t kv_dtype) {
  PagedParams& p = call.params;
  const char* fn = call.function;
  if (kv_dtype == CUATTN_KV_DTYPE_E4M3) {
    k = as_e4m3(k);
    v = as_e4m3(v);
  }
  p.kv_dtype = k.is(DType::e4m3) ? DType::e4m3 : p.dtype;
  CUATTN_REQUIRE(kv_dtype == CUATTN_KV_DTYPE_AUTO || p.kv_dtype == DType::e4m3, fn,
                 ": kv_dtype float8_e4m3fn asks for caches of that dtype or of uint8, got ",
                 text(k.dtype), "; leave kv_dtype out");
  CUATTN_REQUIRE(p.kv_dtype != DType::e4m3 || p.dtype != DType::f32, fn,
                 ": q must be float16 or bfloat16 over float8_e4m3fn caches, got float32; cast it");
}

void place_caches(PagedCall& call, TensorView k, TensorView v, const cuattn_paged_options& o,
                  bool check_data) {
  const char *fn = call.function, *k_name = call.k_name, *v_name = call.v_name;
  PagedParams& p = call.params;
  p.kv_layout = kv_layout_of(fn, o.kv_layout);
  read_kv_dtype(call, k, v, o.kv_dtype);
  require_head_dim(fn, "q", "head_dim", p.head_dim, p.kv_dtype);
  require_dtype(fn, k_name, k, p.kv_dtype, "q");
  CacheShapes caches = read_caches(fn, {k_name, v_name}, k, v, p.kv_layout, p.kv_dtype, call.device,
                                   "q", false, check_data);
  p.pages.num_blocks = checked_extent(fn, k_name, "num_blocks", caches.k.num_blocks);
  p.pages.block_size = static_cast<int32_t>(caches.k.block_size);
  p.work.num_heads_kv = checked_extent(fn, k_name, "num_heads_kv", caches.k.num_heads);
  require_heads(fn, p.num_heads_q, p.work.num_heads_kv);
  check_rows(call);
  require_extent(fn, k_name, "head_dim", caches.k.head_dim, p.head_dim, "q");
  require_extent(fn, v_name, "head_dim", caches.v.head_dim, p.head_dim, "q");
  p.k_cache = k.data;
  p.v_cache = v.data;
  p.k_strides = caches.k.strides;
  p.v_strides = caches.v.strides;
}

// block_tables [num_seqs, max_blocks_per_seq] and context_lens [num_seqs]; `like` is the argument
// that has said where, and how many sequences there are.
void read_tables(PagedCall& call, const TensorView& tables, const TensorView& lens,
                 int64_t max_context_len, const char* like, bool check_data) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  PagedWork& w = p.work;
  BlockTables blocks = read_block_tables(fn, tables, call.device, like, check_data);
  require_rank(fn, "context_lens", lens, 1, "[num_seqs]");
  require_dtype(fn, "context_lens", lens, DType::i32);
  require_device(fn, "context_lens", lens, call.device, like);
  require_extent(fn, "block_tables", "num_seqs", blocks.num_seqs, w.num_seqs, like);
  require_extent(fn, "context_lens", "num_seqs", lens.shape[0], w.num_seqs, like);
  require_contiguous(fn, "context_lens", lens, check_data);
  int64_t capacity = int64_t{blocks.max_blocks} * p.pages.block_size;
  if (max_context_len >= 0) capacity = std::min(capacity, max_context_len);
  w.capacity = checked_length(fn, "block_tables", "max_blocks_per_seq * block_size", capacity);
  w.context_lens = static_cast<const int32_t*>(lens.data);
  p.pages.block_tables = blocks.data;
  p.pages.block_tables_stride = blocks.stride;
}

void read_mask(PagedCall& call, const cuattn_paged_options& o) {
  PagedWork& w = call.params.work;
  require_window(call.function, o.window_left, o.window_right);
  w.mask = {window_side(o.window_left, w.capacity),
            window_side(o.causal ? 0 : o.window_right, w.q_len)};
}

float read_kv_scale(const PagedCall& call, const char* name, double number,
                    const DLTensor* tensor) {
  CUATTN_REQUIRE(call.params.kv_dtype == DType::e4m3 || (tensor == nullptr && number == 1.0),
                 call.function, ": ", name, " belongs to float8_e4m3fn caches, these are ",
                 dtype_name(call.params.kv_dtype), "; leave it out");
  float scale = static_cast<float>(number);
  CUATTN_REQUIRE(std::isfinite(scale), call.function, ": ", name,
                 " must be finite in float32, got ", number, "; value = stored * scale");
  return scale;
}

void read_scores(PagedCall& call, const cuattn_paged_options& o, bool check_data) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  p.scores.scale = read_scale(fn, o.has_scale, o.scale, p.head_dim);
  p.scores.softcap = read_softcap(fn, o.softcap);
  p.scores.inv_softcap = inverse_softcap(p.scores.softcap, p.scores.scale);
  bool scored =
      p.scores.softcap > 0.0f || o.alibi_slopes != nullptr || !is_plain_scale(p.scores.scale);
  p.scores.kind = scored ? ScoreKind::scored : ScoreKind::identity;
  auto heads = [&](const char* name, const DLTensor* tensor, const char* axis, int64_t extent,
                   const char* batch_axis) {
    return read_heads(fn, name, tensor, axis, extent, batch_axis, p.work.num_seqs, call.device,
                      check_data);
  };
  HeadVector slopes =
      heads("alibi_slopes", o.alibi_slopes, "num_heads_q", p.num_heads_q, "num_seqs");
  p.scores.alibi_slopes = slopes.data;
  p.scores.alibi_stride_batch = slopes.stride_batch;
  p.scores.alibi_stride_head = slopes.stride_head;
  HeadVector sinks = heads("sinks", o.sinks, "num_heads_q", p.num_heads_q, nullptr);
  p.scores.sinks = sinks.data;
  p.scores.sinks_stride = sinks.stride_head;
  p.k_scale = read_kv_scale(call, "k_scale", o.k_scale, o.k_scales);
  p.v_scale = read_kv_scale(call, "v_scale", o.v_scale, o.v_scales);
  HeadVector k = heads("k_scale", o.k_scales, "num_heads_kv", p.work.num_heads_kv, "num_seqs");
  HeadVector v = heads("v_scale", o.v_scales, "num_heads_kv", p.work.num_heads_kv, "num_seqs");
  p.k_scales = k.data;
  p.k_scales_stride_batch = k.stride_batch;
  p.k_scales_stride_head = k.stride_head;
  p.v_scales = v.data;
  p.v_scales_stride_batch = v.stride_batch;
  p.v_scales_stride_head = v.stride_head;
}

void read_splits(PagedCall& call, const cuattn_paged_options& o) {
  const char* fn = call.function;
  CUATTN_REQUIRE(o.num_splits >= 0, fn, ": num_splits must be >= 0, got ", o.num_splits,
                 "; pass 0 to let cuattn choose");
  CUATTN_REQUIRE(o.plan == nullptr || (o.num_splits == 0 && !o.batch_invariant), fn,
                 ": plan says how keys are cut, so num_splits must be 0 and batch_invariant False, "
                 "got ",
                 o.num_splits, " and ", o.batch_invariant ? "True" : "False", "; leave one out");
  CUATTN_REQUIRE(o.num_splits == 0 || !o.batch_invariant, fn,
                 ": batch_invariant fixes the length of a split, so num_splits must be 0, got ",
                 o.num_splits, "; leave one out");
  if (o.version != 2) return;
  CUATTN_REQUIRE(o.partition_size == 256 || o.partition_size == 512 || o.partition_size == 1024, fn,
                 ": partition_size must be 256, 512 or 1024, got ", o.partition_size,
                 "; vLLM's is 512");
}

PagedRequest request_of(const PagedCall& call, const cuattn_paged_options& o) {
  const PagedParams& p = call.params;
  PagedRequest r{};
  r.dtype = p.dtype;
  r.kv_dtype = p.kv_dtype;
  r.kv_layout = p.kv_layout;
  r.num_seqs = p.work.num_seqs;
  r.q_len = p.work.q_len;
  r.num_heads_q = p.num_heads_q;
  r.num_heads_kv = p.work.num_heads_kv;
  r.head_dim = p.head_dim;
  r.block_size = p.pages.block_size;
  r.capacity = p.work.capacity;
  r.windowed = p.work.mask.kind() == MaskKind::window;
  r.score = p.scores.kind;
  r.has_plan = o.plan != nullptr;
  r.num_splits = o.num_splits;
  r.partition_size = o.version == 2 ? static_cast<int32_t>(o.partition_size) : 0;
  r.one_pass = o.version == 1;
  r.batch_invariant = o.batch_invariant != 0;
  return r;
}

const char* function_of(int32_t version) {
  return version == 1   ? "paged_attention_v1"
         : version == 2 ? "paged_attention_v2"
                        : "paged_attention";
}

void require_contiguous(const PagedCall& call, const char* name, const TensorView& view,
                        DType dtype, std::initializer_list<int64_t> shape, bool output) {
  const char* fn = call.function;
  require_output(fn, name, view, dtype, TensorView(nullptr, dtype, shape), call.device);
  CUATTN_REQUIRE(view.size() == 0 || is_dense_from(view, 0), fn, ": ", name,
                 " must be contiguous, got strides ", strides_text(view),
                 "; make a contiguous copy");
  require_strided(fn, name, view, output, true);
}

void read_plan(PagedCall& call, const DLTensor* tensor) {
  if (tensor == nullptr) return;
  PagedWork& w = call.params.work;
  TensorView view = view_of(call.function, "plan", tensor);
  require_dtype(call.function, "plan", view, DType::i32);
  CUATTN_REQUIRE(view.ndim == 1 && view.shape[0] == PagedPlan::size(w), call.function,
                 ": plan must have ", PagedPlan::size(w), " entries for backend '",
                 kernel_name(call.plan.kernel), "', got shape ", shape_text(view),
                 "; make it with paged_plan for the shapes, kv_layout and backend of this call");
  require_contiguous(call, "plan", view, DType::i32, {PagedPlan::size(w)}, false);
  w.plan = static_cast<const int32_t*>(view.data);
}

void read_partitions(PagedCall& call, const cuattn_paged_options& o) {
  PagedParams& p = call.params;
  int64_t seqs = p.work.num_seqs, heads = p.num_heads_q, partitions = p.work.num_splits;
  auto read = [&](const char* name, const DLTensor* tensor, DType dtype,
                  std::initializer_list<int64_t> shape) -> void* {
    if (tensor == nullptr) return nullptr;
    TensorView view = view_of(call.function, name, tensor);
    require_contiguous(call, name, view, dtype, shape, true);
    return view.data;
  };
  std::initializer_list<int64_t> per_partition = {seqs, heads, partitions};
  p.exp_sums = static_cast<float*>(read("exp_sums", o.exp_sums, DType::f32, per_partition));
  p.max_logits = static_cast<float*>(read("max_logits", o.max_logits, DType::f32, per_partition));
  p.tmp_out = read("tmp_out", o.tmp_out, p.dtype, {seqs, heads, partitions, p.head_dim});
}

// Takes 256-byte aligned pieces of the workspace; with a base of nullptr only their sizes count.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t count, int64_t itemsize) {
    void* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += (static_cast<size_t>(count) * static_cast<size_t>(itemsize) + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

// What a call keeps in its workspace: its own plan, partial results, V2 buffers not given.
size_t place_workspace(PagedCall& call, void* base) {
  PagedParams& p = call.params;
  PagedWork& w = p.work;
  Pieces pieces(base);
  if (w.num_splits == 0 && !call.request.has_plan) {
    p.own_plan = static_cast<int32_t*>(pieces.take(PagedPlan::size(w), sizeof(int32_t)));
    w.plan = p.own_plan;
  }
  if (call.request.partition_size > 0) {
    int64_t partials = int64_t{w.num_seqs} * p.num_heads_q * w.num_splits;
    auto provide = [&](auto*& buffer, int64_t bytes) {
      using Pointer = std::remove_reference_t<decltype(buffer)>;
      if (buffer == nullptr) buffer = static_cast<Pointer>(pieces.take(partials, bytes));
    };
    provide(p.exp_sums, sizeof(float));
    provide(p.max_logits, sizeof(float));
    provide(p.tmp_out, int64_t{p.head_dim} * itemsize(p.dtype));
  } else {
    int64_t rows = num_paged_slots(w) * w.rows;
    p.partial_out = static_cast<float*>(pieces.take(rows * p.head_dim, sizeof(float)));
    p.partial_lse = static_cast<float*>(pieces.take(rows, sizeof(float)));
  }
  return pieces.used();
}

// How the plan cuts the rows and keys of the call.
void cut_work(PagedCall& call) {
  PagedWork& w = call.params.work;
  int32_t rows = w.q_len * w.group;
  w.rows = std::max(std::min(rows, call.plan.tile.m), 1);
  w.row_groups = rows == 0 ? 0 : (rows - 1) / w.rows + 1;
  w.tile = call.plan.tile.n;
  w.cluster = call.plan.cluster;
  w.in_parts = call.plan.in_parts;
  w.num_splits = call.plan.num_splits;
  w.split_keys = call.plan.split_keys;
  w.num_workers = call.plan.num_workers;
  w.lanes = call.plan.lanes;
  call.params.stages = call.plan.tile.stages;
}

// Splits of all units, and what a plan holds, are counted in 32 bits.
void check_work(const PagedCall& call) {
  const PagedWork& w = call.params.work;
  double seqs = w.num_seqs, units = seqs * head_groups(w);
  if (w.num_splits > 0) {
    CUATTN_REQUIRE(units * w.num_splits <= INT32_MAX, call.function, ": q must make at most ",
                   INT32_MAX, " splits of its sequences and heads, got ", units * w.num_splits,
                   "; split the call");
    return;
  }
  double tiles = (w.capacity - 1.0) / w.tile + 1.0;
  double most = std::max(seqs * tiles, units * tiles / std::max(w.num_workers, 1));
  CUATTN_REQUIRE(most <= INT32_MAX, call.function, ": block_tables must name at most ", INT32_MAX,
                 " tiles of ", w.tile, " keys in all, got ", most,
                 "; narrow it to the longest context, or split the call");
}

Footprint cache_footprint(const char* name, const PagedParams& p, const void* cache,
                          const CacheStrides& strides) {
  bool is_vllm = p.kv_layout == KvLayout::vllm;  // there a head's tokens and dims are one run
  int64_t run = int64_t{p.head_dim} * (is_vllm ? p.pages.block_size : 1);
  return {name,
          cache,
          itemsize(p.kv_dtype),
          {{p.pages.num_blocks, strides.block},
           {p.work.num_heads_kv, strides.head},
           {is_vllm ? 1 : p.pages.block_size, strides.token},
           {run, 1}}};
}

// What is written lies apart from all else; `writes_lens`: each step adds to context_lens.
void check_memory(const PagedCall& call, const TensorView& out, const TensorView* lse,
                  const void* workspace, bool writes_lens) {
  const PagedParams& p = call.params;
  const PagedWork& w = p.work;
  CallMemory memory(call.function);
  memory.writes({"out", out});
  if (lse != nullptr) memory.writes({"lse_out", *lse});
  int64_t bytes = static_cast<int64_t>(call.plan.workspace_bytes);
  memory.writes({"workspace", workspace, 1, {{bytes, 1}}});
  // Those given; the others lie in the workspace, which is not placed yet.
  int64_t partials = int64_t{w.num_seqs} * p.num_heads_q * w.num_splits;
  memory.writes({"exp_sums", p.exp_sums, 4, {{partials, 1}}});
  memory.writes({"max_logits", p.max_logits, 4, {{partials, 1}}});
  memory.writes({"tmp_out", p.tmp_out, itemsize(p.dtype), {{partials * p.head_dim, 1}}});
  Footprint lens{"context_lens", w.context_lens, 4, {{w.num_seqs, 1}}};
  writes_lens ? memory.writes(lens) : memory.reads(lens);

  memory.reads({"q",
                p.q,
                itemsize(p.dtype),
                {{w.num_seqs, p.q_strides.batch},
                 {w.q_len, p.q_strides.seq},
                 {p.num_heads_q, p.q_strides.head},
                 {p.head_dim, 1}}});
  memory.reads(cache_footprint(call.k_name, p, p.k_cache, p.k_strides));
  memory.reads(cache_footprint(call.v_name, p, p.v_cache, p.v_strides));
  int64_t columns = (int64_t{w.capacity} + p.pages.block_size - 1) / p.pages.block_size;
  memory.reads({"block_tables",
                p.pages.block_tables,
                4,
                {{w.num_seqs, p.pages.block_tables_stride}, {columns, 1}}});
  memory.reads(
      {"alibi_slopes",
       p.scores.alibi_slopes,
       4,
       {{w.num_seqs, p.scores.alibi_stride_batch}, {p.num_heads_q, p.scores.alibi_stride_head}}});
  memory.reads({"sinks", p.scores.sinks, 4, {{p.num_heads_q, p.scores.sinks_stride}}});
  auto read_scales = [&](const char* name, const float* data, int64_t batch, int64_t head) {
    memory.reads({name, data, 4, {{w.num_seqs, batch}, {w.num_heads_kv, head}}});
  };
  read_scales("k_scale", p.k_scales, p.k_scales_stride_batch, p.k_scales_stride_head);
  read_scales("v_scale", p.v_scales, p.v_scales_stride_batch, p.v_scales_stride_head);
  if (call.request.has_plan) memory.reads({"plan", w.plan, 4, {{PagedPlan::size(w), 1}}});
}

}  // namespace

PagedCall validate_paged(const PagedArrays& arrays, const cuattn_paged_options& o,
                         bool check_data) {
  PagedCall call{};
  call.function = function_of(o.version);
  call.k_name = o.version == 0 ? "k_cache" : "key_cache";
  call.v_name = o.version == 0 ? "v_cache" : "value_cache";
  call.device = arrays.q.device;
  require_known_device(call.function, "q", call.device);
  read_queries(call, arrays.q, o.version, check_data);
  place_caches(call, arrays.k_cache, arrays.v_cache, o, check_data);
  read_tables(call, arrays.block_tables, arrays.context_lens,
              o.version == 2 ? o.max_context_len : -1, "q", check_data);
  CUATTN_REQUIRE(call.params.pages.num_blocks > 0 || call.params.work.capacity == 0, call.function,
                 ": ", call.k_name, " must hold at least one block, got 0; allocate one");
  read_mask(call, o);
  read_scores(call, o, check_data);
  read_splits(call, o);
  call.request = request_of(call, o);
  return call;
}

PagedCall validate_paged_plan(const TensorView& block_tables, const TensorView& context_lens,
                              const cuattn_paged_shape& shape, const cuattn_paged_options& o) {
  PagedCall call{};
  call.function = "paged_plan";
  call.k_name = "the cache";
  const char* fn = call.function;
  call.device = context_lens.device;
  require_known_device(fn, "context_lens", call.device);
  PagedParams& p = call.params;
  require_rank(fn, "context_lens", context_lens, 1, "[num_seqs]");
  TensorView dtype;
  dtype.dtype = shape.dtype;
  p.dtype = attention_dtype(fn, "dtype", dtype);
  p.kv_dtype = o.kv_dtype == CUATTN_KV_DTYPE_E4M3 ? DType::e4m3 : p.dtype;
  p.kv_layout = kv_layout_of(fn, o.kv_layout);
  require_head_dim(fn, "the call", "head_dim", shape.head_dim, p.kv_dtype);
  require_block_size(fn, call.k_name, shape.block_size, p.kv_layout);
  CUATTN_REQUIRE(shape.num_heads_q >= 0 && shape.num_heads_kv >= 0 && shape.q_len >= 0, fn,
                 ": num_heads_q, num_heads_kv and q_len must be >= 0, got ", shape.num_heads_q,
                 ", ", shape.num_heads_kv, " and ", shape.q_len, "; pass those of the call");
  require_heads(fn, shape.num_heads_q, shape.num_heads_kv);
  p.work.num_seqs = checked_extent(fn, "context_lens", "num_seqs", context_lens.shape[0]);
  p.work.q_len = checked_length(fn, "the call", "q_len", shape.q_len);
  p.num_heads_q = checked_extent(fn, "the call", "num_heads_q", shape.num_heads_q);
  p.work.num_heads_kv = checked_extent(fn, "the call", "num_heads_kv", shape.num_heads_kv);
  check_rows(call);
  p.head_dim = static_cast<int32_t>(shape.head_dim);
  p.pages.block_size = static_cast<int32_t>(shape.block_size);
  read_tables(call, block_tables, context_lens, -1, "context_lens", true);
  read_mask(call, o);
  p.scores.scale = 1.0f;
  call.request = request_of(call, o);
  call.request.has_plan = true;
  return call;
}

void plan_paged(PagedCall& call, const cuattn_paged_options& o, const DeviceInfo& device) {
  call.plan = select_paged(call.function, call.request, device, o.backend);
  cut_work(call);
  check_work(call);
  read_plan(call, o.plan);
  if (o.version == 2) read_partitions(call, o);
  call.plan.workspace_bytes = place_workspace(call, nullptr);
}

Plan plan_step(PagedCall call, int32_t num_splits, const DeviceInfo& device) {
  cuattn_paged_options options;
  cuattn_paged_options_init(&options);
  options.num_splits = num_splits;
  call.request = request_of(call, options);
  plan_paged(call, options, device);
  return call.plan;
}

std::string ladder_of_step(const PagedCall& call, const DeviceInfo& device, const Plan& plan) {
  cuattn_paged_options options;
  cuattn_paged_options_init(&options);
  return explain_paged(request_of(call, options), device, plan.kernel);
}

void run_step(PagedCall call, const Plan& plan, void* workspace, Stream stream) {
  call.plan = plan;
  cut_work(call);
  place_workspace(call, workspace);
  backend_of(call.function, call.device)
      .paged(call.params, call.plan, call.device.device_id, stream);
}

bool bind_paged(PagedCall& call, const TensorView& out, const TensorView* lse, void* workspace,
                size_t workspace_bytes, Stream stream, bool writes_lens) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  PagedWork& w = p.work;
  TensorView want;
  want.ndim = call.is_decode ? 3 : 4;
  int32_t head = want.ndim - 2;
  want.shape[0] = w.num_seqs;
  if (!call.is_decode) want.shape[1] = w.q_len;
  want.shape[head] = p.num_heads_q;
  want.shape[head + 1] = p.head_dim;
  require_output(fn, "out", out, p.dtype, want, call.device);
  require_rows(fn, "out", out, true, true);
  p.out = out.data;
  p.out_strides = {stride_of(out, 0), call.is_decode ? 0 : stride_of(out, 1), stride_of(out, head)};
  p.lse = nullptr;
  if (lse != nullptr) {
    want.ndim -= 1;
    want.shape[1] = p.num_heads_q;
    want.shape[2] = w.q_len;
    require_output(fn, "lse_out", *lse, DType::f32, want, call.device);
    require_strided(fn, "lse_out", *lse, true, true);
    p.lse = static_cast<float*>(lse->data);
    p.lse_strides = {stride_of(*lse, 0), call.is_decode ? 0 : stride_of(*lse, 2),
                     stride_of(*lse, 1)};
  }
  check_memory(call, out, lse, workspace, writes_lens);
  if (!is_cuda(call.device) || checks_device_data())
    backend_of(fn, call.device).check_paged(fn, p, call.device.device_id, stream);
  if (out.size() == 0) return false;
  require_workspace(fn, call.plan, call.device, workspace, workspace_bytes);
  place_workspace(call, workspace);
  return true;
}

void run_paged(PagedCall call, const TensorView& out, const TensorView* lse, void* workspace,
               size_t workspace_bytes, Stream stream) {
  if (!bind_paged(call, out, lse, workspace, workspace_bytes, stream)) return;
  const Backend& backend = backend_of(call.function, call.device);
  backend.paged(call.params, call.plan, call.device.device_id, stream);
}

void run_paged_plan(PagedCall& call, const TensorView& plan, Stream stream) {
  PagedWork& w = call.params.work;
  require_contiguous(call, "out", plan, DType::i32, {PagedPlan::size(w)}, true);
  CallMemory memory(call.function);
  memory.writes({"out", plan});
  memory.reads({"context_lens", w.context_lens, 4, {{w.num_seqs, 1}}});
  const Backend& backend = backend_of(call.function, call.device);
  int32_t device = call.device.device_id;
  if (!is_cuda(call.device) || checks_device_data())
    backend.check_context_lens(call.function, w, device, stream);
  backend.paged_plan(w, static_cast<int32_t*>(plan.data), device, stream);
}

}  // namespace cuattn
