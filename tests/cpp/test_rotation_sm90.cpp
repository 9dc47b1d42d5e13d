// SPDX-License-Identifier: Apache-2.0
// Queries rotated within the forward kernel on Hopper: the bits of apply_rope and the plain call. Next:
// cuda/attention/sm90/rotate.cuh.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cuattn/fused.h"
#include "test.h"
#include "twin.h"

namespace cuattn::test {
namespace {

struct Shape {
  DType dtype;
  int64_t head_dim, half;  // of the columns that are turned
  bool causal, interleaved, given;
  int64_t rows;  // 3: heads share a tile, and keys are cut
  int64_t batch = 2, keys = 700, positions = 900;

  std::string name() const {
    return std::string("sm90_rotation_") + name_of(dtype) + "_d" + std::to_string(head_dim) + "_" +
           std::to_string(2 * half) + (causal ? "_causal" : "_full") +
           (interleaved ? "_neighbours" : "_halves") + (given ? "_given" : "") + "_" +
           std::to_string(rows);
  }
};

struct Arrays {
  Twin q, k, v, out, lse, cos, sin, positions;

  Arrays(const Shape& s, Random& random)
      : q(s.dtype, {s.batch, s.rows, 4, s.head_dim}),
        k(s.dtype, {s.batch, s.keys, 2, s.head_dim}),
        v(s.dtype, {s.batch, s.keys, 2, s.head_dim}),
        out(s.dtype, {s.batch, s.rows, 4, s.head_dim}),
        lse(DType::f32, {s.batch, 4, s.rows}),
        cos(DType::f32, {s.positions, s.half}),
        sin(DType::f32, {s.positions, s.half}),
        positions(DType::i64, {s.batch, s.rows}) {
    for (Twin* x : {&q, &k, &v}) fill_normal(random, s.dtype, *x);
    for (int64_t i = 0; i < cos.size(); ++i) {
      const double angle = random.normal();
      cos.data<float>()[i] = static_cast<float>(std::cos(angle));
      sin.data<float>()[i] = static_cast<float>(std::sin(angle));
    }
    for (int64_t i = 0; i < positions.size(); ++i)
      positions.data<int64_t>()[i] =
          std::abs(static_cast<int64_t>(random.normal() * 1e6)) % s.positions;
    for (Twin* x : {&q, &k, &v, &out, &lse, &cos, &sin, &positions}) x->upload();
  }

  AttentionOptions options(const Shape& s) const {
    AttentionOptions o;
    o.backend = "sm90";
    if (s.causal) o.window_right = 0;
    return o;
  }
  void run(cuattn_attention_call& call) {
    DeviceMemory workspace(call.workspace_bytes);
    detail::run(call, out.on(true), &lse.on(true), {workspace.data(), workspace.bytes()}, nullptr);
    CUDA_OK(cudaDeviceSynchronize());
  }
};

void skip_unless_hopper() {
  int device = 0;
  cudaDeviceProp properties;
  CUDA_OK(cudaGetDevice(&device));
  CUDA_OK(cudaGetDeviceProperties(&properties, device));
  if (properties.major != 9 || properties.minor != 0)
    skip("the GPU is not of compute capability 9.0");
}

void check_rotation(const Shape& s, const std::string& name) {
  skip_unless_hopper();
  Random random(case_seed(name));
  Arrays a(s, random);
  detail::COptions options(a.options(s));
  options.c.return_lse = 1;
  cuattn_attention_call call = detail::prepare(a.q.on(true), a.k.on(true), a.v.on(true), options);
  cuattn_rope_options rope;
  cuattn_rope_options_init(&rope, sizeof rope);
  DLTensor cos = a.cos.on(true).dl(), sin = a.sin.on(true).dl(),
           positions = a.positions.on(true).dl();
  rope.interleaved = s.interleaved;
  if (s.given) rope.positions = &positions;
  int32_t rotates = 0;
  detail::check(cuattn_attention_rotate(&call, &cos, &sin, &rope, &rotates, nullptr));
  CHECK(rotates == 1, "the kernel does not rotate");
  a.run(call);
  const std::vector<uint8_t> found = a.out.download(), found_lse = a.lse.download();
  CHECK(a.out.guards_intact(found) && a.lse.guards_intact(found_lse), "memory beside was written");
  CHECK(a.q.same(), "q was written");
  if (settings().sanitize) return;
  rope.seqlen_k = s.keys;
  DLTensor q = a.q.on(true).dl();
  detail::check(cuattn_apply_rope(&q, &cos, &sin, &rope, &q, nullptr));
  for (Twin* x : {&a.out, &a.lse}) x->upload();  // NaN
  call = detail::prepare(a.q.on(true), a.k.on(true), a.v.on(true), options);
  a.run(call);
  CHECK(found == a.out.download(), "out differs");
  CHECK(found_lse == a.lse.download(), "lse differs");
}

// What the kernel leaves to apply_rope changes nothing.
TEST(sm90_rotation_of_64_columns_is_left) {
  skip_unless_hopper();
  Random random(case_seed("left"));
  const Shape s{DType::bf16, 64, 32, true, false, false, 40};
  Arrays a(s, random);
  detail::COptions options(a.options(s));
  cuattn_attention_call call = detail::prepare(a.q.on(true), a.k.on(true), a.v.on(true), options);
  cuattn_attention_call before = call;
  cuattn_rope_options rope;
  cuattn_rope_options_init(&rope, sizeof rope);
  DLTensor cos = a.cos.on(true).dl(), sin = a.sin.on(true).dl();
  int32_t rotates = 1;
  detail::check(cuattn_attention_rotate(&call, &cos, &sin, &rope, &rotates, nullptr));
  CHECK(rotates == 0, "a kernel of three groups rotates");
  CHECK(std::memcmp(&call, &before, sizeof call) == 0, "the call has changed");
}

bool add_cases() {
  int number = 0;
  for (DType dtype : {DType::f16, DType::bf16})
    for (auto [head_dim, half] : {std::pair<int64_t, int64_t>{80, 36}, {96, 12}, {128, 64}})
      for (bool causal : {false, true})
        for (bool interleaved : {false, true})
          for (int64_t rows : {3, 530}) {
            const bool given = ++number % 3 == 0;
            const Shape s{dtype, head_dim, half, causal, interleaved, given, rows};
            add_case(s.name(), [=] { check_rotation(s, s.name()); }, Needs::gpu);
          }
  return true;
}

const bool kAdded = add_cases();

}  // namespace
}  // namespace cuattn::test
