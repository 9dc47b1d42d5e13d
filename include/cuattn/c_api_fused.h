/* SPDX-License-Identifier: Apache-2.0
 * The C ABI of what stands around attention: rotary embedding, norms, activations and sampling.
 * Rules of arrays, streams, options and errors: c_api.h. Nothing here needs workspace or waits.
 * Shapes and meaning: docs/fused.md. C++ users include fused.h instead. */
#pragma once

#include "cuattn/c_api.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Options of apply_rope. Initialise with cuattn_rope_options_init. */
typedef struct {
  size_t struct_size;
  int32_t interleaved; /* pairs (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2) */
  int32_t inverse;     /* turns back */
  int64_t offset;      /* the first element of a row that is turned */
  int32_t layout;      /* of 4 axes: CUATTN_LAYOUT_BSHD (default) or _BHSD */
  int32_t reserved;    /* 0 */
  /* Where a token stands: positions, int64 [batch, seqlen] or [n]; or else its index in its
   * sequence, plus by how many tokens the keys of the sequence are more, as queries of attention
   * stand at the end of their keys. */
  const DLTensor* positions;
  int64_t seqlen_k;             /* default -1: as many keys as tokens */
  const DLTensor* cu_seqlens_q; /* int32 [num_seqs + 1]: x [n, ..] holds sequences end to end */
  const DLTensor* cu_seqlens_k; /* int32 [num_seqs + 1] */
  const DLTensor* seqused_q;    /* int32 [num_seqs] */
  const DLTensor* seqused_k;    /* int32 [num_seqs] */
} cuattn_rope_options;

CUATTN_API void cuattn_rope_options_init(cuattn_rope_options* options, size_t struct_size);
/* x and out [n, heads, head_dim], [batch, seqlen, heads, head_dim] or by layout; cos and sin float32
 * [max_position, rotary_dim / 2]. out may be x. */
CUATTN_API cuattn_status cuattn_apply_rope(const DLTensor* x, const DLTensor* cos,
                                           const DLTensor* sin, const cuattn_rope_options* options,
                                           const DLTensor* out, void* stream);

/* out = x + residual, added in float32 and rounded once; axes [n, heads, head_dim] or [batch, seqlen,
 * heads, head_dim], in any order before the last. residual and out are of one dtype, x of the same or
 * float32. out may be x or residual. */
CUATTN_API cuattn_status cuattn_add_residual(const DLTensor* x, const DLTensor* residual,
                                             const DLTensor* out, void* stream);
/* Checks that call and writes nothing; errors begin with `function`. lse_out and workspace may be
 * NULL: attention writes them before the sum, they share no memory with residual and out. Where x
 * has no data, no data pointer is looked at. */
CUATTN_API cuattn_status cuattn_check_residual(const char* function, const DLTensor* x,
                                               const DLTensor* residual, const DLTensor* out,
                                               const DLTensor* lse_out, const DLTensor* workspace);

/* Options of rms_norm and layer_norm. Initialise with cuattn_norm_options_init. */
typedef struct {
  size_t struct_size;
  double eps;                   /* default 1e-6 */
  double weight_offset;         /* is added to the weight */
  const DLTensor* bias;         /* [columns], layer_norm alone */
  const DLTensor* residual;     /* of x's shape: x + residual is what is normalised ... */
  const DLTensor* residual_out; /* ... and written here; may be residual */
} cuattn_norm_options;

CUATTN_API void cuattn_norm_options_init(cuattn_norm_options* options, size_t struct_size);
/* Over the last axis of x; weight [columns], of x's dtype or float32, as the bias. out may be x. */
CUATTN_API cuattn_status cuattn_rms_norm(const DLTensor* x, const DLTensor* weight,
                                         const cuattn_norm_options* options, const DLTensor* out,
                                         void* stream);
CUATTN_API cuattn_status cuattn_layer_norm(const DLTensor* x, const DLTensor* weight,
                                           const cuattn_norm_options* options, const DLTensor* out,
                                           void* stream);

enum { CUATTN_ACT_SILU = 0, CUATTN_ACT_GELU = 1, CUATTN_ACT_GELU_TANH = 2 };

/* out [.., n] = act(a) * b, with a and b the halves of the last axis of x [.., 2 n]; bias [2 n] of
 * x's dtype, or NULL, is added to x first. */
CUATTN_API cuattn_status cuattn_act_mul(const DLTensor* x, const DLTensor* bias, int32_t act,
                                        const DLTensor* out, void* stream);
/* out = act(x + bias); bias [n] or NULL. out may be x. */
CUATTN_API cuattn_status cuattn_bias_act(const DLTensor* x, const DLTensor* bias, int32_t act,
                                         const DLTensor* out, void* stream);

/* Options of sample and speculative_verify. Initialise with cuattn_sample_options_init. Each number
 * may be an array instead, one for each row, on the device of the logits. */
typedef struct {
  size_t struct_size;
  double temperature;           /* default 1; 0: the first of the largest */
  double top_p;                 /* default 1: off */
  double min_p;                 /* 0: off */
  int64_t top_k;                /* 0: off */
  int64_t seed, offset;         /* seed: default -1, which is none */
  int32_t joint;                /* 1: top_p of all the mass, 0: of what top_k leaves */
  int32_t reserved;             /* 0 */
  const DLTensor* temperatures; /* float32 [rows] */
  const DLTensor* top_ps;       /* float32 [rows] */
  const DLTensor* min_ps;       /* float32 [rows] */
  const DLTensor* top_ks;       /* int32 [rows] */
  const DLTensor* seeds;        /* int64 [rows] */
  const DLTensor* offsets;      /* int64 [rows], or one element for all */
} cuattn_sample_options;

CUATTN_API void cuattn_sample_options_init(cuattn_sample_options* options, size_t struct_size);
/* logits [rows, vocabulary]; out int32 [rows], -1 for a row that cannot be drawn from. */
CUATTN_API cuattn_status cuattn_sample(const DLTensor* logits, const cuattn_sample_options* options,
                                       const DLTensor* out, void* stream);
/* draft_probs float32 [rows, n, vocabulary], target_probs float32 [rows, n + 1, vocabulary],
 * draft_tokens int32 [rows, n]; tokens int32 [rows, n + 1], accepted int32 [rows]. Of the options,
 * seed and offset count. */
CUATTN_API cuattn_status cuattn_speculative_verify(const DLTensor* draft_probs,
                                                   const DLTensor* target_probs,
                                                   const DLTensor* draft_tokens,
                                                   const cuattn_sample_options* options,
                                                   const DLTensor* tokens, const DLTensor* accepted,
                                                   void* stream);

#ifdef __cplusplus
} /* extern "C" */
#endif
