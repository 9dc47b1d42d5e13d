// SPDX-License-Identifier: Apache-2.0
// Rung one, backend="naive": attention as the formula reads. Three kernels, the scores [batch,
// num_heads_q, seqlen_q, seqlen_kv] in memory between them as float32: dot products, softmax of
// each row, weighted sum of the values. Serves every option and dtype of the library; memory and
// speed are what the other rungs improve. Float8 is converted as it is read, its scales multiplied
// in. Next: products.cuh, float8.cuh, tiled.cuh.
#include "cuda/attention/float8.cuh"
#include "cuda/attention/products.cuh"
#include "cuda/attention/softmax_rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

template <DType kType>
void launch_three(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  float* scores = static_cast<float*>(workspace);
  products::Rows q{p.q, p.q_strides, p.head_dim}, k{p.k, p.k_strides, p.head_dim};
  products::Rows v{p.v, p.v_strides, p.head_dim_v}, out{p.out, p.out_strides, p.head_dim_v};
  products::launch_dot_products<kType>(p, q, k, scores, stream);
  launch_softmax_rows<kType>(p, scores, scores, stream);
  products::launch_sums_over_keys<kType>(p, scores, v, 1.0f, out, stream);
}

}  // namespace

void launch_naive(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  if (int64_t{p.batch} * p.num_heads_q * p.seqlen_q == 0) return;
  switch (p.dtype) {
    case DType::f32: return launch_three<DType::f32>(p, workspace, stream);
    case DType::f16: return launch_three<DType::f16>(p, workspace, stream);
    case DType::bf16: return launch_three<DType::bf16>(p, workspace, stream);
    case DType::e4m3:
    case DType::i8: return launch_float8(p, workspace, stream);
    default: CUATTN_ASSERT(false, "naive: dtype ", static_cast<int>(p.dtype));
  }
}

}  // namespace cuattn
