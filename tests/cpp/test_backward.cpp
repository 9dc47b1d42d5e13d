// SPDX-License-Identifier: Apache-2.0
// The C++ face of the backward pass on the CPU: dq, dk, dv and dsinks against the formula in double
// precision, packed sequences against each by itself, and what is refused. Every option is held by
// the Python tests.
#include <cmath>
#include <stdexcept>
#include <vector>

#include "cuattn/backward.h"
#include "problem.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr DLDevice kHost{kDLCPU, 0};
constexpr int kHeads = 2, kDim = 16;  // query heads; one KV head

// One sequence, float32, causal, with sinks.
struct Sequence {
  int rows, keys;
  std::vector<float> q, k, v, dout, out, lse, dq, dk, dv, sinks, dsinks;

  Sequence(int rows, int keys, Random& random)
      : rows(rows),
        keys(keys),
        out(rows * kHeads * kDim),
        lse(kHeads * rows),
        dq(rows * kHeads * kDim, NAN),
        dk(keys * kDim, NAN),
        dv(keys * kDim, NAN),
        dsinks(kHeads, NAN) {
    auto fill = [&](std::vector<float>& x, int size) {
      x.resize(size);
      for (float& value : x) value = random.normal();
    };
    fill(q, rows * kHeads * kDim);
    fill(dout, rows * kHeads * kDim);
    fill(k, keys * kDim);
    fill(v, keys * kDim);
    fill(sinks, kHeads);
  }

  TensorView view(std::vector<float>& x, std::initializer_list<int64_t> shape) const {
    return {x.data(), DType::f32, shape, kHost};
  }

  void run() {
    int64_t s = rows, t = keys;
    TensorView q_view = view(q, {1, s, kHeads, kDim}), k_view = view(k, {1, t, 1, kDim});
    TensorView v_view = view(v, {1, t, 1, kDim}), out_view = view(out, {1, s, kHeads, kDim});
    TensorView dout_view = view(dout, {1, s, kHeads, kDim}), lse_view = view(lse, {1, kHeads, s});
    TensorView sinks_view = view(sinks, {kHeads}), dsinks_view = view(dsinks, {kHeads});
    TensorView dq_view = view(dq, {1, s, kHeads, kDim}), dk_view = view(dk, {1, t, 1, kDim});
    TensorView dv_view = view(dv, {1, t, 1, kDim});
    AttentionOptions options;
    options.causal = true;
    options.sinks = &sinks_view;
    options.lse = &lse_view;
    attention(q_view, k_view, v_view, out_view, options);
    BackwardInputs inputs{dout_view, q_view, k_view, v_view, out_view, lse_view};
    BackwardResults results{&dq_view, &dk_view, &dv_view, nullptr, &dsinks_view, nullptr};
    std::vector<float> workspace(
        attention_backward_workspace_bytes(inputs, results, options) / sizeof(float) + 16);
    attention_backward(inputs, results, options, {},
                       {workspace.data(), workspace.size() * sizeof(float)});
  }
};

struct Expected {
  std::vector<double> dq, dk, dv, dsinks;
};

// The formula, straight: probabilities, then what each gives.
Expected differentiate(const Sequence& s) {
  Expected e{std::vector<double>(s.q.size()), std::vector<double>(s.k.size()),
             std::vector<double>(s.v.size()), std::vector<double>(kHeads)};
  double scale = 1 / std::sqrt(double{kDim});
  auto dot = [](const float* a, const float* b) {
    double sum = 0;
    for (int d = 0; d < kDim; ++d) sum += double{a[d]} * b[d];
    return sum;
  };
  for (int i = 0; i < s.rows; ++i) {
    for (int h = 0; h < kHeads; ++h) {
      int row = (i * kHeads + h) * kDim, seen = std::min(s.keys, i + s.keys - s.rows + 1);
      double total = std::exp(double{s.sinks[h]}), delta = 0;
      std::vector<double> p(std::max(seen, 0)), dp(p.size());
      for (int j = 0; j < seen; ++j)
        total += p[j] = std::exp(scale * dot(&s.q[row], &s.k[j * kDim]));
      for (int j = 0; j < seen; ++j) {
        p[j] /= total;
        dp[j] = dot(&s.dout[row], &s.v[j * kDim]);
        delta += p[j] * dp[j];
      }
      e.dsinks[h] -= std::exp(double{s.sinks[h]}) / total * delta;
      for (int j = 0; j < seen; ++j) {
        double ds = scale * p[j] * (dp[j] - delta);
        for (int d = 0; d < kDim; ++d) {
          e.dq[row + d] += ds * s.k[j * kDim + d];
          e.dk[j * kDim + d] += ds * s.q[row + d];
          e.dv[j * kDim + d] += p[j] * s.dout[row + d];
        }
      }
    }
  }
  return e;
}

void check_near(const char* name, const std::vector<float>& got, const std::vector<double>& want) {
  for (size_t i = 0; i < want.size(); ++i)
    CHECK(std::abs(got[i] - want[i]) < 1e-4, name, " ", i, ": ", got[i], ", not ", want[i]);
}

}  // namespace

TEST(backward_is_the_formula) {
  Random random(case_seed("backward_is_the_formula"));
  for (auto [rows, keys] : {std::pair{1, 1}, {5, 9}, {40, 33}, {70, 300}}) {
    Sequence s(rows, keys, random);
    s.run();
    Expected e = differentiate(s);
    check_near("dq", s.dq, e.dq);
    check_near("dk", s.dk, e.dk);
    check_near("dv", s.dv, e.dv);
    check_near("dsinks", s.dsinks, e.dsinks);
  }
}

TEST(backward_of_packed_sequences_is_that_of_each) {
  Random random(case_seed("backward_of_packed_sequences_is_that_of_each"));
  Sequence all(12, 20, random), first(5, 8, random), second(7, 12, random);
  auto part = [](const std::vector<float>& from, int begin, int count, std::vector<float>& to) {
    to.assign(from.begin() + begin, from.begin() + begin + count);
  };
  for (auto [s, row, key] : {std::tuple{&first, 0, 0}, {&second, 5, 8}}) {
    part(all.q, row * kHeads * kDim, s->rows * kHeads * kDim, s->q);
    part(all.dout, row * kHeads * kDim, s->rows * kHeads * kDim, s->dout);
    part(all.k, key * kDim, s->keys * kDim, s->k);
    part(all.v, key * kDim, s->keys * kDim, s->v);
    s->sinks = all.sinks;
    s->run();
  }
  int32_t cu_q[] = {0, 5, 12}, cu_k[] = {0, 8, 20};
  TensorView cu_q_view(cu_q, DType::i32, {3}, kHost), cu_k_view(cu_k, DType::i32, {3}, kHost);
  TensorView q = all.view(all.q, {12, kHeads, kDim}), k = all.view(all.k, {20, 1, kDim});
  TensorView v = all.view(all.v, {20, 1, kDim}), out = all.view(all.out, {12, kHeads, kDim});
  TensorView dout = all.view(all.dout, {12, kHeads, kDim}), lse = all.view(all.lse, {kHeads, 12});
  TensorView sinks = all.view(all.sinks, {kHeads}), dq = all.view(all.dq, {12, kHeads, kDim});
  AttentionOptions options;
  options.causal = true;
  options.sinks = &sinks;
  options.lse = &lse;
  attention_varlen(q, k, v, cu_q_view, cu_k_view, 7, 12, out, options);
  BackwardInputs inputs{dout, q, k, v, out, lse};
  BackwardResults results{&dq};
  size_t bytes = attention_varlen_backward_workspace_bytes(inputs, results, cu_q_view, cu_k_view, 7,
                                                           12, options);
  std::vector<float> workspace(bytes / sizeof(float) + 16);
  attention_varlen_backward(inputs, results, cu_q_view, cu_k_view, 7, 12, options, {},
                            {workspace.data(), bytes});
  for (size_t i = 0; i < all.dq.size(); ++i) {
    float want = i < first.dq.size() ? first.dq[i] : second.dq[i - first.dq.size()];
    CHECK(all.dq[i] == want, "dq ", i, ": ", all.dq[i], ", alone ", want);
  }
}

TEST(backward_refuses_in_words) {
  Random random(1);
  Sequence s(3, 4, random);
  TensorView q = s.view(s.q, {1, 3, kHeads, kDim}), k = s.view(s.k, {1, 4, 1, kDim});
  TensorView v = s.view(s.v, {1, 4, 1, kDim}), out = s.view(s.out, {1, 3, kHeads, kDim});
  TensorView dout = s.view(s.dout, {1, 3, kHeads, kDim}), lse = s.view(s.lse, {1, kHeads, 3});
  BackwardInputs inputs{dout, q, k, v, out, lse};
  auto message = [&](const BackwardResults& results, const AttentionOptions& options) {
    try {
      attention_backward(inputs, results, options);
    } catch (const std::exception& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  CHECK(message({}, {}).find("need must name at least one") != std::string::npos);
  TensorView dq = s.view(s.dq, {1, 3, kHeads, kDim}), dsinks = s.view(s.dsinks, {kHeads});
  CHECK(message({&dq}, {}).find("workspace must hold") != std::string::npos);
  CHECK(message({nullptr, nullptr, nullptr, nullptr, &dsinks}, {}).find("no sinks is given") !=
        std::string::npos);
  AttentionOptions dropout;
  dropout.dropout_p = 1.5;
  CHECK(message({&dq}, dropout).find("dropout_p must lie in [0, 1), got 1.5") != std::string::npos);
  dropout.dropout_p = 0.5;
  dropout.dropout_seed = 1;
  dropout.dropout_head = 1;
  CHECK(message({&dq}, dropout).find("dropout_head must leave all heads") != std::string::npos);
  AttentionOptions pages;
  pages.block_tables = &lse;
  CHECK(message({&dq}, pages).find("keys in pages have no gradients") != std::string::npos);
  for (float x : s.dq) CHECK(std::isnan(x), "a refused call wrote something");

  cuattn_backward_call call;
  cuattn_backward_arrays none{};
  cuattn_attention_options options;
  cuattn_backward_options backward_options;
  cuattn_attention_options_init(&options, sizeof options);
  cuattn_backward_options_init(&backward_options, sizeof backward_options);
  auto prepare = [&](const cuattn_backward_arrays* arrays) {
    return cuattn_attention_backward_prepare(arrays, &options, &backward_options, &call);
  };
  CHECK(prepare(nullptr) == CUATTN_INVALID_ARGUMENT, cuattn_last_error());
  CHECK(prepare(&none) == CUATTN_INVALID_ARGUMENT, cuattn_last_error());
  CHECK(cuattn_attention_backward_run(nullptr, nullptr, nullptr, 0, nullptr) ==
        CUATTN_INVALID_ARGUMENT);
}

}  // namespace cuattn::test
