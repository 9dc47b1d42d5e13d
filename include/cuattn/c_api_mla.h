/* SPDX-License-Identifier: Apache-2.0
 * The C ABI of latent attention (MLA). Rules of arrays, streams, options and errors: c_api.h. Shapes
 * and meaning: docs/mla.md. C++ users include mla.h instead. */
#pragma once

#include "cuattn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Latent attention (MLA), absorbed and paged. q_nope [num_seqs, num_heads, latent] or [num_seqs,
 * q_len, num_heads, latent], already times the key projection; ckv_cache [num_blocks, block_size,
 * latent] is key and value. q_pe [..., rope] and kpe_cache [num_blocks, block_size, rope], the
 * rotated columns, may be NULL. A ckv_cache of uint8, [num_blocks, block_size, 656], holds packed
 * latents of 512 e4m3 codes, 4 float32 scales of 128 of them each and 64 bfloat16 rope columns;
 * kpe_cache is NULL then. v_cache, like ckv_cache, holds other values; NULL: there are none.
 * block_tables and context_lens NULL: ckv_cache is [num_seqs, seqlen, latent], without pages, unless
 * indices, int32 [num_seqs(, q_len), topk], lists the tokens that each query sees by their slots,
 * block * block_size + place in the block, in a cache with blocks of any size. Other numbers, as -1,
 * are no token. topk_lens, int32 [num_seqs(, q_len)]: entries of each list; NULL: topk. */
typedef struct {
  const DLTensor *q_nope, *q_pe, *ckv_cache, *kpe_cache, *v_cache, *block_tables, *context_lens;
  const DLTensor *indices, *topk_lens;
} cuattn_mla_arrays;

/* out is like q_nope, lse as paged attention's; run it by cuattn_paged_run. Of the options, scale
 * has no default, and alibi_slopes, plan, kv_layout, kv_dtype and the scales are refused. */
CUATTN_API cuattn_status cuattn_mla_decode_prepare(const cuattn_mla_arrays* arrays,
                                                   const cuattn_paged_options* options,
                                                   cuattn_attention_call* call);

/* out[b, i, h] = x[b, i, h] proj[h], by transpose times proj[h]^T; all axes [batch, rows, heads,
 * columns], proj [heads, latent, head_dim]. x may have a stride of 0 over heads. With proj NULL x is
 * copied. tail, or NULL: columns that follow those of the product in out. apart, or NULL: an array
 * that the caller writes meanwhile, which may share no memory with out and proj. check_only: nothing
 * is written, all is checked. */
typedef struct {
  const DLTensor *x, *proj, *tail, *out;
  int32_t transpose, check_only;
  const DLTensor* apart;
} cuattn_mla_projection;
CUATTN_API cuattn_status cuattn_mla_project(const cuattn_mla_projection* projection, void* stream);

/* Writes row i of ckv [num_tokens, latent] and kpe [num_tokens, rope] into slot slot_mapping[i] of
 * ckv_cache [num_blocks, block_size, latent] and kpe_cache [num_blocks, block_size, rope]. Of the
 * options cos, sin, positions and rope_interleaved count, which rotate kpe, and block_tables with
 * context_lens, in place of slot_mapping as in cuattn_reshape_and_cache. Where kpe and kpe_cache
 * are NULL both, the latents alone are written. Into a ckv_cache of packed latents both are, without
 * a rotation, and kpe_cache is NULL. */
CUATTN_API cuattn_status cuattn_mla_write(const DLTensor* ckv, const DLTensor* kpe,
                                          const DLTensor* ckv_cache, const DLTensor* kpe_cache,
                                          const DLTensor* slot_mapping,
                                          const cuattn_cache_options* options, void* stream);

/* As cuattn_paged_explain. */
CUATTN_API cuattn_status cuattn_mla_decode_explain(const cuattn_mla_arrays* arrays,
                                                   const cuattn_paged_options* options,
                                                   const cuattn_device* device, cuattn_plan* plan);

#ifdef __cplusplus
} /* extern "C" */
#endif
