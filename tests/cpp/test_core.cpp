// SPDX-License-Identifier: Apache-2.0
// The parts that need no GPU: TensorView, the rules of params/rows.h and pages.h, the planner on made-up
// devices, CPU attention against the double-precision reference, merging, threads. The C ABI's
// refusals are in test_errors.cpp.
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "cuattn/params/pages.h"
#include "cuattn/params/rows.h"
#include "problem.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

TEST(tensor_view_is_contiguous_by_default) {
  float data[24];
  TensorView view(data, DType::f32, {2, 3, 4});
  CHECK(view.ndim == 3 && view.size() == 24);
  CHECK(view.strides[0] == 12 && view.strides[1] == 4 && view.strides[2] == 1);
  CHECK(view.is(DType::f32) && !view.is(DType::bf16));
}

TEST(tensor_view_borrows_a_dltensor_with_offset_and_without_strides) {
  float data[24];
  int64_t shape[] = {3, 4}, strides[] = {8, 2};
  DLTensor tensor{data, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 8};
  TensorView view(tensor);
  CHECK(view.data == data + 2 && view.strides[0] == 4 && view.strides[1] == 1);
  tensor.strides = strides;
  view = TensorView(tensor);
  CHECK(view.strides[0] == 8 && view.strides[1] == 2);
  DLTensor back = view.dl();
  CHECK(back.data == data + 2 && back.byte_offset == 0 && back.shape[1] == 4 &&
        back.strides[0] == 8);
}

TEST(tensor_view_keeps_the_rank_of_what_it_cannot_hold) {
  float data = 0;
  int64_t shape[] = {1, 1, 1, 1, 1, 1, 1};
  CHECK(TensorView(DLTensor{&data, {kDLCPU, 0}, 7, {kDLFloat, 32, 1}, shape, nullptr, 0}).ndim ==
        7);
  TensorView view(&data, DType::f32, {1, 1, 1, 1, 1, 1, 1});
  CHECK(view.ndim == 7 && view.strides == TensorView().strides);
}

TEST(visible_keys_agree_with_the_definition) {
  Random random(case_seed("visible_keys"));
  for (int i = 0; i < 20000; ++i) {
    int queries = random.range(1, 30), keys = random.range(0, 30),
        row = random.range(0, queries - 1);
    int left = random.range(-1, 20), right = random.range(-1, 20);
    KeyRange range = visible_keys(left, right, row, queries, keys);
    CHECK(0 <= range.begin && range.begin <= range.end && range.end <= keys);
    for (int key = 0; key < keys; ++key) {
      int diagonal = row + keys - queries;
      bool sees = (left < 0 || key >= diagonal - left) && (right < 0 || key <= diagonal + right);
      CHECK(sees == (key >= range.begin && key < range.end), "row ", row, " of ", queries, " key ",
            key, " of ", keys, " window ", left, ",", right);
    }
  }
}

TEST(a_mask_is_named_by_its_sides) {
  constexpr int32_t kNone = static_cast<int32_t>(kUnlimited);
  const std::vector<std::pair<MaskParams, MaskKind>> masks = {
      {{kNone, kNone}, MaskKind::none}, {{kNone, 0}, MaskKind::causal},
      {{kNone, 5}, MaskKind::window},   {{0, kNone}, MaskKind::window},
      {{3, 0}, MaskKind::window},       {{3, 5}, MaskKind::window}};
  for (const auto& [mask, kind] : masks) CHECK(mask.kind() == kind, mask.left, ", ", mask.right);
}

TEST(any_block_id_is_read_as_one_that_exists) {
  const int32_t tables[] = {4, -1, 5, INT32_MAX, INT32_MIN, 0, 2};
  const Pages pages{5, 16, tables, 3};
  const std::vector<int32_t> want = {4, 0, 4, 4, 0, 0};  // two sequences of three columns
  for (int32_t i = 0; i < 6; ++i) CHECK(pages.block(i / 3, i % 3) == want[i], i);
}

TEST(spans_stay_inside_the_buffers_whatever_the_lengths_say) {
  Random random(case_seed("spans"));
  for (int i = 0; i < 20000; ++i) {
    int32_t starts[2], used;
    for (int32_t& start : starts)
      start = random.chance(0.3) ? static_cast<int32_t>(random.next()) : random.range(0, 50);
    used = random.chance(0.3) ? static_cast<int32_t>(random.next()) : random.range(0, 50);
    int max_seqlen = random.range(0, 40), total = random.range(0, 50);
    Span span = make_span(starts, &used, 0, max_seqlen, total);
    CHECK(span.start >= 0 && span.start + span.stored <= total && span.stored >= 0, "start ",
          span.start);
    CHECK(span.stored <= max_seqlen && span.used >= 0 && span.used <= span.stored);
  }
  Span dense = make_span(nullptr, nullptr, 3, 17, 100);
  CHECK(dense.start == 0 && dense.stored == 17 && dense.used == 17);
}

// ---- CPU attention

std::vector<const char*> cpu_backends() { return {"naive", "cpu", "auto"}; }

void check_on_cpu(Problem& p, const char* backend, double* worst = nullptr) {
  Reference expected = reference(p);
  std::vector<std::vector<uint8_t>> before;
  for (Array* input : p.inputs()) before.push_back(input->bytes());
  run_on_cpu(p, backend);
  std::string verdict = judge(p, expected, worst);
  CHECK(verdict.empty(), backend, ": ", verdict);
  for (size_t i = 0; i < before.size(); ++i) {
    CHECK(p.inputs()[i]->bytes() == before[i], backend, ": input ", i, " was changed [", p.text(),
          "]");
  }
}

Problem random_problem(Random& random, DType dtype) {
  static const std::vector<int> lengths = {1, 2, 5, 16, 31, 64, 65, 100, 130};
  static const std::vector<int> dims = {8, 24, 64, 72, 128, 192, 256};
  Problem p;
  p.dtype = dtype;
  p.batch = random.range(1, 3);
  p.heads_kv = random.range(1, 2);
  p.heads_q = p.heads_kv * random.range(1, 3);
  p.head_dim = random.pick(dims);
  p.head_dim_v = random.chance(0.5) ? p.head_dim : random.pick(dims);
  p.seqlen_q = random.pick(lengths);
  p.seqlen_kv = random.pick(lengths);
  p.layout = random.chance(0.5) ? Layout::bshd : Layout::bhsd;
  p.row_gap = random.chance(0.3) ? random.range(1, 20) : 0;
  p.causal = random.chance(0.4);
  if (random.chance(0.3)) p.window_left = random.range(0, 40);
  if (random.chance(0.3)) p.window_right = random.range(0, 40);
  if (random.chance(0.25)) p.softcap = 20;
  if (random.chance(0.2)) p.scale = random.chance(0.5) ? -0.1 : 0.3;
  p.alibi = random.chance(0.25);
  p.alibi_per_batch = random.chance(0.5);
  p.sinks = random.chance(0.3);
  p.bias_kind =
      random.chance(0.4) ? static_cast<Problem::Bias>(random.range(1, 3)) : Problem::Bias::none;
  p.bias_broadcast = random.chance(0.5);
  p.magnitude = random.chance(0.2) ? 8 : 1;
  p.lse = random.chance(0.8);
  if (random.chance(0.4)) {
    p.unowned = random.range(0, 2);
    for (int b = 0; b < p.batch; ++b) {
      p.lens_q.push_back(random.chance(0.2) ? 0 : random.range(0, p.seqlen_q));
      p.lens_kv.push_back(random.chance(0.2) ? 0 : random.range(0, p.seqlen_kv));
    }
  }
  if (random.chance(0.3)) {
    for (int b = 0; b < p.batch; ++b) {
      p.used_q.push_back(random.range(0, p.stored_q(b)));
      p.used_kv.push_back(random.range(0, p.stored_kv(b)));
    }
  }
  p.fill(random);
  return p;
}

void random_cpu_cases(DType dtype) {
  Random random(case_seed(name_of(dtype)));
  double worst = 0;
  for (int i = 0; i < 150; ++i) {
    Problem p = random_problem(random, dtype);
    for (const char* backend : cpu_backends()) check_on_cpu(p, backend, &worst);
  }
}

TEST(cpu_attention_float32_agrees_with_the_reference) { random_cpu_cases(DType::f32); }
TEST(cpu_attention_float16_agrees_with_the_reference) { random_cpu_cases(DType::f16); }
TEST(cpu_attention_bfloat16_agrees_with_the_reference) { random_cpu_cases(DType::bf16); }

TEST(cpu_attention_of_the_seed_case_is_within_1e_5) {
  Problem p;
  p.batch = 2, p.heads_q = p.heads_kv = 4, p.seqlen_q = p.seqlen_kv = 128;
  Random random(case_seed("seed"));
  p.fill(random);
  Reference expected = reference(p);
  for (const char* backend : cpu_backends()) {
    run_on_cpu(p, backend);
    for (int b = 0; b < 2; ++b)
      for (int row = 0; row < 128; ++row)
        for (int head = 0; head < 4; ++head)
          for (int i = 0; i < 64; ++i) {
            double error = p.out.get(p.offset(p.out, b, row, head) + i) -
                           expected.exact.out[p.index(b, row, head) * 64 + i];
            CHECK(std::abs(error) < 1e-5, backend, ": error ", error);
          }
  }
}

TEST(cpu_attention_without_keys_gives_zero_and_minus_infinity_or_the_sink) {
  for (bool sinks : {false, true}) {
    Problem p;
    p.batch = 2, p.heads_q = 2, p.seqlen_q = 3, p.seqlen_kv = 0, p.sinks = sinks;
    Random random(case_seed("no keys"));
    p.fill(random);
    for (const char* backend : cpu_backends()) {
      run_on_cpu(p, backend);
      p.out.for_each_offset([&](int64_t i) { CHECK(p.out.get(i) == 0.0f, backend); });
      for (int row = 0; row < 3; ++row) {
        double lse = p.lse_out.get(p.lse_offset(1, row, 1));
        CHECK(sinks ? std::abs(lse - p.sink_logits.get(1)) < 1e-6 : lse == -kInf, backend, ": lse ",
              lse);
      }
    }
  }
}

TEST(cpu_attention_accepts_zero_sizes) {
  struct {
    int batch, seqlen_q, heads_q, heads_kv;
  } sizes[] = {{0, 4, 2, 2}, {2, 0, 2, 2}, {2, 4, 0, 2}};
  for (const auto& size : sizes) {
    Problem p;
    p.batch = size.batch, p.seqlen_q = size.seqlen_q, p.seqlen_kv = 5;
    p.heads_q = size.heads_q, p.heads_kv = size.heads_kv;
    Random random(1);
    p.fill(random);
    Bound bound(p, {kDLCPU, 0}, [](Array& array) { return array.data(); }, "auto");
    CHECK(bound.call().nothing_to_do == 1);
    bound.run({}, nullptr);
  }
}

TEST(cpu_attention_passes_on_nan_of_visible_data_only) {
  Problem p;
  p.seqlen_q = 4, p.seqlen_kv = 6, p.causal = true;
  Random random(case_seed("nan"));
  p.fill(random);
  p.v.set(p.offset(p.v, 0, 4, 0) + 7, std::nanf(""));  // key 4: seen by queries 2 and 3
  for (const char* backend : cpu_backends()) {
    run_on_cpu(p, backend);
    bool tiled =
        std::string(backend) != "naive";  // may multiply a masked key's zero with the v of its tile
    for (int row = 0; row < 4; ++row) {
      bool nan = std::isnan(p.out.get(p.offset(p.out, 0, row, 0) + 7));
      CHECK(nan == (row >= 2) || (tiled && nan), backend, ": row ", row, " of v's column");
      CHECK(!std::isnan(p.out.get(p.offset(p.out, 0, row, 0) + 8)), backend, ": row ", row,
            " of another column");
    }
  }
  p.fill(random);
  p.q.set(p.offset(p.q, 0, 1, 0), std::nanf(""));
  for (const char* backend : cpu_backends()) {
    run_on_cpu(p, backend);
    for (int row = 0; row < 4; ++row) {
      CHECK(std::isnan(p.out.get(p.offset(p.out, 0, row, 0))) == (row == 1), backend, ": row ",
            row);
      CHECK(std::isnan(p.lse_out.get(p.lse_offset(0, row, 0))) == (row == 1), backend,
            ": lse of row ", row);
    }
  }
}

// The functions of attention.h as a user calls them, against the prepared calls of this suite.
TEST(the_cpp_functions_give_the_same_bits) {
  Random random(case_seed("wrappers"));
  for (bool ragged : {false, true}) {
    Problem p;
    p.batch = 2, p.heads_q = 2, p.seqlen_q = 7, p.seqlen_kv = 9;
    if (ragged) p.lens_q = {3, 7}, p.lens_kv = {9, 2};
    p.fill(random);
    run_on_cpu(p, "naive");
    std::vector<uint8_t> out_bytes = p.out.bytes(), lse_bytes = p.lse_out.bytes();
    p.out.poison();
    p.lse_out.poison();
    auto view = [](Array& array) { return array.view(array.data(), {kDLCPU, 0}); };
    TensorView q = view(p.q), k = view(p.k), v = view(p.v), out = view(p.out),
               lse = view(p.lse_out);
    AttentionOptions options;
    options.backend = "naive";
    options.lse = &lse;
    if (ragged) {
      TensorView cu_q = view(p.cu_q), cu_kv = view(p.cu_kv);
      std::vector<float> scores(
          attention_varlen_workspace_bytes(q, k, v, cu_q, cu_kv, 7, 9, options) / 4);
      CHECK(scores.size() == 2 * 2 * 7 * 9, scores.size());
      attention_varlen(q, k, v, cu_q, cu_kv, 7, 9, out, options,
                       {scores.data(), scores.size() * 4});
    } else {
      std::vector<float> scores(attention_workspace_bytes(q, k, v, options) / 4);
      CHECK(scores.size() == 2 * 2 * 7 * 9, scores.size());
      attention(q, k, v, out, options, {scores.data(), scores.size() * 4});
    }
    CHECK(p.out.bytes() == out_bytes && p.lse_out.bytes() == lse_bytes, "ragged: ", ragged);
  }
}

TEST(fast_sums_of_codes_are_the_same_bits_on_the_cpu) {
  constexpr int kNumbers = 2 * 70 * 2 * 32;
  Random random(case_seed("accumulate"));
  std::vector<uint8_t> codes(kNumbers);  // sizes up to 26, both signs
  for (uint8_t& code : codes)
    code = static_cast<uint8_t>(random.range(0, 1) * 128 + random.range(0, 93));
  TensorView x(codes.data(), DType::e4m3, {2, 70, 2, 32});
  std::vector<float> results[2];
  for (Accumulate accumulate : {Accumulate::exact, Accumulate::fast}) {
    std::vector<float>& result = results[static_cast<int>(accumulate)];
    result.assign(kNumbers, -1000.0f);
    AttentionOptions options;
    options.accumulate = accumulate;
    options.q_scale = 0.125;
    attention(x, x, x, TensorView(result.data(), DType::f32, {2, 70, 2, 32}), options);
  }
  CHECK(results[0] == results[1] && results[0] != std::vector<float>(kNumbers, -1000.0f));
}

TEST(a_prepared_call_runs_again_with_the_same_bits) {
  Problem p;
  p.seqlen_q = 50, p.seqlen_kv = 70, p.heads_q = 2;
  Random random(case_seed("again"));
  p.fill(random);
  Bound bound(p, {kDLCPU, 0}, [](Array& array) { return array.data(); }, "cpu");
  bound.run({}, nullptr);
  std::vector<uint8_t> first = p.out.bytes();
  for (int i = 0; i < 5; ++i) {
    p.out.poison();
    bound.run({}, nullptr);
    CHECK(p.out.bytes() == first, "run ", i);
  }
}

TEST(calls_from_several_threads_do_not_disturb_each_other) {
  constexpr int kThreads = 8, kCalls = 30;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([t, &wrong] {
      Random random(1000 + t);
      Problem p;
      p.heads_q = 1 + t % 3, p.seqlen_q = 30 + t, p.seqlen_kv = 80 - t, p.causal = t % 2;
      p.fill(random);
      run_on_cpu(p, "cpu");
      std::vector<uint8_t> first = p.out.bytes();
      for (int i = 0; i < kCalls; ++i) {
        run_on_cpu(p, "cpu");
        if (p.out.bytes() != first) ++wrong;
        Problem bad = p;
        bad.softcap = -1 - t;  // each thread must read back its own message
        try {
          run_on_cpu(bad, "cpu");
          ++wrong;
        } catch (const std::invalid_argument& error) {
          if (std::string(error.what()).find(std::to_string(-1 - t)) == std::string::npos) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0, wrong.load(), " wrong results or messages");
}

// ---- the planner, on devices that need not be here

cuattn_device made_up(const char* name, int major, int minor, int sms, int smem_kib,
                      int native = 1) {
  cuattn_device device{};
  device.is_cuda = 1, device.major = major, device.minor = minor, device.num_sms = sms;
  device.smem_per_block_optin = smem_kib * 1024, device.native = native, device.has_cublas = 1;
  std::strncpy(device.name, name, sizeof device.name - 1);
  return device;
}

cuattn_plan planned(const cuattn_device& device, DType dtype, int head_dim,
                    const char* backend = "auto") {
  Problem p;
  p.dtype = dtype, p.head_dim = p.head_dim_v = head_dim, p.seqlen_q = p.seqlen_kv = 100;
  Random random(1);
  p.fill(random);
  return explain(p, backend, {device.is_cuda ? kDLCUDA : kDLCPU, 0}, &device);
}

TEST(planner_picks_tensor_cores_for_16_bit_and_simt_for_float32) {
  for (const cuattn_device& device :
       {made_up("H200", 9, 0, 132, 227), made_up("A100", 8, 0, 108, 163)}) {
    std::string tensor_cores = device.major == 9 ? "sm90" : "sm80";
    CHECK(planned(device, DType::bf16, 128).kernel == tensor_cores, device.name);
    CHECK(planned(device, DType::f16, 40).kernel == tensor_cores, device.name);
    CHECK(std::string(planned(device, DType::f32, 128).kernel) == "simt", device.name);
    CHECK(planned(device, DType::bf16, 128).workspace_bytes == 0, device.name);
  }
}

TEST(planner_pads_head_dims_up_to_a_compiled_one) {
  cuattn_device h200 = made_up("H200", 9, 0, 132, 227);
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    cuattn_plan plan = planned(h200, DType::f16, head_dim);
    CHECK(plan.head_dim >= head_dim && plan.head_dim_v >= head_dim, head_dim, " runs as ",
          plan.head_dim);
    CHECK(plan.head_dim < 2 * head_dim + 64, head_dim, " runs as ", plan.head_dim);
  }
}

TEST(planner_fits_every_tile_into_the_shared_memory_of_small_devices) {
  cuattn_device l4 = made_up("L4", 8, 9, 58, 99);
  for (int head_dim : {32, 64, 96, 128, 192, 256}) {
    cuattn_plan plan = planned(l4, DType::bf16, head_dim);
    CHECK(std::string(plan.kernel) == "sm80", head_dim, " runs on ", plan.kernel);
    CHECK(plan.tile_m > 0 && plan.tile_n > 0 && plan.warps > 0 && plan.stages > 0, head_dim);
  }
}

TEST(planner_refuses_devices_and_backends_by_name) {
  auto refuses = [](auto&& call, const char* word) {
    try {
      call();
      CHECK(false, "accepted where it should name ", word);
    } catch (const std::exception& error) {
      CHECK(std::string(error.what()).find(word) != std::string::npos, error.what());
    }
  };
  refuses([] { planned(made_up("Old GPU", 7, 0, 80, 96, -1), DType::f16, 64); }, "Old GPU");
  refuses([] { planned(made_up("H200", 9, 0, 132, 227), DType::f32, 64, "sm80"); }, "float32");
  refuses([] { planned(made_up("H200", 9, 0, 132, 227), DType::f32, 64, "sm90"); }, "float32");
  refuses([] { planned(made_up("A100", 8, 0, 108, 163), DType::f16, 64, "sm90"); }, "9.0");
  refuses([] { planned(made_up("H200", 9, 0, 132, 227, 0), DType::f16, 64, "sm90"); },
          "no machine code");
  refuses([] { planned(made_up("H200", 9, 0, 132, 227), DType::f32, 64, "fastest"); }, "fastest");
  refuses([] { planned(made_up("H200", 9, 0, 132, 227), DType::f16, 256, "tiled"); }, "128");
}

TEST(planner_states_the_workspace_of_the_rungs_that_keep_scores) {
  cuattn_device h200 = made_up("H200", 9, 0, 132, 227);
  CHECK(planned(h200, DType::f32, 64, "naive").workspace_bytes == 100 * 100 * 4);
  CHECK(planned(h200, DType::f16, 64, "cublas").workspace_bytes >= 100 * 100 * 6);
}

// Its keys are split, and the schedule is stated, for a call that leaves most of the chip idle.
TEST(planner_states_how_work_is_cut) {
  Problem p;
  p.dtype = DType::bf16, p.heads_q = 8, p.heads_kv = 2, p.seqlen_q = 5, p.seqlen_kv = 9000;
  p.head_dim = p.head_dim_v = 128;
  Random random(1);
  p.fill(random);
  cuattn_device h200 = made_up("H200", 9, 0, 132, 227), a100 = made_up("A100", 8, 0, 108, 163);
  cuattn_plan plan = explain(p, "auto", {kDLCUDA, 0}, &h200);
  CHECK(plan.packed_heads == 4, plan.packed_heads, " heads share a tile");
  CHECK(plan.num_splits > 1 && plan.num_splits <= 9000 / plan.tile_n, plan.num_splits, " splits");
  CHECK(plan.workspace_bytes == sizeof(float) * plan.num_splits * 8 * 5 * (128 + 1));
  CHECK(std::strstr(plan.schedule, "persistent") != nullptr, plan.schedule);
  plan = explain(p, "auto", {kDLCUDA, 0}, &a100);
  CHECK(plan.packed_heads == 1 && plan.num_splits > 1, plan.packed_heads, " ", plan.num_splits);
  CHECK(plan.workspace_bytes == sizeof(float) * plan.num_splits * 8 * 5 * (128 + 1));
  CHECK(std::string(plan.schedule) == "one CTA per tile", plan.schedule);
}

TEST(planner_explains_every_rung) {
  cuattn_plan plan = planned(made_up("H200", 9, 0, 132, 227), DType::bf16, 128);
  for (const char* rung : {"sm90", "sm80", "simt", "tiled", "cublas", "naive"}) {
    CHECK(std::strstr(plan.ladder, rung) != nullptr, rung, " is missing in:\n", plan.ladder);
  }
  CHECK(plan.reason[0] != '\0');
}

TEST(kernels_are_listed_and_described) {
  int count = cuattn_kernel_count();
  CHECK(count >= 2, count, " kernels");
  cuattn_kernel_info info;
  for (int i = 0; i < count; ++i) {
    CHECK(cuattn_kernel_at(i, &info) == CUATTN_OK);
    CHECK(info.op[0] && info.kernel[0] && info.arch[0] && info.dtype[0] && info.mask[0] &&
          info.score[0]);
    CHECK(info.head_dim >= 8 && info.head_dim_v >= 8, info.kernel);
  }
  CHECK(cuattn_kernel_at(count, &info) == CUATTN_INVALID_ARGUMENT);
  CHECK(cuattn_kernel_at(-1, &info) == CUATTN_INVALID_ARGUMENT);
  CHECK(cuattn_info_json()[0] == '{' &&
        std::strstr(cuattn_info_json(), cuattn_version()) != nullptr);
}

}  // namespace
}  // namespace cuattn::test
