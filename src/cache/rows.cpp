// SPDX-License-Identifier: Apache-2.0
// reshape_and_cache and gather_cache: from borrowed arrays to the structs of params/cache.h, and
// the checks of slots and tables. Next: cpu/cache.cpp; blocks.cpp for whole blocks.
#include <algorithm>
#include <cmath>
#include <utility>

#include "cuattn/c_api.h"
#include "src/cache/cache.h"
#include "src/check/float8.h"
#include "src/guarded.h"
#include "src/options.h"

namespace cuattn {
namespace {

void read_rows(const char* fn, const char* name, const TensorView& view, DType dtype,
               DLDevice device, const char* like, CacheSide& side) {
  require_rank(fn, name, view, 3, "[num_tokens, num_heads_kv, head_dim]");
  require_dtype(fn, name, view, dtype, like);
  require_device(fn, name, view, device, like);
  side.rows = view.data;
  side.row_token = stride_of(view, 0);
  side.row_head = stride_of(view, 1);
}

void check_head_dim(const char* fn, const char* name, int64_t head_dim, DType cache_dtype,
                    Starts starts) {
  if (starts == Starts::on_elements) {
    CUATTN_REQUIRE(head_dim >= 1 && head_dim <= kMaxCacheHeadDim, fn, ": ", name,
                   " must have head_dim from 1 to ", kMaxCacheHeadDim, ", got ", head_dim,
                   "; cut it into several caches");
    return;
  }
  int64_t step = cache_dtype == DType::e4m3 ? 16 : 8;
  CUATTN_REQUIRE(head_dim >= step && head_dim <= kMaxCacheHeadDim && head_dim % step == 0, fn, ": ",
                 name, " must have head_dim a multiple of ", step, " up to ", kMaxCacheHeadDim,
                 cache_dtype == DType::e4m3 ? " (float8_e4m3fn)" : "", ", got ", head_dim,
                 "; pad it with zeros");
}

// One side of a validated cache.
void place_cache(const TensorView& view, const CacheShape& shape, KvLayout layout,
                 CacheSide& side) {
  side.cache = view.data;
  side.head_dim = static_cast<int32_t>(shape.head_dim);
  side.strides = shape.strides;
  side.run = side.head_dim;
  if (layout != KvLayout::vllm) return;
  side.run = static_cast<int32_t>(shape.strides.token);
  side.run_stride = shape.block_size * side.run;
}

// The caches into p, which is CacheWriteParams or CacheGatherParams; returns what K says of blocks.
template <class Params>
CacheShape place_caches(const char* fn, CacheNames names, const TensorView& k_cache,
                        const TensorView& v_cache, DType dtype, DLDevice device, const char* like,
                        bool output, bool check_data, Starts starts, Params& p) {
  CacheShapes caches = read_caches(fn, names, k_cache, v_cache, p.kv_layout, dtype, device, like,
                                   output, check_data, starts);
  check_head_dim(fn, names.k, caches.k.head_dim, dtype, starts);
  check_head_dim(fn, names.v, caches.v.head_dim, dtype, starts);
  p.num_heads = checked_extent(fn, names.k, "num_heads_kv", caches.k.num_heads);
  place_cache(k_cache, caches.k, p.kv_layout, p.k);
  place_cache(v_cache, caches.v, p.kv_layout, p.v);
  return caches.k;
}

}  // namespace

CacheGatherParams read_pages(const char* fn, CacheNames names, const TensorView& k_cache,
                             const TensorView& v_cache, const TensorView& block_tables,
                             KvLayout layout, DType dtype, DLDevice device, const char* like,
                             bool check_data, Starts starts) {
  CacheGatherParams p{};
  p.kv_layout = layout;
  p.dtype = dtype;
  CacheShape blocks =
      place_caches(fn, names, k_cache, v_cache, dtype, device, like, false, check_data, starts, p);
  BlockTables tables = read_block_tables(fn, block_tables, device, like, check_data);
  p.pages = {checked_extent(fn, names.k, "num_blocks", blocks.num_blocks),
             static_cast<int32_t>(blocks.block_size), tables.data, tables.stride};
  p.num_seqs = tables.num_seqs;
  p.max_blocks = tables.max_blocks;
  return p;
}

namespace {

DType cache_dtype_of(const char* fn, const TensorView& view) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16, DType::e4m3}) {
    if (view.is(dtype)) return dtype;
  }
  fail<InvalidArgument>(fn,
                        ": k_cache must be float32, float16, bfloat16 or float8_e4m3fn (or uint8, "
                        "as its bytes), got ",
                        text(view.dtype), "; view it as one of these");
}

// ---- reshape_and_cache

constexpr const char* kWrite = "reshape_and_cache";

// What is written is value * (1 / scale).
void require_scale(const char* name, float scale, double number) {
  CUATTN_REQUIRE(scale > 0.0f && std::isfinite(scale) && std::isfinite(1.0f / scale), kWrite, ": ",
                 name, " must be positive and finite in float32, as 1 / ", name, ", got ", number,
                 "; value = stored * scale");
}

void read_scale(const char* name, bool has_number, double number, const DLTensor* array,
                const CacheWriteParams& p, DLDevice device, bool check_data, CacheSide& side) {
  side.scale = 1.0f;
  if (!has_number && array == nullptr) return;
  CUATTN_REQUIRE(p.cache_dtype == DType::e4m3, kWrite, ": ", name,
                 " belongs to a float8_e4m3fn cache, got one of ", dtype_name(p.cache_dtype),
                 "; leave it out");
  require_one_scale(kWrite, name, has_number, number, array);
  if (array == nullptr) {
    side.scale = static_cast<float>(number);
    require_scale(name, side.scale, number);
    return;
  }
  TensorView view = view_of(kWrite, name, array);
  require_dtype(kWrite, name, view, DType::f32);
  require_device(kWrite, name, view, device, "k");
  bool one = view.size() == 1 && view.ndim <= 1;
  CUATTN_REQUIRE(one || (view.ndim == 1 && view.shape[0] == p.num_heads), kWrite, ": ", name,
                 " must have shape (num_heads_kv,) = (", p.num_heads, ",) or one element, got ",
                 shape_text(view), "; give one scale for each head");
  require_strided(kWrite, name, view, false, check_data);
  side.scales = static_cast<const float*>(view.data);
  side.scales_stride = one ? 0 : view.strides[0];
}

}  // namespace

void read_rope(const char* fn, const cuattn_cache_options& o, DLDevice device, const char* like,
               bool check_data, CacheWriteParams& p) {
  int given = (o.cos != nullptr) + (o.sin != nullptr) + (o.positions != nullptr);
  bool has_places = p.newest.q_len > 0 && o.positions == nullptr;
  CUATTN_REQUIRE(!has_places || given != 1, fn, ": cos and sin must be given together, got one of ",
                 "them; pass both to rotate k by the places of its tokens, or none");
  CUATTN_REQUIRE(given == 0 || given == (has_places ? 2 : 3), fn,
                 ": cos, sin and positions must be given together, got ", given,
                 " of them; pass all three to rotate k, or none");
  CUATTN_REQUIRE(given != 0 || !o.rope_interleaved, fn,
                 ": rope_interleaved must be False without cos and sin, got True; pass them too");
  if (given == 0) return;
  const std::pair<const char*, TensorView> tables[] = {{"cos", view_of(fn, "cos", o.cos)},
                                                       {"sin", view_of(fn, "sin", o.sin)}};
  for (const auto& [name, view] : tables) {
    require_rank(fn, name, view, 2, "[max_position, rotary_dim / 2]");
    require_dtype(fn, name, view, DType::f32);
    require_device(fn, name, view, device, like);
    require_strided(fn, name, view, false, check_data);
    require_last_axis(fn, name, view);
  }
  const TensorView &cos = tables[0].second, &sin = tables[1].second;
  require_extent(fn, "sin", "max_position", sin.shape[0], cos.shape[0], "cos");
  require_extent(fn, "sin", "rotary_dim / 2", sin.shape[1], cos.shape[1], "cos");
  CUATTN_REQUIRE(cos.shape[0] >= 1, fn,
                 ": cos must have at least one row, got 0; give one for each position");
  CUATTN_REQUIRE(cos.shape[1] >= 1 && 2 * cos.shape[1] <= p.k.head_dim, fn,
                 ": cos must have rotary_dim / 2 from 1 to head_dim / 2 = ", p.k.head_dim / 2,
                 ", got ", cos.shape[1], "; only the first rotary_dim elements are rotated");
  p.rope.cos = static_cast<const float*>(cos.data);
  p.rope.sin = static_cast<const float*>(sin.data);
  p.rope.cos_stride = stride_of(cos, 0);
  p.rope.sin_stride = stride_of(sin, 0);
  p.rope.max_position = cos.shape[0];
  p.rope.rotary_dim = static_cast<int32_t>(2 * cos.shape[1]);
  p.rope.interleaved = o.rope_interleaved != 0;
  if (has_places) return;
  p.rope.positions = static_cast<const int64_t*>(
      read_vector(fn, "positions", view_of(fn, "positions", o.positions), DType::i64, p.num_tokens,
                  "num_tokens", device, like, check_data));
}

namespace {

// The arrays of a call, as they are borrowed.
struct WriteArrays {
  TensorView k, v, k_cache, v_cache;
  const DLTensor* slot_mapping;  // or NULL

  WriteArrays(const DLTensor* k, const DLTensor* v, const DLTensor* k_cache,
              const DLTensor* v_cache, const DLTensor* slot_mapping)
      : k(view_of(kWrite, "k", k)),
        v(view_of(kWrite, "v", v)),
        k_cache(as_e4m3(view_of(kWrite, "k_cache", k_cache))),
        v_cache(as_e4m3(view_of(kWrite, "v_cache", v_cache))),
        slot_mapping(slot_mapping) {}
};

// `check_data` false: no data pointer is looked at.
CacheWriteParams read_write(const WriteArrays& arrays, const cuattn_cache_options* options,
                            bool check_data) {
  cuattn_cache_options room;
  const cuattn_cache_options& o = known_options(kWrite, options, room);
  const auto& [k, v, k_cache, v_cache, slot_mapping] = arrays;
  CacheWriteParams p{};
  DLDevice device = k.device;
  require_known_device(kWrite, "k", device);
  p.kv_layout = kv_layout_of(kWrite, o.kv_layout);
  p.dtype = attention_dtype(kWrite, "k", k);
  read_rows(kWrite, "k", k, p.dtype, device, "k", p.k);
  require_rows(kWrite, "k", k, false, check_data);
  read_rows(kWrite, "v", v, p.dtype, device, "k", p.v);
  require_rows(kWrite, "v", v, false, check_data);
  p.cache_dtype = cache_dtype_of(kWrite, k_cache);
  CUATTN_REQUIRE(p.cache_dtype == p.dtype || p.cache_dtype == DType::e4m3, kWrite,
                 ": k_cache must be ", dtype_name(p.dtype), " like k, or float8_e4m3fn, got ",
                 dtype_name(p.cache_dtype), "; cast k and v to it first");
  CacheShape blocks = place_caches(kWrite, {"k_cache", "v_cache"}, k_cache, v_cache, p.cache_dtype,
                                   device, "k", true, check_data, Starts::on_16_bytes, p);
  p.num_blocks = blocks.num_blocks;
  p.block_size = static_cast<int32_t>(blocks.block_size);
  require_extent(kWrite, "v", "num_tokens", v.shape[0], k.shape[0], "k");
  require_extent(kWrite, "k_cache", "num_heads_kv", p.num_heads, k.shape[1], "k");
  require_extent(kWrite, "v", "num_heads_kv", v.shape[1], k.shape[1], "k");
  require_extent(kWrite, "k_cache", "head_dim", p.k.head_dim, k.shape[2], "k");
  require_extent(kWrite, "v_cache", "head_dim", p.v.head_dim, v.shape[2], "v");
  p.num_tokens = k.shape[0];
  read_slots(kWrite, slot_mapping, o, device, "k", check_data, p);
  read_scale("k_scale", o.has_k_scale, o.k_scale, o.k_scales, p, device, check_data, p.k);
  read_scale("v_scale", o.has_v_scale, o.v_scale, o.v_scales, p, device, check_data, p.v);
  read_rope(kWrite, o, device, "k", check_data, p);
  return p;
}

// On the CPU, and under CUATTN_CHECK=1.
void check_scales(const char* name, const CacheWriteParams& p, const CacheSide& side,
                  DLDevice device, Stream stream) {
  if (side.scales == nullptr || p.num_heads == 0) return;
  int64_t count = (int64_t{p.num_heads} - 1) * side.scales_stride + 1;
  HostCopy<float> scales(backend_of(kWrite, device), device, side.scales, count, stream);
  for (int64_t head = 0; scales.data() != nullptr && head < p.num_heads; ++head) {
    float scale = scales.data()[head * side.scales_stride];
    require_scale(name, scale, static_cast<double>(scale));
  }
}

Footprint rows_footprint(const char* name, const CacheSide& side, int64_t tokens, int64_t heads,
                         DType dtype) {
  return {name,
          side.rows,
          itemsize(dtype),
          {{tokens, side.row_token}, {heads, side.row_head}, {side.head_dim, 1}}};
}

// The caches lie apart from each other and from all that is read.
void check_write_memory(const CacheWriteParams& p) {
  CallMemory memory(kWrite);
  auto cache = [&](const char* name, const CacheSide& side) {
    return cache_footprint(name, side, p.num_blocks, p.num_heads, p.block_size, p.cache_dtype);
  };
  memory.writes(cache("k_cache", p.k));
  memory.writes(cache("v_cache", p.v));
  memory.reads(rows_footprint("k", p.k, p.num_tokens, p.num_heads, p.dtype));
  memory.reads(rows_footprint("v", p.v, p.num_tokens, p.num_heads, p.dtype));
  read_slot_memory(memory, p);
  memory.reads({"k_scale", p.k.scales, 4, {{p.num_heads, p.k.scales_stride}}});
  memory.reads({"v_scale", p.v.scales, 4, {{p.num_heads, p.v.scales_stride}}});
  const RopeParams& rope = p.rope;
  int64_t half = rope.rotary_dim / 2;
  memory.reads({"cos", rope.cos, 4, {{rope.max_position, rope.cos_stride}, {half, 1}}});
  memory.reads({"sin", rope.sin, 4, {{rope.max_position, rope.sin_stride}, {half, 1}}});
}

void reshape_and_cache(const WriteArrays& arrays, const cuattn_cache_options* options,
                       Stream stream) {
  CacheWriteParams p = read_write(arrays, options, true);
  check_write_memory(p);
  DLDevice device = arrays.k.device;
  const Backend& backend = backend_of(kWrite, device);
  check_slots(kWrite, p, device, stream);
  check_scales("k_scale", p, p.k, device, stream);
  check_scales("v_scale", p, p.v, device, stream);
  if (p.num_tokens == 0 || p.num_heads == 0 || p.num_blocks == 0) return;
  backend.cache_write(p, device.device_id, stream);
}

// ---- gather_cache

constexpr const char* kGather = "gather_cache";

// The blocks that a sequence of `length` tokens reads.
void check_blocks(const char* fn, const CacheGatherParams& p, const int32_t* tables, int32_t seq,
                  int64_t length) {
  CUATTN_REQUIRE(length <= int64_t{p.max_blocks} * p.pages.block_size, fn,
                 ": block_tables must have room for every sequence, got a length of ", length,
                 " for sequence ", seq, " with ", p.max_blocks, " blocks of ", p.pages.block_size,
                 "; widen the table");
  for (int64_t i = 0; i * p.pages.block_size < length; ++i) {
    int32_t block = tables[seq * p.pages.block_tables_stride + i];
    CUATTN_REQUIRE(block >= 0 && block < p.pages.num_blocks, fn,
                   ": block_tables must name blocks in [0, ", p.pages.num_blocks, "), got ", block,
                   " at (", seq, ", ", i, "); entries past the sequence may hold anything");
  }
}

void check_tables(const CacheGatherParams& p, const int32_t* cu_seqlens, const int32_t* tables) {
  if (cu_seqlens == nullptr || tables == nullptr) return;
  CUATTN_REQUIRE(cu_seqlens[0] == 0, kGather, ": cu_seqlens must start at 0, got ", cu_seqlens[0],
                 "; element i is where sequence i begins");
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    int64_t begin = cu_seqlens[seq], end = cu_seqlens[seq + 1];
    CUATTN_REQUIRE(end >= begin, kGather, ": cu_seqlens must not decrease, got ", end, " after ",
                   begin, " at index ", seq + 1, "; pass the running sum of the sequence lengths");
    check_blocks(kGather, p, tables, seq, end - begin);
  }
  CUATTN_REQUIRE(cu_seqlens[p.num_seqs] <= p.num_tokens, kGather,
                 ": cu_seqlens must end within the rows of k_out, got ", cu_seqlens[p.num_seqs],
                 " with ", p.num_tokens,
                 " rows; allocate [cu_seqlens[-1], num_heads_kv, head_dim]");
}

int64_t table_span(const CacheGatherParams& p) {
  return p.num_seqs == 0 || p.max_blocks == 0
             ? 0
             : (p.num_seqs - 1) * p.pages.block_tables_stride + p.max_blocks;
}

struct GatherArrays {
  TensorView k_cache, v_cache, block_tables, cu_seqlens, k_out, v_out;

  GatherArrays(const DLTensor* k_cache, const DLTensor* v_cache, const DLTensor* block_tables,
               const DLTensor* cu_seqlens, const DLTensor* k_out, const DLTensor* v_out)
      : k_cache(as_e4m3(view_of(kGather, "k_cache", k_cache))),
        v_cache(as_e4m3(view_of(kGather, "v_cache", v_cache))),
        block_tables(view_of(kGather, "block_tables", block_tables)),
        cu_seqlens(view_of(kGather, "cu_seqlens", cu_seqlens)),
        k_out(as_e4m3(view_of(kGather, "k_out", k_out))),
        v_out(as_e4m3(view_of(kGather, "v_out", v_out))) {}
};

CacheGatherParams read_gather(const GatherArrays& arrays, int32_t kv_layout, bool check_data) {
  const auto& [k_cache, v_cache, block_tables, cu_seqlens, k_out, v_out] = arrays;
  DLDevice device = k_cache.device;
  require_known_device(kGather, "k_cache", device);
  KvLayout layout = kv_layout_of(kGather, kv_layout);
  CacheGatherParams p = read_pages(kGather, {"k_cache", "v_cache"}, k_cache, v_cache, block_tables,
                                   layout, cache_dtype_of(kGather, k_cache), device, "k_cache",
                                   check_data, Starts::on_elements);
  read_rows(kGather, "k_out", k_out, p.dtype, device, "k_cache", p.k);
  read_rows(kGather, "v_out", v_out, p.dtype, device, "k_cache", p.v);
  for (const auto& [name, view] : {std::pair("k_out", &k_out), std::pair("v_out", &v_out)}) {
    require_last_axis(kGather, name, *view);
    require_strided(kGather, name, *view, true, check_data);
  }
  require_extent(kGather, "v_out", "num_tokens", v_out.shape[0], k_out.shape[0], "k_out");
  require_extent(kGather, "k_out", "num_heads_kv", k_out.shape[1], p.num_heads, "k_cache");
  require_extent(kGather, "v_out", "num_heads_kv", v_out.shape[1], p.num_heads, "v_cache");
  require_extent(kGather, "k_out", "head_dim", k_out.shape[2], p.k.head_dim, "k_cache");
  require_extent(kGather, "v_out", "head_dim", v_out.shape[2], p.v.head_dim, "v_cache");
  p.num_tokens = k_out.shape[0];
  p.cu_seqlens = static_cast<const int32_t*>(
      read_vector(kGather, "cu_seqlens", cu_seqlens, DType::i32, int64_t{p.num_seqs} + 1,
                  "num_seqs + 1", device, "k_cache", check_data));
  return p;
}

// The rows lie apart from each other and from all that is read.
void check_gather_memory(const CacheGatherParams& p) {
  CallMemory memory(kGather);
  memory.writes(rows_footprint("k_out", p.k, p.num_tokens, p.num_heads, p.dtype));
  memory.writes(rows_footprint("v_out", p.v, p.num_tokens, p.num_heads, p.dtype));
  memory.reads(cache_footprint("k_cache", p.k, p));
  memory.reads(cache_footprint("v_cache", p.v, p));
  memory.reads(tables_footprint(p));
  memory.reads({"cu_seqlens", p.cu_seqlens, 4, {{p.num_seqs + int64_t{1}, 1}}});
}

void gather_cache(const GatherArrays& arrays, int32_t kv_layout, Stream stream) {
  CacheGatherParams p = read_gather(arrays, kv_layout, true);
  check_gather_memory(p);
  DLDevice device = arrays.k_cache.device;
  const Backend& backend = backend_of(kGather, device);
  HostCopy<int32_t> ends(backend, device, p.cu_seqlens, int64_t{p.num_seqs} + 1, stream);
  HostCopy<int32_t> tables(backend, device, p.pages.block_tables, table_span(p), stream);
  check_tables(p, ends.data(), tables.data());
  if (p.num_seqs == 0 || p.num_tokens == 0 || p.num_heads == 0) return;
  CUATTN_REQUIRE(p.pages.num_blocks > 0 && p.max_blocks > 0, kGather,
                 ": k_cache and block_tables must hold a block, got ", p.pages.num_blocks, " and ",
                 p.max_blocks, " columns; nothing can be gathered from none");
  backend.cache_gather(p, device.device_id, stream);
}

int64_t gather_total(const TensorView& cu_seqlens, Stream stream) {
  require_dtype(kGather, "cu_seqlens", cu_seqlens, DType::i32);
  CUATTN_REQUIRE(cu_seqlens.ndim == 1 && cu_seqlens.shape[0] >= 1, kGather,
                 ": cu_seqlens must have shape (num_seqs + 1,), got ", shape_text(cu_seqlens),
                 "; start it with 0");
  require_contiguous(kGather, "cu_seqlens", cu_seqlens, true);
  const int32_t* last = static_cast<const int32_t*>(cu_seqlens.data) + cu_seqlens.shape[0] - 1;
  int32_t total = 0;
  if (is_cpu(cu_seqlens.device)) {
    total = *last;
  } else {
    require_known_device(kGather, "cu_seqlens", cu_seqlens.device);
    bool done = backend_of(kGather, cu_seqlens.device)
                    .read_back(&total, last, sizeof(total), cu_seqlens.device.device_id, stream);
    CUATTN_REQUIRE(done, kGather,
                   ": k_out and v_out must be given under stream capture, where the total length "
                   "cannot be read; allocate [total, num_heads_kv, head_dim]");
  }
  CUATTN_REQUIRE(total >= 0, kGather, ": cu_seqlens must not decrease, got ", total,
                 " as its last element; pass the running sum of the sequence lengths");
  return total;
}

}  // namespace

void check_pages(const char* fn, const CacheGatherParams& p, DLDevice device, Stream stream) {
  const Backend& backend = backend_of(fn, device);
  HostCopy<int32_t> tables(backend, device, p.pages.block_tables, table_span(p), stream);
  HostCopy<int32_t> ends(backend, device, p.cu_seqlens, int64_t{p.num_seqs} + 1, stream);
  HostCopy<int32_t> used(backend, device, p.seqused, p.num_seqs, stream);
  if (tables.data() == nullptr) return;
  if ((p.cu_seqlens != nullptr && ends.data() == nullptr) ||
      (p.seqused != nullptr && used.data() == nullptr))
    return;
  for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
    int64_t length = p.seqused != nullptr ? used.data()[seq] : int64_t{p.padded_len};
    if (p.cu_seqlens != nullptr) {
      int64_t stored = int64_t{ends.data()[seq + 1]} - ends.data()[seq];
      length = p.seqused != nullptr ? std::min(length, stored) : stored;
    }
    check_blocks(fn, p, tables.data(), seq, length);
    CUATTN_REQUIRE(length <= p.padded_len, fn,
                   ": max_seqlen_k must be at least the longest sequence, got ", p.padded_len,
                   " with a length of ", length, " for sequence ", seq, "; pass an upper bound");
  }
}

}  // namespace cuattn

using namespace cuattn;

extern "C" {

void cuattn_cache_options_init(cuattn_cache_options* options, size_t struct_size) {
  init_options(kWrite, options, struct_size);
}

cuattn_status cuattn_reshape_and_cache(const DLTensor* k, const DLTensor* v,
                                       const DLTensor* k_cache, const DLTensor* v_cache,
                                       const DLTensor* slot_mapping,
                                       const cuattn_cache_options* options, void* stream) {
  return guarded(
      [&] { reshape_and_cache({k, v, k_cache, v_cache, slot_mapping}, options, stream); });
}

cuattn_status cuattn_reshape_and_cache_check(const DLTensor* k, const DLTensor* v,
                                             const DLTensor* k_cache, const DLTensor* v_cache,
                                             const DLTensor* slot_mapping,
                                             const cuattn_cache_options* options) {
  return guarded([&] { read_write({k, v, k_cache, v_cache, slot_mapping}, options, false); });
}

cuattn_status cuattn_gather_cache(const DLTensor* k_cache, const DLTensor* v_cache,
                                  const DLTensor* block_tables, const DLTensor* cu_seqlens,
                                  const DLTensor* k_out, const DLTensor* v_out, int32_t kv_layout,
                                  void* stream) {
  return guarded([&] {
    gather_cache({k_cache, v_cache, block_tables, cu_seqlens, k_out, v_out}, kv_layout, stream);
  });
}

cuattn_status cuattn_gather_cache_check(const DLTensor* k_cache, const DLTensor* v_cache,
                                        const DLTensor* block_tables, const DLTensor* cu_seqlens,
                                        const DLTensor* k_out, const DLTensor* v_out,
                                        int32_t kv_layout) {
  return guarded([&] {
    read_gather({k_cache, v_cache, block_tables, cu_seqlens, k_out, v_out}, kv_layout, false);
  });
}

cuattn_status cuattn_gather_cache_total(const DLTensor* cu_seqlens, void* stream, int64_t* total) {
  return guarded([&] {
    require_given(kGather, "total", total);
    *total = gather_total(view_of(kGather, "cu_seqlens", cu_seqlens), stream);
  });
}

}  // extern "C"
