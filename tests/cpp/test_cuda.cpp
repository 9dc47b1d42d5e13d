// SPDX-License-Identifier: Apache-2.0
// What only a device can show: batches beyond a grid's limits, offsets beyond 2^31, streams,
// graphs, threads, junk in lengths, refusals that launch nothing, merging. Next: perf.cpp.
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>

#include "gpu.h"
#include "merge.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr DLDevice kGpu{kDLCUDA, 0};

struct Rung {
  const char* backend;
  DType dtype;
};
// Under a sanitizer sm90 is left to the cases of its instances: racecheck, which must not see the
// copies of the TMA, knows those by name.
bool has_hopper() {
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDeviceProperties(&properties, 0));
  return properties.major == 9 && properties.minor == 0 && !settings().sanitize;
}

const std::vector<Rung>& rungs() {
  static const std::vector<Rung> list = [] {
    std::vector<Rung> all = {{"sm80", DType::f16},  {"sm80", DType::bf16},  {"simt", DType::f32},
                             {"tiled", DType::f16}, {"tiled", DType::bf16}, {"tiled", DType::f32},
                             {"naive", DType::bf16}};
    if (has_hopper()) all.insert(all.begin(), {{"sm90", DType::f16}, {"sm90", DType::bf16}});
    return all;
  }();
  return list;
}

void check(Problem& p, const Rung& rung) {
  Reference expected = reference(p);
  std::string changed = run_on_device(p, rung.backend);
  CHECK(changed.empty(), changed);
  std::string verdict = judge(p, expected);
  CHECK(verdict.empty(), rung.backend, ": ", verdict);
}

Problem small_problem(DType dtype, uint64_t seed, int seqlen_q = 70, int seqlen_kv = 130) {
  Problem p;
  p.dtype = dtype, p.batch = 2, p.heads_q = 4, p.heads_kv = 2, p.seqlen_q = seqlen_q,
  p.seqlen_kv = seqlen_kv;
  p.causal = true;
  Random random(seed);
  p.fill(random);
  return p;
}

CUDA_TEST(cuda_batches_beyond_65535_are_right) {
  if (settings().sanitize) skip("too large for a sanitizer");
  for (const Rung& rung : rungs()) {
    Problem p;
    p.dtype = rung.dtype, p.batch = 70000, p.head_dim = p.head_dim_v = 32, p.seqlen_q = 2,
    p.seqlen_kv = 3;
    Random random(case_seed("batch"));
    p.fill(random);
    check(p, rung);
  }
}

CUDA_TEST(cuda_empty_calls_and_sequences_without_keys_are_right) {
  for (const Rung& rung : rungs()) {
    for (int seqlen_kv : {0, 1}) {
      Problem p = small_problem(rung.dtype, 5, 3, seqlen_kv);
      check(p, rung);
    }
    Problem none = small_problem(rung.dtype, 6, 0, 4);
    check(none, rung);
  }
}

// The same call with k and v strided so far that the second sequence lies beyond 2^31 elements.
CUDA_TEST(cuda_offsets_beyond_2_to_the_31_are_right) {
  if (settings().sanitize) skip("too large for a sanitizer");
  size_t free_bytes = 0, total_bytes = 0;
  CUDA_OK(cudaMemGetInfo(&free_bytes, &total_bytes));
  if (free_bytes < (size_t{20} << 30)) skip("needs 20 GiB of device memory");
  constexpr int64_t kStride = (int64_t{1} << 31) + 4096;
  for (const Rung& rung : rungs()) {
    Problem p = small_problem(rung.dtype, case_seed("far"));
    std::string changed = run_on_device(p, rung.backend);
    CHECK(changed.empty(), changed);
    std::vector<uint8_t> near = p.out.bytes();
    int64_t slab = p.k.strides()[0];
    DeviceMemory far((kStride + slab) * bytes_of(p.dtype));
    auto spread = [&](Array& array) {
      for (int b = 0; b < 2; ++b) {
        CUDA_OK(cudaMemcpy(far.data() + b * kStride * bytes_of(p.dtype),
                           static_cast<char*>(array.data()) + b * slab * bytes_of(p.dtype),
                           slab * bytes_of(p.dtype), cudaMemcpyHostToDevice));
      }
      TensorView view = array.view(far.data(), kGpu);
      view.strides[0] = kStride;
      return view;
    };
    DeviceMemory q(p.q.bytes().size()), v(p.v.bytes().size()), out(p.out.bytes().size());
    CUDA_OK(cudaMemcpy(q.data(), p.q.bytes().data(), q.bytes(), cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemcpy(v.data(), p.v.bytes().data(), v.bytes(), cudaMemcpyHostToDevice));
    CUDA_OK(cudaMemset(out.data(), 0xff, out.bytes()));
    TensorView far_k = spread(p.k);
    AttentionOptions options;
    options.causal = true;
    options.backend = rung.backend;
    TensorView q_view = p.q.view(q.data() + p.q.guard_bytes(), kGpu);
    TensorView v_view = p.v.view(v.data() + p.v.guard_bytes(), kGpu);
    TensorView out_view = p.out.view(out.data() + p.out.guard_bytes(), kGpu);
    DeviceMemory workspace(attention_workspace_bytes(q_view, far_k, v_view, options));
    attention(q_view, far_k, v_view, out_view, options, {workspace.data(), workspace.bytes()});
    std::vector<uint8_t> seen(out.bytes());
    CUDA_OK(cudaMemcpy(seen.data(), out.data(), seen.size(), cudaMemcpyDeviceToHost));
    CHECK(seen == near, rung.backend, " ", name_of(p.dtype), ": far strides gave other bits");
  }
}

CUDA_TEST(cuda_junk_in_lengths_never_leaves_the_buffers) {
  if (settings().sanitize) skip("guard bands are what shows it");
  Random random(case_seed("junk"));
  for (const Rung& rung : rungs()) {
    for (int round = 0; round < 6; ++round) {
      Problem p;
      p.dtype = rung.dtype, p.batch = 3, p.seqlen_q = p.seqlen_kv = 40, p.causal = round % 2;
      p.lens_q = p.lens_kv = {40, 10, 30};
      p.used_q = p.used_kv = {40, 10, 30};
      p.fill(random);
      for (Array* array : {&p.cu_q, &p.cu_kv, &p.used_q_array, &p.used_kv_array}) {
        for (int64_t i = 0; i < array->shape()[0]; ++i) {
          if (random.chance(0.5)) array->i32(i) = static_cast<int32_t>(random.next());
        }
      }
      std::string changed = run_on_device(p, rung.backend);
      CHECK(changed.empty(), changed);
      for (Array* output : {&p.out, &p.lse_out}) {
        const std::vector<uint8_t>& bytes = output->bytes();
        for (size_t i = 0; i < output->guard_bytes(); ++i) {
          CHECK(bytes[i] == 0xff && bytes[bytes.size() - 1 - i] == 0xff, rung.backend,
                " wrote into a guard band");
        }
      }
    }
  }
}

CUDA_TEST(cuda_calls_are_ordered_on_their_stream_and_captured_in_graphs) {
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (const Rung& rung : rungs()) {
    Problem p = small_problem(rung.dtype, case_seed("graph"));
    Reference expected = reference(p);
    OnDevice device(p, rung.backend, stream);
    device.poison();
    device.launch();
    cudaGraph_t graph;
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    device.launch();
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t replay;
    CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
    for (int i = 0; i < 3; ++i) {
      device.poison();
      CUDA_OK(cudaGraphLaunch(replay, stream));
      device.download();
      std::string verdict = judge(p, expected);
      CHECK(verdict.empty(), "replay ", i, " of ", rung.backend, ": ", verdict);
    }
    CUDA_OK(cudaGraphExecDestroy(replay));
    CUDA_OK(cudaGraphDestroy(graph));
  }
  CUDA_OK(cudaStreamDestroy(stream));
}

CUDA_TEST(cuda_calls_from_threads_on_own_streams_do_not_disturb_each_other) {
  if (settings().sanitize) skip("repeats of what one call shows");
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([t, &wrong] {
      const Rung& rung = rungs()[t % rungs().size()];
      Problem p = small_problem(rung.dtype, 100 + t, 60 + t, 200 - t);
      cudaStream_t stream;
      CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
      OnDevice device(p, rung.backend, stream);
      std::vector<uint8_t> first;
      for (int i = 0; i < 60; ++i) {
        device.poison();
        device.launch();
        device.download();
        if (i == 0) first = p.out.bytes();
        if (p.out.bytes() != first) ++wrong;
      }
      CUDA_OK(cudaStreamDestroy(stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0, wrong.load(), " results differ");
}

CUDA_TEST(cuda_calls_run_where_the_arrays_are_and_leave_the_current_device) {
  if (settings().gpus < 2) skip("needs two GPUs");
  for (const Rung& rung : rungs()) {
    Problem p = small_problem(rung.dtype, case_seed("second"));
    Reference expected = reference(p);
    CUDA_OK(cudaSetDevice(1));
    OnDevice device(p, rung.backend, nullptr, 1);
    device.poison();
    CUDA_OK(cudaSetDevice(0));
    device.launch();
    int current = -1;
    CUDA_OK(cudaGetDevice(&current));
    CHECK(current == 0, "the current device became ", current);
    CUDA_OK(cudaSetDevice(1));
    device.download();
    std::string verdict = judge(p, expected);
    CHECK(verdict.empty(), rung.backend, ": ", verdict);
    CUDA_OK(cudaSetDevice(0));
  }
}

CUDA_TEST(cuda_results_repeat_bitwise_under_load) {
  if (settings().sanitize) skip("repeats of what one call shows");
  for (const Rung& rung : rungs()) {
    Problem p;
    p.dtype = rung.dtype, p.batch = 60, p.heads_q = 4, p.heads_kv = 2, p.seqlen_q = 200,
    p.seqlen_kv = 300;
    p.head_dim = p.head_dim_v = 128;
    p.causal = true;
    Random random(case_seed("repeat"));
    p.fill(random);
    OnDevice device(p, rung.backend);
    std::vector<uint8_t> first;
    for (int i = 0; i < 50; ++i) {
      device.poison();
      device.launch();
      device.download();
      if (i == 0) first = p.out.bytes();
      if (p.out.bytes() != first) {
        CHECK(false, rung.backend, " ", name_of(rung.dtype), ": repeat ", i, " gave other bits");
        break;
      }
    }
  }
}

// A NaN in a visible key or query reaches every row that sees it, and no other.
CUDA_TEST(cuda_nan_of_visible_data_propagates) {
  for (const Rung& rung : rungs()) {
    Problem p;
    p.dtype = rung.dtype, p.seqlen_q = 4, p.seqlen_kv = 6, p.causal = true;
    Random random(case_seed("nan"));
    p.fill(random);
    p.k.set(p.offset(p.k, 0, 4, 0), NAN);  // key 4: seen by queries 2 and 3
    run_on_device(p, rung.backend);
    for (int row = 0; row < 4; ++row) {
      CHECK(std::isnan(p.out.get(p.offset(p.out, 0, row, 0))) == (row >= 2), rung.backend,
            ": out of row ", row);
      CHECK(std::isnan(p.lse_out.get(p.lse_offset(0, row, 0))) == (row >= 2), rung.backend,
            ": lse of row ", row);
    }
  }
}

CUDA_TEST(cuda_refused_calls_launch_nothing_and_leave_no_error) {
  if (settings().sanitize) skip("the poison is what shows it");
  Problem p = small_problem(DType::f32, 9);
  auto refused = [&](const char* backend) {
    try {
      run_on_device(p, backend);
    } catch (const NotImplemented&) {
      return true;
    }
    return false;
  };
  CHECK(refused("sm80"), "sm80 took float32");
  CHECK(refused("cpu"), "the CPU backend took CUDA arrays");
  OnDevice device(p, "naive");
  device.poison();
  uintptr_t place = 0;  // of arrays that lie apart and that nobody reads
  auto apart = [&](Array&) { return reinterpret_cast<void*>(place += uintptr_t{1} << 32); };
  Bound without(p, kGpu, apart, "naive");
  try {
    without.run({}, nullptr);
    CHECK(false, "naive ran without its workspace");
  } catch (const std::exception& error) {
    CHECK(std::strstr(error.what(), "workspace") != nullptr, error.what());
  }
  device.download();
  p.out.for_each_offset(
      [&](int64_t i) { CHECK(std::isnan(p.out.get(i)), "an output was written"); });
  CHECK(cudaGetLastError() == cudaSuccess);
}

CUDA_TEST(cuda_rows_that_do_not_start_on_16_bytes_are_refused) {
  Problem p = small_problem(DType::f16, 10);
  Arguments::Address odd = [&](Array& array) {
    return reinterpret_cast<void*>(uintptr_t{1 << 20} + (&array == &p.k ? 8 : 0));
  };
  try {
    Bound bound(p, kGpu, odd, "auto");
    CHECK(false, "a misaligned k was accepted");
  } catch (const std::invalid_argument& error) {
    CHECK(std::strstr(error.what(), "k must start on 16 bytes") != nullptr, error.what());
  }
}

CUDA_TEST(cuda_merge_weighs_parts_by_their_lse) {
  for (MergeProblem& m : merge_problems(case_seed("merge"))) {
    for (bool stacked : {false, true}) {
      if (!stacked && m.num_parts != 2) continue;
      std::map<Array*, std::unique_ptr<DeviceMemory>> copies;
      auto address = [&](Array& array) -> void* {
        std::unique_ptr<DeviceMemory>& copy = copies[&array];
        copy = std::make_unique<DeviceMemory>(array.bytes().size());
        bool input = &array == &m.outs || &array == &m.lses;
        if (input)
          CUDA_OK(cudaMemcpy(copy->data(), array.bytes().data(), copy->bytes(),
                             cudaMemcpyHostToDevice));
        else if (!settings().sanitize)
          CUDA_OK(cudaMemset(copy->data(), 0xff, copy->bytes()));
        return copy->data() + array.guard_bytes();
      };
      run_merge(m, stacked, kGpu, address, nullptr);
      for (Array* output : {&m.out, &m.lse}) {
        CUDA_OK(cudaMemcpy(output->bytes().data(), copies[output]->data(), output->bytes().size(),
                           cudaMemcpyDeviceToHost));
        Array untouched = *output;
        untouched.poison();
        size_t guard = output->guard_bytes(), size = output->bytes().size();
        CHECK(std::memcmp(output->bytes().data(), untouched.bytes().data(), guard) == 0,
              "merge wrote before its output");
        CHECK(std::memcmp(output->bytes().data() + size - guard, untouched.bytes().data(), guard) ==
                  0,
              "merge wrote past its output");
      }
      std::string wrong = judge_merge(m);
      CHECK(wrong.empty(), wrong);
    }
  }
}

}  // namespace
}  // namespace cuattn::test
