/* SPDX-License-Identifier: Apache-2.0
 * The C ABI of libcuattn.so. Arrays are borrowed `const DLTensor*`; every function returns a status
 * and leaves its message in cuattn_last_error() of the calling thread. Nothing here allocates
 * device memory or waits for the device, but where it says so. C++ users include attention.h,
 * kv_cache.h, block_pool.h and explain.h instead, thin wrappers that throw.
 *
 * A pointer may be NULL where that is said, as a stream (the default one), for what is destroyed,
 * and for what has no elements: a list with a count of 0, a workspace of 0 bytes. Elsewhere NULL is
 * refused as any wrong argument is. A DLTensor may hold anything: what cannot be an array (negative
 * extents, bytes beyond 64 bits) is refused.
 *
 * Programs and libraries of different versions. Structs of options grow at their end; each begins
 * with struct_size, which X_options_init(&options, sizeof options) writes with the defaults.
 *   smaller than the library's   the fields that it lacks have their defaults
 *   larger, up to 4096 bytes     what it has beyond must be 0: an option that the library does not
 *                                know is refused (CUATTN_NOT_IMPLEMENTED), never ignored
 *   else                         refused: nobody has initialised it
 * So a new field is appended, means at 0 what libraries without it do, and no struct ends in
 * padding. All other structs keep their size; cuattn_device and cuattn_plan have room to grow in.
 * Shapes, layouts and the meaning of every option: docs/layouts.md and docs/numerics.md. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "cuattn/dlpack.h"

#if defined(_WIN32)
#error "cuattn supports Linux"
#endif
#define CUATTN_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  CUATTN_OK = 0,
  CUATTN_INVALID_ARGUMENT = 1,   /* the caller's fault; ValueError in Python */
  CUATTN_NOT_IMPLEMENTED = 2,    /* valid, but no kernel serves it; NotImplementedError */
  CUATTN_UNSUPPORTED_DEVICE = 3, /* the build has no code for this device; RuntimeError */
  CUATTN_CUDA_ERROR = 4,         /* a CUDA call failed; cuattn.CudaError */
  CUATTN_OUT_OF_MEMORY = 5,      /* workspace missing or too small; MemoryError */
  CUATTN_INTERNAL_ERROR = 6,     /* a bug of the library; RuntimeError */
  CUATTN_OUT_OF_BLOCKS = 7       /* too few free blocks in a pool; cuattn.OutOfBlocksError */
} cuattn_status;

/* The message of the last failed call on this thread; valid until the next one. */
CUATTN_API const char* cuattn_last_error(void);
CUATTN_API const char* cuattn_version(void);
enum {
  CUATTN_LAYOUT_BSHD = 0,
  CUATTN_LAYOUT_BHSD = 1,
  CUATTN_LAYOUT_NHD = 2,
  CUATTN_LAYOUT_THD = 3
};
/* Products of float8 values: sums of a tile of keys by the tensor cores, of tiles in float32; or all
 * by the tensor cores, which keep about 13 bits. What has no such products sums in float32. */
enum { CUATTN_ACCUMULATE_EXACT = 0, CUATTN_ACCUMULATE_FAST = 1 };

/* Options of attention. Initialise with cuattn_attention_options_init. Tensors may be NULL. */
typedef struct {
  size_t struct_size;
  int32_t layout;                    /* CUATTN_LAYOUT_BSHD or _BHSD; ignored for ragged calls */
  int32_t causal;                    /* bottom-right aligned */
  int64_t window_left, window_right; /* -1 = unlimited */
  int32_t has_scale;                 /* 0: 1 / sqrt(head_dim) */
  int32_t num_splits;                /* a wish; 0 = chosen */
  double scale;
  double softcap; /* 0 = off */
  int32_t batch_invariant;
  int32_t return_lse;
  const DLTensor* alibi_slopes; /* float32 [num_heads_q] or [batch, num_heads_q] */
  const DLTensor* sinks;        /* float32 [num_heads_q] */
  const DLTensor* bias;         /* q's dtype, float32 or bool, broadcastable to [batch, num_heads_q,
                                   seqlen_q, seqlen_kv] */
  const DLTensor* seqused_q;    /* int32 [batch] */
  const DLTensor* seqused_k;    /* int32 [batch] */
  /* Ragged calls: both given, int32 [batch + 1], never falling; max_seqlen_* are upper bounds. */
  const DLTensor* cu_seqlens_q;
  const DLTensor* cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  /* Ragged calls: k and v are caches in blocks (kv_layout below), cu_seqlens_k may be NULL where
   * seqused_k says the lengths. Where the kernel does not read blocks, the keys are gathered into
   * the workspace first; cuattn_attention_explain says so. */
  const DLTensor* block_tables; /* int32 [batch, max_blocks_per_seq] */
  int32_t kv_layout;            /* CUATTN_KV_NHD, _HND, _VLLM */
  const char* backend;          /* NULL = "auto" */
  /* Dropout of the probabilities, in steps of 1 / 256; 0 = off. Seed, offset and place alone say
   * which are kept (docs/backward.md). It takes a seed in [0, 2^63) (-1, the default: none) and an
   * offset in [0, 2^32), or dropout_state: int64 [2] of both, a seed of any bits, on q's device. */
  double dropout_p;
  int64_t dropout_seed, dropout_offset;
  const DLTensor* dropout_state;
  const DLTensor* kv_start; /* int32 [batch]: the first key in use; not of ragged calls */
  /* Of codes, float8 or int8. dtype says what bytes (uint8) are: CUATTN_KV_DTYPE_E4M3; else AUTO.
   * value = stored * scale, a number (default 1), or instead float32 on the device of q: one
   * element, [num_heads_kv] or [batch, num_heads_kv]; of q also [batch, num_heads_q, blocks], of k
   * [batch, num_heads_kv, blocks], a block being 128 rows of a sequence; of v [batch, num_heads_kv,
   * head_dim_v]. out is then bfloat16, or float16 or float32 as the caller gives it. */
  int32_t dtype;
  double q_scale, k_scale, v_scale;
  const DLTensor *q_scales, *k_scales, *v_scales;
  /* Dropout of a part of a greater call: the places there of its first row, key (on CUDA a multiple
   * of 16) and head, and how many heads a sequence has there, 0 = num_heads_q. */
  int64_t dropout_row, dropout_key, dropout_head, dropout_heads;
  int32_t accumulate, reserved; /* of codes: CUATTN_ACCUMULATE_EXACT or _FAST; 0 */
} cuattn_attention_options;

CUATTN_API void cuattn_attention_options_init(cuattn_attention_options* options,
                                              size_t struct_size);

/* A validated and planned call. `prepare` fills it; the caller allocates out (and lse, workspace)
 * as it says; `run` launches, and may be called again, with other outputs and workspace. It borrows
 * the tensors of `prepare`, which must live until `run` returns. */
typedef struct {
  DLDevice device;
  DLDataType out_dtype;
  int32_t out_ndim, lse_ndim;
  int64_t out_shape[4];
  int64_t lse_shape[3];
  size_t workspace_bytes; /* 256-byte aligned memory of `device`; 0 = none */
  int32_t nothing_to_do;  /* out has no element */
  uint64_t state[512];    /* the library's own: 4 KB, of which it uses a part */
} cuattn_attention_call;

CUATTN_API cuattn_status cuattn_attention_prepare(const DLTensor* q, const DLTensor* k,
                                                  const DLTensor* v,
                                                  const cuattn_attention_options* options,
                                                  cuattn_attention_call* call);
/* lse may be NULL. stream is a cudaStream_t, ignored on the CPU. out may be float32 where q is not,
 * unrounded for a merge (on CUDA not by naive, cublas, tiled): here and in cuattn_paged_run but V1, V2. out, lse and workspace share no
 * memory with each other or with the inputs. */
CUATTN_API cuattn_status cuattn_attention_run(cuattn_attention_call* call, const DLTensor* out,
                                              const DLTensor* lse, void* workspace,
                                              size_t workspace_bytes, void* stream);

/* What a user wrote, beside the options of attention. Initialise with cuattn_flex_options_init.
 * Served on the CPU; on CUDA row ranges are, by naive, cublas, simt, sm80 and sm90. */
typedef struct {
  size_t struct_size;
  /* Row i sees at most the keys [row_begin[i], row_end[i]): int32 of the shape of lse, where any
   * extent may be 1. Both or none. */
  const DLTensor *row_begin, *row_end;
  /* Operations, int32 [n, 6] in host memory: the score from the scaled and capped score, and
   * whether a key is seen. params/flex.h has the codes, docs/flex.md the meaning. */
  const DLTensor *score_program, *mask_program;
  const DLTensor* const* arrays; /* that programs read: bool, int32 or float32, 0 to 2 axes */
  int64_t num_arrays;
  /* Which blocks of queries and keys hold a visible pair: int32 [batch or 1, num_heads_q or 1,
   * query blocks + 1], and of each query block the key blocks from the last to the first, as
   * 2 * block + 1 where mask_program is yet to be asked, else 2 * block. */
  const DLTensor *block_starts, *block_entries;
  int32_t query_block, key_block; /* queries and keys of a block */
  /* Of cuattn_flex_backward_prepare alone, and needed there with score_program: operations that
   * give the derivative by the score, and to the gradients of arrays, which are float32 of the
   * shapes of `arrays`, num_arrays long, NULL where one is not wanted. They are written by the run. */
  const DLTensor* score_gradient;
  const DLTensor* const* array_gradients;
  /* On CUDA, in place of the two programs: machine code that reads `arrays`, and the int32 [n] of
   * host memory that are its numbers, a float as its bits. 0: there is none. */
  int64_t functor;
  const DLTensor* numbers;
} cuattn_flex_options;

CUATTN_API void cuattn_flex_options_init(cuattn_flex_options* options, size_t struct_size);
/* Keeps machine code of one kernel, which the first call loads, for ever; flex/emit.py writes it for
 * heads of a group in a tile of sm90 (else 1), and keys in blocks (else 0). *functor: its number. */
CUATTN_API cuattn_status cuattn_flex_add_functor(const void* image, size_t bytes,
                                                 int32_t packed_heads, int32_t reads_blocks,
                                                 int64_t* functor);
/* Runs as attention does, by cuattn_attention_run; also borrows what flex_options point to. */
CUATTN_API cuattn_status cuattn_flex_prepare(const DLTensor* q, const DLTensor* k,
                                             const DLTensor* v,
                                             const cuattn_attention_options* options,
                                             const cuattn_flex_options* flex_options,
                                             cuattn_attention_call* call);

/* The gradients of a loss by the arguments of attention. */
enum {
  CUATTN_NEED_DQ = 1,
  CUATTN_NEED_DK = 2,
  CUATTN_NEED_DV = 4,
  CUATTN_NEED_DBIAS = 8,
  CUATTN_NEED_DSINKS = 16,
  CUATTN_NEED_DSLOPES = 32
};

/* Beside those of the forward call. Initialise with cuattn_backward_options_init. */
typedef struct {
  size_t struct_size;
  int32_t need;          /* CUATTN_NEED_*, or-ed; default DQ, DK and DV */
  int32_t deterministic; /* 1: the same bits each time; 0: need not be; default -1: where it costs
                            little. Only dq of the fused kernel of sm90 moves. */
  const DLTensor* dlse;  /* gradient of lse, float32, of its shape; NULL: 0 */
} cuattn_backward_options;

/* Of the forward pass: its arguments, what it gave (lse float32), and the gradient of out. */
typedef struct {
  const DLTensor *dout, *q, *k, *v, *out, *lse;
} cuattn_backward_arrays;

/* Results, NULL where not needed, of the shapes of what they are gradients of. dq has the dtype of
 * q; dk and dv have it or are both float32; dbias has the dtype of the bias; dsinks and dslopes are
 * float32. Rows of ragged arrays that belong to no sequence become 0. */
typedef struct {
  const DLTensor *dq, *dk, *dv, *dbias, *dsinks, *dslopes;
} cuattn_gradients;

/* A validated and planned backward pass, as cuattn_attention_call is one of the forward pass. */
typedef struct {
  DLDevice device;
  size_t workspace_bytes; /* 256-byte aligned memory of `device`; 0 = none */
  uint64_t state[512];    /* the library's own */
} cuattn_backward_call;

CUATTN_API void cuattn_backward_options_init(cuattn_backward_options* options, size_t struct_size);
/* `options` are those of the forward call; batch_invariant asks it of the gradients too. On the
 * CPU and on CUDA; docs/backward.md says which kernel serves what. */
CUATTN_API cuattn_status cuattn_attention_backward_prepare(
    const cuattn_backward_arrays* arrays, const cuattn_attention_options* options,
    const cuattn_backward_options* backward_options, cuattn_backward_call* call);
/* The same of flex_attention, run by cuattn_attention_backward_run; also borrows what flex_options
 * point to. On CUDA by a functor, or row ranges alone. */
CUATTN_API cuattn_status cuattn_flex_backward_prepare(
    const cuattn_backward_arrays* arrays, const cuattn_attention_options* options,
    const cuattn_backward_options* backward_options, const cuattn_flex_options* flex_options,
    cuattn_backward_call* call);
/* Gradients and workspace share no memory with each other or with the inputs. */
CUATTN_API cuattn_status cuattn_attention_backward_run(cuattn_backward_call* call,
                                                       const cuattn_gradients* gradients,
                                                       void* workspace, size_t workspace_bytes,
                                                       void* stream);

/* Merges two results over disjoint keys. layout: BSHD, BHSD (out 4-D, lse [batch, heads, seqlen]),
 * NHD (out [n, heads, dim], lse [n, heads]) or THD (out [total, heads, dim], lse [heads, total]). Of
 * lse +-inf: no keys. out may be a part, or of 16 bits with float32 parts; lse_out NULL, or a lse. */
CUATTN_API cuattn_status cuattn_merge_states(const DLTensor* out_a, const DLTensor* lse_a,
                                             const DLTensor* out_b, const DLTensor* lse_b,
                                             const DLTensor* out, const DLTensor* lse_out,
                                             int32_t layout, void* stream);
/* The same for parts stacked on a new first axis of outs and lses. */
CUATTN_API cuattn_status cuattn_merge_many(const DLTensor* outs, const DLTensor* lses,
                                           const DLTensor* out, const DLTensor* lse_out,
                                           int32_t layout, void* stream);

/* Caches in blocks; k and v have the same layout.
 *   NHD   [num_blocks, block_size, num_heads_kv, head_dim]
 *   HND   [num_blocks, num_heads_kv, block_size, head_dim]
 *   VLLM  k [num_blocks, num_heads_kv, head_dim / x, block_size, x], x = 16 bytes / itemsize;
 *         v [num_blocks, num_heads_kv, head_dim, block_size] */
enum { CUATTN_KV_NHD = 0, CUATTN_KV_HND = 1, CUATTN_KV_VLLM = 2 };
enum { CUATTN_KV_DTYPE_AUTO = 0, CUATTN_KV_DTYPE_E4M3 = 1 };

/* Options of paged attention. Initialise with cuattn_paged_options_init. Tensors may be NULL. */
typedef struct {
  size_t struct_size;
  int32_t version;                   /* 0: paged_attention, 1 and 2: PagedAttention V1 and V2 */
  int32_t kv_layout;                 /* CUATTN_KV_NHD, _HND, _VLLM */
  int32_t kv_dtype;                  /* of bytes (uint8): CUATTN_KV_DTYPE_E4M3; else AUTO */
  int32_t causal;                    /* default 1 */
  int64_t window_left, window_right; /* -1 = unlimited */
  int32_t has_scale;                 /* 0: 1 / sqrt(head_dim) */
  int32_t num_splits;                /* a wish; 0 = chosen */
  double scale;
  double softcap; /* 0 = off */
  int32_t batch_invariant;
  const DLTensor* alibi_slopes;        /* float32 [num_heads_q] or [num_seqs, num_heads_q] */
  const DLTensor* sinks;               /* float32 [num_heads_q] */
  double k_scale, v_scale;             /* of e4m3 caches: value = stored * scale; default 1 */
  const DLTensor *k_scales, *v_scales; /* float32 [1], [num_heads_kv], [num_seqs, num_heads_kv] */
  const DLTensor* plan;                /* of cuattn_paged_plan_run */
  /* V2 alone. partition_size 256, 512 (default) or 1024; max_context_len < 0, or above that: what
   * block_tables can name. Buffers not given are of the workspace: float32 [num_seqs, num_heads_q,
   * max(ceil(max_context_len / partition_size), 1)], tmp_out of q's dtype [.., head_dim]. */
  int64_t partition_size, max_context_len;
  const DLTensor *exp_sums, *max_logits, *tmp_out;
  const char* backend;      /* NULL = "auto" */
  double q_scale;           /* of e4m3 q over e4m3 caches, where out is bfloat16, or as given */
  const DLTensor* q_scales; /* instead, as k_scales; V1 and V2 take no such q */
} cuattn_paged_options;

CUATTN_API void cuattn_paged_options_init(cuattn_paged_options* options, size_t struct_size);

/* Attention over paged keys. q [num_seqs, num_heads_q, head_dim] (decode) or [num_seqs, q_len,
 * num_heads_q, head_dim]; block_tables int32 [num_seqs, max_blocks_per_seq]; context_lens int32
 * [num_seqs], the newest token included. Runs as attention does: prepare, allocate, run. */
CUATTN_API cuattn_status cuattn_paged_prepare(const DLTensor* q, const DLTensor* k_cache,
                                              const DLTensor* v_cache, const DLTensor* block_tables,
                                              const DLTensor* context_lens,
                                              const cuattn_paged_options* options,
                                              cuattn_attention_call* call);
CUATTN_API cuattn_status cuattn_paged_run(cuattn_attention_call* call, const DLTensor* out,
                                          const DLTensor* lse, void* workspace,
                                          size_t workspace_bytes, void* stream);
/* What run would refuse, with nothing written: for before the newest tokens go to the caches. */
CUATTN_API cuattn_status cuattn_paged_check(const cuattn_attention_call* call, const DLTensor* out,
                                            const DLTensor* lse, const void* workspace,
                                            size_t workspace_bytes, void* stream);

/* What the calls of a step have in common, for its plan. */
typedef struct {
  int64_t q_len, num_heads_q, num_heads_kv, head_dim, block_size;
  DLDataType dtype; /* of q */
} cuattn_paged_shape;

/* A plan cuts the keys of a step into equal work for the device; made on the device, it serves all
 * layers of the step. prepare says its size (int32, out_shape[0]), run fills it. Of the options,
 * kv_layout, kv_dtype, causal, window and backend count. */
CUATTN_API cuattn_status cuattn_paged_plan_prepare(const DLTensor* block_tables,
                                                   const DLTensor* context_lens,
                                                   const cuattn_paged_shape* shape,
                                                   const cuattn_paged_options* options,
                                                   cuattn_attention_call* call);
CUATTN_API cuattn_status cuattn_paged_plan_run(cuattn_attention_call* call, const DLTensor* plan,
                                               void* stream);

/* Options of reshape_and_cache. Initialise with cuattn_cache_options_init. */
typedef struct {
  size_t struct_size;
  int32_t kv_layout, rope_interleaved; /* CUATTN_KV_*; a flag */
  /* Of a float8_e4m3fn cache, value = stored * scale: a number, or float32 [num_heads_kv] (or one
   * element) on the device of k; by default 1. */
  int32_t has_k_scale, has_v_scale;
  double k_scale, v_scale;
  const DLTensor *k_scales, *v_scales;
  /* Rotation of k: all three or none. */
  const DLTensor *cos, *sin; /* float32 [max_position, rotary_dim / 2] */
  const DLTensor* positions; /* int64 [num_tokens]; of newest tokens it may be left out */
  /* Instead of slot_mapping: int32 [num_seqs, max_blocks_per_seq] and [num_seqs], lengths with these
   * tokens. Rows are the newest of each, as many of each; of a shorter one the last are written. */
  const DLTensor *block_tables, *context_lens;
} cuattn_cache_options;

CUATTN_API void cuattn_cache_options_init(cuattn_cache_options* options, size_t struct_size);

/* Writes row i of k and v, [num_tokens, num_heads_kv, head_dim], into slot slot_mapping[i] (int64)
 * of the caches; slot = block * block_size + token in the block, -1 skips. NULL: by block_tables. */
CUATTN_API cuattn_status cuattn_reshape_and_cache(const DLTensor* k, const DLTensor* v,
                                                  const DLTensor* k_cache, const DLTensor* v_cache,
                                                  const DLTensor* slot_mapping,
                                                  const cuattn_cache_options* options,
                                                  void* stream);
/* Its checks alone, but for those of the contents: data pointers are not read and may be NULL. */
CUATTN_API cuattn_status cuattn_reshape_and_cache_check(const DLTensor* k, const DLTensor* v,
                                                        const DLTensor* k_cache,
                                                        const DLTensor* v_cache,
                                                        const DLTensor* slot_mapping,
                                                        const cuattn_cache_options* options);
/* The reverse: the first tokens of each sequence, end to end, into k_out and v_out [num_tokens,
 * num_heads_kv, head_dim] of the caches' dtype. block_tables int32 [num_seqs, max_blocks_per_seq],
 * cu_seqlens int32 [num_seqs + 1]. */
CUATTN_API cuattn_status cuattn_gather_cache(const DLTensor* k_cache, const DLTensor* v_cache,
                                             const DLTensor* block_tables,
                                             const DLTensor* cu_seqlens, const DLTensor* k_out,
                                             const DLTensor* v_out, int32_t kv_layout,
                                             void* stream);
/* As cuattn_reshape_and_cache_check. */
CUATTN_API cuattn_status cuattn_gather_cache_check(const DLTensor* k_cache, const DLTensor* v_cache,
                                                   const DLTensor* block_tables,
                                                   const DLTensor* cu_seqlens,
                                                   const DLTensor* k_out, const DLTensor* v_out,
                                                   int32_t kv_layout);
/* The last element of cu_seqlens, for allocating k_out and v_out. On CUDA it waits for stream. */
CUATTN_API cuattn_status cuattn_gather_cache_total(const DLTensor* cu_seqlens, void* stream,
                                                   int64_t* total);

/* Copies whole blocks within each cache: block_mapping int64 [n, 2] (source, destination), on the
 * host or on the device of the caches. Every cache has its blocks on the first axis; those of a
 * list are alike. All pairs are copied at once: a destination occurs once, and never as the source
 * of another pair. */
CUATTN_API cuattn_status cuattn_copy_blocks(const DLTensor* const* k_caches, int32_t num_k_caches,
                                            const DLTensor* const* v_caches, int32_t num_v_caches,
                                            const DLTensor* block_mapping, void* stream);
/* Copies whole blocks of src[i] into dst[i], within one device or between it and the host.
 * block_mapping is on the host. Host memory must live, and stay as it is, until the stream has
 * passed; pinned memory (cuattn_host_alloc) lets the copies overlap with kernels. */
CUATTN_API cuattn_status cuattn_swap_blocks(const DLTensor* const* src, int32_t num_src,
                                            const DLTensor* const* dst, int32_t num_dst,
                                            const DLTensor* block_mapping, void* stream);
/* Memory of the host for swap_blocks, on 256 bytes: pinned where there is a CUDA device. */
CUATTN_API cuattn_status cuattn_host_alloc(size_t bytes, void** memory, int32_t* is_pinned);
CUATTN_API void cuattn_host_free(void* memory, int32_t is_pinned);

/* A GPU for explain, real or made up. */
typedef struct {
  int32_t is_cuda, major, minor, num_sms, smem_per_block_optin;
  int32_t native; /* 1: the build has machine code for it, 0: it runs from PTX, -1: it cannot run */
  int32_t has_cublas;
  char name[64];
  int32_t reserved[41]; /* must be 0 */
} cuattn_device;

typedef struct {
  char kernel[16], mask[16], score[16];
  int32_t tile_m, tile_n, stages, warps, head_dim, head_dim_v;
  int32_t num_splits; /* parts of the keys, merged through memory; 0: a plan of the device's */
  int32_t cluster;    /* thread blocks that share the keys of a split and merge on chip; 1 = none */
  int32_t packed_heads; /* query heads of a group that share a tile; 1 = none */
  size_t workspace_bytes;
  char schedule[40]; /* who computes which tile */
  char reason[160];
  char ladder[4096];    /* each rung with its verdict, one line each */
  int64_t reserved[32]; /* 0 */
} cuattn_plan;

/* Which kernel a call would run and why: of attention, its backward pass and paged attention. Data
 * pointers are not read and may be NULL. device NULL = the tensors' own. */
CUATTN_API cuattn_status cuattn_attention_explain(const DLTensor* q, const DLTensor* k,
                                                  const DLTensor* v,
                                                  const cuattn_attention_options* options,
                                                  const cuattn_device* device, cuattn_plan* plan);
CUATTN_API cuattn_status cuattn_attention_backward_explain(
    const cuattn_backward_arrays* arrays, const cuattn_attention_options* options,
    const cuattn_backward_options* backward_options, const cuattn_device* device,
    cuattn_plan* plan);
CUATTN_API cuattn_status cuattn_paged_explain(const DLTensor* q, const DLTensor* k_cache,
                                              const DLTensor* v_cache, const DLTensor* block_tables,
                                              const DLTensor* context_lens,
                                              const cuattn_paged_options* options,
                                              const cuattn_device* device, cuattn_plan* plan);
typedef struct {
  char op[32], kernel[16], arch[32], dtype[16], mask[16], score[16];
  int32_t head_dim, head_dim_v;
} cuattn_kernel_info;

CUATTN_API int32_t cuattn_kernel_count(void);
CUATTN_API cuattn_status cuattn_kernel_at(int32_t index, cuattn_kernel_info* info);

/* The blocks of a paged KV cache: which are free, who shares them, and which hold a prefix that can
 * be had again. Blocks are numbers in [0, num_blocks); the pool holds no keys and no values. Every
 * function is safe to call from several threads, takes O(1) time per block (and per token given),
 * and a failed one changes nothing. */
typedef struct cuattn_block_pool cuattn_block_pool;

typedef struct {
  int64_t num_blocks, block_size; /* as created; block_size in tokens */
  int64_t free_blocks;            /* that allocate can hand out, the evictable ones included */
  int64_t used_blocks;            /* with a reference */
  int64_t shared_blocks;          /* with two references and more */
  int64_t cached_blocks;          /* that match_prefix can find, used or not */
  int64_t evictable_blocks;       /* cached, without a reference */
  int64_t evictions;              /* cached blocks handed out anew, since creation */
  int64_t copies;                 /* blocks that make_writable replaced */
  int64_t queried_tokens, matched_tokens; /* of all calls of match_prefix */
} cuattn_block_pool_stats;

CUATTN_API cuattn_status cuattn_block_pool_create(int64_t num_blocks, int64_t block_size,
                                                  cuattn_block_pool** pool);
CUATTN_API void cuattn_block_pool_destroy(cuattn_block_pool* pool);
/* ids[count]: free blocks, each now with one reference. CUATTN_OUT_OF_BLOCKS: none is taken. */
CUATTN_API cuattn_status cuattn_block_pool_allocate(cuattn_block_pool* pool, int64_t count,
                                                    int32_t* ids);
/* Drops one reference of each block. Without one a block is free; a committed one can be matched
 * until it is handed out anew, the longest unused first, and of one call the last of ids first. */
CUATTN_API cuattn_status cuattn_block_pool_free(cuattn_block_pool* pool, const int32_t* ids,
                                                int64_t count);
/* Adds one reference to each block. */
CUATTN_API cuattn_status cuattn_block_pool_fork(cuattn_block_pool* pool, const int32_t* ids,
                                                int64_t count);
CUATTN_API cuattn_status cuattn_block_pool_ref_count(cuattn_block_pool* pool, int32_t id,
                                                     int64_t* count);
/* *writable: `id` itself if the caller holds its only reference, no longer matched then; else a new
 * block that takes over this reference, into which the caller copies the content of `id`. */
CUATTN_API cuattn_status cuattn_block_pool_make_writable(cuattn_block_pool* pool, int32_t id,
                                                         int32_t* writable);
/* What keys depend on beside the tokens: an adapter, an image behind placeholder tokens, a tenant.
 * Sequences share blocks only where their salts are the same bytes; no bytes are no salt.
 * Initialise with cuattn_prefix_options_init; NULL in its place means no salt. */
typedef struct {
  size_t struct_size;
  const void* salt;
  int64_t salt_bytes;
} cuattn_prefix_options;

CUATTN_API void cuattn_prefix_options_init(cuattn_prefix_options* options, size_t struct_size);
/* The longest chain of committed full blocks that begins like `tokens`, each with one more
 * reference. ids has room for num_tokens / block_size. */
CUATTN_API cuattn_status cuattn_block_pool_match_prefix(cuattn_block_pool* pool,
                                                        const int64_t* tokens, int64_t num_tokens,
                                                        const cuattn_prefix_options* options,
                                                        int32_t* ids, int64_t* num_ids);
/* The keys and values of `tokens` have been written to `ids`, which follow `parent` (a committed
 * block, or -1 for the begin of a sequence, which alone has a salt): full blocks can be matched
 * from now on, tokens beyond the last full block are ignored. Where the same tokens are cached
 * already, that block stays the one found. */
CUATTN_API cuattn_status cuattn_block_pool_commit(cuattn_block_pool* pool, const int32_t* ids,
                                                  int64_t count, const int64_t* tokens,
                                                  int64_t num_tokens, int32_t parent,
                                                  const cuattn_prefix_options* options);
CUATTN_API cuattn_status cuattn_block_pool_get_stats(cuattn_block_pool* pool,
                                                     cuattn_block_pool_stats* stats);

/* Version, build, CPU and every GPU as a JSON object; the text lives until the next call on this
 * thread. "{}" where an environment variable is wrong: cuattn_last_error() says which. */
CUATTN_API const char* cuattn_info_json(void);

#ifdef __cplusplus
} /* extern "C" */
#endif
