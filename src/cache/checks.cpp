// SPDX-License-Identifier: Apache-2.0
#include "src/cache/checks.h"

#include "cuattn/c_api.h"

namespace cuattn {
namespace {

constexpr int64_t kGroupBytes = 16;  // x of the vLLM layout, in bytes
constexpr int64_t kMaxBlockSize = 256;

// Where each axis of a cache lies in its shape. From `inner` on it is row-major without gaps.
struct CacheAxes {
  int32_t ndim, head, token, dim, inner;
  const char* names;
};

CacheAxes axes_of(KvLayout layout, bool is_k) {
  switch (layout) {
    case KvLayout::nhd: return {4, 2, 1, 3, 3, "[num_blocks, block_size, num_heads_kv, head_dim]"};
    case KvLayout::hnd: return {4, 1, 2, 3, 3, "[num_blocks, num_heads_kv, block_size, head_dim]"};
    default: break;
  }
  if (is_k) return {5, 1, 3, 2, 2, "[num_blocks, num_heads_kv, head_dim / x, block_size, x]"};
  return {4, 1, 3, 2, 2, "[num_blocks, num_heads_kv, head_dim, block_size]"};
}

CacheShape read_cache(const char* fn, const char* name, const TensorView& view, KvLayout layout,
                      bool is_k, DType dtype, bool output, bool check_data, Starts starts) {
  CacheAxes axes = axes_of(layout, is_k);
  require_rank(fn, name, view, axes.ndim, axes.names);
  bool is_vllm = layout == KvLayout::vllm, is_grouped = is_vllm && is_k;
  int64_t x = is_grouped ? kGroupBytes / itemsize(dtype) : 1;
  CUATTN_REQUIRE(!is_grouped || view.shape[4] == x, fn, ": ", name, " must have x = ", x,
                 " (16 bytes) as its last axis in kv_layout 'vllm', got ", view.shape[4],
                 "; view it as ", axes.names);
  CacheShape shape{
      view.shape[0],
      view.shape[axes.head],
      view.shape[axes.token],
      view.shape[axes.dim] * x,
      {stride_of(view, 0), stride_of(view, axes.head), is_vllm ? x : stride_of(view, axes.token)}};
  require_block_size(fn, name, shape.block_size, layout);
  require_strided(fn, name, view, output, check_data);
  if (is_vllm) {
    CUATTN_REQUIRE(view.size() == 0 || is_dense_from(view, axes.inner), fn, ": ", name,
                   " must be contiguous within a block and head, got strides ", strides_text(view),
                   "; make a contiguous copy");
  } else {
    require_last_axis(fn, name, view);
  }
  // Note: also of an empty cache, whose strides the TMA would refuse. A head_dim with which nothing
  // could be aligned is refused by the caller, who knows which ones there may be.
  if (starts == Starts::on_16_bytes && is_cuda(view.device) &&
      shape.head_dim * itemsize(dtype) % 16 == 0) {
    require_aligned(fn, name, "blocks, heads and tokens", view, axes.inner, check_data);
  }
  return shape;
}

}  // namespace

KvLayout kv_layout_of(const char* function, int32_t code) {
  CUATTN_REQUIRE(code == CUATTN_KV_NHD || code == CUATTN_KV_HND || code == CUATTN_KV_VLLM, function,
                 ": kv_layout must be 'nhd', 'hnd' or 'vllm', got code ", code,
                 "; choose one of these");
  return static_cast<KvLayout>(code);
}

CacheShapes read_caches(const char* fn, CacheNames names, const TensorView& k_cache,
                        const TensorView& v_cache, KvLayout layout, DType dtype, DLDevice device,
                        const char* like, bool output, bool check_data, Starts starts) {
  require_device(fn, names.k, k_cache, device, like);
  require_dtype(fn, names.v, v_cache, dtype, names.k);
  require_device(fn, names.v, v_cache, device, like);
  CacheShape k = read_cache(fn, names.k, k_cache, layout, true, dtype, output, check_data, starts);
  CacheShape v = read_cache(fn, names.v, v_cache, layout, false, dtype, output, check_data, starts);
  require_extent(fn, names.v, "num_blocks", v.num_blocks, k.num_blocks, names.k);
  require_extent(fn, names.v, "num_heads_kv", v.num_heads, k.num_heads, names.k);
  require_extent(fn, names.v, "block_size", v.block_size, k.block_size, names.k);
  return {k, v};
}

void require_block_size(const char* fn, const char* name, int64_t block_size, KvLayout layout) {
  if (layout == KvLayout::vllm) {
    CUATTN_REQUIRE(block_size == 8 || block_size == 16 || block_size == 32, fn, ": ", name,
                   " must have block_size 8, 16 or 32 in kv_layout 'vllm', got ", block_size,
                   "; use 'nhd' or 'hnd' for others");
  } else {
    CUATTN_REQUIRE(block_size >= 1 && block_size <= kMaxBlockSize, fn, ": ", name,
                   " must have block_size from 1 to ", kMaxBlockSize, ", got ", block_size,
                   "; cut the cache into blocks of such a size");
  }
}

TensorView as_e4m3(TensorView view) {
  if (view.dtype.code == kDLUInt && view.dtype.bits == 8 && view.dtype.lanes == 1)
    view.dtype = dl_dtype(DType::e4m3);
  return view;
}

BlockTables read_block_tables(const char* fn, const TensorView& view, DLDevice device,
                              const char* like, bool check_data) {
  const char* name = "block_tables";
  require_rank(fn, name, view, 2, "[num_seqs, max_blocks_per_seq]");
  require_dtype(fn, name, view, DType::i32);
  require_device(fn, name, view, device, like);
  require_strided(fn, name, view, false, check_data);
  require_last_axis(fn, name, view);
  return {static_cast<const int32_t*>(view.data), stride_of(view, 0),
          checked_extent(fn, name, "num_seqs", view.shape[0]),
          checked_extent(fn, name, "max_blocks_per_seq", view.shape[1])};
}

}  // namespace cuattn
