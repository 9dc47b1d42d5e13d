// SPDX-License-Identifier: Apache-2.0
// Rotary embedding of q within the kernel of a prepared call: who turns it, and the tables. Next:
// cuda/attention/sm90/rotate.cuh.
#include "src/attention/rotation.h"

#include <algorithm>

#include "src/check/arrays.h"
#include "src/fused/fused.h"
#include "src/options.h"

namespace cuattn {
namespace {

// What apply_rope would be told of q, but where q and its result lie.
RotateParams as_turned(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  RotateParams turned{};
  turned.dtype = p.dtype;
  turned.batch = call.ragged ? 1 : p.batch;
  turned.seqlen = call.ragged ? p.total_q : p.seqlen_q;
  turned.num_heads = p.num_heads_q;
  turned.head_dim = p.head_dim;
  TokenPlaces& places = turned.places;
  places.queries = p.seqlen_q;
  places.keys = p.seqlen_kv;
  places.cu_seqlens_q = p.cu_seqlens_q;
  places.cu_seqlens_k = p.cu_seqlens_kv;
  places.seqused_q = p.seqused_q;
  places.seqused_k = p.seqused_kv;
  return turned;
}

// The kernel reads the tables by 16 bytes.
bool has_pieces(const RotateParams& p) {
  auto is_aligned = [](const float* table, int64_t stride) {
    return reinterpret_cast<uintptr_t>(table) % 16 == 0 && stride % 4 == 0 &&
           std::abs(stride) <= INT32_MAX;
  };
  return p.rotary_dim % 8 == 0 && is_aligned(p.cos, p.cos_stride) &&
         is_aligned(p.sin, p.sin_stride);
}

}  // namespace

bool rotates_queries(const AttentionCall& call) {
  const Plan& plan = call.plan;
  bool reads_rows = plan.keys == KeyAccess::rows || plan.keys == KeyAccess::gathered;
  return plan.rotates_queries && reads_rows && !plan.decodes_apart && !is_code(call.params.dtype);
}

bool rotate_queries(AttentionCall& call, const TensorView& cos, const TensorView& sin,
                    const cuattn_rope_options& options, Stream stream) {
  const char* fn = call.function();
  require_nothing_reserved(fn, options.reserved);
  RotateParams p = as_turned(call);
  read_tables(fn, "q", cos, sin, options.offset, call.device, p);
  std::optional<TensorView> storage;
  const TensorView* positions = optional_view(fn, "positions", options.positions, storage);
  if (positions != nullptr) read_positions(fn, "q", *positions, !call.ragged, call.device, p);
  bool as_kernel = options.offset == 0 && options.inverse == 0 && has_pieces(p);
  if (!as_kernel || !rotates_queries(call)) return false;
  check_positions(fn, p, positions, backend_of(fn, call.device), call.device, stream);
  const TokenPlaces& places = p.places;
  constexpr int64_t kMost = INT32_MAX;
  call.rotation = {p.cos,
                   p.sin,
                   static_cast<int32_t>(p.cos_stride),
                   static_cast<int32_t>(p.sin_stride),
                   places.positions,
                   places.stride_batch,
                   places.stride_seq,
                   static_cast<int32_t>(std::min(p.max_position, kMost)),
                   p.rotary_dim / 2,
                   options.interleaved != 0};
  return true;
}

void check_tables(const AttentionCall& call, const CallMemory& memory) {
  const QueryRotation& r = call.rotation;
  if (r.cos == nullptr) return;
  const AttentionParams& p = call.params;
  memory.reads({"cos", r.cos, 4, {{r.max_position, r.cos_stride}, {r.half, 1}}});
  memory.reads({"sin", r.sin, 4, {{r.max_position, r.sin_stride}, {r.half, 1}}});
  int64_t batch = call.ragged ? 1 : p.batch, rows = call.ragged ? p.total_q : p.seqlen_q;
  memory.reads(
      {"positions", r.positions, 8, {{batch, r.positions_batch}, {rows, r.positions_seq}}});
}

}  // namespace cuattn
