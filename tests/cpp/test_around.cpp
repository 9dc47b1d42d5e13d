// SPDX-License-Identifier: Apache-2.0
// Latent attention and what stands around attention, from C++ on the CPU: results against double
// precision, what is refused and that nothing is written then, NULLs through the C ABI. Random
// cases of every option are those of Python; here is what the headers add.
#include <cmath>
#include <stdexcept>
#include <vector>

#include "cuattn/fused.h"
#include "cuattn/mla.h"
#include "problem.h"
#include "test.h"

namespace cuattn::test {
namespace {

using Invalid = std::invalid_argument;
const DLDevice kHost{kDLCPU, 0};

Array drawn(Random& random, DType dtype, std::vector<int64_t> shape) {
  Array array(dtype, std::move(shape));
  array.for_each_offset([&](int64_t i) { array.set(i, random.normal()); });
  return array;
}
TensorView view_of(Array& array) { return array.view(array.data(), kHost); }

// A small decode over a joined cache: two sequences, 3 heads, latents of 48 and 16 columns.
struct Decode {
  static constexpr int kHeads = 3, kLatent = 48, kRope = 16, kBlocks = 4, kSize = 5;
  static constexpr int kColumns = kLatent + kRope;
  Array q, cache, out, lse;
  std::vector<int32_t> tables = {2, 0, 3, -7}, lens = {8, 4};
  PagedOptions options;
  TensorView lse_view;
  MlaArrays arrays;

  Decode(Random& random, DType dtype)
      : q(drawn(random, dtype, {2, kHeads, kColumns})),
        cache(drawn(random, dtype, {kBlocks, kSize, kColumns})),
        out(dtype, {2, kHeads, kLatent}),
        lse(DType::f32, {2, kHeads}) {
    lse_view = view_of(lse);
    options.scale = 0.3;
    options.lse = &lse_view;
    arrays = {part(q, 0, kLatent),
              part(q, kLatent, kRope),
              part(cache, 0, kLatent),
              part(cache, kLatent, kRope),
              {tables.data(), DType::i32, {2, 2}},
              {lens.data(), DType::i32, {2}}};
  }
  Decode(const Decode&) = delete;

  // Columns [first, first + count) of every row.
  static TensorView part(Array& array, int first, int count) {
    TensorView view = view_of(array);
    view.data = static_cast<char*>(view.data) + first * bytes_of(array.dtype());
    view.shape[view.ndim - 1] = count;
    return view;
  }
  void run() {
    std::vector<char> room(mla_decode_workspace_bytes(arrays, options) + 64);
    uintptr_t start = (reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64;
    mla_decode(arrays, view_of(out), options, {reinterpret_cast<void*>(start), room.size() - 64});
  }
  double score(int b, int h, int key) const {
    double sum = 0;
    for (int d = 0; d < kColumns; ++d)
      sum += double{q.get((b * kHeads + h) * kColumns + d)} * cache.get(row(b, key) + d);
    return 0.3 * sum;
  }
  int64_t row(int b, int key) const {
    return (tables[b * 2 + key / kSize] * kSize + key % kSize) * int64_t{kColumns};
  }
};

TEST(cpu_mla_decode_is_its_formula) {
  Random random(case_seed("mla_decode"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Decode call(random, dtype);
    call.out.poison();
    call.run();
    for (int b = 0; b < 2; ++b)
      for (int h = 0; h < Decode::kHeads; ++h) {
        double sum = 0;
        std::vector<double> y(Decode::kLatent), size(Decode::kLatent);
        for (int key = 0; key < call.lens[b]; ++key) {
          double weight = std::exp(call.score(b, h, key));
          sum += weight;
          for (int d = 0; d < Decode::kLatent; ++d) {
            double value = call.cache.get(call.row(b, key) + d);
            y[d] += weight * value;
            size[d] += weight * std::abs(value);
          }
        }
        double lse = call.lse.get(b * Decode::kHeads + h);
        CHECK(std::abs(lse - std::log(sum)) < 1e-4, name_of(dtype), " ", lse, " ", std::log(sum));
        for (int d = 0; d < Decode::kLatent; ++d) {
          double got = call.out.get((b * Decode::kHeads + h) * Decode::kLatent + d);
          double limit = 2 * (epsilon(dtype) + 1e-6) * size[d] / sum;
          CHECK(std::abs(got - y[d] / sum) <= limit, name_of(dtype), " ", got, " ", y[d] / sum);
        }
      }
  }
}

// The same keys by their slots, with entries between them that are none: the same bits, since one
// chunk of keys holds them all.
TEST(cpu_mla_decode_of_lists) {
  Random random(case_seed("mla_decode_of_lists"));
  Decode call(random, DType::f32);
  call.run();
  std::vector<uint8_t> out = call.out.bytes(), lse = call.lse.bytes();
  constexpr int kTopk = 12, kSlots = Decode::kBlocks * Decode::kSize;
  std::vector<int32_t> indices(2 * kTopk, -1), lens = {11, kTopk};
  indices[kTopk - 1] = 3;  // behind the list
  for (int b = 0; b < 2; ++b) {
    for (int key = 0; key < call.lens[b]; ++key)
      indices[b * kTopk + key + (key > 2 ? 3 : 0)] =
          static_cast<int32_t>(call.row(b, key) / Decode::kColumns);
    indices[b * kTopk + 4] = kSlots;
  }
  call.arrays.indices = {indices.data(), DType::i32, {2, kTopk}};
  call.arrays.topk_lens = {lens.data(), DType::i32, {2}};
  call.out.poison();
  call.run();
  CHECK(call.out.bytes() == out && call.lse.bytes() == lse, "other bits than by blocks");
  call.arrays.indices.shape[0] = 1;
  check_throws<Invalid>("indices must have num_seqs 2 like q_nope, got 1", [&] { call.run(); });
  call.arrays.indices = {};
  check_throws<Invalid>("topk_lens must be given with indices", [&] { call.run(); });
}

// One token of ones among packed latents: 1 = 448 (1 / 448).
TEST(cpu_mla_of_packed_latents) {
  Random random(case_seed("mla_of_packed_latents"));
  constexpr int kHeads = 3, kLatent = PackedLatent::kLatent, kRope = PackedLatent::kRope;
  Array ckv(DType::bf16, {1, kLatent}), kpe = drawn(random, DType::bf16, {1, kRope});
  for (int d = 0; d < kLatent; ++d) ckv.set(d, d < 128 ? 1.0f : -2.0f);
  std::vector<uint8_t> bytes(3 * 4 * PackedLatent::kBytes, 0xff);
  std::vector<int64_t> slots = {9};
  std::vector<int32_t> indices = {-1, 9};
  TensorView cache = packed_latents(bytes.data(), 3, 4);
  mla_write(view_of(ckv), view_of(kpe), cache, {}, {slots.data(), DType::i64, {1}});
  Array q = drawn(random, DType::bf16, {1, kHeads, kLatent}),
        out(DType::bf16, {1, kHeads, kLatent});
  Array q_pe = drawn(random, DType::bf16, {1, kHeads, kRope});
  MlaArrays arrays{view_of(q), view_of(q_pe), cache, {}, {}, {}};
  arrays.indices = {indices.data(), DType::i32, {1, 2}};
  PagedOptions options;
  options.scale = 0.1;
  std::vector<char> room(mla_decode_workspace_bytes(arrays, options) + 64);
  uintptr_t start = (reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64;
  mla_decode(arrays, view_of(out), options, {reinterpret_cast<void*>(start), room.size() - 64});
  for (int i = 0; i < kHeads * kLatent; ++i)
    CHECK(out.get(i) == (i % kLatent < 128 ? 1.0f : -2.0f), "column ", i, ": ", out.get(i));
  arrays.kpe_cache = view_of(kpe);
  check_throws<Invalid>("kpe_cache must be None and q_pe an array",
                        [&] { mla_decode_workspace_bytes(arrays, options); });
}

TEST(cpu_mla_decode_refuses_by_name) {
  Random random(case_seed("mla_decode"));
  Decode call(random, DType::f32);
  call.out.poison();
  std::vector<uint8_t> before = call.out.bytes();
  auto refuses = [&](const char* what, auto&& change) {
    MlaArrays kept = call.arrays;
    PagedOptions options = call.options;
    std::vector<int32_t> tables = call.tables;
    change();
    check_throws<Invalid>(what, [&] { call.run(); });
    call.arrays = kept, call.options = options;
    std::copy(tables.begin(), tables.end(), call.tables.begin());
  };
  refuses("mla_decode: scale must be given", [&] { call.options.scale = NAN; });
  refuses("scale must be finite", [&] { call.options.scale = INFINITY; });
  refuses("q_pe and kpe_cache must be given together", [&] { call.arrays.q_pe = {}; });
  refuses("q_pe and kpe_cache must be given together", [&] { call.arrays.kpe_cache = {}; });
  refuses("block_tables must hold block ids", [&] { call.tables[1] = 4; });
  refuses("kpe_cache must have columns 16", [&] { call.arrays.kpe_cache.shape[2] = 8; });
  refuses("q_nope must have a latent", [&] { call.arrays.q_nope.shape[2] = 47; });
  CHECK(call.out.bytes() == before, "out was written");
  MlaArrays none = call.arrays;  // no rope columns at all
  none.q_pe = none.kpe_cache = {};
  CHECK(mla_decode_workspace_bytes(none, call.options) ==
        mla_decode_workspace_bytes(call.arrays, call.options));
}

TEST(cpu_mla_write_and_project) {
  Random random(case_seed("mla_write"));
  Array ckv = drawn(random, DType::f32, {3, 48}), kpe = drawn(random, DType::f32, {3, 16});
  Array cache(DType::f32, {2, 4, 64}), proj = drawn(random, DType::f32, {2, 48, 24});
  std::vector<int64_t> slots = {7, -1, 0};
  mla_write(view_of(ckv), view_of(kpe), Decode::part(cache, 0, 48), Decode::part(cache, 48, 16),
            {slots.data(), DType::i64, {3}});
  int64_t rows = 0;
  for (int64_t slot = 0; slot < 8; ++slot) {
    int from = slot == 7 ? 0 : slot == 0 ? 2 : -1;
    for (int d = 0; d < 64; ++d) {
      float got = cache.get(slot * 64 + d);
      if (from < 0) {
        CHECK(std::isnan(got), "slot ", slot);
      } else {
        CHECK(got == (d < 48 ? ckv.get(from * 48 + d) : kpe.get(from * 16 + d - 48)), slot, d);
        ++rows;
      }
    }
  }
  CHECK(rows == 2 * 64);
  Array alone(DType::f32, {2, 4, 48});
  mla_write(view_of(ckv), view_of(alone), {slots.data(), DType::i64, {3}});
  for (int d = 0; d < 48; ++d) {
    CHECK(alone.get(d) == ckv.get(2 * 48 + d) && alone.get(7 * 48 + d) == ckv.get(d), d);
    CHECK(std::isnan(alone.get(48 + d)), d);
  }
  Array x = drawn(random, DType::f32, {1, 3, 2, 24}), out(DType::f32, {1, 3, 2, 48});
  mla_project(view_of(x), view_of(proj), true, view_of(out));
  for (int i = 0; i < 3 * 2 * 48; ++i) {
    int column = i % 48, h = i / 48 % 2, row = i / 48;
    double sum = 0, size = 0;
    for (int d = 0; d < 24; ++d) {
      double term = double{x.get(row * 24 + d)} * proj.get((h * 48 + column) * 24 + d);
      sum += term, size += std::abs(term);
    }
    CHECK(std::abs(out.get(i) - sum) <= 1e-6 * size, i, " ", out.get(i), " ", sum);
  }
  check_throws<Invalid>("mla_project: proj must have heads 2 like x, got 1", [&] {
    TensorView one = view_of(proj);
    one.shape[0] = 1;
    mla_project(view_of(x), one, true, view_of(out));
  });
}

TEST(cpu_rows_around_attention) {
  Random random(case_seed("fused"));
  Array x = drawn(random, DType::f32, {3, 40}), weight = drawn(random, DType::f32, {40});
  Array out(DType::f32, {3, 40}), residual = drawn(random, DType::f32, {3, 40}), sum = residual;
  TensorView residual_view = view_of(sum);
  NormOptions options;
  options.residual = &residual_view;  // written in place
  for (bool centred : {false, true}) {
    sum = residual;
    residual_view = view_of(sum);
    (centred ? layer_norm : rms_norm)(view_of(x), view_of(weight), view_of(out), options, nullptr);
    for (int row = 0; row < 3; ++row) {
      double mean = 0, squares = 0;
      auto h = [&](int d) { return double{x.get(row * 40 + d)} + residual.get(row * 40 + d); };
      for (int d = 0; d < 40; ++d) mean += centred ? h(d) / 40 : 0;
      for (int d = 0; d < 40; ++d) squares += (h(d) - mean) * (h(d) - mean) / 40;
      for (int d = 0; d < 40; ++d) {
        double want = (h(d) - mean) / std::sqrt(squares + 1e-6) * weight.get(d);
        CHECK(std::abs(out.get(row * 40 + d) - want) < 1e-5 * (1 + std::abs(want)), centred, d);
        CHECK(std::abs(sum.get(row * 40 + d) - h(d)) < 1e-6, "the sum, ", d);
      }
    }
  }
  Array half(DType::f32, {3, 20});
  act_mul(view_of(x), view_of(half), Act::silu);
  for (int i = 0; i < 60; ++i) {
    double a = x.get(i / 20 * 40 + i % 20), b = x.get(i / 20 * 40 + i % 20 + 20);
    CHECK(std::abs(half.get(i) - a / (1 + std::exp(-a)) * b) < 1e-5 * (1 + std::abs(a * b)), i);
  }
  check_throws<Invalid>("act must be 0",
                        [&] { bias_act(view_of(x), view_of(out), static_cast<Act>(9)); });
}

// In place and apart, of float32 and of 16 bits, heads before the sequence.
TEST(cpu_residual_is_rounded_once) {
  Random random(case_seed("residual"));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Array x = drawn(random, DType::f32, {2, 3, 5, 24}),
          residual = drawn(random, dtype, {2, 3, 5, 24});
    Array sum(dtype, {2, 3, 5, 24}), want = sum, kept = residual;
    for (int64_t i = 0; i < 2 * 3 * 5 * 24; ++i) want.set(i, x.get(i) + residual.get(i));
    add_residual(view_of(x), view_of(residual), view_of(sum));
    CHECK(sum.bytes() == want.bytes(), name_of(dtype));
    add_residual(view_of(x), view_of(residual), view_of(residual));
    CHECK(residual.bytes() == want.bytes(), name_of(dtype), ", in place");
    TensorView turned = view_of(sum), from = view_of(kept);  // what lies how does not count
    std::swap(turned.shape[1], turned.shape[2]), std::swap(turned.strides[1], turned.strides[2]);
    std::swap(from.shape[1], from.shape[2]), std::swap(from.strides[1], from.strides[2]);
    TensorView wide = view_of(x);
    std::swap(wide.shape[1], wide.shape[2]), std::swap(wide.strides[1], wide.strides[2]);
    sum.poison();
    add_residual(wide, from, turned);
    CHECK(sum.bytes() == want.bytes(), name_of(dtype), ", turned");
    check_throws<Invalid>("add_residual: residual must have shape",
                          [&] { add_residual(wide, view_of(kept), turned); });
  }
}

TEST(cpu_rotation_stands_at_the_end_of_the_keys) {
  Random random(case_seed("rope"));
  Array x = drawn(random, DType::f32, {6, 1, 4}), out(DType::f32, {6, 1, 4});
  Array cos = drawn(random, DType::f32, {5, 2}), sin = drawn(random, DType::f32, {5, 2});
  std::vector<int32_t> ends_q = {0, 2, 5}, ends_k = {0, 2, 7};  // the last row is nobody's
  TensorView q(ends_q.data(), DType::i32, {3}), k(ends_k.data(), DType::i32, {3});
  RopeOptions options;
  options.cu_seqlens_q = &q;
  options.cu_seqlens_k = &k;
  apply_rope(view_of(x), view_of(cos), view_of(sin), view_of(out), options);
  const int places[5] = {0, 1, 2, 3, 4};
  for (int row = 0; row < 5; ++row)
    for (int i = 0; i < 2; ++i) {
      float a = x.get(row * 4 + i), b = x.get(row * 4 + i + 2);
      float c = cos.get(places[row] * 2 + i), s = sin.get(places[row] * 2 + i);
      CHECK(std::abs(out.get(row * 4 + i) - (a * c - b * s)) < 1e-5, row, " ", i);
      CHECK(std::abs(out.get(row * 4 + i + 2) - (b * c + a * s)) < 1e-5, row, " ", i);
    }
  TensorView inside(out.data(), DType::i32, {3});
  options.cu_seqlens_k = &inside;
  check_throws<Invalid>("out must not share memory with cu_seqlens_k", [&] {
    apply_rope(view_of(x), view_of(cos), view_of(sin), view_of(out), options);
  });
}

// Of packed rows without keys of their own: each token at its place in its sequence.
TEST(cpu_rotation_counts_within_sequences) {
  Random random(case_seed("rope of tokens"));
  Array x = drawn(random, DType::f32, {7, 1, 4}), out(DType::f32, {7, 1, 4});
  Array cos = drawn(random, DType::f32, {4, 2}), sin = drawn(random, DType::f32, {4, 2});
  std::vector<int32_t> ends = {0, 2, 6}, used = {2, 3};
  TensorView q(ends.data(), DType::i32, {3}), lens(used.data(), DType::i32, {2});
  for (bool shorter : {false, true}) {
    RopeOptions options;
    options.cu_seqlens_q = &q;
    options.seqused_q = shorter ? &lens : nullptr;
    apply_rope(view_of(x), view_of(cos), view_of(sin), view_of(out), options);
    const int places[] = {0, 1, 0, 1, 2, 3};
    for (int row = 0; row < 6 - shorter; ++row)
      for (int i = 0; i < 2; ++i) {
        float a = x.get(row * 4 + i), b = x.get(row * 4 + i + 2);
        float c = cos.get(places[row] * 2 + i), s = sin.get(places[row] * 2 + i);
        CHECK(std::abs(out.get(row * 4 + i) - (a * c - b * s)) < 1e-5, row, " ", i, shorter);
      }
  }
}

TEST(cpu_samples_and_verifies) {
  std::vector<float> logits = {0, 3, 1, 5, 1, 0}, probs = {0, 1, 0, 0, 0, 1};
  std::vector<int32_t> tokens(2, 7), drafts = {1}, chain(2, 7), count(1, 7);
  SampleOptions options;
  TensorView out(tokens.data(), DType::i32, {2});
  auto draw = [&] { sample({logits.data(), DType::f32, {2, 3}}, out, options); };
  check_throws<Invalid>("sample: seed must be given", draw);
  CHECK(tokens[0] == 7);
  options.seed = 4;
  options.top_k = 1;
  draw();
  CHECK(tokens[0] == 1 && tokens[1] == 0, tokens[0], tokens[1]);
  speculative_verify({probs.data(), DType::f32, {1, 1, 3}}, {probs.data(), DType::f32, {1, 2, 3}},
                     {drafts.data(), DType::i32, {1, 1}}, {chain.data(), DType::i32, {1, 2}},
                     {count.data(), DType::i32, {1}}, options);
  CHECK(chain[0] == 1 && chain[1] == 2 && count[0] == 1, chain[0], chain[1]);
}

// Every pointer of every function may be NULL: an error says which, none is followed.
TEST(c_abi_around_attention_names_what_is_null) {
  Random random(case_seed("null"));
  Array rows = drawn(random, DType::f32, {2, 1, 8});
  TensorView view = view_of(rows);  // has the extents that x points to
  DLTensor x = view.dl();
  auto refuses = [](const char* what, cuattn_status status) {
    CHECK(status == CUATTN_INVALID_ARGUMENT, what, " gave ", status);
    CHECK(std::string(cuattn_last_error()).find(what) != std::string::npos, "wanted ", what,
          ", got ", cuattn_last_error());
  };
  cuattn_norm_options norm;
  cuattn_norm_options_init(&norm, sizeof norm);
  refuses("add_residual: x must be", cuattn_add_residual(nullptr, &x, &x, nullptr));
  refuses("add_residual: residual must be", cuattn_add_residual(&x, nullptr, &x, nullptr));
  refuses("add_residual: out must be", cuattn_add_residual(&x, &x, nullptr, nullptr));
  refuses("check_residual: function must not be NULL",
          cuattn_check_residual(nullptr, &x, &x, &x, nullptr, nullptr));
  refuses("f: out must be", cuattn_check_residual("f", &x, &x, nullptr, nullptr, nullptr));
  refuses("f: lse_out must not share", cuattn_check_residual("f", &x, &x, &x, &x, nullptr));
  refuses("f: workspace must not share", cuattn_check_residual("f", &x, &x, &x, nullptr, &x));
  refuses("rms_norm: x must be", cuattn_rms_norm(nullptr, &x, &norm, &x, nullptr));
  refuses("rms_norm: weight must be", cuattn_rms_norm(&x, nullptr, &norm, &x, nullptr));
  refuses("layer_norm: options must be", cuattn_layer_norm(&x, &x, nullptr, &x, nullptr));
  refuses("layer_norm: out must be", cuattn_layer_norm(&x, &x, &norm, nullptr, nullptr));
  refuses("act_mul: out must be", cuattn_act_mul(&x, nullptr, 0, nullptr, nullptr));
  refuses("bias_act: x must be", cuattn_bias_act(nullptr, nullptr, 0, &x, nullptr));
  refuses("apply_rope: options must be", cuattn_apply_rope(&x, &x, &x, nullptr, &x, nullptr));
  refuses("sample: options must be", cuattn_sample(&x, nullptr, &x, nullptr));
  refuses("speculative_verify: options must be",
          cuattn_speculative_verify(&x, &x, &x, nullptr, &x, &x, nullptr));
  cuattn_paged_options paged;
  cuattn_paged_options_init(&paged, sizeof paged);
  cuattn_attention_call call;
  cuattn_mla_arrays none{};
  refuses("mla_decode: arrays must", cuattn_mla_decode_prepare(nullptr, &paged, &call));
  refuses("mla_decode: call must", cuattn_mla_decode_prepare(&none, &paged, nullptr));
  refuses("mla_decode: options must", cuattn_mla_decode_prepare(&none, nullptr, &call));
  refuses("mla_decode: q_nope must be", cuattn_mla_decode_prepare(&none, &paged, &call));
  cuattn_mla_projection empty{nullptr, nullptr, nullptr, &x, 0, 0, nullptr};
  refuses("mla_project: projection must", cuattn_mla_project(nullptr, nullptr));
  refuses("mla_project: x must be", cuattn_mla_project(&empty, nullptr));
  cuattn_cache_options cache;
  cuattn_cache_options_init(&cache, sizeof cache);
  refuses("mla_write: ckv must be", cuattn_mla_write(nullptr, &x, &x, &x, &x, &cache, nullptr));
  refuses("mla_write: options must be", cuattn_mla_write(&x, &x, &x, &x, &x, nullptr, nullptr));
}

}  // namespace
}  // namespace cuattn::test
