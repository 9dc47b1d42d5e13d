// SPDX-License-Identifier: Apache-2.0
#include "src/attention/numbers.h"

#include "cuattn/instances.h"
#include "src/check/arrays.h"
#include "src/float8/codes.h"

namespace cuattn {

// dequantize counts parts of 128 rows, and sequences, along the axes of an array: those of packed
// batches, and of sequences that begin inside theirs, are others.
bool may_become_numbers(const AttentionRequest& r, const DeviceInfo& device) {
  bool is_packed = r.ragged && (r.has_sequence_scales || r.has_part_scales);
  bool is_shifted = r.has_kv_start && r.has_part_scales;
  return device.is_cuda && is_code(r.dtype) && !r.paged && !r.has_programs && !is_packed &&
         !is_shifted;
}

AttentionRequest as_numbers(AttentionRequest r) {
  r.dtype = DType::bf16;
  r.has_columns = r.has_part_scales = r.has_query_head_scales = r.has_sequence_scales = r.is_fast =
      false;
  return r;
}

size_t numbers_bytes(const char* function, const AttentionRequest& r) {
  auto bytes = [&](int64_t rows, int32_t heads, int32_t dim) {
    return whole_pieces(checked_bytes(function, {rows, heads, dim, itemsize(DType::bf16)}));
  };
  return bytes(r.total_q, r.num_heads_q, r.head_dim) +
         bytes(r.total_kv, r.num_heads_kv, r.head_dim) +
         bytes(r.total_kv, r.num_heads_kv, r.head_dim_v);
}

namespace {

constexpr Float8Scale kNoScale = {nullptr, 1.0f, 1, {1, 1, 1}, {0, 0, 0}};

DType numbers_under(DType out) { return out == DType::f16 ? DType::f16 : DType::bf16; }

}  // namespace

bool may_become_numbers(const AttentionCall& call, const DeviceInfo& device) {
  bool has_parts = call.params.float8.v.extents[2] > 1;
  for (int32_t array : {0, 1}) has_parts |= has_scale_axis(call, array, 2);
  bool by_sequence = has_scale_axis(call, 0, 0);
  return device.is_cuda && call.paged && is_code(call.params.dtype) && !has_parts && !by_sequence;
}

AttentionCall as_numbers(AttentionCall call) {
  AttentionParams& p = call.params;
  CacheGatherParams& g = call.gather;
  p.dtype = g.number_dtype = numbers_under(p.out_dtype);
  g.makes_numbers = true;
  g.k_scale = p.float8.k;
  g.v_scale = p.float8.v;
  p.float8.q = p.float8.k = p.float8.v = kNoScale;
  call.is_fast = false;
  for (int32_t& axes : call.scale_axes) axes = 0;
  return call;
}

size_t numbers_bytes(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  return whole_pieces(checked_bytes(call.function(),
                                    {p.total_q, p.num_heads_q, p.head_dim, itemsize(DType::bf16)}));
}

void make_numbers(AttentionCall& call, void* workspace, Stream stream) {
  AttentionParams& p = call.params;
  const Plan& plan = call.plan;
  const Backend& backend = backend_of(call.function(), call.device);
  const DType numbers = numbers_under(p.out_dtype);
  char* place = static_cast<char*>(workspace) + (plan.workspace_bytes - plan.numbers_bytes);
  const int32_t batch = call.ragged ? 1 : p.batch;
  auto make = [&](const Codes& from, const void*& data, Strides& strides) {
    strides = make_numbers(from, numbers, place, backend, call.device.device_id, stream);
    data = place;
    place += whole_pieces(static_cast<size_t>(batch * from.rows * from.heads * from.dim) *
                          itemsize(numbers));
  };
  const int64_t rows_q = call.ragged ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = call.ragged ? p.total_kv : p.seqlen_kv;
  make({p.q, p.q_strides, 1, p.dtype, p.float8.q, ScalePart::rows, batch, rows_q, p.num_heads_q,
        p.head_dim},
       p.q, p.q_strides);
  const Instance& made = instance_at(plan.instance);
  if (made.op == Op::attention) {  // else it reads codes of pages, under queries of any 16 bits
    call.plan.instance =
        find_instance(made.op, made.kernel, numbers, made.dims, *made.mask, *made.score);
  }
  if (call.paged) {
    call = as_numbers(call);
    return;
  }
  make({p.k, p.k_strides, 1, p.dtype, p.float8.k, ScalePart::rows, batch, rows_kv, p.num_heads_kv,
        p.head_dim},
       p.k, p.k_strides);
  make({p.v, p.v_strides, p.v_channel_stride, value_dtype(p.dtype), p.float8.v, ScalePart::channels,
        batch, rows_kv, p.num_heads_kv, p.head_dim_v},
       p.v, p.v_strides);
  p.v_channel_stride = 1;
  p.float8.q = p.float8.k = p.float8.v = kNoScale;
  p.dtype = numbers;
}

}  // namespace cuattn
