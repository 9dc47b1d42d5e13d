// SPDX-License-Identifier: Apache-2.0
// backend="naive" of the backward pass: the gradients as the formula reads, the letters those of
// cpu/backward.cpp. The products q k and dout v go to memory as float32 planes [batch, num_heads_q,
// seqlen_q, seqlen_kv], a warp turns each row of them into P Z and dx, and plain products of those
// planes are dq, dk and dv. Serves every option and dtype of the library. Every sum has one thread
// or warp and a fixed order: no atomics, the same bits in every run. Next: row_gradients.cuh.
#include "cuda/attention/products.cuh"
#include "cuda/backward/clear.cuh"
#include "cuda/backward/row_gradients.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

using namespace products;

template <class T>
__device__ void store_row_part(const GradientRows& to, int64_t at, const T* values, int count) {
  T* row = static_cast<T*>(to.data) + at;
  for (int i = 0; i < count; ++i) row[i] = values[i];
}

// result[b, j, h, :] = factor * sum over the heads of h's group and their rows i of
// plane[b, h, i, j] rows_i. One thread per 16 bytes of rows.
template <DType kType>
__global__ void __launch_bounds__(kThreads, kResident)
    sums_over_rows(const __grid_constant__ AttentionParams p, const float* plane,
                   const __grid_constant__ Rows rows, float factor,
                   const __grid_constant__ GradientRows result) {
  using T = Element<kType>;
  constexpr int kSize = Chunk<T>::kSize;
  const auto [b, head_kv, key, chunk] =
      part_of_thread(p.num_heads_kv, p.seqlen_kv, result.dim / kSize);
  if (key >= p.seqlen_kv) return;
  Span queries = query_span(p, b), keys = key_span(p, b);
  if (key >= keys.stored) return;

  // Keys that are stored but not used are seen by no row: they become zeros.
  int32_t used = key < keys.used ? queries.used : 0, group = p.num_heads_q / p.num_heads_kv;
  float sum[kSize] = {};
  for (int32_t head = head_kv * group; head < (head_kv + 1) * group; ++head) {
    const float* weights = plane + (int64_t{b} * p.num_heads_q + head) * p.seqlen_q * p.seqlen_kv;
    for (int32_t begin = 0; begin < used; begin += kTermsPerSum) {
      float part[kSize] = {};
      for (int32_t row = begin; row < min(begin + kTermsPerSum, used); ++row) {
        float weight = weights[int64_t{row} * p.seqlen_kv + key];
        if (weight == 0.0f) continue;  // does not see the key: the row may be anything, even NaN
        Chunk<T> x = chunks_of<T>(rows, b, queries.start + row, head)[chunk];
        for (int i = 0; i < kSize; ++i) part[i] = fmaf(weight, to_float(x.x[i]), part[i]);
      }
      for (int i = 0; i < kSize; ++i) sum[i] += part[i];
    }
  }
  int64_t to = b * result.strides.batch + (keys.start + key) * result.strides.seq +
               head_kv * result.strides.head + chunk * kSize;
  T rounded[kSize];
  for (int i = 0; i < kSize; ++i) {
    sum[i] *= factor;
    rounded[i] = from_float<T>(sum[i]);
  }
  if (result.dtype == DType::f32) return store_row_part(result, to, sum, kSize);
  store_row_part(result, to, rounded, kSize);
}

template <DType kType>
void launch_sums_over_rows(const AttentionParams& p, const float* plane, const Rows& rows,
                           float factor, const GradientRows& result, cudaStream_t stream) {
  int64_t blocks = row_blocks<Element<kType>>(p.batch, p.num_heads_kv, p.seqlen_kv, result.dim);
  if (blocks == 0) return;
  sums_over_rows<kType>
      <<<grid_blocks(blocks, "naive"), kThreads, 0, stream>>>(p, plane, rows, factor, result);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

template <DType kType>
void launch_all(const BackwardParams& p, float* memory, cudaStream_t stream) {
  const AttentionParams& f = p.forward;
  PlanesLayout at = planes_of(p);
  RowArrays arrays{memory + at.weights, memory + at.ds, memory + at.dx, memory + at.sink_terms,
                   memory + at.slope_terms};
  Rows q{f.q, f.q_strides, f.head_dim}, k{f.k, f.k_strides, f.head_dim};
  Rows v{f.v, f.v_strides, f.head_dim_v}, dout{p.dout, p.dout_strides, f.head_dim_v};
  if (int64_t{f.batch} * f.num_heads_q * f.seqlen_q > 0) {
    launch_dot_products<kType>(f, q, k, arrays.weights, stream);
    launch_dot_products<kType>(f, dout, v, arrays.ds, stream);
    launch_row_gradients<kType>(p, arrays, stream);
  }
  if (p.dq != nullptr) {
    Rows dq{p.dq, p.dq_strides, f.head_dim};
    launch_sums_over_keys<kType>(f, arrays.dx, k, f.scores.scale, dq, stream);
    launch_clear(f.cu_seqlens_q, f.batch, f.total_q, f.num_heads_q,
                 {p.dq, p.dq_strides, f.dtype, f.head_dim}, stream);
  }
  GradientRows dk{p.dk, p.dk_strides, p.dk_dtype, f.head_dim};
  GradientRows dv{p.dv, p.dv_strides, p.dv_dtype, f.head_dim_v};
  if (p.dk != nullptr) launch_sums_over_rows<kType>(f, arrays.dx, q, f.scores.scale, dk, stream);
  if (p.dv != nullptr) launch_sums_over_rows<kType>(f, arrays.weights, dout, 1.0f, dv, stream);
  launch_clear_keys(f, dk, stream);
  launch_clear_keys(f, dv, stream);
  launch_option_gradients<kType>(p, arrays, stream);
}

}  // namespace

void launch_naive_backward(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  float* memory = static_cast<float*>(workspace);
  switch (p.forward.dtype) {
    case DType::f32: return launch_all<DType::f32>(p, memory, stream);
    case DType::f16: return launch_all<DType::f16>(p, memory, stream);
    case DType::bf16: return launch_all<DType::bf16>(p, memory, stream);
    default: CUATTN_ASSERT(false, "naive: dtype ", static_cast<int>(p.forward.dtype));
  }
}

}  // namespace cuattn
