// SPDX-License-Identifier: Apache-2.0
// One attention problem with all its arrays on the host, random ones of every kind, and the
// judgement of a result: a double-precision reference in scalar loops and the plain low-precision
// formula, whose error bounds ours. Shared by the CPU and the CUDA tests. Next: test_core.cpp,
// test_attention.cu.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cuattn/attention.h"

namespace cuattn::test {

// Software conversions, round to nearest even: the models that the device's own conversions are
// held against.
uint16_t f16_bits(float value);
float f16_value(uint16_t bits);
uint16_t bf16_bits(float value);
float bf16_value(uint16_t bits);
float rounded(DType dtype, float value);
double epsilon(DType dtype);  // distance from 1 to the next number
int bytes_of(DType dtype);
const char* name_of(DType dtype);
DType dtype_named(const std::string& name);

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();               // splitmix64
  int range(int low, int high);  // both included
  bool chance(double probability);
  float normal();
  template <class T>
  const T& pick(const std::vector<T>& from) {
    return from[range(0, static_cast<int>(from.size()) - 1)];
  }

 private:
  uint64_t state_;
};

// A host array with guard bands: 512 elements of 0xFF bytes (a NaN in every float type) before and
// after it, and in the gaps its strides leave. Under --sanitize there are none, so that the tool
// sees each access past the end.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides = {});

  bool exists() const { return !shape_.empty(); }
  DType dtype() const { return dtype_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  const std::vector<int64_t>& strides() const { return strides_; }
  std::vector<uint8_t>& bytes() { return bytes_; }  // guards included
  const std::vector<uint8_t>& bytes() const { return bytes_; }
  size_t guard_bytes() const { return guard_bytes_; }
  void* data() { return bytes_.data() + guard_bytes_; }
  const void* data() const { return bytes_.data() + guard_bytes_; }

  float get(int64_t offset) const;
  void set(int64_t offset, float value);
  int32_t& i32(int64_t offset) { return static_cast<int32_t*>(data())[offset]; }
  int32_t i32(int64_t offset) const { return static_cast<const int32_t*>(data())[offset]; }
  void poison();  // 0xFF everywhere
  TensorView view(const void* address, DLDevice device) const;
  void for_each_offset(const std::function<void(int64_t)>& visit) const;

 private:
  DType dtype_ = DType::f32;
  std::vector<int64_t> shape_, strides_;
  std::vector<uint8_t> bytes_;
  size_t guard_bytes_ = 0;
};

struct Problem {
  DType dtype = DType::f32;
  Layout layout = Layout::bshd;
  int batch = 1, heads_q = 1, heads_kv = 1, head_dim = 64, head_dim_v = 64, seqlen_q = 1,
      seqlen_kv = 1;
  int64_t row_gap = 0;               // elements between rows: views into a wider tensor
  std::vector<int> lens_q, lens_kv;  // ragged when not empty
  int unowned = 0;                   // ragged: rows stored behind the last sequence
  std::vector<int> used_q, used_kv;  // seqused_*, absent when empty
  bool causal = false;
  int64_t window_left = kUnlimited, window_right = kUnlimited;
  double softcap = 0, scale = 0;  // scale 0: the default
  enum class Bias { none, f32, same, boolean } bias_kind = Bias::none;
  bool bias_broadcast = false;  // over batch and heads
  bool alibi = false, alibi_per_batch = false, sinks = false, lse = true;
  float magnitude = 1;  // of q: 10 gives sharp softmaxes
  int num_splits = 0;   // 0: chosen
  bool batch_invariant = false;

  Array q, k, v, cu_q, cu_kv, used_q_array, used_kv_array, alibi_slopes, bias, sink_logits, out,
      lse_out;

  bool ragged() const { return !lens_q.empty(); }
  int64_t rows_q() const;
  int64_t rows_kv() const;
  int64_t start_q(int b) const;
  int64_t start_kv(int b) const;
  int stored_q(int b) const { return ragged() ? lens_q[b] : seqlen_q; }
  int stored_kv(int b) const { return ragged() ? lens_kv[b] : seqlen_kv; }
  int active_q(int b) const {
    return used_q.empty() ? stored_q(b) : std::min(used_q[b], stored_q(b));
  }
  int active_kv(int b) const {
    return used_kv.empty() ? stored_kv(b) : std::min(used_kv[b], stored_kv(b));
  }
  // Offset of element (sequence, row in it, head, 0) of q, k, v, out.
  int64_t offset(const Array& array, int b, int row, int head) const;
  int64_t lse_offset(int b, int row, int head) const;
  size_t index(int b, int row, int head) const;  // of a row and head in Values

  void fill(Random& random);  // makes the arrays; rows of k and v that no query may see hold NaN
  std::vector<Array*> inputs();
  std::string text() const;
};

// A problem's arrays at their addresses, as attention() and attention_varlen() take them.
class Arguments {
 public:
  using Address = std::function<void*(Array&)>;
  Arguments(Problem& problem, DLDevice device, const Address& address, const char* backend);
  Arguments(const Arguments&) = delete;

  cuattn_attention_call prepare() const;
  cuattn_plan explain(const cuattn_device* made_up) const;
  const TensorView& out() const { return out_; }
  const TensorView* lse() const { return options_.lse; }

 private:
  TensorView q_, k_, v_, out_, lse_, alibi_, sinks_, bias_, used_q_, used_kv_, cu_q_, cu_kv_;
  AttentionOptions options_;
  bool ragged_;
  int64_t max_seqlen_q_, max_seqlen_kv_;
};

// Arguments and the prepared call; throws as prepare does.
class Bound {
 public:
  Bound(Problem& problem, DLDevice device, const Arguments::Address& address, const char* backend)
      : arguments_(problem, device, address, backend), call_(arguments_.prepare()) {}

  size_t workspace_bytes() const { return call_.workspace_bytes; }
  const cuattn_attention_call& call() const { return call_; }
  void run(Workspace workspace, void* stream) {
    detail::run(call_, arguments_.out(), arguments_.lse(), workspace, stream);
  }

 private:
  Arguments arguments_;
  cuattn_attention_call call_;
};

// The plan for a problem on its own device or on a made-up one; throws as prepare does.
cuattn_plan explain(Problem& problem, const char* backend, DLDevice device,
                    const cuattn_device* made_up = nullptr);

// Runs on the CPU backend into problem.out and problem.lse_out.
void run_on_cpu(Problem& problem, const char* backend);

struct Values {
  std::vector<double> out, lse;  // [row][head][head_dim_v] and [row][head] over all stored rows
};
struct Reference {
  Values exact, plain;       // float64 truth; the formula with everything rounded to the dtype
  double largest_score = 0;  // in magnitude
};
Reference reference(const Problem& problem);

// What is wrong with problem.out and problem.lse_out, guard bands and unowned rows included; empty
// when all is right. worst: raised to the largest error seen, as a fraction of what is allowed.
std::string judge(const Problem& problem, const Reference& expected, double* worst = nullptr);

// Splits work over the cores; the tests' own, so that a bug in the library's pool cannot hide here.
void parallel(int tasks, const std::function<void(int)>& body);

}  // namespace cuattn::test
