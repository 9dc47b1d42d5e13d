// SPDX-License-Identifier: Apache-2.0
// The backward pass on the GPU against the CPU's, dense and ragged, with all options at once that the
// kernel has; and in a graph whose dropout state changes between replays. Next:
// cuda/backward/naive.cu.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "cuattn/backward.h"
#include "test.h"
#include "twin.h"

namespace cuattn::test {
namespace {

constexpr int64_t kBatch = 3, kHeads = 4, kHeadsKv = 2;
constexpr int64_t kRows = 37, kKeys = 70;  // of a sequence at most
constexpr int64_t kTotalRows = 80, kTotalKeys = 150;

struct Problem {
  DType dtype;
  bool ragged;
  std::string backend;
  Twin q, k, v, out, dout, lse, dlse, bias, sinks, slopes, state;
  Twin used_q, used_k, cu_q, cu_k;
  Twin dq, dk, dv, dbias, dsinks, dslopes;
  std::vector<Twin*> results;

  Twin rows(int64_t count, int64_t total, int64_t heads, int64_t dim) const {
    return ragged ? Twin(dtype, {total, heads, dim}) : Twin(dtype, {kBatch, count, heads, dim});
  }
  Twin row_numbers() const {
    return ragged ? Twin(DType::f32, {kHeads, kTotalRows})
                  : Twin(DType::f32, {kBatch, kHeads, kRows});
  }

  bool has_all() const { return backend != "sm90"; }  // dropout, dbias, dsinks and dslopes, too
  bool is_naive() const { return backend == "naive"; }
  int64_t head_dim() const { return dtype == DType::f32 || is_naive() ? 40 : 64; }
  int64_t head_dim_v() const { return dtype == DType::f32 || is_naive() ? 24 : 64; }

  Problem(DType dtype, bool ragged, std::string backend, Random& random)
      : dtype(dtype),
        ragged(ragged),
        backend(std::move(backend)),
        q(rows(kRows, kTotalRows, kHeads, head_dim())),
        k(rows(kKeys, kTotalKeys, kHeadsKv, head_dim())),
        v(rows(kKeys, kTotalKeys, kHeadsKv, head_dim_v())),
        out(rows(kRows, kTotalRows, kHeads, head_dim_v())),
        dout(rows(kRows, kTotalRows, kHeads, head_dim_v())),
        lse(row_numbers()),
        dlse(row_numbers()),
        bias(DType::f32, {kHeads, 1, kKeys}),
        sinks(DType::f32, {kHeads}),
        slopes(DType::f32, {kBatch, kHeads}),
        state(DType::i64, {2}),
        used_q(DType::i32, {kBatch}),
        used_k(DType::i32, {kBatch}),
        cu_q(DType::i32, {kBatch + 1}),
        cu_k(DType::i32, {kBatch + 1}),
        dq(rows(kRows, kTotalRows, kHeads, head_dim())),
        dk(rows(kKeys, kTotalKeys, kHeadsKv, head_dim())),
        dv(rows(kKeys, kTotalKeys, kHeadsKv, head_dim_v())),
        dbias(DType::f32, {kHeads, 1, kKeys}),
        dsinks(DType::f32, {kHeads}),
        dslopes(DType::f32, {kBatch, kHeads}),
        results{&dq, &dk, &dv} {
    if (has_all()) results.insert(results.end(), {&dbias, &dsinks, &dslopes});
    for (Twin* x : {&q, &k, &v, &dout}) fill_normal(random, dtype, *x);
    for (Twin* x : {&dlse, &bias, &sinks, &slopes}) fill_normal(random, DType::f32, *x);
    auto set = [](Twin& twin, const std::vector<int32_t>& values) {
      std::copy(values.begin(), values.end(), twin.data<int32_t>());
    };
    set(used_q, {30, 0, 37});
    set(used_k, ragged ? std::vector{65, 5, 9} : std::vector{65, 70, 9});
    set(cu_q, {0, 30, 30, 67});  // 13 rows of no sequence
    set(cu_k, {0, 70, 75, 140});
    state.data<int64_t>()[0] = 1234567;
    state.data<int64_t>()[1] = 7;
    Twin* inputs[] = {&q,     &k,      &v,     &out,    &dout,   &lse,  &dlse, &bias,
                      &sinks, &slopes, &state, &used_q, &used_k, &cu_q, &cu_k};
    std::memset(out.data<char>(), 0, out.bytes());  // rows that take no part stay so
    std::memset(lse.data<char>(), 0, lse.bytes());
    run_forward();
    for (Twin* x : inputs) x->upload();
    for (Twin* x : results) x->upload();
  }

  AttentionOptions options(bool gpu) const {
    AttentionOptions o;
    o.window_left = 50;
    o.window_right = 3;
    o.softcap = 4.0;
    o.bias = &bias.on(gpu);
    o.sinks = &sinks.on(gpu);
    o.alibi_slopes = &slopes.on(gpu);
    if (has_all()) {
      o.dropout_p = 0.25;
      o.dropout_state = &state.on(gpu);
    }
    if (!ragged) o.seqused_q = &used_q.on(gpu);
    o.seqused_k = &used_k.on(gpu);
    o.backend = gpu ? backend.c_str() : "naive";
    return o;
  }

  void run_forward() {
    AttentionOptions o = options(false);
    o.lse = &lse.on(false);
    if (!ragged) return attention(q.on(false), k.on(false), v.on(false), out.on(false), o, lent(o));
    attention_varlen(q.on(false), k.on(false), v.on(false), cu_q.on(false), cu_k.on(false), kRows,
                     kKeys, out.on(false), o, lent(o));
  }
  std::vector<float> memory = std::vector<float>(size_t{1} << 20);
  Workspace lent(const AttentionOptions&) { return {memory.data(), memory.size() * sizeof(float)}; }

  BackwardInputs inputs(bool gpu) const {
    return {dout.on(gpu), q.on(gpu), k.on(gpu), v.on(gpu), out.on(gpu), lse.on(gpu)};
  }
  BackwardResults wanted(bool gpu) const {
    BackwardResults wanted{&dq.on(gpu), &dk.on(gpu), &dv.on(gpu)};
    if (!has_all()) return wanted;
    wanted.dbias = &dbias.on(gpu);
    wanted.dsinks = &dsinks.on(gpu);
    wanted.dslopes = &dslopes.on(gpu);
    return wanted;
  }
  size_t workspace_bytes(bool gpu) const {
    BackwardOptions b{&dlse.on(gpu)};
    if (!ragged)
      return attention_backward_workspace_bytes(inputs(gpu), wanted(gpu), options(gpu), b);
    return attention_varlen_backward_workspace_bytes(inputs(gpu), wanted(gpu), cu_q.on(gpu),
                                                     cu_k.on(gpu), kRows, kKeys, options(gpu), b);
  }
  void run(bool gpu, Workspace workspace, cudaStream_t stream = nullptr) const {
    BackwardOptions b{&dlse.on(gpu)};
    if (!ragged)
      return attention_backward(inputs(gpu), wanted(gpu), options(gpu), b, workspace, stream);
    attention_varlen_backward(inputs(gpu), wanted(gpu), cu_q.on(gpu), cu_k.on(gpu), kRows, kKeys,
                              options(gpu), b, workspace, stream);
  }
  void run_on_cpu() {
    std::vector<float> space(workspace_bytes(false) / sizeof(float) + 16);
    run(false, {space.data(), space.size() * sizeof(float)});
  }

  // Each result within a rounding of its dtype of the CPU's, which sums in double; within a few
  // where the kernel rounds P and the gradients of the scores to that dtype, too.
  void check_results(const std::string& which) const {
    const char* names[] = {"dq", "dk", "dv", "dbias", "dsinks", "dslopes"};
    for (size_t number = 0; number < results.size(); ++number) {
      const Twin& x = *results[number];
      std::vector<uint8_t> there = x.download();
      bool narrow = number < 3 && dtype != DType::f32;
      float unit = !narrow ? 5e-5f : dtype == DType::f16 ? 0x1p-10f : 0x1p-7f, largest = 0.0f;
      if (!is_naive()) unit *= 4;
      for (int64_t i = 0; i < x.size(); ++i)
        largest = std::max(largest, std::abs(x.both(there, i).first));
      CHECK(largest > 0.1f, which, ": ", names[number], " is nearly 0");
      for (int64_t i = 0; i < x.size(); ++i) {
        auto [want, got] = x.both(there, i);
        CHECK(std::abs(got - want) <= unit * (std::abs(want) + 0.1f * largest), which, ": ",
              names[number], " ", i, ": ", got, ", the CPU's ", want);
      }
      CHECK(x.guards_intact(there), which, ": memory beside ", names[number], " was written");
    }
  }
};

bool is_hopper() {
  int device = 0, major = 0, minor = 0;
  CUDA_OK(cudaGetDevice(&device));
  CUDA_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  CUDA_OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  return major == 9 && minor == 0;
}

bool add_cases(const std::string& backend, std::initializer_list<DType> dtypes) {
  for (DType dtype : dtypes)
    for (bool ragged : {false, true}) {
      std::string name =
          "cuda_backward_" + backend + "_" + name_of(dtype) + (ragged ? "_ragged" : "_dense");
      auto run = [=] {
        if (backend == "sm90" && !is_hopper()) skip("the GPU is not of compute capability 9.0");
        Random random(case_seed(name));
        Problem problem(dtype, ragged, backend, random);
        problem.run_on_cpu();
        DeviceMemory workspace(problem.workspace_bytes(true));
        if (!settings().sanitize) CUDA_OK(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
        problem.run(true, {workspace.data(), workspace.bytes()});
        CUDA_OK(cudaDeviceSynchronize());
        problem.check_results(name);
      };
      add_case(name, run, Needs::gpu);
    }
  return true;
}

const bool kAdded =
    add_cases("naive", {DType::f32, DType::f16, DType::bf16}) && add_cases("simt", {DType::f32}) &&
    add_cases("sm80", {DType::f16, DType::bf16}) && add_cases("sm90", {DType::f16, DType::bf16});

CUDA_TEST(cuda_backward_is_captured_and_reads_the_dropout_state_of_each_replay) {
  Random random(case_seed("cuda_backward_graph"));
  Problem problem(DType::f32, false, "naive", random);
  DeviceMemory workspace(problem.workspace_bytes(true));
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaGraph_t graph;
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  problem.run(true, {workspace.data(), workspace.bytes()}, stream);
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  cudaGraphExec_t replay;
  CUDA_OK(cudaGraphInstantiate(&replay, graph, 0));
  for (int64_t offset : {7, 8}) {
    problem.state.data<int64_t>()[1] = offset;
    problem.state.upload();
    problem.run_on_cpu();
    CUDA_OK(cudaGraphLaunch(replay, stream));
    CUDA_OK(cudaStreamSynchronize(stream));
    problem.check_results("offset " + std::to_string(offset));
  }
  CUDA_OK(cudaGraphExecDestroy(replay));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace cuattn::test
