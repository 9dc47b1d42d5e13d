// SPDX-License-Identifier: Apache-2.0
// The fused backward pass on Hopper, with an order of dq and without: its values against those of
// the kernel that the CPU has checked, and the bits of an order in repeats beside other work and
// where few CTAs are resident. Next: cuda/backward/sm90/ordered.cuh.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "cuattn/backward.h"
#include "stress.h"
#include "test.h"
#include "twin.h"

namespace cuattn::test {
namespace {

struct Shape {
  DType dtype;
  int64_t head_dim, heads_kv;  // of 4 heads
  bool causal;
  int64_t batch = 1, rows = 530, keys = 650;

  std::string name() const {
    return std::string(name_of(dtype)) + "_d" + std::to_string(head_dim) +
           (heads_kv < 4 ? "_groups" : "_heads") + (causal ? "_causal" : "_full");
  }
};

struct Gradients {
  Twin dq, dk, dv;

  explicit Gradients(const Shape& s)
      : dq(s.dtype, {s.batch, s.rows, 4, s.head_dim}),
        dk(s.dtype, {s.batch, s.keys, s.heads_kv, s.head_dim}),
        dv(s.dtype, {s.batch, s.keys, s.heads_kv, s.head_dim}) {
    for (Twin* x : {&dq, &dk, &dv}) x->upload();  // NaN
  }
  BackwardResults wanted() { return {&dq.on(true), &dk.on(true), &dv.on(true)}; }
};

class Problem {
 public:
  Problem(const Shape& shape, Random& random)
      : shape_(shape),
        q_(shape.dtype, {shape.batch, shape.rows, 4, shape.head_dim}),
        k_(shape.dtype, {shape.batch, shape.keys, shape.heads_kv, shape.head_dim}),
        v_(shape.dtype, {shape.batch, shape.keys, shape.heads_kv, shape.head_dim}),
        out_(shape.dtype, {shape.batch, shape.rows, 4, shape.head_dim}),
        dout_(shape.dtype, {shape.batch, shape.rows, 4, shape.head_dim}),
        lse_(DType::f32, {shape.batch, 4, shape.rows}) {
    for (Twin* x : {&q_, &k_, &v_, &dout_}) {
      fill_normal(random, shape.dtype, *x);
      x->upload();
    }
    AttentionOptions o = options("sm90");
    o.lse = &lse_.on(true);
    DeviceMemory space(attention_workspace_bytes(q_.on(true), k_.on(true), v_.on(true), o));
    attention(q_.on(true), k_.on(true), v_.on(true), out_.on(true), o,
              {space.data(), space.bytes()});
    CUDA_OK(cudaDeviceSynchronize());
  }

  AttentionOptions options(const char* backend) const {
    AttentionOptions o;
    o.backend = backend;
    if (shape_.causal) o.window_right = 0;
    return o;
  }
  BackwardInputs inputs() const {
    return {dout_.on(true), q_.on(true), k_.on(true), v_.on(true), out_.on(true), lse_.on(true)};
  }
  size_t workspace_bytes(const char* backend, bool ordered, Gradients& to) const {
    return attention_backward_workspace_bytes(inputs(), to.wanted(), options(backend),
                                              {nullptr, ordered});
  }
  void run(const char* backend, bool ordered, Gradients& to, DeviceMemory& workspace,
           cudaStream_t stream = nullptr) const {
    attention_backward(inputs(), to.wanted(), options(backend), {nullptr, ordered},
                       {workspace.data(), workspace.bytes()}, stream);
  }
  void run(const char* backend, bool ordered, Gradients& to) const {
    DeviceMemory workspace(workspace_bytes(backend, ordered, to));
    if (!settings().sanitize) CUDA_OK(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
    run(backend, ordered, to, workspace);
    CUDA_OK(cudaDeviceSynchronize());
  }

 private:
  Shape shape_;
  Twin q_, k_, v_, out_, dout_, lse_;
};

// Both round P and the gradients of the scores to the dtype, in tiles of their own.
void check_near(const Twin& x, const Twin& reference, DType dtype, const char* name) {
  const std::vector<uint8_t> there = x.download(), wanted = reference.download();
  const float unit = dtype == DType::f16 ? 0x1p-8f : 0x1p-5f;
  float largest = 0.0f;
  for (int64_t i = 0; i < x.size(); ++i)
    largest = std::max(largest, std::abs(x.both(wanted, i).second));
  CHECK(largest > 0.1f, name, " is nearly 0");
  for (int64_t i = 0; i < x.size(); ++i) {
    const float want = x.both(wanted, i).second, got = x.both(there, i).second;
    CHECK(std::abs(got - want) <= unit * (std::abs(want) + 0.1f * largest), name, " ", i, ": ", got,
          ", that of the naive kernel ", want);
  }
  CHECK(x.guards_intact(there), "memory beside ", name, " was written");
}

void skip_unless_hopper() {
  int device = 0;
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDevice(&device));
  CUDA_OK(cudaGetDeviceProperties(&properties, device));
  if (properties.major != 9 || properties.minor != 0)
    skip("the GPU is not of compute capability 9.0");
}

bool add_values(const Shape& shape, bool ordered) {
  std::string name =
      std::string("cuda_backward_sm90_fused_") + (ordered ? "in_order_" : "") + shape.name();
  auto run = [=] {
    skip_unless_hopper();
    Random random(case_seed(name));
    Problem problem(shape, random);
    Gradients got(shape), want(shape);
    problem.run("sm90", ordered, got);
    if (settings().sanitize) return;
    problem.run("naive", false, want);
    check_near(got.dq, want.dq, shape.dtype, "dq");
    check_near(got.dk, want.dk, shape.dtype, "dk");
    check_near(got.dv, want.dv, shape.dtype, "dv");
  };
  return add_case(name, run, Needs::gpu);
}

// What repeats give must be what the first run gave, while other work takes a changing share of the
// GPU; with `free_sms`, of which the kernel has no more.
void check_same_bits(const Shape& shape, const std::string& name, int repeats, int free_sms) {
  skip_unless_hopper();
  if (settings().sanitize) skip("of order in time, which no tool sees");
  Random random(case_seed(name));
  Problem problem(shape, random);
  Gradients first(shape), again(shape);
  problem.run("sm90", true, first);
  DeviceMemory workspace(problem.workspace_bytes("sm90", true, again)), junk(size_t{1} << 22);
  OnGpu<unsigned> differences(std::vector<unsigned>(3));
  cudaStream_t stream, other;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  auto repeat = [&](int number) {
    for (int i = 0; i < number % 7; ++i)
      CUDA_OK(cudaMemsetAsync(junk.data(), i, size_t{1} << (10 + number % 13), other));
    const std::pair<Twin*, Twin*> pairs[] = {
        {&first.dq, &again.dq}, {&first.dk, &again.dk}, {&first.dv, &again.dv}};
    for (auto [x, y] : pairs)
      CUDA_OK(cudaMemsetAsync(y->on(true).data, 0xff, static_cast<size_t>(y->bytes()), stream));
    problem.run("sm90", true, again, workspace, stream);
    for (int i = 0; i < 3; ++i)
      count_differences(pairs[i].first->on(true).data, pairs[i].second->on(true).data,
                        static_cast<size_t>(pairs[i].first->bytes()), differences.data() + i,
                        stream);
  };
  for (int i = 0; i < 7; ++i) repeat(i);  // what is loaded at its first use is there
  CUDA_OK(cudaDeviceSynchronize());
  if (free_sms == 0) {
    for (int i = 0; i < repeats; ++i) repeat(i);
    CUDA_OK(cudaStreamSynchronize(stream));
  } else {
    HeldSms held(free_sms);
    for (int i = 0; i < repeats; ++i) repeat(i);
    CHECK(held.ends(stream), "with ", free_sms, " SMs the kernel did not end");
  }
  CUDA_OK(cudaDeviceSynchronize());
  std::vector<unsigned> count = differences.host();
  CHECK(count[0] == 0 && count[1] == 0 && count[2] == 0, "words that differ: ", count[0],
        " of dq, ", count[1], " of dk, ", count[2], " of dv");
  CUDA_OK(cudaStreamDestroy(stream));
  CUDA_OK(cudaStreamDestroy(other));
}

bool add_repeats(const Shape& shape, const std::string& what, int repeats, int free_sms) {
  std::string name = "cuda_backward_sm90_order_" + what + "_" + shape.name();
  return add_case(name, [=] { check_same_bits(shape, name, repeats, free_sms); }, Needs::gpu);
}

bool add_cases() {
  for (int64_t head_dim : {64, 96, 128})
    for (int64_t heads_kv : {4, 2})
      for (bool causal : {false, true}) {
        for (DType dtype : {DType::f16, DType::bf16})
          for (bool ordered : {false, true})
            add_values({dtype, head_dim, heads_kv, causal}, ordered);
        const Shape longer = {DType::bf16, head_dim, heads_kv, causal, 3, 1800, 1800};  // 180 CTAs
        Shape shorter = longer;  // 60 CTAs: the problem is made on the host
        shorter.batch = 1;
        for (int free : {1, 2, 37})
          add_repeats(shorter, "with_" + std::to_string(free) + "_sms", 6, free);
        add_repeats(longer, "in_1000_repeats", 1000, 0);
      }
  return true;
}

const bool kAdded = add_cases();

}  // namespace
}  // namespace cuattn::test
