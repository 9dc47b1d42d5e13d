// SPDX-License-Identifier: Apache-2.0
// merge_states of two and of many parts, on the CPU and on the GPU: the definition in double
// precision, neutral elements, extreme lse, every layout; and attention split over the keys,
// merged, against attention over all keys.
#include <cmath>
#include <limits>
#include <stdexcept>

#include "merge.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

// Axes in the order batch, row, head of [2, 5, 3] rows; ragged layouts have one sequence.
std::vector<int64_t> out_shape(Layout layout, int dim) {
  switch (layout) {
    case Layout::bshd: return {2, 5, 3, dim};
    case Layout::bhsd: return {2, 3, 5, dim};
    default: return {5, 3, dim};
  }
}
std::vector<int64_t> lse_shape(Layout layout) {
  switch (layout) {
    case Layout::nhd: return {5, 3};
    case Layout::thd: return {3, 5};
    default: return {2, 3, 5};
  }
}

int64_t out_offset(const MergeProblem& m, int b, int row, int head) {
  const std::vector<int64_t>& s = m.out.strides();
  if (m.layout == Layout::bhsd) return b * s[0] + head * s[1] + row * s[2];
  if (m.layout == Layout::bshd) return b * s[0] + row * s[1] + head * s[2];
  return row * s[0] + head * s[1];
}
int64_t lse_offset(const MergeProblem& m, int b, int row, int head) {
  const std::vector<int64_t>& s = m.lse.strides();
  if (m.layout == Layout::nhd) return row * s[0] + head * s[1];
  if (m.layout == Layout::thd) return head * s[0] + row * s[1];
  return b * s[0] + head * s[1] + row * s[2];
}

}  // namespace

static MergeProblem make_merge(Random& random, DType dtype, Layout layout, int parts, int dim) {
  MergeProblem m;
  m.dtype = dtype, m.layout = layout, m.num_parts = parts, m.head_dim = dim;
  std::vector<int64_t> shape = out_shape(layout, dim), rows = lse_shape(layout);
  m.out = Array(dtype, shape);
  m.lse = Array(DType::f32, rows);
  shape.insert(shape.begin(), parts);
  rows.insert(rows.begin(), parts);
  m.outs = Array(dtype, shape);
  m.lses = Array(DType::f32, rows);
  m.outs.for_each_offset([&](int64_t i) { m.outs.set(i, random.normal()); });
  float size = random.pick(std::vector<float>{1, 30, 5000});
  m.lses.for_each_offset(
      [&](int64_t i) { m.lses.set(i, random.chance(0.25) ? -kInf : size * random.normal()); });
  return m;
}

std::string judge_merge(const MergeProblem& m) {
  int batch = m.layout == Layout::bshd || m.layout == Layout::bhsd ? 2 : 1;
  std::ostringstream text;
  for (int b = 0; b < batch; ++b)
    for (int row = 0; row < 5; ++row)
      for (int head = 0; head < 3; ++head) {
        double largest = -kInf, sum = 0;
        auto lse = [&](int part) {
          return m.lses.get(part * m.lses.strides()[0] + lse_offset(m, b, row, head));
        };
        for (int part = 0; part < m.num_parts; ++part)
          largest = std::max<double>(largest, lse(part));
        auto weight = [&](int part) {
          return largest == -kInf ? 0.0 : std::exp(lse(part) - largest);
        };
        for (int part = 0; part < m.num_parts; ++part) sum += weight(part);
        double want_lse = largest == -kInf ? largest : largest + std::log(sum);
        double got_lse = m.lse.get(lse_offset(m, b, row, head));
        if (!(got_lse == want_lse ||
              std::abs(got_lse - want_lse) <= 1e-6 * std::max(1.0, std::abs(want_lse)))) {
          text << "lse " << got_lse << " instead of " << want_lse;
        }
        for (int i = 0; i < m.head_dim; ++i) {
          double want = 0;
          for (int part = 0; part < m.num_parts; ++part) {
            int64_t at = part * m.outs.strides()[0] + out_offset(m, b, row, head) + i;
            if (weight(part) > 0) want += weight(part) / sum * m.outs.get(at);
          }
          double got = m.out.get(out_offset(m, b, row, head) + i);
          if (!(std::abs(got - want) <= epsilon(m.dtype) * std::abs(want) + 2e-6)) {
            text << "out " << got << " instead of " << want;
          }
        }
        if (!text.str().empty()) {
          text << " at " << b << "," << row << "," << head << " of layout "
               << static_cast<int>(m.layout) << ", " << m.num_parts << " parts, "
               << name_of(m.dtype);
          return text.str();
        }
      }
  return "";
}

void run_merge(MergeProblem& m, bool stacked, DLDevice device, const Arguments::Address& address,
               void* stream) {
  TensorView outs = m.outs.view(address(m.outs), device),
             lses = m.lses.view(address(m.lses), device);
  TensorView out = m.out.view(address(m.out), device), lse = m.lse.view(address(m.lse), device);
  if (stacked) {
    merge_states(outs, lses, out, &lse, m.layout, stream);
    return;
  }
  auto part = [](const TensorView& all, int index, int bytes) {
    TensorView view = all;
    view.ndim = all.ndim - 1;
    view.data = static_cast<char*>(all.data) + index * all.strides[0] * bytes;
    for (int axis = 0; axis < view.ndim; ++axis) {
      view.shape[axis] = all.shape[axis + 1];
      view.strides[axis] = all.strides[axis + 1];
    }
    return view;
  };
  int bytes = bytes_of(m.dtype);
  merge_states(part(outs, 0, bytes), part(lses, 0, 4), part(outs, 1, bytes), part(lses, 1, 4), out,
               &lse, m.layout, stream);
}

std::vector<MergeProblem> merge_problems(uint64_t seed) {
  Random random(seed);
  std::vector<MergeProblem> list;
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (Layout layout : {Layout::bshd, Layout::bhsd, Layout::nhd, Layout::thd})
      for (int parts : {1, 2, 2, 7, 33})
        list.push_back(make_merge(random, dtype, layout, parts, 8 * random.range(1, 32)));
  return list;
}

namespace {

const DLDevice kHost{kDLCPU, 0};
void* host_address(Array& array) { return array.data(); }

TEST(cpu_merge_weighs_parts_by_their_lse) {
  for (MergeProblem& m : merge_problems(case_seed("merge"))) {
    for (bool stacked : {false, true}) {
      if (!stacked && m.num_parts != 2) continue;
      m.out.poison();
      m.lse.poison();
      run_merge(m, stacked, kHost, host_address, nullptr);
      std::string wrong = judge_merge(m);
      CHECK(wrong.empty(), wrong);
    }
  }
}

TEST(cpu_merge_of_split_keys_is_attention_over_all_keys) {
  Random random(case_seed("split"));
  Problem whole;
  whole.seqlen_q = 20, whole.seqlen_kv = 90, whole.heads_q = 4, whole.heads_kv = 2;
  whole.fill(random);
  run_on_cpu(whole, "cpu");
  MergeProblem m;
  m.dtype = DType::f32, m.layout = Layout::bshd, m.num_parts = 3, m.head_dim = 64;
  m.outs = Array(DType::f32, {3, 1, 20, 4, 64});
  m.lses = Array(DType::f32, {3, 1, 4, 20});
  m.out = Array(DType::f32, {1, 20, 4, 64});
  m.lse = Array(DType::f32, {1, 4, 20});
  for (int part = 0; part < 3; ++part) {
    Problem some = whole;
    some.seqlen_kv = 30;
    some.k = Array(DType::f32, {1, 30, 2, 64});
    some.v = Array(DType::f32, {1, 30, 2, 64});
    for (int64_t i = 0; i < 30 * 2 * 64; ++i) {
      some.k.set(i, whole.k.get(part * 30 * 2 * 64 + i));
      some.v.set(i, whole.v.get(part * 30 * 2 * 64 + i));
    }
    run_on_cpu(some, "cpu");
    for (int64_t i = 0; i < 20 * 4 * 64; ++i) m.outs.set(part * 20 * 4 * 64 + i, some.out.get(i));
    for (int64_t i = 0; i < 4 * 20; ++i) m.lses.set(part * 4 * 20 + i, some.lse_out.get(i));
  }
  run_merge(m, true, kHost, host_address, nullptr);
  for (int64_t i = 0; i < 20 * 4 * 64; ++i)
    CHECK(std::abs(m.out.get(i) - whole.out.get(i)) < 2e-6, "element ", i);
  for (int64_t i = 0; i < 4 * 20; ++i)
    CHECK(std::abs(m.lse.get(i) - whole.lse_out.get(i)) < 1e-5, "lse ", i);
}

TEST(cpu_merge_of_many_parts_needs_no_lse_and_may_write_over_the_first) {
  Random random(case_seed("many"));
  for (Layout layout : {Layout::bshd, Layout::thd}) {
    MergeProblem m = make_merge(random, DType::f16, layout, 5, 40);
    run_merge(m, true, kHost, host_address, nullptr);
    Array lone(m.dtype, m.out.shape());
    TensorView outs = m.outs.view(m.outs.data(), kHost), lses = m.lses.view(m.lses.data(), kHost);
    TensorView out = lone.view(lone.data(), kHost);
    if (layout == Layout::bshd) {
      merge_states(outs, lses, out);
    } else {
      merge_states(outs, lses, out, nullptr, layout);
    }
    CHECK(lone.bytes() == m.out.bytes(), "without lse");
    std::vector<uint8_t> want = m.outs.bytes();
    size_t part = m.out.bytes().size() - 2 * m.out.guard_bytes();
    std::copy_n(m.out.bytes().begin() + m.out.guard_bytes(), part,
                want.begin() + m.outs.guard_bytes());
    out.data = outs.data;
    merge_states(outs, lses, out, nullptr, layout);
    CHECK(m.outs.bytes() == want, "over the first part");
  }
}

TEST(merge_of_many_parts_refuses_by_name) {
  Random random(1);
  MergeProblem m = make_merge(random, DType::f32, Layout::bshd, 3, 16);
  TensorView outs = m.outs.view(m.outs.data(), kHost), lses = m.lses.view(m.lses.data(), kHost);
  TensorView out = m.out.view(m.out.data(), kHost), lse = m.lse.view(m.lse.data(), kHost);
  std::vector<uint8_t> before = m.out.bytes();
  auto refuses = [&](const char* named, auto&& spoil) {
    TensorView a = outs, b = lses, c = out, d = lse;
    Layout layout = Layout::bshd;
    spoil(a, b, c, d, layout);
    check_throws<std::invalid_argument>(named, [&] { merge_states(a, b, c, &d, layout); });
    CHECK(m.out.bytes() == before, "written although refused for ", named);
  };
  using View = TensorView;
  refuses("merge_states: outs must stack at least one part",
          [&](View& a, View&, View&, View&, Layout&) { a = out; });
  refuses("merge_states: outs must stack at least one part",
          [&](View& a, View&, View&, View&, Layout&) { a.shape[0] = 0; });
  refuses("outs must stack at least one part [n, num_heads, head_dim]",
          [&](View&, View&, View&, View&, Layout& layout) { layout = Layout::nhd; });
  refuses("lses must stack 3 parts",
          [&](View&, View& b, View&, View&, Layout&) { b.shape[0] = 2; });
  refuses("lses must be float32",
          [&](View&, View& b, View&, View&, Layout&) { b.dtype = dl_dtype(DType::f16); });
  refuses("out must have the shape of one part of outs",
          [&](View&, View&, View& c, View&, Layout&) { c.shape[1] = 4; });
  refuses("lse_out must have num_heads",
          [&](View&, View&, View&, View& d, Layout&) { d.shape[1] = 2; });
}

}  // namespace
}  // namespace cuattn::test
