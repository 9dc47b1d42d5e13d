// SPDX-License-Identifier: Apache-2.0
// Every kernel instance that libcuattn lists, on random problems that only it can serve: against
// the double-precision reference, with guard bands, unchanged inputs and bitwise repeats; the CPU
// backend is held against the same reference. Next: test_cuda.cpp (sizes, streams, graphs),
// test_device_math.cu and test_device_tiles.cu (the primitives).
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "gpu.h"
#include "suite.h"
#include "test.h"

namespace cuattn::test {

namespace {

struct Instance {
  std::string backend, dtype, mask, score;
  int head_dim, head_dim_v;
  bool any_head_dim;  // not compiled in: everything up to these

  std::string name() const {
    return "instance/" + backend + "/" + dtype + "/" + std::to_string(head_dim) + "x" +
           std::to_string(head_dim_v) + "/" + mask + "/" + score;
  }
};

// The axes an instance leaves to run-time branches ("any") become one instance per value.
std::vector<Instance> instances() {
  std::vector<Instance> list;
  auto values = [](const char* given, std::vector<std::string> all) {
    return std::string(given) == "any" ? all : std::vector<std::string>{given};
  };
  for (int i = 0; i < cuattn_kernel_count(); ++i) {
    cuattn_kernel_info info;
    detail::check(cuattn_kernel_at(i, &info));
    bool on_cuda = std::isdigit(
        static_cast<unsigned char>(info.arch[0]));  // "80;90;90-ptx"; the CPU's name an ISA
    if (std::string(info.op) != "attention" || !on_cuda) continue;
    const std::string codes = info.dtype;
    if (codes == "float8_e4m3fn" || codes == "int8") continue;  // tests/float8
    for (const std::string& dtype : values(info.dtype, {"float32", "float16", "bfloat16"}))
      for (const std::string& mask : values(info.mask, {"none", "causal", "window"}))
        for (const std::string& score : values(info.score, {"identity", "scored"})) {
          if (score == "dropped") continue;  // tests/attention/test_dropout.py
          list.push_back({info.kernel, dtype, mask, score, info.head_dim, info.head_dim_v,
                          std::string(info.mask) == "any"});
        }
  }
  return list;
}

const std::vector<int>& lengths() {
  static const std::vector<int> list = {1,  3,   17,  31,  33,  63,  64,  65,
                                        97, 127, 128, 129, 191, 200, 255, 257};
  return list;
}

void choose_mask(Problem& p, const std::string& mask, Random& random) {
  if (mask == "causal") p.causal = true;
  if (mask != "none")
    p.seqlen_q = std::max(p.seqlen_q, 2);  // one query: its causal mask hides nothing
  if (mask != "window") return;
  p.seqlen_kv = std::max(p.seqlen_kv, 3);
  p.causal = random.chance(0.4);
  p.window_left = random.range(0, std::min(150, p.seqlen_kv - 2));
  p.window_right = p.causal ? kUnlimited : random.range(-1, 90);
}

void choose_score(Problem& p, const std::string& score, Random& random) {
  if (score != "scored") {
    if (random.chance(0.25)) p.scale = 0.2;
    return;
  }
  int which = random.range(1, 15);  // a non-empty subset
  if (which & 1) p.softcap = random.pick(std::vector<double>{1.0, 15.0, 50.0});
  if (which & 2) p.alibi = true;
  if (which & 4) p.bias_kind = static_cast<Problem::Bias>(random.range(1, 3));
  bool in_boxes = p.bias_kind == Problem::Bias::same && random.chance(0.5);
  if (in_boxes) p.seqlen_kv = (p.seqlen_kv + 7) / 8 * 8;  // rows that the TMA can bring
  if (which & 8) p.scale = -0.1;                          // which needs the scored kernels too
  p.alibi_per_batch = random.chance(0.5);
  p.bias_broadcast = random.chance(0.5);
}

enum Variant { kDense, kRagged, kStrided, kShortKeys };

// Under --sanitize one to three tiles each way with odd tails, exact allocations without gaps.
Problem make_problem(const Instance& instance, int variant, Random& random) {
  bool small = settings().sanitize;
  auto length = [&] { return small ? random.range(1, 150) : random.pick(lengths()); };
  Problem p;
  p.dtype = dtype_named(instance.dtype);
  p.head_dim = instance.head_dim;
  p.head_dim_v = instance.head_dim_v;
  if (instance.any_head_dim) {
    p.head_dim = 8 * random.range(2, instance.head_dim / 8);
    p.head_dim_v = 8 * random.range(2, instance.head_dim_v / 8);
  }
  p.heads_kv = small ? 1 : random.range(1, 2);
  p.heads_q = p.heads_kv * (small ? 2 : random.range(1, 3));
  p.batch = small ? 2 : random.range(1, 3);
  p.seqlen_q = length();
  p.seqlen_kv = !small && random.chance(0.25) ? random.range(300, 700) : length();
  p.magnitude = random.chance(0.25) ? 8.0f : 1.0f;
  choose_mask(p, instance.mask, random);
  choose_score(p, instance.score, random);
  bool splits_keys =
      instance.backend == "sm90" || instance.backend == "sm80" || instance.backend == "simt";
  if (splits_keys && random.chance(0.3)) p.num_splits = random.range(2, 5);
  p.batch_invariant = instance.backend == "sm90" && random.chance(0.4);  // its first tile, always
  switch (variant) {
    case kRagged:
      p.sinks = random.chance(0.5);
      p.unowned = small ? 0 : random.range(0, 3);
      for (int b = 0; b < p.batch; ++b) {
        p.lens_q.push_back(random.chance(0.15) ? 0 : length());
        p.lens_kv.push_back(random.chance(0.15) ? 0 : length());
      }
      p.seqlen_q =
          std::max(1, *std::max_element(p.lens_q.begin(), p.lens_q.end()) + random.range(0, 40));
      p.seqlen_kv =
          std::max(1, *std::max_element(p.lens_kv.begin(), p.lens_kv.end()) + random.range(0, 40));
      break;
    case kStrided:
      p.layout = random.chance(0.5) ? Layout::bhsd : Layout::bshd;
      p.row_gap = small ? 0 : 8 * random.range(0, 5);
      p.head_dim -= 8 * random.range(0, 1);
      p.head_dim_v -= 8 * random.range(0, 1);
      p.lse = random.chance(0.5);
      if (instance.backend == "cublas") break;  // takes no lengths
      for (int b = 0; b < p.batch; ++b) {
        p.used_q.push_back(random.range(0, p.seqlen_q));
        p.used_kv.push_back(random.range(0, p.seqlen_kv));
      }
      break;
    case kShortKeys:  // more queries than keys: empty rows under a causal mask
      p.sinks = random.chance(0.3);
      if (p.seqlen_q < p.seqlen_kv) std::swap(p.seqlen_q, p.seqlen_kv);
      break;
    default: break;
  }
  return p;
}

// Whether this backend serves the problem through this very instance.
bool reaches(Problem& p, const Instance& instance) {
  cuattn_plan plan;
  try {
    plan = explain(p, instance.backend.c_str(), {kDLCUDA, 0});
  } catch (const NotImplemented&) {
    return false;
  }
  bool same_dims = instance.any_head_dim ||
                   (plan.head_dim == instance.head_dim && plan.head_dim_v == instance.head_dim_v);
  return same_dims && instance.backend == plan.kernel && instance.mask == plan.mask &&
         instance.score == plan.score;
}

// The same numbers as float32 arrays.
Problem widened(const Problem& p) {
  Problem wide = p;
  wide.dtype = DType::f32;
  auto widen = [](Array& array) {
    Array copy(DType::f32, array.shape(), array.strides());
    array.for_each_offset([&](int64_t i) { copy.set(i, array.get(i)); });
    array = copy;
  };
  for (Array* array : {&wide.q, &wide.k, &wide.v, &wide.out}) widen(*array);
  if (wide.bias_kind == Problem::Bias::same) widen(wide.bias);
  return wide;
}

void check_cpu(const Problem& p, const Reference& expected) {
  Problem wide = widened(p);
  run_on_cpu(wide, "naive");
  double largest = 0;
  for (int b = 0; b < p.batch; ++b)
    for (int row = 0; row < p.stored_q(b); ++row)
      for (int head = 0; head < p.heads_q; ++head)
        for (int i = 0; i < p.head_dim_v; ++i) {
          double exact = expected.exact.out[p.index(b, row, head) * p.head_dim_v + i];
          largest = std::max(
              largest, std::abs(wide.out.get(wide.offset(wide.out, b, row, head) + i) - exact));
        }
  CHECK(largest < 1e-4 * p.magnitude, "the CPU backend is ", largest, " away from the reference [",
        p.text(), "]");
}

void check_repeats(Problem& p, const char* backend, int repeats) {
  OnDevice device(p, backend);
  std::vector<uint8_t> first_out, first_lse;
  for (int i = 0; i < repeats; ++i) {
    device.poison();
    device.launch();
    device.download();
    if (i == 0) {
      first_out = p.out.bytes();
      first_lse = p.lse_out.bytes();
    } else if (first_out != p.out.bytes() || first_lse != p.lse_out.bytes()) {
      CHECK(false, "repeat ", i, " gave other bits [", p.text(), "]");
      return;
    }
  }
}

// A random problem of this variant that the instance serves; false when it refuses the variant's
// options.
bool draw(const Instance& instance, int variant, Random& random, Problem& p) {
  for (int attempt = 0; attempt < 4; ++attempt) {
    p = make_problem(instance, variant, random);
    p.fill(random);
    if (reaches(p, instance)) return true;
  }
  return false;
}

// All variants; under --sanitize the plain one and another.
std::vector<int> variants(Random& random) {
  if (settings().sanitize) return {kDense, random.range(kRagged, kStrided)};
  return {kDense, kRagged, kStrided, kShortKeys};
}

void run_instance(const Instance& instance) {
  const char* backend = instance.backend.c_str();
  Random random(case_seed(instance.name()));
  int served = 0;
  double worst = 0;
  for (int variant : variants(random)) {
    Problem p;
    if (!draw(instance, variant, random, p)) continue;
    ++served;
    Reference expected = reference(p);
    std::string changed = run_on_device(p, backend);
    CHECK(changed.empty(), changed);
    std::string verdict = judge(p, expected, &worst);
    CHECK(verdict.empty(), verdict);
    check_cpu(p, expected);
    if (variant == kDense && !settings().sanitize) check_repeats(p, backend, 20);
  }
  if (served == 0 && instance.backend == "cublas") skip("the cuBLAS library was not found");
  CHECK(served > 0, "no call reaches this instance");
}

}  // namespace

void add_kernel_cases() {
  for (const Instance& instance : instances()) {
    // Only flex_attention gives row ranges: tests/flex/test_flex_cuda.py.
    if (instance.mask == "rows") continue;
    add_case(instance.name(), [instance] { run_instance(instance); }, Needs::gpu);
  }
}

}  // namespace cuattn::test
