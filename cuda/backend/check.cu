// SPDX-License-Identifier: Apache-2.0
// CUATTN_CHECK=1: the lengths and block ids of a call, which only the device sees, are copied to
// the host and held against the rules and messages of the CPU backend. Costs a synchronisation of
// the caller's stream. Next: cpu/attention.cpp, cpu/paged.cpp (the rules).
#include <atomic>
#include <cstdio>
#include <vector>

#include "cuattn/backend.h"
#include "cuda/host/launch.h"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

// Replaces a device array by a copy; the copy is complete once `stream` is.
template <class T>
void copy_to_host(const T*& array, std::vector<T>& host, int64_t count, cudaStream_t stream) {
  if (array == nullptr || count == 0) return;
  host.resize(static_cast<size_t>(count));
  CUATTN_CUDA_TRY(
      cudaMemcpyAsync(host.data(), array, host.size() * sizeof(T), cudaMemcpyDefault, stream));
  array = host.data();
}

void copy_scale(Float8Scale& scale, std::vector<float>& host, cudaStream_t stream) {
  int64_t count = 1;
  for (int axis = 0; axis < 3; ++axis) count += (scale.extents[axis] - 1) * scale.strides[axis];
  copy_to_host(scale.data, host, count, stream);
}

// A captured call cannot wait for the device: it goes unchecked, with one warning.
bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  CUATTN_CUDA_TRY(cudaStreamIsCapturing(stream, &capture));
  if (capture == cudaStreamCaptureStatusNone) return false;
  static std::atomic_flag warned = ATOMIC_FLAG_INIT;
  if (!warned.test_and_set()) {
    std::fputs("cuattn: CUATTN_CHECK is skipped for calls under stream capture\n", stderr);
  }
  return true;
}

}  // namespace

bool read_device_data(void* host, const void* data, size_t bytes, cudaStream_t stream) {
  if (is_captured(stream)) return false;
  CUATTN_CUDA_TRY(cudaMemcpyAsync(host, data, bytes, cudaMemcpyDefault, stream));
  CUATTN_CUDA_TRY(cudaStreamSynchronize(stream));
  return true;
}

void check_attention(const char* function, const AttentionParams& params, cudaStream_t stream) {
  if (is_captured(stream)) return;
  AttentionParams host = params;
  std::vector<int64_t> dropout_state;
  copy_to_host(host.dropout.state, dropout_state, 2, stream);
  std::vector<int32_t> cu_seqlens_q, cu_seqlens_kv, seqused_q, seqused_kv, kv_start;
  copy_to_host(host.cu_seqlens_q, cu_seqlens_q, int64_t{params.batch} + 1, stream);
  copy_to_host(host.cu_seqlens_kv, cu_seqlens_kv, int64_t{params.batch} + 1, stream);
  copy_to_host(host.seqused_q, seqused_q, params.batch, stream);
  copy_to_host(host.seqused_kv, seqused_kv, params.batch, stream);
  copy_to_host(host.kv_start, kv_start, params.batch, stream);
  std::vector<float> scales[3];
  copy_scale(host.float8.q, scales[0], stream);
  copy_scale(host.float8.k, scales[1], stream);
  copy_scale(host.float8.v, scales[2], stream);
  CUATTN_CUDA_TRY(cudaStreamSynchronize(stream));
  cpu_backend().check(function, host, 0, nullptr);
}

void check_paged(const char* function, const PagedParams& params, cudaStream_t stream) {
  if (is_captured(stream)) return;
  PagedParams host = params;
  std::vector<int32_t> context_lens, block_tables, deal;
  int64_t rows = params.work.num_seqs, row = params.pages.block_tables_stride;
  int64_t blocks =
      (int64_t{params.work.capacity} + params.pages.block_size - 1) / params.pages.block_size;
  copy_to_host(host.work.context_lens, context_lens, rows, stream);
  if (host.latent.queries == 0) {  // else what lists hold is all right
    copy_to_host(host.pages.block_tables, block_tables, rows == 0 ? 0 : (rows - 1) * row + blocks,
                 stream);
  }
  if (host.work.deal != nullptr) {
    copy_to_host(host.work.deal, deal, PagedDeal::size(params.work), stream);
  }
  std::vector<float> scales[2];
  auto copy_scales = [&](const float*& data, std::vector<float>& to, int64_t batch, int64_t head) {
    int64_t heads = params.work.num_heads_kv;
    int64_t count = rows * heads == 0 ? 0 : (rows - 1) * batch + (heads - 1) * head + 1;
    copy_to_host(data, to, count, stream);
  };
  copy_scales(host.k_scales, scales[0], params.k_scales_stride_batch, params.k_scales_stride_head);
  copy_scales(host.v_scales, scales[1], params.v_scales_stride_batch, params.v_scales_stride_head);
  CUATTN_CUDA_TRY(cudaStreamSynchronize(stream));
  cpu_backend().check_paged(function, host, 0, nullptr);
}

void check_context_lens(const char* function, const PagedWork& work, cudaStream_t stream) {
  if (is_captured(stream)) return;
  PagedWork host = work;
  std::vector<int32_t> context_lens;
  copy_to_host(host.context_lens, context_lens, work.num_seqs, stream);
  CUATTN_CUDA_TRY(cudaStreamSynchronize(stream));
  cpu_backend().check_context_lens(function, host, 0, nullptr);
}

}  // namespace cuattn
