// SPDX-License-Identifier: Apache-2.0
// paged_attention and paged_plan through the C++ header, on the CPU: every layout and dtype against
// the formula in double precision.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuattn/explain.h"
#include "cuattn/float8.h"
#include "paged.h"
#include "test.h"

namespace cuattn::test {
namespace {

const DLDevice kHost{kDLCPU, 0};

TEST(cpu_paged_attention_is_attention_over_the_keys_of_its_blocks) {
  Random random(case_seed("paged"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (bool e4m3 : {false, true})
      for (KvLayout layout : {KvLayout::nhd, KvLayout::hnd, KvLayout::vllm}) {
        if (e4m3 && dtype == DType::f32) continue;
        for (PagedProblem& p : paged_problems(dtype, e4m3, layout, 16 * random.range(1, 8))) {
          p.fill(random);
          PagedCall call(p, kHost, [](Array& array) { return array.data(); }, "auto");
          std::vector<int32_t> plan(call.plan_size());
          if (p.planned) call.make_plan(plan.data(), nullptr);
          std::vector<float> workspace(call.workspace_bytes() / sizeof(float) + 64);
          call.run({workspace.data(), call.workspace_bytes()}, nullptr);
          std::string wrong = judge_paged(p);
          CHECK(wrong.empty(), wrong);
        }
      }
}

std::string refusal_of(PagedProblem& p) {
  try {
    PagedCall call(p, kHost, [](Array& array) { return array.data(); }, "auto");
    std::vector<float> workspace(call.workspace_bytes() / sizeof(float) + 64);
    call.run({workspace.data(), call.workspace_bytes()}, nullptr);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(cpu_paged_attention_has_its_versions) {
  Random random(case_seed("versions"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (bool e4m3 : {false, true})
      for (KvLayout layout : {KvLayout::nhd, KvLayout::hnd, KvLayout::vllm}) {
        if (e4m3 && dtype == DType::f32) continue;
        for (PagedProblem& p : version_problems(dtype, e4m3, layout, 16 * random.range(1, 8))) {
          p.fill(random);
          if (p.wrong) {
            CHECK(refusal_of(p).find(" must ") != std::string::npos, p.text());
            continue;
          }
          std::string wrong = refusal_of(p);
          if (wrong.empty()) wrong = judge_paged(p);
          CHECK(wrong.empty(), wrong);
        }
      }
}

// Whatever version and scale the options say; V2 with buffers of its own and with the workspace.
TEST(cpu_paged_attention_v1_and_v2_go_by_their_arguments) {
  Random random(case_seed("by name"));
  PagedProblem p = version_problems(DType::f32, false, KvLayout::vllm, 32)[2];
  p.fill(random);
  int64_t seqs = static_cast<int64_t>(p.lens.size());
  auto view = [](Array& array) { return array.view(array.data(), kHost); };
  TensorView q(p.q.data(), p.dtype, {seqs, p.heads_q, p.head_dim}), k = view(p.k), v = view(p.v);
  TensorView tables = view(p.tables), context_lens = view(p.context_lens);
  auto bits = [&](auto&& run) {
    p.out.poison();
    run(TensorView(p.out.data(), p.dtype, {seqs, p.heads_q, p.head_dim}));
    return p.out.bytes();
  };
  PagedOptions plain, other;
  plain.kv_layout = other.kv_layout = KvLayout::vllm;
  plain.partition_size = other.partition_size = kPartition;
  plain.scale = 0.3, other.scale = 7;
  for (int version : {1, 2}) {
    plain.version = version, other.version = 3 - version;
    std::vector<float> workspace(
        paged_attention_workspace_bytes(q, k, v, tables, context_lens, plain) / sizeof(float));
    Workspace lent{workspace.data(), workspace.size() * sizeof(float)};
    auto expected = bits([&](const TensorView& out) {
      paged_attention(q, k, v, tables, context_lens, out, plain, lent);
    });
    auto got = bits([&](const TensorView& out) {
      if (version == 1) {
        paged_attention_v1(out, q, k, v, tables, context_lens, 0.3, other);
      } else {
        CHECK(paged_attention_v2_workspace_bytes(q, k, v, tables, context_lens, other) ==
              lent.bytes);
        paged_attention_v2(out, q, k, v, tables, context_lens, 0.3, other, lent);
      }
    });
    CHECK(got == expected, "version ", version);
    CHECK((lent.bytes > 0) == (version == 2), "version ", version);
  }
  TensorView exp_sums = view(p.exp_sums), max_logits = view(p.max_logits), tmp = view(p.tmp_out);
  auto with_workspace = p.out.bytes();
  other.exp_sums = &exp_sums, other.max_logits = &max_logits, other.tmp_out = &tmp;
  CHECK(paged_attention_v2_workspace_bytes(q, k, v, tables, context_lens, other) == 0);
  CHECK(with_workspace == bits([&](const TensorView& out) {
          paged_attention_v2(out, q, k, v, tables, context_lens, 0.3, other);
        }));
  TensorView four(p.q.data(), p.dtype, {seqs, 1, p.heads_q, p.head_dim});
  check_throws<std::invalid_argument>("paged_attention_v1: q must have 3 axes", [&] {
    paged_attention_v1(four, four, k, v, tables, context_lens, 0.3, other);
  });
  check_throws<std::invalid_argument>("paged_attention_v2: q must have 3 axes", [&] {
    paged_attention_v2(four, four, k, v, tables, context_lens, 0.3, other);
  });
}

// With a scale for each sequence and key head: the bits of the numbers that dequantize makes.
TEST(cpu_paged_attention_takes_queries_of_codes) {
  Random random(case_seed("codes"));
  PagedProblem p = paged_problems(DType::bf16, true, KvLayout::nhd, 64)[0];
  p.fill(random);
  int64_t seqs = static_cast<int64_t>(p.lens.size()), rows = int64_t{p.q_len} * p.heads_q;
  size_t count = static_cast<size_t>(seqs * rows * p.head_dim);
  std::vector<uint8_t> codes(count);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random.range(0, 126));
  std::vector<float> factors(static_cast<size_t>(seqs * p.heads_kv));
  for (float& factor : factors) factor = 0.25f * static_cast<float>(random.range(1, 8));
  std::vector<uint16_t> numbers(count), outs[2] = {numbers, numbers};
  auto shaped = [&](void* data, DType dtype) {
    return TensorView(data, dtype, {seqs, p.q_len, p.heads_q, p.head_dim});
  };
  TensorView q = shaped(codes.data(), DType::e4m3), wide = shaped(numbers.data(), DType::bf16);
  TensorView scale(factors.data(), DType::f32, {seqs, p.heads_kv});
  dequantize(q, wide, scale);
  auto view = [](Array& array) { return array.view(array.data(), kHost); };
  TensorView k = view(p.k), v = view(p.v), tables = view(p.tables), lens = view(p.context_lens);
  PagedOptions options;
  size_t bytes = paged_attention_workspace_bytes(wide, k, v, tables, lens, options);
  for (int i = 0; i < 2; ++i) {
    if (i == 1) options.q_scales = &scale;
    const TensorView& queries = i == 0 ? wide : q;
    size_t needed = paged_attention_workspace_bytes(queries, k, v, tables, lens, options);
    CHECK(i == 0 || needed >= bytes + count * sizeof(uint16_t), needed);
    std::vector<float> workspace(needed / sizeof(float) + 64);
    paged_attention(queries, k, v, tables, lens, shaped(outs[i].data(), DType::bf16), options,
                    {workspace.data(), needed});
  }
  CHECK(outs[0] == outs[1]);
  CHECK(outs[0] != std::vector<uint16_t>(count));
  options.q_scales = nullptr, options.q_scale = -1;
  check_throws<std::invalid_argument>("paged_attention: q_scale must be finite", [&] {
    paged_attention_workspace_bytes(q, k, v, tables, lens, options);
  });
  options.q_scale = 2;
  check_throws<std::invalid_argument>("paged_attention: q_scale belongs to float8", [&] {
    paged_attention_workspace_bytes(wide, k, v, tables, lens, options);
  });
  options.q_scales = &scale;
  check_throws<std::invalid_argument>("q_scale must be a number or an array, got 2 and", [&] {
    paged_attention_workspace_bytes(q, k, v, tables, lens, options);
  });
  options.q_scales = nullptr, options.q_scale = 1, options.v_scale = 2, options.v_scales = &scale;
  check_throws<std::invalid_argument>("v_scale must be a number or an array, got 2 and", [&] {
    paged_attention_workspace_bytes(q, k, v, tables, lens, options);
  });
}

// Without data, for a GPU that need not be here, and refused as the call is.
TEST(paged_calls_are_explained) {
  Random random(1);
  cuattn_device h200{1, 9, 0, 132, 227 * 1024, 1, 1, "H200", {}};
  auto nowhere = [](Array&) -> void* { return nullptr; };
  PagedProblem p = paged_problems(DType::f16, false, KvLayout::nhd, 64)[1];
  p.num_splits = 9, p.lens = {700, 40};  // more than a cluster merges: parts lie in the workspace
  p.fill(random);
  auto explained = [&](const cuattn_device* device) {
    DLDevice where{device == nullptr ? kDLCPU : kDLCUDA, 0};
    return PagedCall(p, where, nowhere, "auto").explain(device);
  };
  cuattn_plan here = explained(nullptr), there = explained(&h200);
  CHECK(std::string(here.kernel) == "cpu", here.kernel);
  CHECK(std::string(there.kernel) != "cpu" && there.workspace_bytes > 0, there.kernel);
  CHECK(std::string(there.ladder).find(there.kernel) != std::string::npos, there.ladder);
  PagedCall call(p, kHost, [](Array& array) { return array.data(); }, "auto");
  CHECK(here.workspace_bytes == call.workspace_bytes());
  p.version = 1;
  CHECK(explained(&h200).num_splits == 1 && explained(&h200).workspace_bytes == 0);
  p.version = 0, p.packed = true;
  CHECK(std::string(explained(nullptr).kernel) == "cpu");
  p.packed = false, p.block_size = 300;
  p.fill(random);
  check_throws<std::invalid_argument>("block_size from 1 to 256, got 300",
                                      [&] { explained(&h200); });
}

TEST(cpu_attention_varlen_reads_blocks) {
  Random random(case_seed("pages"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (KvLayout layout : {KvLayout::nhd, KvLayout::hnd, KvLayout::vllm})
      for (PagedProblem& p : prefill_problems(dtype, layout, 16 * random.range(1, 8))) {
        p.fill(random);
        PagedCall call(p, kHost, [](Array& array) { return array.data(); }, "auto");
        std::vector<float> workspace(call.workspace_bytes() / sizeof(float) + 64);
        call.run({workspace.data(), call.workspace_bytes()}, nullptr);
        std::string wrong = judge_paged(p);
        CHECK(wrong.empty(), wrong);
      }
}

TEST(cpu_paged_attention_refuses_blocks_and_versions_that_are_not_there) {
  Random random(1);
  PagedProblem p = paged_problems(DType::f32, false, KvLayout::nhd, 64)[1];
  p.fill(random);
  p.tables.i32(0) = 1000;
  std::string message = refusal_of(p);
  CHECK(message.find("block_tables must hold block ids") != std::string::npos, message);
  p.version = 3;
  message = refusal_of(p);
  CHECK(message.find("version must be 0, 1 or 2, got 3") != std::string::npos, message);
}

TEST(a_prepared_call_of_v2_runs_again_with_another_workspace) {
  Random random(1);
  PagedProblem p = paged_problems(DType::f32, false, KvLayout::nhd, 64)[1];
  p.version = 2, p.lens = {2 * kPartition + 9, 40};
  p.fill(random);
  int64_t seqs = static_cast<int64_t>(p.lens.size());
  TensorView q(p.q.data(), p.dtype, {seqs, p.heads_q, p.head_dim});
  TensorView views[] = {p.k.view(p.k.data(), kHost), p.v.view(p.v.data(), kHost),
                        p.tables.view(p.tables.data(), kHost),
                        p.context_lens.view(p.context_lens.data(), kHost)};
  DLTensor dq = q.dl(), dk = views[0].dl(), dv = views[1].dl(), dt = views[2].dl(),
           dc = views[3].dl();
  cuattn_paged_options options;
  cuattn_paged_options_init(&options, sizeof options);
  options.version = 2;
  options.partition_size = kPartition;
  cuattn_attention_call call;
  CHECK(cuattn_paged_prepare(&dq, &dk, &dv, &dt, &dc, &options, &call) == CUATTN_OK,
        cuattn_last_error());
  const float unwritten = -123.0f;
  size_t count = call.workspace_bytes / sizeof(float);
  std::vector<float> first(count, unwritten), second(count, unwritten);
  std::vector<float> outs[2] = {std::vector<float>(seqs * p.heads_q * p.head_dim),
                                std::vector<float>(seqs * p.heads_q * p.head_dim)};
  for (int i = 0; i < 2; ++i) {
    TensorView out(outs[i].data(), p.dtype, {seqs, p.heads_q, p.head_dim});
    DLTensor d_out = out.dl();
    std::vector<float>& workspace = i == 0 ? first : second;
    std::fill(first.begin(), first.end(), unwritten);
    CHECK(cuattn_paged_check(&call, &d_out, nullptr, workspace.data(), call.workspace_bytes - 1,
                             nullptr) == CUATTN_OUT_OF_MEMORY);
    CHECK(cuattn_paged_check(&call, &d_out, nullptr, workspace.data(), call.workspace_bytes,
                             nullptr) == CUATTN_OK,
          cuattn_last_error());
    CHECK(workspace == std::vector<float>(count, unwritten), "the check has written");
    CHECK(cuattn_paged_run(&call, &d_out, nullptr, workspace.data(), call.workspace_bytes,
                           nullptr) == CUATTN_OK,
          cuattn_last_error());
  }
  CHECK(outs[0] == outs[1]);
  CHECK(first == std::vector<float>(count, unwritten), "the first workspace was written again");
  CHECK(second != first);
}

TEST(options_that_have_no_part_in_a_plan_do_not_change_it) {
  Random random(1);
  PagedProblem p = paged_problems(DType::f32, false, KvLayout::nhd, 64)[2];
  p.fill(random);
  std::vector<int32_t> plans[2];
  for (int i = 0; i < 2; ++i) {
    p.num_splits = 3 * i;
    p.batch_invariant = i == 1;
    PagedCall call(p, kHost, [](Array& array) { return array.data(); }, "auto");
    plans[i].resize(call.plan_size());
    call.make_plan(plans[i].data(), nullptr);
  }
  CHECK(plans[0] == plans[1]);
}

}  // namespace
}  // namespace cuattn::test
