// SPDX-License-Identifier: Apache-2.0
// Latent attention (MLA) for C++ programs: mla_decode over paged latents, mla_write into them, and
// mla_project, the products with the matrices of each head on both sides of it. A header over the C
// ABI; names and meaning are those of Python's functions. Source: DeepSeek-V2, arXiv:2405.04434.
// Next: attention.h (errors, Workspace, options).
#pragma once

#include "cuattn/attention.h"
#include "cuattn/c_api_mla.h"
#include "cuattn/params/pages.h"

namespace cuattn {

// The arrays of mla_decode. TensorView{} for q_pe and kpe_cache: there are no rope columns.
struct MlaArrays {
  TensorView q_nope;     // [num_seqs, num_heads, latent] or [num_seqs, q_len, num_heads, latent]
  TensorView q_pe;       // the same with rope columns
  TensorView ckv_cache;  // [num_blocks, block_size, latent]: key and value
  TensorView kpe_cache;  // [num_blocks, block_size, rope]
  TensorView block_tables, context_lens;  // int32 [num_seqs, max_blocks_per_seq], [num_seqs]
  // Instead of these: the slots that each query sees, int32 [num_seqs(, q_len), topk], those that
  // the cache does not have left out; and, or TensorView{}, how many entries of each list count.
  TensorView indices = {}, topk_lens = {};
};

// A ckv_cache of packed latents, FlashMLA's of 656 bytes a token; kpe_cache is TensorView{} with it.
inline TensorView packed_latents(void* data, int64_t num_blocks, int64_t block_size,
                                 DLDevice device = {kDLCPU, 0}) {
  TensorView view(data, DType::e4m3, {num_blocks, block_size, PackedLatent::kBytes}, device);
  view.dtype = {kDLUInt, 8, 1};
  return view;
}

namespace detail {

inline cuattn_attention_call prepare_mla(const MlaArrays& a, const CPagedOptions& options) {
  DLTensor q_nope = a.q_nope.dl(), q_pe = a.q_pe.dl(), ckv = a.ckv_cache.dl();
  DLTensor kpe = a.kpe_cache.dl(), tables = a.block_tables.dl(), lens = a.context_lens.dl();
  DLTensor indices = a.indices.dl(), topk_lens = a.topk_lens.dl();
  bool has_lists = a.indices.ndim > 0;
  cuattn_mla_arrays c{&q_nope,
                      a.q_pe.ndim > 0 ? &q_pe : nullptr,
                      &ckv,
                      a.kpe_cache.ndim > 0 ? &kpe : nullptr,
                      nullptr,
                      has_lists ? nullptr : &tables,
                      has_lists ? nullptr : &lens,
                      has_lists ? &indices : nullptr,
                      a.topk_lens.ndim > 0 ? &topk_lens : nullptr};
  cuattn_attention_call call;
  check(cuattn_mla_decode_prepare(&c, &options.c, &call));
  return call;
}

}  // namespace detail

// Bytes of workspace that mla_decode() needs for these arguments; they depend on shapes alone.
inline size_t mla_decode_workspace_bytes(const MlaArrays& arrays, const PagedOptions& options) {
  detail::CPagedOptions c(options);
  return detail::prepare_mla(arrays, c).workspace_bytes;
}

// Attention of the newest tokens of each sequence over cached latents, absorbed: q_nope is already
// times the key projection, out, like q_nope, is yet to go times the value projection.
// options.scale must be set: it is that of the heads before the projection.
inline void mla_decode(const MlaArrays& arrays, const TensorView& out, const PagedOptions& options,
                       Workspace workspace = {}, void* stream = nullptr) {
  detail::CPagedOptions c(options);
  cuattn_attention_call call = detail::prepare_mla(arrays, c);
  DLTensor d_out = out.dl(), d_lse;
  detail::check(cuattn_paged_run(&call, &d_out, detail::COptions::borrow(options.lse, d_lse),
                                 workspace.data, workspace.bytes, stream));
}

// Row i of ckv [num_tokens, latent] and kpe [num_tokens, rope] goes to slot slot_mapping[i] (int64)
// of the caches; -1 skips it. Packed latents take both, and kpe_cache is TensorView{}.
inline void mla_write(const TensorView& ckv, const TensorView& kpe, const TensorView& ckv_cache,
                      const TensorView& kpe_cache, const TensorView& slot_mapping,
                      void* stream = nullptr) {
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  DLTensor c = ckv.dl(), k = kpe.dl(), cc = ckv_cache.dl(), kc = kpe_cache.dl();
  DLTensor slots = slot_mapping.dl();
  const DLTensor* ropes = kpe_cache.ndim > 0 ? &kc : nullptr;
  detail::check(cuattn_mla_write(&c, &k, &cc, ropes, &slots, &options, stream));
}

// The same of latents that have no rope columns.
inline void mla_write(const TensorView& ckv, const TensorView& ckv_cache,
                      const TensorView& slot_mapping, void* stream = nullptr) {
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  DLTensor c = ckv.dl(), cc = ckv_cache.dl(), slots = slot_mapping.dl();
  detail::check(cuattn_mla_write(&c, nullptr, &cc, nullptr, &slots, &options, stream));
}

// out[b, i, h] = x[b, i, h] proj[h], with `transpose` x[b, i, h] proj[h]^T: x and out [batch, rows,
// num_heads, columns], proj [num_heads, latent, head_dim].
inline void mla_project(const TensorView& x, const TensorView& proj, bool transpose,
                        const TensorView& out, void* stream = nullptr) {
  DLTensor d_x = x.dl(), d_proj = proj.dl(), d_out = out.dl();
  cuattn_mla_projection c{&d_x, &d_proj, nullptr, &d_out, transpose, 0, nullptr};
  detail::check(cuattn_mla_project(&c, stream));
}

}  // namespace cuattn
