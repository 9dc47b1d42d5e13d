// SPDX-License-Identifier: Apache-2.0
// Mode perf: the time of each rung of the ladder on a few shapes, by CUDA events, as a table of
// TFLOP/s. For a first look at a machine; comparisons with other libraries are the job of
// benchmarks/.
#include <algorithm>
#include <functional>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include "gpu.h"
#include "suite.h"
#include "test.h"

namespace cuattn::test {

namespace {

struct Shape {
  int batch, heads_q, heads_kv, seqlen, head_dim;
  bool causal;
};

// Operands of small random bit patterns: exponents near 1, so that the chip draws the power of real
// data.
void fill_device(DeviceMemory& memory, DType dtype, uint64_t seed) {
  Random random(seed);
  std::vector<uint8_t> block(1 << 20);
  for (size_t i = 0; i < block.size(); i += bytes_of(dtype)) {
    float value = random.normal();
    uint16_t half = dtype == DType::f16 ? f16_bits(value) : bf16_bits(value);
    std::copy_n(reinterpret_cast<const uint8_t*>(
                    dtype == DType::f32 ? static_cast<const void*>(&value) : &half),
                bytes_of(dtype), block.begin() + i);
  }
  for (size_t at = 0; at < memory.bytes(); at += block.size()) {
    CUDA_OK(cudaMemcpy(memory.data() + at, block.data(),
                       std::min(block.size(), memory.bytes() - at), cudaMemcpyHostToDevice));
  }
}

// Median milliseconds over seven rounds, each of enough calls to last some milliseconds.
double milliseconds(const std::function<void()>& call) {
  cudaEvent_t begin, end;
  CUDA_OK(cudaEventCreate(&begin));
  CUDA_OK(cudaEventCreate(&end));
  auto round = [&](int calls) {
    CUDA_OK(cudaEventRecord(begin));
    for (int i = 0; i < calls; ++i) call();
    CUDA_OK(cudaEventRecord(end));
    CUDA_OK(cudaEventSynchronize(end));
    float elapsed = 0;
    CUDA_OK(cudaEventElapsedTime(&elapsed, begin, end));
    return elapsed / calls;
  };
  round(2);
  int calls = std::clamp(static_cast<int>(20 / std::max(round(1), 1e-3f)), 1, 200);
  std::vector<double> rounds;
  for (int i = 0; i < 7; ++i) rounds.push_back(round(calls));
  std::nth_element(rounds.begin(), rounds.begin() + 3, rounds.end());
  CUDA_OK(cudaEventDestroy(begin));
  CUDA_OK(cudaEventDestroy(end));
  return rounds[3];
}

void measure(const char* backend, DType dtype, const Shape& s) {
  auto view = [&](DeviceMemory& memory, int heads) {
    return TensorView(memory.data(), dtype, {s.batch, s.seqlen, heads, s.head_dim}, {kDLCUDA, 0});
  };
  auto bytes = [&](int heads) {
    return static_cast<size_t>(s.batch) * s.seqlen * heads * s.head_dim * bytes_of(dtype);
  };
  DeviceMemory q(bytes(s.heads_q)), k(bytes(s.heads_kv)), v(bytes(s.heads_kv)),
      out(bytes(s.heads_q));
  fill_device(q, dtype, 1);
  fill_device(k, dtype, 2);
  fill_device(v, dtype, 3);
  AttentionOptions options;
  options.causal = s.causal;
  options.backend = backend;
  TensorView q_view = view(q, s.heads_q), k_view = view(k, s.heads_kv),
             v_view = view(v, s.heads_kv);
  TensorView out_view = view(out, s.heads_q);
  size_t workspace_bytes;
  try {
    workspace_bytes = attention_workspace_bytes(q_view, k_view, v_view, options);
  } catch (const NotImplemented&) {
    return;  // this rung does not serve the shape
  }
  DeviceMemory workspace(workspace_bytes);
  double ms = milliseconds([&] {
    attention(q_view, k_view, v_view, out_view, options, {workspace.data(), workspace_bytes});
  });
  double flop =
      4.0 * s.batch * s.heads_q * s.seqlen * s.seqlen * s.head_dim * (s.causal ? 0.5 : 1.0);
  std::cout << std::left << std::setw(11) << backend << std::setw(10) << name_of(dtype)
            << std::right << std::setw(6) << s.batch << std::setw(4) << s.heads_q << "/"
            << std::left << std::setw(4) << s.heads_kv << std::right << std::setw(7) << s.seqlen
            << std::setw(5) << s.head_dim << (s.causal ? "  causal" : "    full") << std::fixed
            << std::setprecision(3) << std::setw(11) << ms << std::setprecision(1) << std::setw(10)
            << flop / ms * 1e-9 << std::endl;
}

}  // namespace

int run_perf(const std::string& filter) {
  if (settings().gpus == 0) {
    std::cout << "perf measures CUDA kernels; no CUDA device is here\n";
    return 1;
  }
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  std::cout << properties.name
            << "\nbackend    dtype      batch heads  seqlen  dim    mask         ms   TFLOP/s\n";
  const std::vector<Shape> shapes = {
      {4, 16, 16, 2048, 64, false}, {4, 16, 16, 2048, 64, true},  {2, 16, 16, 4096, 128, false},
      {2, 16, 16, 4096, 128, true}, {2, 32, 8, 4096, 128, true},  {1, 8, 8, 8192, 256, false},
      {1, 8, 8, 8192, 256, true},   {16, 16, 16, 512, 128, true},
  };
  for (const char* backend : {"sm90", "sm80", "simt", "tiled", "cublas", "naive"}) {
    if (std::string(backend).find(filter) == std::string::npos) continue;
    for (DType dtype : {DType::f16, DType::bf16, DType::f32})
      for (const Shape& shape : shapes) measure(backend, dtype, shape);
  }
  return 0;
}

}  // namespace cuattn::test
