// SPDX-License-Identifier: Apache-2.0
// Each primitive of include/cuattn/device against a host model: accuracy of the approximate
// functions, rounding of the conversions, the fragment maps by one-hot operands, zero fill of
// cp.async, the swizzle and the ranges of key tiles.
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include "cuattn/device/mask.cuh"
#include "cuattn/device/mma_sm90.cuh"
#include "gpu.h"
#include "suite.h"
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

__global__ void transpose(uint32_t* out) {
  uint32_t at = threadIdx.x / 4 * 8 + threadIdx.x % 4 * 2;  // element (row, column) holds its index
  out[threadIdx.x] = movmatrix_trans(at | (at + 1) << 16);
}

CUDA_TEST(device_movmatrix_transposes_an_8_x_8_matrix) {
  OnGpu<uint32_t> out(size_t{32});
  transpose<<<1, 32>>>(out.data());
  std::vector<uint32_t> seen = out.host();
  for (uint32_t lane = 0; lane < 32; ++lane) {
    uint32_t g = lane / 4, q = lane % 4;
    CHECK(seen[lane] == ((2 * q * 8 + g) | ((2 * q + 1) * 8 + g) << 16), "lane ", lane);
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

// Four 8 x 8 matrices whose element (matrix, row, column) holds its own index.
__global__ void load_matrices(uint32_t* straight, uint32_t* transposed) {
  __shared__ alignas(16) uint16_t tile[4 * 64];
  for (int i = threadIdx.x; i < 4 * 64; i += 32) tile[i] = static_cast<uint16_t>(i);
  __syncwarp();
  uint32_t address = smem_address(tile + threadIdx.x * 8), r[4];
  ldmatrix_x4(r, address);
  for (int i = 0; i < 4; ++i) straight[threadIdx.x * 4 + i] = r[i];
  ldmatrix_x4_trans(r, address);
  for (int i = 0; i < 4; ++i) transposed[threadIdx.x * 4 + i] = r[i];
}

CUDA_TEST(device_ldmatrix_gives_each_lane_its_fragment) {
  OnGpu<uint32_t> straight(size_t{128}), transposed(size_t{128});
  load_matrices<<<1, 32>>>(straight.data(), transposed.data());
  std::vector<uint32_t> rows = straight.host(), columns = transposed.host();
  for (uint32_t lane = 0; lane < 32; ++lane)
    for (uint32_t matrix = 0; matrix < 4; ++matrix) {
      uint32_t g = lane / 4, q = lane % 4, base = matrix * 64;
      uint32_t row = (base + g * 8 + 2 * q) | (base + g * 8 + 2 * q + 1) << 16;
      uint32_t column = (base + 2 * q * 8 + g) | (base + (2 * q + 1) * 8 + g) << 16;
      CHECK(rows[lane * 4 + matrix] == row, "lane ", lane, " matrix ", matrix);
      CHECK(columns[lane * 4 + matrix] == column, "trans: lane ", lane, " matrix ", matrix);
    }
}

// C = A B + C for `count` problems of 16 x 16 by 16 x 8, operands laid out by the fragment map of
// mma_sm80.cuh.
template <DType kType>
__global__ void multiply(const float* gA, const float* gB, float* gC, int count) {
  int g = threadIdx.x / 4, q = threadIdx.x % 4;
  for (int i = 0; i < count; ++i, gA += 256, gB += 128, gC += 128) {
    uint32_t a[4];
    for (int r = 0; r < 4; ++r) {
      const float* from = gA + (g + 8 * (r & 1)) * 16 + 2 * q + 8 * (r >> 1);
      a[r] = pack2<kType>(from[0], from[1]);
    }
    const float* b = gB + 2 * q * 8 + g;
    float c[4];
    for (int r = 0; r < 4; ++r) c[r] = gC[(g + 8 * (r >> 1)) * 8 + 2 * q + (r & 1)];
    mma_m16n8k16<kType>(c, a, pack2<kType>(b[0], b[8]), pack2<kType>(b[64], b[72]));
    for (int r = 0; r < 4; ++r) gC[(g + 8 * (r >> 1)) * 8 + 2 * q + (r & 1)] = c[r];
  }
}

template <DType kType>
void check_mma() {
  // Problem (m, k): A has a single one there, so row m of C must become row k of B and every other
  // row stay.
  Random random(case_seed("mma"));
  std::vector<float> a(256 * 256, 0.0f), b(256 * 128), c(256 * 128);
  for (int i = 0; i < 256; ++i) a[i * 256 + i] = 1.0f;
  for (float& value : b) value = static_cast<float>(random.range(-128, 128));
  for (float& value : c) value = static_cast<float>(random.range(-1000, 1000));
  OnGpu<float> gA(a), gB(b), gC(c);
  multiply<kType><<<1, 32>>>(gA.data(), gB.data(), gC.data(), 256);
  std::vector<float> seen = gC.host();
  for (int i = 0; i < 256; ++i)
    for (int m = 0; m < 16; ++m)
      for (int n = 0; n < 8; ++n) {
        float want = c[i * 128 + m * 8 + n] + (m == i / 16 ? b[i * 128 + i % 16 * 8 + n] : 0.0f);
        CHECK(seen[i * 128 + m * 8 + n] == want, "A one at (", i / 16, ", ", i % 16, "), C at (", m,
              ", ", n, ")");
      }
}

CUDA_TEST(device_mma_maps_float16_fragments) { check_mma<DType::f16>(); }
CUDA_TEST(device_mma_maps_bfloat16_fragments) { check_mma<DType::bf16>(); }

__global__ void copy_async(const uint4* in, uint4* out) {
  __shared__ alignas(16) uint4 tile[96];
  int i = threadIdx.x;
  for (int j = i; j < 96; j += 32) tile[j] = uint4{7, 7, 7, 7};
  __syncthreads();
  cp_async16(smem_address(tile + i), in + i);
  cp_async_commit();
  cp_async16(smem_address(tile + 32 + i), in + 32 + i, i % 2 == 0);
  cp_async_commit();
  cp_async_wait<1>();  // the first group is complete for this thread, the second may be under way
  out[i] = tile[i];
  cp_async_wait<0>();
  __syncthreads();
  for (int j = i; j < 96; j += 32) out[j] = tile[j];
}

CUDA_TEST(device_cp_async_copies_or_writes_zeros) {
  std::vector<uint32_t> source(64 * 4);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<uint32_t>(1000 + i);
  OnGpu<uint32_t> in(source), out(size_t{96 * 4});
  copy_async<<<1, 32>>>(reinterpret_cast<const uint4*>(in.data()),
                        reinterpret_cast<uint4*>(out.data()));
  std::vector<uint32_t> seen = out.host();
  for (uint32_t i = 0; i < 96 * 4; ++i) {
    uint32_t chunk = i / 4, want = chunk < 32       ? 1000 + i
                                   : chunk >= 64    ? 7
                                   : chunk % 2 == 0 ? 1000 + i
                                                    : 0;
    CHECK(seen[i] == want, "word ", i, " is ", seen[i], " instead of ", want);
  }
}

__global__ void copy_async8(const uint2* in, uint2* out) {
  __shared__ alignas(16) uint2 tile[32];
  tile[threadIdx.x] = {7, 7};
  __syncwarp();
  cp_async8(smem_address(tile + threadIdx.x), in + threadIdx.x, threadIdx.x % 3 != 0);
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = tile[threadIdx.x];
}

CUDA_TEST(device_cp_async_of_8_bytes_copies_or_writes_zeros) {
  std::vector<uint32_t> source(64);
  for (uint32_t i = 0; i < 64; ++i) source[i] = 1000 + i;
  OnGpu<uint32_t> in(source), out(size_t{64});
  copy_async8<<<1, 32>>>(reinterpret_cast<const uint2*>(in.data()),
                         reinterpret_cast<uint2*>(out.data()));
  std::vector<uint32_t> seen = out.host();
  for (uint32_t i = 0; i < 64; ++i)
    CHECK(seen[i] == (i / 2 % 3 != 0 ? 1000 + i : 0), "word ", i, " is ", seen[i]);
}

template <DType kType>
__global__ void score(AttentionParams p, const float* dots, float* out) {
  ScoreMod<kType, ScoreKind::scored> mod(p, 1, 2, p.seqlen_q, p.seqlen_kv);
  ScoreMod<kType, ScoreKind::identity> identity(p, 1, 2, p.seqlen_q, p.seqlen_kv);
  int cells = p.seqlen_q * p.seqlen_kv;
  for (int i = threadIdx.x; i < cells; i += blockDim.x) {
    out[i] = mod(dots[i], i / p.seqlen_kv, i % p.seqlen_kv) * mod.to_log2;
    out[cells + i] = identity(dots[i], i / p.seqlen_kv, i % p.seqlen_kv) * identity.to_log2;
  }
}

CUDA_TEST(device_score_functor_caps_then_adds_alibi_then_bias) {
  constexpr int kQueries = 5, kKeys = 9, kHeads = 4, kCells = kQueries * kKeys;
  Random random(case_seed("score"));
  for (DType bias_type : {DType::f32, DType::bf16, DType::boolean}) {
    Array bias(bias_type, {2, kHeads, kQueries, kKeys});
    bias.for_each_offset([&](int64_t i) {
      bias.set(i, bias_type == DType::boolean ? i % 3 != 0 : random.normal());
    });
    std::vector<float> dots(kCells), slopes(2 * kHeads);
    for (float& dot : dots) dot = 20 * random.normal();
    for (float& slope : slopes) slope = random.normal();
    OnGpu<uint8_t> g_bias(bias.bytes());
    OnGpu<float> g_dots(dots), g_slopes(slopes), out(size_t{2 * kCells});
    AttentionParams p{};
    p.batch = 2, p.num_heads_q = kHeads, p.seqlen_q = kQueries, p.seqlen_kv = kKeys;
    p.scores.scale = 0.25f, p.scores.softcap = 3.0f,
    p.scores.inv_softcap = inverse_softcap(3.0f, 0.25f);
    p.scores.alibi_slopes = g_slopes.data(), p.scores.alibi_stride_batch = kHeads,
    p.scores.alibi_stride_head = 1;
    p.scores.bias = g_bias.data() + bias.guard_bytes(), p.scores.bias_dtype = bias_type;
    p.scores.bias_stride_batch = kHeads * kCells, p.scores.bias_stride_head = kCells,
    p.scores.bias_stride_q = kKeys, p.scores.bias_stride_kv = 1;
    score<DType::bf16><<<1, 32>>>(p, g_dots.data(), out.data());
    std::vector<float> seen = out.host();
    for (int i = 0; i < kCells; ++i) {
      int row = i / kKeys, key = i % kKeys;
      double want = 3 * std::tanh(0.25 * dots[i] / 3) -
                    slopes[kHeads + 2] * std::abs(row + kKeys - kQueries - key);
      float extra = bias.get((kHeads + 2) * kCells + i);
      if (bias_type != DType::boolean)
        want += extra;
      else if (extra == 0)
        want = -kInfinity;
      want *= 1.4426950408889634;
      CHECK(want == seen[i] || std::abs(want - seen[i]) < 2e-5, "cell ", i, ": ", seen[i],
            " instead of ", want);
      double plain = 0.25 * dots[i] * 1.4426950408889634;
      CHECK(std::abs(seen[kCells + i] - plain) < 1e-5 * std::max(1.0, std::abs(plain)),
            "identity, cell ", i);
    }
  }
}

template <int kRowBytes>
void check_swizzle() {
  std::set<uint32_t> offsets;
  constexpr uint32_t kChunks = kRowBytes / 16;
  for (uint32_t row = 0; row < 64; ++row)
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t at = swizzled<kRowBytes>(row, chunk);
      CHECK(at / kRowBytes == row && at % 16 == 0, "row ", row, " chunk ", chunk, " lands at ", at);
      CHECK(offsets.insert(at).second, "two chunks of ", kRowBytes, "-byte rows land at ", at);
    }
  for (uint32_t first = 0; first < 64; first += 8)
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      uint32_t banks = 0;  // one bit per group of four banks
      for (uint32_t row = first; row < first + 8; ++row)
        banks |= 1u << (swizzled<kRowBytes>(row, chunk) / 16 % 8);
      CHECK(banks == 0xff, "ldmatrix of rows from ", first, ", chunk ", chunk, " of ", kRowBytes,
            " conflicts");
    }
}

TEST(swizzle_is_one_to_one_and_free_of_bank_conflicts) {
  check_swizzle<64>();
  check_swizzle<128>();
  check_swizzle<192>();
  check_swizzle<256>();
  check_swizzle<384>();
  check_swizzle<512>();
}

template <int kTileN>
void check_tile_range(int left, int right, int row_begin, int row_end, int queries, int keys) {
  TileRange range = tile_range<kTileN>(left, right, row_begin, row_end, queries, keys);
  auto sees = [&](int row, int key) {
    int64_t diagonal = static_cast<int64_t>(row) + keys - queries;
    return key < keys && (left < 0 || key >= diagonal - left) &&
           (right < 0 || key <= diagonal + right);
  };
  for (int tile = 0; tile <= keys / kTileN + 1; ++tile) {
    bool any = false, all = true;
    for (int row = row_begin; row < row_end; ++row)
      for (int key = tile * kTileN; key < (tile + 1) * kTileN; ++key) {
        any = any || sees(row, key);
        all = all && sees(row, key);
      }
    bool visited = tile >= range.begin && tile < range.end;
    bool unmasked = visited && tile >= range.full_begin && tile < range.full_end;
    CHECK(visited || !any, "tile ", tile, " is skipped: window ", left, ",", right, " rows ",
          row_begin, "..", row_end, " of ", queries, " keys ", keys);
    CHECK(!unmasked || all, "tile ", tile, " runs unmasked: window ", left, ",", right, " rows ",
          row_begin, "..", row_end, " of ", queries, " keys ", keys);
    CHECK(unmasked || !all || row_end <= row_begin, "tile ", tile, " is masked in vain");
  }
}

TEST(tile_ranges_cover_what_is_visible_and_unmask_only_full_tiles) {
  Random random(case_seed("tile_range"));
  for (int i = 0; i < 3000; ++i) {
    int queries = random.range(1, 200), keys = random.range(0, 200);
    int row_begin = random.range(0, queries),
        row_end = random.range(row_begin, std::min(queries, row_begin + 64));
    int left = random.chance(0.5) ? -1 : random.range(0, 150),
        right = random.chance(0.5) ? -1 : random.range(0, 100);
    if (i % 3 == 0) left = -1, right = 0;
    if (i % 2 == 0)
      check_tile_range<16>(left, right, row_begin, row_end, queries, keys);
    else
      check_tile_range<64>(left, right, row_begin, row_end, queries, keys);
  }
}

__global__ void write_past_the_end(int* out, int count) { out[count + threadIdx.x] = 1; }

__global__ void read_unset(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x] + 1; }

__global__ void race(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = shared[63 - threadIdx.x];  // written by the other warp, without a barrier
}

__global__ void diverge(int* out) {
  if (threadIdx.x < 33) __syncthreads();  // of the second warp one lane comes
  out[threadIdx.x] = 1;
}

// Waits for an arrival that no thread makes; without the watchdog, and before Hopper, not at all.
__global__ void wait_in_vain() {
#if defined(CUATTN_WATCHDOG) && __CUDA_ARCH__ >= 900
  __shared__ alignas(8) uint64_t barrier;
  if (threadIdx.x == 0) barrier_init(smem_address(&barrier), 1);
  __syncthreads();
  barrier_wait(smem_address(&barrier), 0);
#endif
}

// 0 when a kernel that waits in vain was ended by the watchdog.
int plant_hang() {
  auto begin = std::chrono::steady_clock::now();
  wait_in_vain<<<1, 32>>>();
  cudaError_t status = cudaDeviceSynchronize();
  std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  std::cout << "a kernel that waits in vain: " << cudaGetErrorName(status) << " after "
            << seconds.count() << " s\n";
  return status == cudaErrorLaunchFailure || status == cudaErrorIllegalInstruction ? 0 : 1;
}

}  // namespace

int plant_fault(const std::string& tool) {
  OnGpu<int> in(size_t{64}), out(size_t{64});
  if (tool == "memcheck") {
    write_past_the_end<<<1, 1>>>(out.data(), 64);
  } else if (tool == "racecheck") {
    race<<<1, 64>>>(out.data());
  } else if (tool == "initcheck") {
    read_unset<<<1, 64>>>(in.data(), out.data());
  } else if (tool == "synccheck") {
    diverge<<<1, 64>>>(out.data());
  } else if (tool == "watchdog") {
    return plant_hang();
  } else {
    return 2;
  }
  CUDA_OK(cudaGetLastError());
  cudaDeviceSynchronize();  // its error, if any, is the fault
  return 0;
}

}  // namespace cuattn::test
