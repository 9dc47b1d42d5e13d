// SPDX-License-Identifier: Apache-2.0
// Primitives of include/cuattn/device on numbers, against a host model: accuracy of the approximate
// functions, rounding of the conversions, reductions over lanes, division by a constant.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cuattn/device/mask.cuh"
#include "gpu.h"
#include "test.h"

namespace cuattn::test {
namespace {

using namespace cuattn::device;  // NOLINT: the file tests exactly this namespace

enum class Function { exp2, log2, rcp, tanh };

template <Function kFunction>
__global__ void apply(const float* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  if constexpr (kFunction == Function::exp2) out[i] = exp2_approx(in[i]);
  if constexpr (kFunction == Function::log2) out[i] = log2_approx(in[i]);
  if constexpr (kFunction == Function::rcp) out[i] = rcp_approx(in[i]);
  if constexpr (kFunction == Function::tanh) out[i] = tanh_exp2(in[i]);
}

template <Function kFunction>
std::vector<float> applied(const std::vector<float>& values) {
  OnGpu<float> in(values), out(values.size());
  int n = static_cast<int>(values.size());
  apply<kFunction><<<ceil_div(n, 256), 256>>>(in.data(), out.data(), n);
  return out.host();
}

std::vector<float> spread(float low, float high) {
  std::vector<float> values;
  for (int i = 0; i <= 20000; ++i)
    values.push_back(low + (high - low) * static_cast<float>(i) / 20000);
  return values;
}

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

CUDA_TEST(device_exp2_is_within_two_ulp_and_zero_at_minus_infinity) {
  std::vector<float> x = spread(-125.0f, 127.0f), y = applied<Function::exp2>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    double exact = std::exp2(static_cast<double>(x[i]));
    CHECK(std::abs(y[i] - exact) <= std::ldexp(exact, -22), "exp2(", x[i], ") = ", y[i]);
  }
  y = applied<Function::exp2>({-kInfinity, -200.0f, kInfinity, kNan, 0.0f});
  CHECK(y[0] == 0.0f && y[1] == 0.0f && y[2] == kInfinity && std::isnan(y[3]) && y[4] == 1.0f);
}

CUDA_TEST(device_log2_is_accurate_and_minus_infinity_at_zero) {
  std::vector<float> x = spread(1e-3f, 5000.0f), y = applied<Function::log2>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    double exact = std::log2(static_cast<double>(x[i]));
    CHECK(std::abs(y[i] - exact) <= 0x1p-21 * std::max(1.0, std::abs(exact)), "log2(", x[i],
          ") = ", y[i]);
  }
  y = applied<Function::log2>({0.0f, 1.0f, kInfinity, kNan});
  CHECK(y[0] == -kInfinity && y[1] == 0.0f && y[2] == kInfinity && std::isnan(y[3]));
}

CUDA_TEST(device_rcp_is_within_one_ulp) {
  std::vector<float> x = spread(1e-3f, 5000.0f), y = applied<Function::rcp>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    double exact = 1.0 / x[i];
    CHECK(std::abs(y[i] - exact) <= std::ldexp(exact, -22), "rcp(", x[i], ") = ", y[i]);
  }
}

CUDA_TEST(device_tanh_is_accurate_and_saturates) {
  std::vector<float> x = spread(-12.0f, 12.0f), y = applied<Function::tanh>(x);
  for (size_t i = 0; i < x.size(); ++i) {
    CHECK(std::abs(y[i] - std::tanh(static_cast<double>(x[i]))) <= 4e-7, "tanh(", x[i],
          ") = ", y[i]);
  }
  y = applied<Function::tanh>({-kInfinity, -1e30f, 0.0f, 1e30f, kInfinity, kNan});
  CHECK(y[0] == -1.0f && y[1] == -1.0f && y[2] == 0.0f && y[3] == 1.0f && y[4] == 1.0f &&
        std::isnan(y[5]));
}

template <class T>
__global__ void widen(const uint16_t* in, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = to_float(T{in[i]});
}

template <class T>
__global__ void narrow(const float* in, uint16_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = from_float<T>(in[i]).bits;
}

template <DType kType>
__global__ void pack(const float* in, uint32_t* out, int pairs) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < pairs) out[i] = pack2<kType>(in[2 * i], in[2 * i + 1]);
}

bool is_nan_pattern(uint16_t bits, int mantissa_bits) {
  uint16_t exponent = static_cast<uint16_t>((0x7fff >> mantissa_bits) << mantissa_bits);
  return (bits & exponent) == exponent && (bits & ((1 << mantissa_bits) - 1)) != 0;
}

// Random patterns of all magnitudes, and the values where rounding turns.
std::vector<float> rounding_cases() {
  Random random(case_seed("rounding"));
  std::vector<float> values = {0.0f,      -0.0f,      1.0f,     65504.0f,     65519.0f,
                               65520.0f,  -65520.0f,  1e38f,    3.4e38f,      0x1p-24f,
                               0x1p-25f,  0x1.8p-25f, 0x1p-14f, 0x1.ffcp-15f, 0x1p-149f,
                               kInfinity, -kInfinity, kNan};
  for (int i = 0; i < 60000; ++i) {
    uint32_t bits = static_cast<uint32_t>(random.next());
    if (i % 3 == 0) bits &= 0xffffe000u;                    // ties of float16
    if (i % 3 == 1) bits = (bits & 0xffff0000u) | 0x8000u;  // ties of bfloat16
    if (i % 2 == 0)
      bits = (bits & 0x807fffffu) | (112 + random.range(-12, 18)) << 23;  // the range of float16
    float value;
    std::memcpy(&value, &bits, 4);
    values.push_back(value);
  }
  if (values.size() % 2 != 0) values.push_back(2.0f);
  return values;
}

template <class T, DType kType>
void check_conversion(int mantissa_bits, float (*value)(uint16_t), uint16_t (*bits)(float)) {
  std::vector<uint16_t> patterns(65536);
  for (int i = 0; i < 65536; ++i) patterns[i] = static_cast<uint16_t>(i);
  OnGpu<uint16_t> all(patterns);
  OnGpu<float> wide(patterns.size());
  widen<T><<<256, 256>>>(all.data(), wide.data(), 65536);
  std::vector<float> seen = wide.host();
  for (int i = 0; i < 65536; ++i) {
    bool nan = is_nan_pattern(patterns[i], mantissa_bits);
    CHECK(nan ? std::isnan(seen[i]) : seen[i] == value(patterns[i]), "pattern ", i, " became ",
          seen[i]);
  }
  std::vector<float> cases = rounding_cases();
  int n = static_cast<int>(cases.size());
  OnGpu<float> in(cases);
  OnGpu<uint16_t> single(n);
  OnGpu<uint32_t> paired(n / 2);
  narrow<T><<<ceil_div(n, 256), 256>>>(in.data(), single.data(), n);
  pack<kType><<<ceil_div(n / 2, 256), 256>>>(in.data(), paired.data(), n / 2);
  std::vector<uint16_t> narrowed = single.host();
  std::vector<uint32_t> packed = paired.host();
  for (int i = 0; i < n; ++i) {
    uint16_t half = static_cast<uint16_t>(packed[i / 2] >> (i % 2 * 16));
    if (std::isnan(cases[i])) {
      CHECK(is_nan_pattern(narrowed[i], mantissa_bits) && is_nan_pattern(half, mantissa_bits),
            "NaN lost");
    } else {
      CHECK(narrowed[i] == bits(cases[i]), cases[i], " became ", narrowed[i], " instead of ",
            bits(cases[i]));
      CHECK(half == bits(cases[i]), "pack2: ", cases[i], " became ", half, " instead of ",
            bits(cases[i]));
    }
  }
}

CUDA_TEST(device_float16_conversions_round_to_nearest_even) {
  check_conversion<Half, DType::f16>(10, f16_value, f16_bits);
}

CUDA_TEST(device_bfloat16_conversions_round_to_nearest_even) {
  check_conversion<Bfloat16, DType::bf16>(7, bf16_value, bf16_bits);
}

// Four codes a thread: the first pair lies low.
__global__ void unpack(float* out) {
  uint32_t code = threadIdx.x, low, high;
  unpack_e4m3(code | (code ^ 0x80) << 8 | (255 - code) << 16 | (code * 7 & 0xff) << 24, low, high);
  for (int i = 0; i < 4; ++i) {
    uint32_t pair = i < 2 ? low : high;
    out[4 * code + i] = to_float(Half{static_cast<uint16_t>(pair >> i % 2 * 16)});
  }
}

float e4m3_value(uint32_t code) {
  float mantissa = static_cast<float>(code & 7), sign = code & 0x80 ? -1.0f : 1.0f;
  int exponent = static_cast<int>(code >> 3 & 15);
  if ((code & 0x7f) == 0x7f) return kNan;
  return sign *
         (exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0f + mantissa, exponent - 10));
}

CUDA_TEST(device_unpack_of_e4m3_is_exact_and_keeps_nan) {
  OnGpu<float> out(size_t{1024});
  unpack<<<1, 256>>>(out.data());
  std::vector<float> seen = out.host();
  for (uint32_t code = 0; code < 256; ++code) {
    uint32_t codes[4] = {code, code ^ 0x80, 255 - code, code * 7 & 0xff};
    for (int i = 0; i < 4; ++i) {
      float want = e4m3_value(codes[i]), got = seen[4 * code + i];
      CHECK(std::isnan(want) ? std::isnan(got) : want == got, "code ", codes[i], " at byte ", i,
            " became ", got, " instead of ", want);
    }
  }
}

__global__ void reduce(const float* in, float* out) {
  float x = in[threadIdx.x];
  out[threadIdx.x] = quad_max(x);
  out[32 + threadIdx.x] = quad_sum(x);
  out[64 + threadIdx.x] = warp_max(x);
  out[96 + threadIdx.x] = warp_sum(x);
}

CUDA_TEST(device_reductions_span_a_quad_or_a_warp) {
  Random random(case_seed("reductions"));
  std::vector<float> x(32);
  for (float& value : x) value = static_cast<float>(random.range(-100, 100));
  OnGpu<float> in(x), out(size_t{128});
  reduce<<<1, 32>>>(in.data(), out.data());
  std::vector<float> y = out.host();
  float warp_largest = -kInfinity, warp_total = 0;
  for (float value : x) warp_largest = std::max(warp_largest, value), warp_total += value;
  for (int lane = 0; lane < 32; ++lane) {
    float largest = -kInfinity, total = 0;
    for (int i = lane / 4 * 4; i < lane / 4 * 4 + 4; ++i)
      largest = std::max(largest, x[i]), total += x[i];
    CHECK(y[lane] == largest && y[32 + lane] == total, "quad of lane ", lane);
    CHECK(y[64 + lane] == warp_largest && y[96 + lane] == warp_total, "lane ", lane);
  }
}

__global__ void divide(const Divisor* divisors, const int32_t* x, int32_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = divisors[i].quotient(x[i]);
}

CUDA_TEST(device_divisor_is_exact) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  Random random(case_seed("divisor"));
  std::vector<int32_t> numbers, x;
  std::vector<Divisor> divisors;
  auto try_with = [&](int32_t number) {
    auto add = [&](int64_t value) {
      if (value < 0 || value > kMost) return;
      numbers.push_back(number);
      divisors.push_back(Divisor::of(number));
      x.push_back(static_cast<int32_t>(value));
    };
    for (int64_t value : {int64_t{0}, int64_t{number} - 1, int64_t{number}, int64_t{kMost}})
      add(value);
    for (int i = 0; i < 20; ++i) {
      int64_t multiple = random.range(0, kMost / number) * int64_t{number};
      for (int64_t off : {-1, 0, 1}) add(multiple + off);
    }
  };
  for (int32_t number = 2; number <= 1100; ++number) try_with(number);
  for (int bit = 11; bit < 31; ++bit)
    for (int32_t off : {-1, 0, 1}) try_with((int32_t{1} << bit) + off);
  try_with(kMost);
  int n = static_cast<int>(x.size());
  OnGpu<Divisor> by(divisors);
  OnGpu<int32_t> in(x), out(x.size());
  divide<<<ceil_div(n, 256), 256>>>(by.data(), in.data(), out.data(), n);
  std::vector<int32_t> y = out.host();
  for (int i = 0; i < n; ++i)
    CHECK(y[i] == x[i] / numbers[i], x[i], " / ", numbers[i], " gave ", y[i]);
}

}  // namespace
}  // namespace cuattn::test
