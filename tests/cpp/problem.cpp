// SPDX-License-Identifier: Apache-2.0
// Arrays, random problems and their binding to the C ABI. Next: reference.cpp (the judgement).
#include "problem.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <thread>

#include "cuattn/explain.h"
#include "test.h"

namespace cuattn::test {

namespace {

uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace

uint16_t f16_bits(float value) {
  uint32_t bits = float_bits(value);
  uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return 0x7fff;          // NaN, as the device writes it
  if (bits >= 0x477ff000) return sign | 0x7c00;  // from 65520 on rounds to infinity
  if (bits < 0x38800000) {                       // subnormal: a multiple of 2^-24
    return sign | static_cast<uint16_t>(std::nearbyint(bits_float(bits) * 16777216.0f));
  }
  bits += 0xfff + ((bits >> 13) & 1);
  return sign | static_cast<uint16_t>((bits - 0x38000000) >> 13);
}

float f16_value(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023;
  if (exponent == 31) return bits_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0)
    return bits_float(sign | float_bits(static_cast<float>(mantissa) / 16777216.0f));
  return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

uint16_t bf16_bits(float value) {
  uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float bf16_value(uint16_t bits) { return bits_float(static_cast<uint32_t>(bits) << 16); }

float rounded(DType dtype, float value) {
  if (dtype == DType::f16) return f16_value(f16_bits(value));
  if (dtype == DType::bf16) return bf16_value(bf16_bits(value));
  return value;
}

double epsilon(DType dtype) {
  return dtype == DType::f16 ? std::ldexp(1.0, -10)
                             : std::ldexp(1.0, dtype == DType::bf16 ? -7 : -23);
}

int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::f16:
    case DType::bf16: return 2;
    default: return 1;
  }
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "float32";
    case DType::f16: return "float16";
    case DType::bf16: return "bfloat16";
    default: return "other";
  }
}

DType dtype_named(const std::string& name) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    if (name == name_of(dtype)) return dtype;
  }
  return DType::f32;
}

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

int Random::range(int low, int high) { return low + static_cast<int>(next() % (high - low + 1)); }

bool Random::chance(double probability) { return (next() >> 11) * 0x1p-53 < probability; }

float Random::normal() {
  double a = ((next() >> 11) + 1) * 0x1p-53, b = (next() >> 11) * 0x1p-53;
  return static_cast<float>(std::sqrt(-2 * std::log(a)) * std::cos(2 * 3.141592653589793 * b));
}

Array::Array(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> strides)
    : dtype_(dtype), shape_(std::move(shape)), strides_(std::move(strides)) {
  if (strides_.empty()) {
    strides_.assign(shape_.size(), 1);
    for (int i = static_cast<int>(shape_.size()) - 2; i >= 0; --i)
      strides_[i] = strides_[i + 1] * shape_[i + 1];
  }
  int64_t extent = 1;
  for (size_t i = 0; i < shape_.size(); ++i) {
    extent = shape_[i] == 0 ? 0 : extent == 0 ? 0 : extent + (shape_[i] - 1) * strides_[i];
  }
  guard_bytes_ = settings().sanitize ? 0 : static_cast<size_t>(512) * 4;
  bytes_.assign(2 * guard_bytes_ + static_cast<size_t>(extent) * bytes_of(dtype_), 0xff);
}

float Array::get(int64_t offset) const {
  const char* at = static_cast<const char*>(data()) + offset * bytes_of(dtype_);
  uint16_t half = 0;
  float value = 0;
  switch (dtype_) {
    case DType::f32: std::memcpy(&value, at, 4); return value;
    case DType::f16: std::memcpy(&half, at, 2); return f16_value(half);
    case DType::bf16: std::memcpy(&half, at, 2); return bf16_value(half);
    default: return static_cast<float>(*at);
  }
}

void Array::set(int64_t offset, float value) {
  char* at = static_cast<char*>(data()) + offset * bytes_of(dtype_);
  uint16_t half = dtype_ == DType::f16 ? f16_bits(value) : bf16_bits(value);
  switch (dtype_) {
    case DType::f32: std::memcpy(at, &value, 4); break;
    case DType::f16:
    case DType::bf16: std::memcpy(at, &half, 2); break;
    default: *at = value != 0;
  }
}

void Array::poison() { std::fill(bytes_.begin(), bytes_.end(), 0xff); }

TensorView Array::view(const void* address, DLDevice device) const {
  TensorView view;
  view.data = const_cast<void*>(address);
  view.device = device;
  view.dtype = dl_dtype(dtype_);
  view.ndim = static_cast<int32_t>(shape_.size());
  std::copy(shape_.begin(), shape_.end(), view.shape.begin());
  std::copy(strides_.begin(), strides_.end(), view.strides.begin());
  return view;
}

void Array::for_each_offset(const std::function<void(int64_t)>& visit) const {
  std::vector<int64_t> index(shape_.size(), 0);
  if (std::find(shape_.begin(), shape_.end(), 0) != shape_.end()) return;
  for (;;) {
    visit(std::inner_product(index.begin(), index.end(), strides_.begin(), int64_t{0}));
    int axis = static_cast<int>(index.size()) - 1;
    while (axis >= 0 && ++index[axis] == shape_[axis]) index[axis--] = 0;
    if (axis < 0) return;
  }
}

int64_t Problem::rows_q() const {
  return ragged() ? start_q(batch) + unowned : static_cast<int64_t>(batch) * seqlen_q;
}
int64_t Problem::rows_kv() const {
  return ragged() ? start_kv(batch) + unowned : static_cast<int64_t>(batch) * seqlen_kv;
}
int64_t Problem::start_q(int b) const {
  return std::accumulate(lens_q.begin(), lens_q.begin() + b, int64_t{0});
}
int64_t Problem::start_kv(int b) const {
  return std::accumulate(lens_kv.begin(), lens_kv.begin() + b, int64_t{0});
}

int64_t Problem::offset(const Array& array, int b, int row, int head) const {
  const std::vector<int64_t>& s = array.strides();
  if (ragged())
    return ((&array == &k || &array == &v ? start_kv(b) : start_q(b)) + row) * s[0] + head * s[1];
  bool heads_first = layout == Layout::bhsd;
  return b * s[0] + row * s[heads_first ? 2 : 1] + head * s[heads_first ? 1 : 2];
}

int64_t Problem::lse_offset(int b, int row, int head) const {
  if (ragged()) return head * rows_q() + start_q(b) + row;
  return (static_cast<int64_t>(b) * heads_q + head) * seqlen_q + row;
}

size_t Problem::index(int b, int row, int head) const {
  int64_t stored = (ragged() ? start_q(b) : static_cast<int64_t>(b) * seqlen_q) + row;
  return static_cast<size_t>(stored * heads_q + head);
}

void Problem::fill(Random& random) {
  auto make = [&](int64_t rows, int seqlen, int heads, int dim, int64_t gap) {
    int64_t d = dim, row = heads * d + gap;
    if (ragged()) return Array(dtype, {rows, heads, d}, {row, d, 1});
    if (layout == Layout::bhsd) {
      return Array(dtype, {batch, heads, seqlen, d},
                   {heads * seqlen * (d + gap), seqlen * (d + gap), d + gap, 1});
    }
    return Array(dtype, {batch, seqlen, heads, d}, {seqlen * row, row, d, 1});
  };
  q = make(rows_q(), seqlen_q, heads_q, head_dim, row_gap);
  k = make(rows_kv(), seqlen_kv, heads_kv, head_dim, row_gap);
  v = make(rows_kv(), seqlen_kv, heads_kv, head_dim_v, row_gap);
  out = make(rows_q(), seqlen_q, heads_q, head_dim_v, row_gap);
  for (int b = 0; b < batch; ++b) {  // rows beyond the active ones keep their NaN
    auto fill_rows = [&](Array& array, int rows, int heads, int dim, float size) {
      for (int row = 0; row < rows; ++row)
        for (int head = 0; head < heads; ++head)
          for (int i = 0; i < dim; ++i)
            array.set(offset(array, b, row, head) + i, size * random.normal());
    };
    fill_rows(q, active_q(b), heads_q, head_dim, magnitude);
    fill_rows(k, active_kv(b), heads_kv, head_dim, 1);
    fill_rows(v, active_kv(b), heads_kv, head_dim_v, 1);
  }
  auto ints = [](const std::vector<int>& values) {
    Array array(DType::i32, {static_cast<int64_t>(values.size())});
    for (size_t i = 0; i < values.size(); ++i) array.i32(i) = values[i];
    return array;
  };
  auto starts = [&](const std::vector<int>& lens) {
    std::vector<int> sums(lens.size() + 1, 0);
    std::partial_sum(lens.begin(), lens.end(), sums.begin() + 1);
    return ints(sums);
  };
  if (ragged()) {
    cu_q = starts(lens_q);
    cu_kv = starts(lens_kv);
    lse_out = Array(DType::f32, {heads_q, rows_q()});
  } else {
    lse_out = Array(DType::f32, {batch, heads_q, seqlen_q});
  }
  if (!used_q.empty()) used_q_array = ints(used_q);
  if (!used_kv.empty()) used_kv_array = ints(used_kv);
  if (alibi) {
    alibi_slopes =
        alibi_per_batch ? Array(DType::f32, {batch, heads_q}) : Array(DType::f32, {heads_q});
    alibi_slopes.for_each_offset(
        [&](int64_t i) { alibi_slopes.set(i, 0.05f * std::abs(random.normal())); });
  }
  if (sinks) {
    sink_logits = Array(DType::f32, {heads_q});
    sink_logits.for_each_offset([&](int64_t i) { sink_logits.set(i, random.normal()); });
  }
  if (bias_kind != Bias::none) {
    DType type = bias_kind == Bias::f32    ? DType::f32
                 : bias_kind == Bias::same ? dtype
                                           : DType::boolean;
    int64_t outer = bias_broadcast ? 1 : batch, heads = bias_broadcast ? 1 : heads_q;
    bias = Array(type, {outer, heads, seqlen_q, seqlen_kv});
    bias.for_each_offset([&](int64_t i) {
      bias.set(i, type == DType::boolean ? random.chance(0.8) : random.normal());
    });
  }
}

std::vector<Array*> Problem::inputs() {
  std::vector<Array*> list;
  for (Array* a : {&q, &k, &v, &cu_q, &cu_kv, &used_q_array, &used_kv_array, &alibi_slopes, &bias,
                   &sink_logits}) {
    if (a->exists()) list.push_back(a);
  }
  return list;
}

std::string Problem::text() const {
  std::ostringstream s;
  s << name_of(dtype)
    << (ragged()                 ? " ragged"
        : layout == Layout::bhsd ? " bhsd"
                                 : " bshd")
    << " batch " << batch << " heads " << heads_q << "/" << heads_kv << " dims " << head_dim << "/"
    << head_dim_v << " q " << seqlen_q << " kv " << seqlen_kv << " gap " << row_gap << " causal "
    << causal << " window " << window_left << "," << window_right << " splits " << num_splits
    << " softcap " << softcap << " bias " << static_cast<int>(bias_kind) << " alibi " << alibi
    << " sinks " << sinks << " invariant " << batch_invariant;
  auto list = [&](const char* name, const std::vector<int>& values) {
    if (values.empty()) return;
    s << " " << name;
    for (int value : values) s << " " << value;
  };
  list("lens_q", lens_q);
  list("lens_kv", lens_kv);
  list("used_q", used_q);
  list("used_kv", used_kv);
  return s.str();
}

Arguments::Arguments(Problem& p, DLDevice device, const Address& address, const char* backend)
    : ragged_(p.ragged()), max_seqlen_q_(p.seqlen_q), max_seqlen_kv_(p.seqlen_kv) {
  auto view = [&](Array& array) {
    return array.exists() ? array.view(address(array), device) : TensorView();
  };
  q_ = view(p.q), k_ = view(p.k), v_ = view(p.v), out_ = view(p.out), lse_ = view(p.lse_out);
  alibi_ = view(p.alibi_slopes), sinks_ = view(p.sink_logits), bias_ = view(p.bias);
  used_q_ = view(p.used_q_array), used_kv_ = view(p.used_kv_array);
  cu_q_ = view(p.cu_q), cu_kv_ = view(p.cu_kv);
  options_.layout = p.layout;
  options_.causal = p.causal;
  options_.window_left = p.window_left;
  options_.window_right = p.window_right;
  if (p.scale != 0) options_.scale = p.scale;
  options_.softcap = p.softcap;
  options_.num_splits = p.num_splits;
  options_.batch_invariant = p.batch_invariant;
  options_.backend = backend;
  if (p.alibi) options_.alibi_slopes = &alibi_;
  if (p.sinks) options_.sinks = &sinks_;
  if (p.bias_kind != Problem::Bias::none) options_.bias = &bias_;
  if (!p.used_q.empty()) options_.seqused_q = &used_q_;
  if (!p.used_kv.empty()) options_.seqused_k = &used_kv_;
  if (p.lse) options_.lse = &lse_;
}

cuattn_attention_call Arguments::prepare() const {
  detail::COptions c(options_);
  if (ragged_) c.set_lengths(cu_q_, cu_kv_, max_seqlen_q_, max_seqlen_kv_);
  return detail::prepare(q_, k_, v_, c);
}

cuattn_plan Arguments::explain(const cuattn_device* made_up) const {
  if (!ragged_) return attention_explain(q_, k_, v_, options_, made_up);
  return attention_varlen_explain(q_, k_, v_, cu_q_, cu_kv_, max_seqlen_q_, max_seqlen_kv_,
                                  options_, made_up);
}

cuattn_plan explain(Problem& p, const char* backend, DLDevice device,
                    const cuattn_device* made_up) {
  auto nowhere = [](Array&) -> void* { return nullptr; };
  return Arguments(p, device, nowhere, backend).explain(made_up);
}

void run_on_cpu(Problem& p, const char* backend) {
  p.out.poison();
  p.lse_out.poison();
  Bound bound(p, {kDLCPU, 0}, [](Array& array) { return array.data(); }, backend);
  std::vector<uint8_t> memory(bound.workspace_bytes() + 256, 0xff);
  uintptr_t base = (reinterpret_cast<uintptr_t>(memory.data()) + 255) / 256 * 256;
  bound.run({reinterpret_cast<void*>(base), bound.workspace_bytes()}, nullptr);
}

void parallel(int tasks, const std::function<void(int)>& body) {
  std::atomic<int> next{0};
  auto work = [&] {
    for (int task; (task = next.fetch_add(1)) < tasks;) body(task);
  };
  int count = std::min<int>(tasks, std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (int i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace cuattn::test
