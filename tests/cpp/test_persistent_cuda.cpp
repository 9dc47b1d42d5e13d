// SPDX-License-Identifier: Apache-2.0
// The persistent decode kernel through the C ABI, small enough for compute-sanitizer: its steps
// have the bits of paged attention over the grown contexts, and it ends when it is told to.
#include <cuattn/c_api.h>

#include <algorithm>
#include <numeric>

#include "gpu.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr int kSeqs = 3, kHeadsQ = 4, kHeadsKv = 2, kDim = 128, kBlock = 16, kWidth = 8;
constexpr int kSteps = 3, kGrow = 2;
constexpr DLDevice kGpu{kDLCUDA, 0};

#define OK(call) CHECK((call) == CUATTN_OK, cuattn_last_error())

std::vector<uint16_t> normal_halves(Random& random, int64_t count) {
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = f16_bits(random.normal());
  return values;
}

struct Decode {
  OnGpu<uint16_t> q, k, v, out;
  OnGpu<int32_t> tables, lens;

  Decode(Random& random, const std::vector<int32_t>& blocks, const std::vector<int32_t>& contexts)
      : q(normal_halves(random, kSeqs * kHeadsQ * kDim)),
        k(normal_halves(random, int64_t{kSeqs} * kWidth * kBlock * kHeadsKv * kDim)),
        v(normal_halves(random, int64_t{kSeqs} * kWidth * kBlock * kHeadsKv * kDim)),
        out(size_t{kSeqs} * kHeadsQ * kDim),
        tables(blocks),
        lens(contexts) {}

  DLTensor rows(OnGpu<uint16_t>& array) {
    return keep(TensorView(array.data(), DType::f16, {kSeqs, kHeadsQ, kDim}, kGpu));
  }
  DLTensor cache(OnGpu<uint16_t>& array) {
    return keep(
        TensorView(array.data(), DType::f16, {kSeqs * kWidth, kBlock, kHeadsKv, kDim}, kGpu));
  }

  // Over lengths in `lens`; `persistent` says which kernel the call is for.
  cuattn_attention_call prepare(bool persistent) {
    DLTensor q_now = rows(q), k_now = cache(k), v_now = cache(v);
    DLTensor tables_now = keep(TensorView(tables.data(), DType::i32, {kSeqs, kWidth}, kGpu));
    DLTensor lens_now = keep(TensorView(lens.data(), DType::i32, {kSeqs}, kGpu));
    cuattn_paged_options options;
    cuattn_paged_options_init(&options);
    options.num_splits = 2;
    options.backend = "sm80";
    cuattn_attention_call call;
    auto prepare = persistent ? cuattn_persistent_prepare : cuattn_paged_prepare;
    OK(prepare(&q_now, &k_now, &v_now, &tables_now, &lens_now, &options, &call));
    return call;
  }

  std::vector<uint16_t> result() { return out.host(); }

 private:
  DLTensor keep(const TensorView& view) {
    views_.push_back(std::make_unique<TensorView>(view));
    return views_.back()->dl();
  }
  std::vector<std::unique_ptr<TensorView>> views_;
};

CUDA_TEST(cuda_persistent_decode) {
  Random random(case_seed("cuda_persistent_decode"));
  std::vector<int32_t> blocks(kSeqs * kWidth), contexts = {70, 0, 40}, grown = contexts;
  std::iota(blocks.rbegin(), blocks.rend(), 0);
  for (int32_t& length : grown) length += kSteps * kGrow;
  Decode decode(random, blocks, grown);
  DLTensor out = decode.rows(decode.out);

  cuattn_attention_call call = decode.prepare(false);
  DeviceMemory workspace(call.workspace_bytes);
  OK(cuattn_paged_run(&call, &out, nullptr, workspace.data(), workspace.bytes(), nullptr));
  std::vector<uint16_t> expected = decode.result();

  CUDA_OK(cudaMemcpy(decode.lens.data(), contexts.data(), kSeqs * sizeof(int32_t),
                     cudaMemcpyHostToDevice));
  CUDA_OK(cudaMemset(decode.out.data(), 0xff, decode.out.memory.bytes()));
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  call = decode.prepare(true);
  DeviceMemory queue(call.workspace_bytes);
  cuattn_persistent_options options;
  cuattn_persistent_options_init(&options);
  options.grow = kGrow;
  options.idle_seconds = 5;
  cuattn_persistent* persistent = nullptr;
  OK(cuattn_persistent_start(&call, &out, nullptr, queue.data(), queue.bytes(), &options, stream,
                             &persistent));
  if (persistent == nullptr) return;
  int64_t posted = 0;
  cuattn_persistent_state state = CUATTN_PERSISTENT_RUNNING;
  OK(cuattn_persistent_post(persistent, 1, &posted));
  OK(cuattn_persistent_post(persistent, kSteps - 1, &posted));
  OK(cuattn_persistent_wait(persistent, posted, 30, &state));
  CHECK(state == CUATTN_PERSISTENT_DONE, "state ", state);
  cuattn_persistent_destroy(persistent);
  CUDA_OK(cudaStreamSynchronize(stream));
  CUDA_OK(cudaStreamDestroy(stream));
  CHECK(decode.lens.host() == grown);
  CHECK(decode.result() == expected);
}

}  // namespace
}  // namespace cuattn::test
