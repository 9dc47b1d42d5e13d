// SPDX-License-Identifier: Apache-2.0
// The naive rung over float8, or int8 q and k: dot products times the scales of q and k, softmax, and sums over values
// of any strides times the scale of v. Codes are converted as they are read. Used by naive.cu.
#pragma once

#include "cuda/attention/products.cuh"
#include "cuda/attention/softmax_rows.cuh"

namespace cuattn {

// out[b, i, h, c] = v_scale * sum_j probs[b, h, i, j] v_j[c] over float8 values of any strides. One
// thread a channel of a row.
static __global__ void __launch_bounds__(products::kThreads)
    sums_over_float8(const __grid_constant__ AttentionParams p, const float* probs) {
  using namespace device;
  int64_t index = int64_t{blockIdx.x} * products::kThreads + threadIdx.x;
  int32_t channel = static_cast<int32_t>(index % p.head_dim_v);
  int64_t line = index / p.head_dim_v;
  int32_t row = static_cast<int32_t>(line % p.seqlen_q);
  int64_t b_head = line / p.seqlen_q;
  if (b_head >= int64_t{p.batch} * p.num_heads_q) return;
  int32_t b = static_cast<int32_t>(b_head / p.num_heads_q);
  int32_t head = static_cast<int32_t>(b_head % p.num_heads_q);
  Span queries = query_span(p, b), keys = key_span(p, b);
  if (row >= queries.stored) return;

  KeyRange seen{0, 0};
  if (row < queries.used) seen = p.mask.visible(row, queries.used, keys.used);
  int32_t head_kv = head / (p.num_heads_q / p.num_heads_kv);
  const E4m3* value = static_cast<const E4m3*>(p.v) + b * p.v_strides.batch +
                      keys.start * p.v_strides.seq + head_kv * p.v_strides.head +
                      channel * p.v_channel_stride;
  const float* weights = probs + (b_head * p.seqlen_q + row) * p.seqlen_kv;
  float sum = 0.0f;
  for (int32_t begin = seen.begin; begin < seen.end; begin += products::kTermsPerSum) {
    float part = 0.0f;
    for (int32_t key = begin; key < min(begin + products::kTermsPerSum, seen.end); ++key) {
      if (weights[key] == 0.0f) continue;  // not seen: the code may be NaN
      part = fmaf(weights[key], to_float(value[key * p.v_strides.seq]), part);
    }
    sum += part;
  }
  sum *= p.float8.of_value(b, head_kv, channel);
  int64_t to = b * p.out_strides.batch + (queries.start + row) * p.out_strides.seq +
               head * p.out_strides.head + channel;
  switch (p.out_dtype) {
    case DType::f32: static_cast<float*>(p.out)[to] = sum; break;
    case DType::f16: static_cast<Half*>(p.out)[to] = from_float<Half>(sum); break;
    default: static_cast<Bfloat16*>(p.out)[to] = from_float<Bfloat16>(sum);
  }
}

inline void launch_float8(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  float* scores = static_cast<float*>(workspace);
  products::Rows q{p.q, p.q_strides, p.head_dim}, k{p.k, p.k_strides, p.head_dim};
  if (p.dtype == DType::i8) {
    products::launch_dot_products<DType::i8>(p, q, k, scores, stream);
  } else {
    products::launch_dot_products<DType::e4m3>(p, q, k, scores, stream);
  }
  launch_softmax_rows<DType::e4m3>(p, scores, scores, stream);
  int64_t elements = int64_t{p.batch} * p.num_heads_q * p.seqlen_q * p.head_dim_v;
  unsigned blocks = grid_blocks(device::ceil_div<int64_t>(elements, products::kThreads), "naive");
  sums_over_float8<<<blocks, products::kThreads, 0, stream>>>(p, scores);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
