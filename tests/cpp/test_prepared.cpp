// SPDX-License-Identifier: Apache-2.0
// A call knows what prepared it: other runs, and runs after a prepare that refused, are refused and
// read nothing of it. Next: src/abi/prepared.h.
#include <cstring>
#include <string>
#include <vector>

#include "problem.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr float kPoison = -77.0f;

// Arrays that every op takes: 2 sequences of 4 rows, 2 heads of 8; blocks of 4 slots.
struct Arrays {
  std::vector<float> values = std::vector<float>(2 * 4 * 2 * 8, 0.5f), lse = {}, out = values;
  std::vector<int32_t> ids = {0, 1}, lens = {4, 3}, plan = std::vector<int32_t>(4096);
  TensorView rows{values.data(), DType::f32, {2, 4, 2, 8}};
  TensorView one{values.data(), DType::f32, {2, 2, 8}}, into{out.data(), DType::f32, {2, 4, 2, 8}};
  TensorView into_one{out.data(), DType::f32, {2, 2, 8}};
  TensorView tables{ids.data(), DType::i32, {2, 1}}, ends{lens.data(), DType::i32, {2}};
  DLTensor drows = rows.dl(), done = one.dl(), dout = into.dl(), dout_one = into_one.dl(),
           dtables = tables.dl(), dends = ends.dl();
  cuattn_attention_options attention;
  cuattn_paged_options paged;

  Arrays() {
    cuattn_attention_options_init(&attention, sizeof attention);
    cuattn_paged_options_init(&paged, sizeof paged);
    out.assign(out.size(), kPoison);
  }
  cuattn_status prepare(const char* op, cuattn_attention_call* call) {
    if (std::string(op) == "attention")
      return cuattn_attention_prepare(&drows, &drows, &drows, &attention, call);
    if (std::string(op) == "paged")
      return cuattn_paged_prepare(&done, &drows, &drows, &dtables, &dends, &paged, call);
    cuattn_paged_shape shape = {1, 2, 2, 8, 4, dl_dtype(DType::f32)};
    return cuattn_paged_plan_prepare(&dtables, &dends, &shape, &paged, call);
  }
  cuattn_status run(const char* op, cuattn_attention_call* call) {
    std::vector<char> memory(call->workspace_bytes + 256);
    char* aligned = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
    size_t bytes = call->workspace_bytes;
    if (std::string(op) == "attention")
      return cuattn_attention_run(call, &dout, nullptr, aligned, bytes, nullptr);
    if (std::string(op) == "paged")
      return cuattn_paged_run(call, &dout_one, nullptr, aligned, bytes, nullptr);
    TensorView view(plan.data(), DType::i32, {std::string(op) == "plan" ? call->out_shape[0] : 1});
    DLTensor to = view.dl();
    return cuattn_paged_plan_run(call, &to, nullptr);
  }
};

constexpr const char* kOps[] = {"attention", "paged", "plan"};

void refuses(const char* op, cuattn_status status) {
  CHECK(status == CUATTN_INVALID_ARGUMENT, op, " gave ", status);
  CHECK(std::string(cuattn_last_error()).find("call must have been prepared by cuattn_") !=
            std::string::npos,
        op, ": ", cuattn_last_error());
}

TEST(a_call_is_run_by_what_prepared_it) {
  for (const char* prepared : kOps) {
    for (const char* op : kOps) {
      Arrays x;
      cuattn_attention_call call;
      std::memset(&call, 0x5a, sizeof call);
      CHECK(x.prepare(prepared, &call) == CUATTN_OK, prepared, ": ", cuattn_last_error());
      if (prepared == op) {
        CHECK(x.run(op, &call) == CUATTN_OK, op, ": ", cuattn_last_error());
        CHECK(x.run(op, &call) == CUATTN_OK, "a second time, ", cuattn_last_error());
        continue;
      }
      refuses(op, x.run(op, &call));
      CHECK(x.out == std::vector<float>(x.out.size(), kPoison), prepared, " by ", op);
    }
  }
}

TEST(a_call_of_nobody_is_not_run) {
  for (int filling : {0, 0x5a, 0xff}) {
    cuattn_attention_call call;
    std::memset(&call, filling, sizeof call);
    call.workspace_bytes = 0;
    Arrays x;
    for (const char* op : kOps) refuses(op, x.run(op, &call));
    refuses("check", cuattn_paged_check(&call, &x.dout_one, nullptr, nullptr, 0, nullptr));
    cuattn_backward_call backward;
    std::memset(&backward, filling, sizeof backward);
    cuattn_gradients gradients = {&x.dout, nullptr, nullptr, nullptr, nullptr, nullptr};
    refuses("backward", cuattn_attention_backward_run(&backward, &gradients, nullptr, 0, nullptr));
  }
}

// Whatever the call held before.
TEST(a_refused_prepare_leaves_a_call_of_nobody) {
  for (const char* op : kOps) {
    Arrays x;
    cuattn_attention_call call;
    CHECK(x.prepare(op, &call) == CUATTN_OK, op, ": ", cuattn_last_error());
    x.attention.backend = x.paged.backend = "sm90";
    x.dends.dtype = dl_dtype(DType::f32);
    CHECK(x.prepare(op, &call) != CUATTN_OK, op);
    refuses(op, x.run(op, &call));
    Arrays y;
    CHECK(y.prepare(op, &call) == CUATTN_OK, op, ": ", cuattn_last_error());
    y.attention.struct_size = y.paged.struct_size = 3;  // options that are none
    CHECK(y.prepare(op, &call) == CUATTN_INVALID_ARGUMENT, op);
    refuses(op, y.run(op, &call));
  }
  Arrays x;
  cuattn_flex_options flex;
  cuattn_flex_options_init(&flex, sizeof flex);
  cuattn_attention_call call;
  CHECK(cuattn_flex_prepare(&x.drows, &x.drows, &x.drows, &x.attention, &flex, &call) == CUATTN_OK);
  CHECK(x.run("attention", &call) == CUATTN_OK, cuattn_last_error());
  x.attention.backend = "sm90";
  CHECK(cuattn_flex_prepare(&x.drows, &x.drows, &x.drows, &x.attention, &flex, &call) != CUATTN_OK);
  refuses("attention", x.run("attention", &call));
}

TEST(a_refused_backward_prepare_leaves_a_call_of_nobody) {
  Arrays x;
  std::vector<float> lse(2 * 2 * 4, 2.0f);
  TensorView sums(lse.data(), DType::f32, {2, 2, 4});
  DLTensor dlse = sums.dl();
  cuattn_backward_arrays arrays = {&x.drows, &x.drows, &x.drows, &x.drows, &x.drows, &dlse};
  cuattn_backward_options options;
  cuattn_backward_options_init(&options, sizeof options);
  options.need = CUATTN_NEED_DQ;
  cuattn_gradients gradients = {&x.dout, nullptr, nullptr, nullptr, nullptr, nullptr};
  cuattn_backward_call call;
  auto run = [&] {
    std::vector<char> memory(call.workspace_bytes + 256);
    char* aligned = memory.data() + (256 - reinterpret_cast<uintptr_t>(memory.data()) % 256) % 256;
    return cuattn_attention_backward_run(&call, &gradients, aligned, call.workspace_bytes, nullptr);
  };
  CHECK(cuattn_attention_backward_prepare(&arrays, &x.attention, &options, &call) == CUATTN_OK,
        cuattn_last_error());
  CHECK(run() == CUATTN_OK, cuattn_last_error());
  x.attention.backend = "sm90";
  CHECK(cuattn_attention_backward_prepare(&arrays, &x.attention, &options, &call) != CUATTN_OK);
  refuses("backward", run());
}

}  // namespace
}  // namespace cuattn::test
