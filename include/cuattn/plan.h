// SPDX-License-Identifier: Apache-2.0
// The choice of a kernel: from what a call asks and what a device offers to one rung of the ladder,
// with the reason. Pure functions: tested on made-up GPUs, without any. Next:
// src/attention/plan.cpp (the ladder), tiles.h (the tiles).
#pragma once

#include <cstddef>
#include <string>

#include "cuattn/names.h"
#include "cuattn/params/backward.h"
#include "cuattn/params/paged.h"
#include "cuattn/tiles.h"

namespace cuattn {

struct DeviceInfo {
  bool is_cuda;
  int32_t id;
  int32_t major, minor;  // compute capability
  int32_t num_sms;
  int32_t smem_per_block_optin;  // bytes
  int32_t
      native;  // 1: machine code for this device is in the build, 0: runs from PTX, -1: cannot run
  bool has_cublas;  // found at run time
  char name[64];
};

// Parts that the chooser cuts keys into at most: more cost the combine a further round of loads.
constexpr int32_t kMaxSplits = 128;

// What the choice depends on, and nothing else.
struct AttentionRequest {
  DType dtype;
  int32_t batch, num_heads_q, num_heads_kv, head_dim, head_dim_v;
  int32_t seqlen_q, seqlen_kv;  // ragged: the maxima
  bool ragged, uses_seqused;
  MaskKind mask;
  int32_t window_left, window_right;  // kUnlimited, or how far a query sees
  ScoreKind score;
  bool has_sinks, batch_invariant;
  bool has_bias, has_bias_map;  // params/attention.h
  bool has_slopes;              // ALiBi
  int32_t num_splits;           // asked for; 0 = chosen
  bool paged;                   // keys lie in blocks of kv_layout and block_size
  KvLayout kv_layout;
  int32_t block_size;
  bool has_dropout;
  bool is_flex;                 // asked by flex_attention
  bool has_rows, has_programs;  // row ranges; programs or lists of a user
  bool has_head_rows;           // row ranges of each query head
  bool has_functor;             // these compiled for CUDA
  FunctorForm functor;          // its packed heads, and whether it reads blocks
  bool has_score_options;       // beside a functor: softcap, ALiBi, a bias or a scale up to 0
  bool has_columns;             // float8: values lie by columns
  bool has_kv_start;            // float8: sequences begin anywhere in their arrays
  int64_t total_q;              // rows of q, of all sequences
  int64_t total_kv;             // float8: rows of k and v
  bool has_part_scales;         // float8: q or k has a scale for each block of rows, or query head
  bool has_query_head_scales;   // q has one for each query head
  bool has_sequence_scales;     // float8: some array has a scale for each sequence
  bool has_float8_pages;        // paged: the blocks hold codes of float8
  bool is_fast;                 // float8: sums of one level will do
};

// What the choice of a paged kernel depends on.
struct PagedRequest {
  DType dtype, kv_dtype;
  KvLayout kv_layout;
  int32_t num_seqs, q_len, num_heads_q, num_heads_kv, head_dim, block_size;
  int32_t capacity;        // tokens that a row of block_tables can name
  bool has_deal;           // the caller brings one (plan=)
  int32_t num_splits;      // asked for; 0 = chosen
  int32_t partition_size;  // V2's; 0 = none
  bool one_pass;           // V1
  bool batch_invariant;
  bool latent;       // mla_decode: head_dim is the latent's
  bool own_values;   // of it: values are not the latents that are the keys
  int32_t rope_dim;  // of it
  bool has_pages;    // of it: keys are not rows
  bool has_lists;    // of it: each query has a list of tokens
  bool are_rows;     // of a dense batch: a sequence has room for `capacity` tokens
  bool are_alike;    // all sequences have so many
};

// Each names a rung of every op that has one.
enum class Kernel : int32_t { cpu_naive, cpu, naive, cublas, tiled, simt, sm80, sm90 };

// How attention_varlen comes by keys in pages: its kernel follows the block tables, or they are
// copied into the workspace first, or a kernel of paged_attention runs. rows: there are no pages;
// rows_by_step: a kernel of paged_attention all the same.
enum class KeyAccess : int32_t { rows, in_blocks, gathered, by_step, rows_by_step };

// How a bias comes to sm90: a warp of its own brings it by the TMA, or the threads that add it read
// it: the kernel has no room for it, or its keys lie in blocks (direct), or its strides, dtype or
// alignment make no tensor map (unmapped). elsewhere: there is none, or another kernel runs.
enum class BiasAccess : int32_t { elsewhere, tma, direct, unmapped };

constexpr int32_t kNoInstance = -1;

// Workspace is cut into pieces of 256 bytes.
constexpr size_t whole_pieces(size_t bytes) { return (bytes + 255) / 256 * 256; }
constexpr size_t kCublasBytes = size_t{32} << 20;  // of it for cuBLAS: what NVIDIA says for sm_90

struct Plan {
  Kernel kernel;
  int32_t instance = kNoInstance;  // its number in the table (instances.h), where it stands there
  int32_t head_dim, head_dim_v;    // of the instance; smaller heads run padded in shared memory
  Tile tile;
  int32_t num_splits;   // parts of the keys that memory holds; paged: 0 = by a deal of the device
  int32_t split_keys;   // the fixed length of a split, or 0; of attention the least
  int32_t most_splits;  // attention: parts of a sequence at most, where their length is fixed
  int32_t cluster;  // paged: thread blocks that share a split and merge what they find; 1 = none
  bool in_parts;    // paged: batch invariant in parts of a split (PagedWork)
  int32_t num_workers;   // paged: thread blocks that share a deal
  int32_t tracks;        // paged: rows of tiles in which they stand (PagedDeal)
  int32_t packed_heads;  // query heads of a group that share a tile; 1 = none
  int32_t num_ctas;      // grid of a persistent kernel; 0 = a CTA for each tile
  bool draws_tiles;      // persistent: each CTA draws its next tile; else a fixed order
  KeyAccess keys;
  bool makes_numbers;  // keys are gathered as numbers of q's dtype, their blocks hold codes
  bool decodes_apart;  // sequences with one query go by a kernel of paged_attention, the others not
  int32_t num_decodes, saved_us;  // of such a kernel, and of rows_by_step: expected
  BiasAccess bias;
  int32_t chunk_keys;  // backward: keys of a part of the work, and such parts; else 0
  int32_t num_chunks;
  bool in_order;  // backward: these are added in the order of the keys
  size_t workspace_bytes;
  size_t numbers_bytes;  // of these at the end, for codes that become numbers of 16 bits; or 0
  bool turns_values;     // float8 by rows: they become columns as they come
  const char* reason;    // one clause, static storage
};

// backend: "auto", "naive", "cublas", "tiled", "simt", "sm80", "sm90", "cpu".
// Throws InvalidArgument for an unknown name, NotImplemented when no rung (or not the named one)
// can run the request.
Plan select_attention(const AttentionRequest& request, const DeviceInfo& device,
                      const char* backend);

// The order of sums in the backward pass: any; the same each time, where that costs nothing, or always;
// that of a sequence, whatever else is in its batch.
enum class SumOrder : int32_t { any, where_free, of_problem, of_sequence };

// The same for the backward pass, whose data pointers may be nullptr. `function` is named in
// refusals. backend: "auto", "cpu", "naive", "simt", "sm80", "sm90".
Plan select_backward(const char* function, const BackwardParams& params, SumOrder order,
                     const DeviceInfo& device, const char* backend);
std::string explain_backward(const Plan& plan, const BackwardParams& params,
                             const DeviceInfo& device);

// The whole ladder as text: each rung with its verdict, then the plan.
std::string explain_attention(const AttentionRequest& request, const DeviceInfo& device,
                              const char* backend);

// The same for paged_attention. `function` is named in refusals. backend: "auto", "cpu", "simt",
// "sm80", "sm90". workspace_bytes is left to src/paged/work.cpp.
Plan select_paged(const char* function, const PagedRequest& request, const DeviceInfo& device,
                  const char* backend);
// Each rung with its verdict, `chosen` marked.
std::string explain_paged(const PagedRequest& request, const DeviceInfo& device, Kernel chosen);

bool is_auto(const char* backend);  // NULL is auto, too

// Throws UnsupportedDevice where the build has no code for the device.
void require_supported(const char* function, const DeviceInfo& device);

// Behind a reason: how keys and a bias are reached, and where keys are cut.
std::string access_clause(const Plan& plan);

}  // namespace cuattn
