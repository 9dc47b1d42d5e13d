// SPDX-License-Identifier: Apache-2.0
// mla_write: from borrowed arrays to CacheWriteParams. Its keys are the rope columns, which it may
// rotate, its values the latents; of latents alone either is half of their columns. The kernels are
// those of reshape_and_cache. Next: cache/rows.cpp.
#include "src/cache/cache.h"
#include "src/guarded.h"
#include "src/mla/mla.h"
#include "src/options.h"

namespace cuattn {
namespace {

constexpr const char* kName = "mla_write";

// Rows [num_tokens, columns] and their cache [num_blocks, block_size, columns].
void read_side(const char* name, const char* cache_name, const TensorView& rows,
               const TensorView& cache, const CacheWriteParams& p, DLDevice device,
               CacheSide& side) {
  require_rank(kName, name, rows, 2, "[num_tokens, columns]");
  require_dtype(kName, name, rows, p.dtype, "ckv");
  require_device(kName, name, rows, device, "ckv");
  require_rows(kName, name, rows, false, true);
  require_rank(kName, cache_name, cache, 3, "[num_blocks, block_size, columns]");
  require_dtype(kName, cache_name, cache, p.dtype, "ckv");
  require_device(kName, cache_name, cache, device, "ckv");
  require_extent(kName, cache_name, "columns", cache.shape[2], rows.shape[1], name);
  require_rows(kName, cache_name, cache, true, true);
  int64_t columns = rows.shape[1];
  CUATTN_REQUIRE(columns >= 8 && columns <= kMaxLatent && columns % 8 == 0, kName, ": ", name,
                 " must have columns a multiple of 8 up to ", kMaxLatent, ", got ", columns,
                 "; pad it with zeros");
  side.rows = rows.data;
  side.row_token = stride_of(rows, 0);
  side.cache = cache.data;
  side.strides = {stride_of(cache, 0), 0, stride_of(cache, 1)};
  side.head_dim = side.run = static_cast<int32_t>(columns);
  side.scale = 1.0f;
}

void check_memory(const CacheWriteParams& p) {
  CallMemory memory(kName);
  auto cache = [&](const char* name, const CacheSide& side) {
    return cache_footprint(name, side, p.num_blocks, 1, p.block_size, p.dtype);
  };
  auto rows = [&](const char* name, const CacheSide& side) {
    return Footprint(name, side.rows, itemsize(p.dtype),
                     {{p.num_tokens, side.row_token}, {side.head_dim, 1}});
  };
  if (p.is_packed) {
    memory.writes({"ckv_cache",
                   p.v.cache,
                   1,
                   {{p.num_blocks, p.v.strides.block},
                    {p.block_size, p.v.strides.token},
                    {PackedLatent::kBytes, 1}}});
  } else {
    memory.writes(cache("ckv_cache", p.v));
  }
  memory.reads(rows("ckv", p.v));
  if (p.k.cache != nullptr) memory.writes(cache("kpe_cache", p.k));
  if (p.k.rows != nullptr) memory.reads(rows("kpe", p.k));
  read_slot_memory(memory, p);
  const RopeParams& rope = p.rope;
  int64_t half = rope.rotary_dim / 2;
  memory.reads({"cos", rope.cos, 4, {{rope.max_position, rope.cos_stride}, {half, 1}}});
  memory.reads({"sin", rope.sin, 4, {{rope.max_position, rope.sin_stride}, {half, 1}}});
}

// The rope columns, held against the latents, and their rotation.
void read_ropes(const TensorView& kpe, const TensorView& kpe_cache, const TensorView& ckv,
                const TensorView& ckv_cache, const cuattn_cache_options& o, DLDevice device,
                CacheWriteParams& p) {
  read_side("kpe", "kpe_cache", kpe, kpe_cache, p, device, p.k);
  require_extent(kName, "kpe", "num_tokens", kpe.shape[0], ckv.shape[0], "ckv");
  require_extent(kName, "kpe_cache", "num_blocks", kpe_cache.shape[0], ckv_cache.shape[0],
                 "ckv_cache");
  require_extent(kName, "kpe_cache", "block_size", kpe_cache.shape[1], ckv_cache.shape[1],
                 "ckv_cache");
  read_rope(kName, o, device, "ckv", true, p);
}

// Rows of both sides into packed latents.
void read_packed(const TensorView& ckv, const TensorView& kpe, const TensorView& cache,
                 const cuattn_cache_options& o, DLDevice device, CacheWriteParams& p) {
  CUATTN_REQUIRE(p.dtype == DType::bf16, kName,
                 ": ckv must be bfloat16 for packed latents (ckv_cache of uint8), got ",
                 dtype_name(p.dtype), "; cast it");
  CUATTN_REQUIRE(
      o.cos == nullptr && o.sin == nullptr && o.positions == nullptr, kName,
      ": cos, sin and positions must be None where ckv_cache is uint8, got one; turn kpe "
      "with apply_rope before");
  auto side = [&](const char* name, const TensorView& rows, CacheSide& side) {
    require_rank(kName, name, rows, 2, "[num_tokens, columns]");
    require_dtype(kName, name, rows, p.dtype, "ckv");
    require_device(kName, name, rows, device, "ckv");
    require_rows(kName, name, rows, false, true);
    side.rows = rows.data;
    side.row_token = stride_of(rows, 0);
    side.head_dim = static_cast<int32_t>(rows.shape[1]);
  };
  side("ckv", ckv, p.v);
  side("kpe", kpe, p.k);
  require_extent(kName, "kpe", "num_tokens", kpe.shape[0], ckv.shape[0], "ckv");
  require_rank(kName, "ckv_cache", cache, 3, "[num_blocks, block_size, 656]");
  require_device(kName, "ckv_cache", cache, device, "ckv");
  check_packed(kName, cache, ckv.shape[1], kpe.shape[1], "ckv", "kpe", true, true);
  p.is_packed = true;
  p.cache_dtype = DType::e4m3;
  p.v.cache = cache.data;
  p.v.strides = {stride_of(cache, 0), 0, stride_of(cache, 1)};
}

// Makes the first half of the latents the keys of the call, the rest its values, each a multiple of
// 8 columns, as kernels take them. Of 8 columns both are all, and the same bits are written twice.
void cut_latents(CacheWriteParams& p) {
  int32_t half = p.v.head_dim / 16 * 8;
  p.k = p.v;
  if (half == 0) return;
  p.k.head_dim = p.k.run = half;
  p.v.head_dim = p.v.run = p.v.head_dim - half;
  p.v.rows = static_cast<char*>(p.v.rows) + half * itemsize(p.dtype);
  p.v.cache = static_cast<char*>(p.v.cache) + half * itemsize(p.dtype);
}

// Without kpe and kpe_cache, nullptr both, the latents alone are written.
void mla_write(const TensorView& ckv, const DLTensor* kpe, const TensorView& ckv_cache,
               const DLTensor* kpe_cache, const DLTensor* slot_mapping,
               const cuattn_cache_options* options, Stream stream) {
  cuattn_cache_options room;
  const cuattn_cache_options& o = known_options(kName, options, room);
  CUATTN_REQUIRE(o.kv_layout == CUATTN_KV_NHD && !o.has_k_scale && !o.has_v_scale &&
                     o.k_scales == nullptr && o.v_scales == nullptr,
                 kName,
                 ": options must leave kv_layout, k_scale and v_scale at their defaults, "
                 "got one of them; the caches have the dtype of the rows");
  CacheWriteParams p{};
  DLDevice device = ckv.device;
  require_known_device(kName, "ckv", device);
  p.kv_layout = KvLayout::nhd;
  p.dtype = p.cache_dtype = attention_dtype(kName, "ckv", ckv);
  bool packs = is_packed(ckv_cache);
  if (packs) {
    CUATTN_REQUIRE(kpe != nullptr && kpe_cache == nullptr, kName,
                   ": kpe_cache must be None and kpe an array where ckv_cache is uint8, packed "
                   "latents with their rope columns, got another");
    read_packed(ckv, view_of(kName, "kpe", kpe), ckv_cache, o, device, p);
  } else {
    read_side("ckv", "ckv_cache", ckv, ckv_cache, p, device, p.v);
  }
  require_block_size(kName, "ckv_cache", ckv_cache.shape[1], KvLayout::nhd);
  p.num_heads = 1;
  p.num_blocks = ckv_cache.shape[0];
  p.block_size = static_cast<int32_t>(ckv_cache.shape[1]);
  p.num_tokens = ckv.shape[0];
  read_slots(kName, slot_mapping, o, device, "ckv", true, p);
  bool has_ropes = kpe != nullptr || kpe_cache != nullptr;
  if (has_ropes && !packs) {
    read_ropes(view_of(kName, "kpe", kpe), view_of(kName, "kpe_cache", kpe_cache), ckv, ckv_cache,
               o, device, p);
  }
  CUATTN_REQUIRE(has_ropes || (o.cos == nullptr && o.sin == nullptr && o.positions == nullptr),
                 kName,
                 ": cos, sin and positions must not be given without kpe, which they "
                 "rotate; leave them out");
  check_memory(p);
  check_slots(kName, p, device, stream);
  if (p.num_tokens == 0 || p.num_blocks == 0) return;
  if (!has_ropes) cut_latents(p);
  backend_of(kName, device).cache_write(p, device.device_id, stream);
}

}  // namespace
}  // namespace cuattn

using namespace cuattn;

cuattn_status cuattn_mla_write(const DLTensor* ckv, const DLTensor* kpe, const DLTensor* ckv_cache,
                               const DLTensor* kpe_cache, const DLTensor* slot_mapping,
                               const cuattn_cache_options* options, void* stream) {
  return guarded([&] {
    mla_write(view_of(kName, "ckv", ckv), kpe, view_of(kName, "ckv_cache", ckv_cache), kpe_cache,
              slot_mapping, options, stream);
  });
}
