// SPDX-License-Identifier: Apache-2.0
// What attention should give, in scalar loops: once in double precision, once as the plain formula
// that rounds scores, probabilities and results to the dtype. A result passes when its error is at
// most twice the plain formula's plus one rounding (docs/numerics.md). Written without a line of
// the library's own arithmetic.
#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "problem.h"
#include "test.h"

namespace cuattn::test {

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

bool visible(const Problem& p, int b, int row, int key) {
  int64_t diagonal = static_cast<int64_t>(row) + p.active_kv(b) - p.active_q(b);
  if (p.causal && key > diagonal) return false;
  if (p.window_left >= 0 && key < diagonal - p.window_left) return false;
  if (p.window_right >= 0 && key > diagonal + p.window_right) return false;
  return true;
}

// The additive terms after the scale: softcap, ALiBi, bias.
template <class T>
T modified(const Problem& p, T score, int b, int head, int row, int key) {
  if (p.softcap > 0)
    score = static_cast<T>(p.softcap) * std::tanh(score / static_cast<T>(p.softcap));
  if (p.alibi) {
    T slope = p.alibi_slopes.get(p.alibi_per_batch ? b * p.heads_q + head : head);
    score -= slope * static_cast<T>(std::abs(row + p.active_kv(b) - p.active_q(b) - key));
  }
  if (p.bias_kind != Problem::Bias::none) {
    const std::vector<int64_t>& s = p.bias.strides();
    int64_t outer = p.bias_broadcast ? 0 : b * s[0] + head * s[1];
    float value = p.bias.get(outer + row * s[2] + key);
    if (p.bias_kind != Problem::Bias::boolean)
      score += value;
    else if (value == 0)
      score = -std::numeric_limits<T>::infinity();
  }
  return score;
}

struct Head {  // one head's operands as floats: [row][dim]
  std::vector<float> q, k, v;
};

Head load(const Problem& p, int b, int head) {
  Head h;
  int kv_head = head / (p.heads_q / p.heads_kv);
  auto copy = [&](const Array& array, int rows, int which, int dim, std::vector<float>& into) {
    into.resize(static_cast<size_t>(rows) * dim);
    for (int row = 0; row < rows; ++row) {
      int64_t at = p.offset(array, b, row, which);
      for (int i = 0; i < dim; ++i) into[static_cast<size_t>(row) * dim + i] = array.get(at + i);
    }
  };
  copy(p.q, p.active_q(b), head, p.head_dim, h.q);
  copy(p.k, p.active_kv(b), kv_head, p.head_dim, h.k);
  copy(p.v, p.active_kv(b), kv_head, p.head_dim_v, h.v);
  return h;
}

// T = double: exact. T = float: every intermediate that the plain formula stores is rounded to the
// dtype. Returns the largest magnitude of a finite score.
template <class T>
double attend(const Problem& p, const Head& h, int b, int head, int row, double* out, double* lse) {
  constexpr bool kPlain = sizeof(T) == sizeof(float);
  int keys = p.active_kv(b), d = p.head_dim, dv = p.head_dim_v;
  T scale = static_cast<T>(p.scale != 0 ? p.scale : 1 / std::sqrt(static_cast<double>(d)));
  std::vector<T> scores(keys, -std::numeric_limits<T>::infinity());
  T sink = p.sinks ? static_cast<T>(p.sink_logits.get(head)) : -std::numeric_limits<T>::infinity();
  T largest = sink;
  double magnitude = 0;
  for (int key = 0; key < keys; ++key) {
    if (!visible(p, b, row, key)) continue;
    const float *x = &h.q[static_cast<size_t>(row) * d], *y = &h.k[static_cast<size_t>(key) * d];
    T dot = 0;
    for (int i = 0; i < d; ++i) dot += static_cast<T>(x[i]) * y[i];
    if (kPlain) dot = rounded(p.dtype, static_cast<float>(dot));
    scores[key] = modified<T>(p, scale * dot, b, head, row, key);
    largest = std::max(largest, scores[key]);
    if (std::isfinite(scores[key])) magnitude = std::max<double>(magnitude, std::abs(scores[key]));
  }
  std::fill(out, out + dv, 0.0);
  *lse = -kInf;
  if (largest == -std::numeric_limits<T>::infinity()) return 0;
  T sum = std::exp(sink - largest);
  for (T& score : scores) {
    score = std::exp(score - largest);
    sum += score;
  }
  std::vector<T> accumulator(dv, 0);
  for (int key = 0; key < keys; ++key) {
    if (scores[key] == 0) continue;
    T weight = scores[key] / sum;
    if (kPlain) weight = rounded(p.dtype, static_cast<float>(weight));
    for (int i = 0; i < dv; ++i) accumulator[i] += weight * h.v[static_cast<size_t>(key) * dv + i];
  }
  for (int i = 0; i < dv; ++i) {
    out[i] = kPlain ? rounded(p.dtype, static_cast<float>(accumulator[i]))
                    : static_cast<double>(accumulator[i]);
  }
  *lse = static_cast<double>(largest + std::log(sum));
  return magnitude;
}

// The rule of docs/numerics.md over one tensor, fed value by value.
class Judge {
 public:
  Judge(const char* name, double epsilon, bool frobenius)
      : name_(name), epsilon_(epsilon), frobenius_(frobenius) {}

  void add(double got, double plain, double exact, int b, int row, int head, int i) {
    if (std::isnan(got) != std::isnan(exact) ||
        ((std::isinf(exact) || std::isinf(got)) && got != exact)) {
      if (bad_values_++ == 0) first_bad_ = {got, exact, b, row, head, i};
      return;
    }
    if (!std::isfinite(exact)) return;
    double error = std::abs(got - exact);
    if (error > largest_) {
      largest_ = error;
      worst_at_ = {got, exact, b, row, head, i};
    }
    if (std::isfinite(plain)) plain_largest_ = std::max(plain_largest_, std::abs(plain - exact));
    size_ = std::max(size_, std::abs(exact));
    square_ += error * error;
    if (std::isfinite(plain)) plain_square_ += (plain - exact) * (plain - exact);
    size_square_ += exact * exact;
  }

  // floor: the smallest size a rounding is taken of; roundings: how many of them are allowed beside
  // the plain formula's.
  std::string verdict(double floor, double roundings, double* worst) const {
    std::ostringstream text;
    if (bad_values_ > 0) {
      text << name_ << ": " << bad_values_
           << " values not finite where they should be (or the reverse), first ";
      first_bad_.print(text);
      return text.str();
    }
    double limit = 2 * plain_largest_ + roundings * epsilon_ * std::max(floor, size_);
    if (worst != nullptr && limit > 0) *worst = std::max(*worst, largest_ / limit);
    if (largest_ > limit) {
      text << name_ << ": error " << largest_ << " above the limit " << limit << " (plain formula "
           << plain_largest_ << ") ";
      worst_at_.print(text);
    }
    double norm_limit =
        2 * std::sqrt(plain_square_) + roundings * epsilon_ * std::sqrt(size_square_);
    if (frobenius_ && std::sqrt(square_) > norm_limit) {
      text << " " << name_ << ": Frobenius error " << std::sqrt(square_) << " above the limit "
           << norm_limit;
    }
    return text.str();
  }

 private:
  struct Place {
    double got = 0, exact = 0;
    int b = 0, row = 0, head = 0, i = 0;
    void print(std::ostream& text) const {
      text << "at sequence " << b << " row " << row << " head " << head << " element " << i
           << ": got " << got << ", exact " << exact;
    }
  };
  const char* name_;
  double epsilon_;
  bool frobenius_;
  double largest_ = 0, plain_largest_ = 0, size_ = 0, square_ = 0, plain_square_ = 0,
         size_square_ = 0;
  int64_t bad_values_ = 0;
  Place first_bad_, worst_at_;
};

// Every byte that belongs to no row of a sequence (guard bands, stride gaps, unowned rows) must
// hold the poison still.
template <class Offset>
std::string overrun(const char* name, const Problem& p, const Array& array, int width,
                    Offset offset) {
  Array expected = array;
  expected.poison();
  int size = bytes_of(array.dtype());
  for (int b = 0; b < p.batch; ++b)
    for (int row = 0; row < p.stored_q(b); ++row)
      for (int head = 0; head < p.heads_q; ++head) {
        size_t first = array.guard_bytes() + offset(b, row, head) * size;
        std::copy_n(array.bytes().begin() + first, width * size, expected.bytes().begin() + first);
      }
  auto at = std::mismatch(array.bytes().begin(), array.bytes().end(), expected.bytes().begin());
  if (at.first == array.bytes().end()) return "";
  std::ostringstream text;
  text << name << " was written outside its rows, at byte "
       << at.first - array.bytes().begin() - static_cast<int64_t>(array.guard_bytes());
  return text.str();
}

}  // namespace

Reference reference(const Problem& p) {
  Reference r;
  size_t rows = static_cast<size_t>(p.rows_q()) * p.heads_q;
  for (Values* values : {&r.exact, &r.plain}) {
    values->out.assign(rows * p.head_dim_v, 0.0);
    values->lse.assign(rows, -kInf);
  }
  std::vector<double> magnitudes(static_cast<size_t>(p.batch) * p.heads_q, 0.0);
  parallel(p.batch * p.heads_q, [&](int task) {
    int b = task / p.heads_q, head = task % p.heads_q;
    Head h = load(p, b, head);
    for (int row = 0; row < p.active_q(b); ++row) {
      size_t at = p.index(b, row, head);
      double magnitude =
          attend<double>(p, h, b, head, row, &r.exact.out[at * p.head_dim_v], &r.exact.lse[at]);
      magnitudes[task] = std::max(magnitudes[task], magnitude);
      attend<float>(p, h, b, head, row, &r.plain.out[at * p.head_dim_v], &r.plain.lse[at]);
    }
  });
  for (double magnitude : magnitudes) r.largest_score = std::max(r.largest_score, magnitude);
  return r;
}

std::string judge(const Problem& p, const Reference& r, double* worst) {
  Judge out("out", epsilon(p.dtype), true), lse("lse", 1e-5, false);
  for (int b = 0; b < p.batch; ++b)
    for (int row = 0; row < p.stored_q(b); ++row)
      for (int head = 0; head < p.heads_q; ++head) {
        size_t at = p.index(b, row, head);
        int64_t first = p.offset(p.out, b, row, head);
        for (int i = 0; i < p.head_dim_v; ++i) {
          size_t j = at * p.head_dim_v + i;
          out.add(p.out.get(first + i), r.plain.out[j], r.exact.out[j], b, row, head, i);
        }
        if (p.lse) {
          lse.add(p.lse_out.get(p.lse_offset(b, row, head)), r.plain.lse[at], r.exact.lse[at], b,
                  row, head, 0);
        }
      }
  // Note: in float32 the plain formula never rounds a score, while base-2 arithmetic does once:
  // that moves a weight by as many roundings as the score is large.
  double roundings = 1 + (p.dtype == DType::f32 ? r.largest_score : 0);
  std::string text = out.verdict(0, roundings, worst) + lse.verdict(1, 1, worst);
  if (text.empty()) {
    text = overrun("out", p, p.out, p.head_dim_v,
                   [&](int b, int row, int head) { return p.offset(p.out, b, row, head); });
  }
  if (text.empty() && p.lse) {
    text = overrun("lse", p, p.lse_out, 1,
                   [&](int b, int row, int head) { return p.lse_offset(b, row, head); });
  }
  return text.empty() ? text : text + " [" + p.text() + "]";
}

}  // namespace cuattn::test
