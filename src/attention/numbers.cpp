// SPDX-License-Identifier: Apache-2.0
#include "src/attention/numbers.h"

#include "cuattn/instances.h"
#include "cuattn/params/quantize.h"
#include "src/check/arrays.h"

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
  r.has_columns = r.has_part_scales = r.has_sequence_scales = r.is_fast = false;
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

struct Codes {
  const void* data;
  Strides strides;
  int64_t channel;  // stride of the last axis
  DType dtype;
  const Float8Scale& scale;
  ScalePart part;  // what its third axis counts
  int64_t rows;
  int32_t heads, dim;
};

}  // namespace

void make_numbers(AttentionCall& call, void* workspace, Stream stream) {
  AttentionParams& p = call.params;
  const Plan& plan = call.plan;
  const Backend& backend = backend_of(call.function(), call.device);
  const DType numbers = p.out_dtype == DType::f16 ? DType::f16 : DType::bf16;
  char* place = static_cast<char*>(workspace) + (plan.workspace_bytes - plan.numbers_bytes);
  auto make = [&](const Codes& from, const void*& data, Strides& strides) {
    const int64_t token = int64_t{from.heads} * from.dim;
    QuantizeParams to{};
    to.x = {const_cast<void*>(from.data), from.dtype, from.strides, from.channel};
    to.out = {place, numbers, {call.ragged ? 0 : from.rows * token, token, from.dim}, 1};
    to.batch = call.ragged ? 1 : p.batch;
    to.heads = from.heads;
    to.dim = from.dim;
    to.rows = to.out_rows = from.rows;
    to.scale = from.scale;
    to.part = from.scale.extents[2] > 1 ? from.part : ScalePart::none;
    backend.dequantize(to, call.device.device_id, stream);
    data = place;
    strides = to.out.strides;
    place += whole_pieces(static_cast<size_t>(to.batch * from.rows * token * itemsize(numbers)));
  };
  const int64_t rows_q = call.ragged ? p.total_q : p.seqlen_q;
  const int64_t rows_kv = call.ragged ? p.total_kv : p.seqlen_kv;
  make({p.q, p.q_strides, 1, p.dtype, p.float8.q, ScalePart::rows, rows_q, p.num_heads_q,
        p.head_dim},
       p.q, p.q_strides);
  make({p.k, p.k_strides, 1, p.dtype, p.float8.k, ScalePart::rows, rows_kv, p.num_heads_kv,
        p.head_dim},
       p.k, p.k_strides);
  make({p.v, p.v_strides, p.v_channel_stride, value_dtype(p.dtype), p.float8.v, ScalePart::channels,
        rows_kv, p.num_heads_kv, p.head_dim_v},
       p.v, p.v_strides);
  p.v_channel_stride = 1;
  p.float8.q = p.float8.k = p.float8.v = {nullptr, 1.0f, 1, {1, 1, 1}, {0, 0, 0}};
  p.dtype = numbers;
  const Instance& made = instance_at(plan.instance);
  call.plan.instance =
      find_instance(made.op, made.kernel, numbers, made.dims, *made.mask, *made.score);
}

}  // namespace cuattn
