// SPDX-License-Identifier: Apache-2.0
// Tensor maps: what the TMA of sm_90 knows of Q, K, V, O, a bias and caches. Made by the driver
// (about a microsecond each), so the latest ones are kept per thread. Used by
// attention/sm90/forward.cuh and paged/sm90/decode.cuh.
#pragma once

#include <cuda.h>

#include <cstring>

#include "cuattn/device/mma_sm90.cuh"
#include "cuattn/params/paged.h"
#include "cuda/host/launch.h"

namespace cuattn {

// A tensor of up to five axes, innermost first; strides in bytes of axes 1 to 4.
struct TensorMapKey {
  const void* base;
  uint64_t extent[5];
  uint64_t stride[4];
  uint32_t box[5];
  DType dtype;
};
static_assert(sizeof(TensorMapKey) == 104, "compared as bytes: no padding");

// Note: promotion to 256 bytes fetches what the box of the next panel asks for, too: decode is 7 %
// slower, prefill the same.
inline device::TensorMap encode_tensor_map(const TensorMapKey& key) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    CUATTN_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                     cudaEnableDefault, &found));
    CUATTN_ASSERT(entry != nullptr, "a driver for sm_90 has cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(entry);
  }();
  constexpr cuuint32_t kSteps[5] = {1, 1, 1, 1, 1};
  device::TensorMap map;
  CUresult status = encode(reinterpret_cast<CUtensorMap*>(&map),
                           is_code(key.dtype)        ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                           : key.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                     : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           5, const_cast<void*>(key.base), key.extent, key.stride, key.box, kSteps,
                           CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    fail<CudaError>("cuTensorMapEncodeTiled failed: CUresult ", static_cast<int>(status),
                    "; extents ", key.extent[0], ", ", key.extent[1], ", ", key.extent[2], ", ",
                    key.extent[3], ", ", key.extent[4], ", strides ", key.stride[0], ", ",
                    key.stride[1], ", ", key.stride[2], ", ", key.stride[3]);
  }
  return map;
}

// The same map again costs a comparison: calls of a training or serving loop repeat their tensors,
// the caches of all layers among them. A copy, for the next map may take the place of this one.
inline device::TensorMap tensor_map(const TensorMapKey& key) {
  constexpr int kEntries = 512;
  struct Entry {
    TensorMapKey key;
    device::TensorMap map;
  };
  static thread_local Entry cache[kEntries] = {};
  uint64_t hash = reinterpret_cast<uintptr_t>(key.base) * 0x9e3779b97f4a7c15ull ^ key.extent[1] ^
                  key.box[1] << 8 ^ key.stride[0] << 16;
  Entry& entry = cache[(hash ^ hash >> 32) % kEntries];
  if (std::memcmp(&entry.key, &key, sizeof(key)) != 0) {
    entry.map = encode_tensor_map(key);
    entry.key = key;
  }
  return entry.map;
}

// An axis of one element may carry any stride: a legal one takes its place.
inline uint64_t map_stride(DType dtype, int64_t elements, int64_t extent) {
  int64_t size = is_code(dtype) ? 1 : 2;
  return extent > 1 ? static_cast<uint64_t>(elements * size) : 16;
}

inline device::TensorMap tensor_map(DType dtype, const void* base, const int64_t (&extent)[5],
                                    const int64_t (&stride)[4], const int32_t (&box)[5]) {
  TensorMapKey key;
  std::memset(&key, 0, sizeof(key));
  key.base = base;
  key.dtype = dtype;
  for (int axis = 0; axis < 5; ++axis) {
    key.extent[axis] = static_cast<uint64_t>(extent[axis] > 0 ? extent[axis] : 1);
    key.box[axis] = static_cast<uint32_t>(box[axis]);
    if (axis > 0) key.stride[axis - 1] = map_stride(dtype, stride[axis - 1], extent[axis]);
  }
  return tensor_map(key);
}

// 128 bytes of a row.
constexpr int32_t panel_columns(DType dtype) { return is_code(dtype) ? 128 : 64; }

// Q as (columns, heads of a group, tokens, groups, batch): a box is a panel of `tokens` tokens of
// `packed` heads, which land as rows token * packed + head.
inline device::TensorMap query_map(const AttentionParams& p, int32_t packed, int32_t tokens) {
  bool ragged = p.cu_seqlens_q != nullptr;
  const Strides& s = p.q_strides;
  return tensor_map(p.dtype, p.q,
                    {p.head_dim, packed, ragged ? p.total_q : p.seqlen_q, p.num_heads_q / packed,
                     ragged ? 1 : p.batch},
                    {s.head, s.seq, s.head * packed, s.batch},
                    {panel_columns(p.dtype), packed, tokens, 1, 1});
}

// O as (columns, tokens, heads, batch, 1): a box is the 16 rows of a warp.
inline device::TensorMap output_map(const AttentionParams& p) {
  bool ragged = p.cu_seqlens_q != nullptr;
  const Strides& s = p.out_strides;
  return tensor_map(
      p.out_dtype, p.out,
      {p.head_dim_v, ragged ? p.total_q : p.seqlen_q, p.num_heads_q, ragged ? 1 : p.batch, 1},
      {s.seq, s.head, s.batch, 0}, {64, 16, 1, 1, 1});
}

// A bias that has_bias_map (params/attention.h), as (keys, tokens, heads, batch, 1): a box is 64
// keys of 64 tokens.
inline device::TensorMap bias_map(const AttentionParams& p) {
  return tensor_map(
      p.dtype, p.scores.bias,
      {p.seqlen_kv, p.seqlen_q, p.scores.bias_stride_head != 0 ? p.num_heads_q : 1,
       p.scores.bias_stride_batch != 0 ? p.batch : 1, 1},
      {p.scores.bias_stride_q, p.scores.bias_stride_head, p.scores.bias_stride_batch, 0},
      {64, 64, 1, 1, 1});
}

// K or V as (columns, tokens, heads, batch, 1), in panels. Note: the base must be mapped memory: the TMA reads
// there for a box that lies wholly outside of its map.
inline device::TensorMap key_map(const AttentionParams& p, const void* base, const Strides& s,
                                 int32_t columns, int32_t rows) {
  bool ragged = p.cu_seqlens_kv != nullptr;
  int64_t tokens = ragged ? p.total_kv : p.seqlen_kv;
  if (tokens == 0) base = p.q;  // never read, but legal
  return tensor_map(p.dtype, base, {columns, tokens, p.num_heads_kv, ragged ? 1 : p.batch, 1},
                    {s.seq, s.head, s.batch, 0}, {panel_columns(p.dtype), rows, 1, 1, 1});
}

// A cache of K or V as (columns, tokens of a block, heads, blocks, 1): a box is 64 columns of
// `piece` tokens of a block. Packed rows are one block, so that none behind the last is read.
inline device::TensorMap paged_cache_map(const PagedParams& p, const void* cache,
                                         const CacheStrides& s, int32_t piece) {
  const Pages& pages = p.pages;
  const bool packed = pages.packed_rows > 0;
  const int64_t tokens = packed                          ? pages.packed_rows
                         : pages.block_tables == nullptr ? p.work.capacity
                                                         : pages.block_size;
  return tensor_map(p.kv_dtype,
                    pages.num_blocks > 0 ? cache : p.q,  // without blocks nothing is read
                    {p.head_dim, tokens, p.work.num_heads_kv, packed ? 1 : pages.num_blocks, 1},
                    {s.token, s.head, s.block, 0}, {64, piece, 1, 1, 1});
}

}  // namespace cuattn
