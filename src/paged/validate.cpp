// SPDX-License-Identifier: Apache-2.0
// paged_attention, paged_attention_v1, paged_attention_v2 and paged_plan: arrays and options to
// PagedParams. Next: work.cpp (kernel, splits, workspace), check/ (the rules).
#include <algorithm>
#include <cmath>

#include "src/cache/checks.h"
#include "src/check/float8.h"
#include "src/check/options.h"
#include "src/paged/call.h"
#include "src/paged/work.h"

namespace cuattn {
namespace {

// The dtype that kernels see of q: its own, or that of the numbers that its codes become.
DType read_query_dtype(PagedCall& call, const char* argument, const TensorView& q,
                       int32_t version) {
  call.has_codes = q.is(DType::e4m3);
  if (!call.has_codes) return attention_dtype(call.function, argument, q);
  if (version != 0) {
    fail<NotImplemented>(call.function,
                         ": q is float8_e4m3fn, which V1 and V2 have no kernel for; use "
                         "paged_attention, or cast q to bfloat16");
  }
  return DType::bf16;  // float16 under such an out
}

// q [num_seqs, num_heads_q, head_dim] or [num_seqs, q_len, num_heads_q, head_dim].
void read_queries(PagedCall& call, const TensorView& q, int32_t version, bool check_data) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  p.dtype = read_query_dtype(call, "q", q, version);
  call.is_decode = q.ndim == 3;
  call.q_shape[0] = q.shape[0];
  call.q_shape[1] = call.is_decode ? 1 : q.shape[1];
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

}  // namespace

void check_rows(PagedCall& call) {
  const PagedParams& p = call.params;
  PagedWork& w = call.params.work;
  w.group = w.num_heads_kv == 0 ? 0 : p.num_heads_q / w.num_heads_kv;
  checked_extent(call.function, "q", "q_len * num_heads_q", int64_t{w.q_len} * p.num_heads_q);
}

namespace {

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
  CUATTN_REQUIRE(p.kv_dtype == DType::e4m3 || !call.has_codes, fn, ": ", call.k_name,
                 " must be float8_e4m3fn like q, got ", text(k.dtype),
                 "; give q in the dtype of the caches");
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

}  // namespace

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

void fill_mask(PagedCall& call, const cuattn_paged_options& o) {
  PagedWork& w = call.params.work;
  w.mask = read_mask(call.function, o.causal, o.window_left, o.window_right, w.q_len, w.capacity);
}

namespace {

float read_kv_scale(const PagedCall& call, const char* name, double number,
                    const DLTensor* tensor) {
  CUATTN_REQUIRE(call.params.kv_dtype == DType::e4m3 || (tensor == nullptr && number == 1.0),
                 call.function, ": ", name, " belongs to float8_e4m3fn caches, these are ",
                 dtype_name(call.params.kv_dtype), "; leave it out");
  require_one_scale(call.function, name, number != 1.0, number, tensor);
  float scale = static_cast<float>(number);
  CUATTN_REQUIRE(std::isfinite(scale) && scale >= 0.0f, call.function, ": ", name,
                 " must be finite in float32 and not negative, got ", number,
                 "; value = stored * scale");
  return scale;
}

void fill_scores(PagedCall& call, const cuattn_paged_options& o, bool check_data) {
  const char* fn = call.function;
  PagedParams& p = call.params;
  int32_t seqs = p.work.num_seqs;
  p.scores = read_scores(fn, o, false, {seqs, p.num_heads_q, p.head_dim, "num_seqs"}, call.device,
                         check_data);
  CUATTN_REQUIRE(call.has_codes || (o.q_scales == nullptr && o.q_scale == 1.0), fn,
                 ": q_scale belongs to float8_e4m3fn queries, these are ", dtype_name(p.dtype),
                 "; leave it out, or make such queries with cuattn.quantize");
  call.q_scale = read_float8_scale(
      fn, {"q_scale", seqs, p.work.num_heads_kv, 0, 0, nullptr, std::max(p.work.group, 1)},
      o.q_scale, o.q_scales, call.device, check_data);
  p.k_scale = read_kv_scale(call, "k_scale", o.k_scale, o.k_scales);
  p.v_scale = read_kv_scale(call, "v_scale", o.v_scale, o.v_scales);
  auto heads = [&](const char* name, const DLTensor* tensor) {
    return read_heads(fn, name, tensor, "num_heads_kv", p.work.num_heads_kv, "num_seqs", seqs,
                      call.device, check_data, true);
  };
  HeadVector k = heads("k_scale", o.k_scales), v = heads("v_scale", o.v_scales);
  p.k_scales = k.data;
  p.k_scales_stride_batch = k.stride_batch;
  p.k_scales_stride_head = k.stride_head;
  p.v_scales = v.data;
  p.v_scales_stride_batch = v.stride_batch;
  p.v_scales_stride_head = v.stride_head;
}

}  // namespace

void read_splits(const PagedCall& call, const cuattn_paged_options& o) {
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

namespace {

const char* function_of(int32_t version) {
  return version == 1   ? "paged_attention_v1"
         : version == 2 ? "paged_attention_v2"
                        : "paged_attention";
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
  bool may_be_bytes = o.version == 0 && o.kv_dtype == CUATTN_KV_DTYPE_E4M3;
  read_queries(call, may_be_bytes ? as_e4m3(arrays.q) : arrays.q, o.version, check_data);
  place_caches(call, arrays.k_cache, arrays.v_cache, o, check_data);
  read_tables(call, arrays.block_tables, arrays.context_lens,
              o.version == 2 ? o.max_context_len : -1, "q", check_data);
  CUATTN_REQUIRE(call.params.pages.num_blocks > 0 || call.params.work.capacity == 0, call.function,
                 ": ", call.k_name, " must hold at least one block, got 0; allocate one");
  fill_mask(call, o);
  fill_scores(call, o, check_data);
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
  p.dtype = read_query_dtype(call, "dtype", dtype, 0);  // codes go over caches of codes
  bool has_codes = call.has_codes || o.kv_dtype == CUATTN_KV_DTYPE_E4M3;
  p.kv_dtype = has_codes ? DType::e4m3 : p.dtype;
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
  fill_mask(call, o);
  p.scores.scale = 1.0f;
  call.request = request_of(call, o);
  call.request.has_deal = true;
  return call;
}

}  // namespace cuattn
