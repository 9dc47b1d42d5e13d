// SPDX-License-Identifier: Apache-2.0
// PTX instructions as C++ functions of their operands, in the order of the assembly, under the
// instruction's name with _ for dots. The translator turns each asm statement into such a call; one
// that is missing here does not compile. Add it where it belongs. Source: PTX ISA 9.0.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>

#define EMULATED_AT Place place = Place::here()

namespace emulate::ptx {

// Conversions. _Float16 rounds to nearest even, as .rn does.
inline uint16_t half_bits(float x) { return std::bit_cast<uint16_t>(static_cast<_Float16>(x)); }
inline float half_value(uint16_t bits) {
#ifdef __F16C__
  using Halves [[gnu::vector_size(16)]] = short;  // the cast calls a function of libgcc
  return __builtin_ia32_vcvtph2ps(Halves{static_cast<short>(bits)})[0];
#else
  return static_cast<float>(std::bit_cast<_Float16>(bits));
#endif
}
inline uint16_t bfloat_bits(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
inline float bfloat_value(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline void cvt_f32_f16(float& to, uint16_t from) { to = half_value(from); }
inline void cvt_rn_f16_f32(uint16_t& to, float from) {
  to = from != from ? 0x7fff : half_bits(from);
}
inline void cvt_rn_bf16_f32(uint16_t& to, float from) { to = bfloat_bits(from); }
inline void cvt_rn_f16x2_f32(uint32_t& to, float high, float low) {
  uint16_t h, l;
  cvt_rn_f16_f32(h, high);
  cvt_rn_f16_f32(l, low);
  to = uint32_t{h} << 16 | l;
}
inline void cvt_rn_bf16x2_f32(uint32_t& to, float high, float low) {
  to = uint32_t{bfloat_bits(high)} << 16 | bfloat_bits(low);
}
inline void mul_f16x2(uint32_t& to, uint32_t a, uint32_t b) {
  uint32_t result = 0;
  for (int i = 0; i < 32; i += 16) {
    uint16_t half;
    cvt_rn_f16_f32(half, half_value(static_cast<uint16_t>(a >> i)) *
                             half_value(static_cast<uint16_t>(b >> i)));
    result |= uint32_t{half} << i;
  }
  to = result;
}

// Approximations: nearer than the device's, which err by up to 2 ulp; .ftz flushes subnormals.
inline float flushed(float x) {
  return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x;  // a NaN stays
}
inline void ex2_approx_ftz_f32(float& to, float x) { to = flushed(std::exp2(flushed(x))); }
inline void ex2_approx_f32(float& to, float x) { to = std::exp2(x); }
inline void lg2_approx_f32(float& to, float x) { to = std::log2(x); }
inline void lg2_approx_ftz_f32(float& to, float x) { to = std::log2(flushed(x)); }
inline void rcp_approx_ftz_f32(float& to, float x) { to = flushed(1.0f / flushed(x)); }
inline void sqrt_approx_f32(float& to, float x) { to = std::sqrt(x); }
inline void div_full_f32(float& to, float x, float y) { to = x / y; }
inline void rsqrt_approx_ftz_f32(float& to, float x) { to = 1.0f / std::sqrt(flushed(x)); }
inline void tanh_approx_f32(float& to, float x) { to = std::tanh(x); }

// Loads and stores of shared memory.
template <class T>
void load(T& to, uint32_t address, const char* what, Place place) {
  std::memcpy(&to, at_shared(address, sizeof(T), what, place), sizeof(T));
}
template <class T>
void store(uint32_t address, const T& from, const char* what, Place place) {
  std::memcpy(at_shared(address, sizeof(T), what, place), &from, sizeof(T));
}
inline void ld_shared_b32(uint32_t& to, uint32_t from, EMULATED_AT) {
  load(to, from, "ld.shared.b32", place);
}
inline void ld_shared_v4_b32(uint32_t& x, uint32_t& y, uint32_t& z, uint32_t& w, uint32_t from,
                             EMULATED_AT) {
  uint4 four;
  load(four, from, "ld.shared.v4.b32", place);
  x = four.x, y = four.y, z = four.z, w = four.w;
}
inline void st_shared_b8(uint32_t to, uint16_t x, EMULATED_AT) {
  store(to, static_cast<uint8_t>(x), "st.shared.b8", place);
}
inline void st_shared_b16(uint32_t to, uint16_t x, EMULATED_AT) {
  store(to, x, "st.shared.b16", place);
}
inline void st_shared_b32(uint32_t to, uint32_t x, EMULATED_AT) {
  store(to, x, "st.shared.b32", place);
}
inline void st_shared_v4_b32(uint32_t to, uint32_t x, uint32_t y, uint32_t z, uint32_t w,
                             EMULATED_AT) {
  store(to, uint4{x, y, z, w}, "st.shared.v4.b32", place);
}
inline void ld_relaxed_gpu_global_s32(int32_t& to, const int32_t* from) { to = *from; }

// Asynchronous copies: `read` bytes, then zeros.
inline void cp_async_cg_shared_global_L2_128B(uint32_t to, const void* from, uint32_t bytes,
                                              uint32_t read, EMULATED_AT) {
  start_copy(to, from, bytes, read, place);
}
inline void cp_async_cg_shared_global_L2_128B(uint32_t to, const void* from, uint32_t bytes,
                                              EMULATED_AT) {
  start_copy(to, from, bytes, bytes, place);
}
inline void cp_async_ca_shared_global_L2_128B(uint32_t to, const void* from, uint32_t bytes,
                                              uint32_t read, EMULATED_AT) {
  start_copy(to, from, bytes, read, place);
}
inline void cp_async_ca_shared_global(uint32_t to, const void* from, uint32_t bytes, EMULATED_AT) {
  start_copy(to, from, bytes, bytes, place);
}
inline void cp_async_commit_group() { commit_copies(); }
inline void cp_async_wait_group(int pending) { wait_copies(pending); }
inline void cp_async_wait_all() { wait_copies(-1); }

// Named barriers.
inline void bar_sync(int id, int threads = 0, EMULATED_AT) {
  barrier(id, threads, 0, "bar.sync", place);
}
inline void barrier_sync(int id, int threads = 0, EMULATED_AT) {
  barrier(id, threads, 0, "barrier.sync", place);
}
inline void bar_arrive(int id, int threads, EMULATED_AT) {
  barrier(id, threads, 0, "bar.arrive", place, false);
}

// Matrices of 8 x 8 elements of 16 bits. Lane 8 i + r names row r of matrix i; of each matrix lane
// 4 g + q gets row g, columns 2 q and 2 q + 1, of the transposed matrix the same.
struct Matrices {
  const uint16_t* row;
  uint32_t got[4];
};

template <int kCount, bool kTrans>
void load_matrices(Matrices& mine, uint32_t address, const char* what, Place place) {
  // Only the lanes that name a row of a matrix give an address that counts.
  mine.row = lane() < 8 * kCount ? static_cast<const uint16_t*>(at_shared(address, 16, what, place))
                                 : nullptr;
  meet_as(kAllLanes, what, place, mine, [](Matrices*(&lanes)[32]) {
    for (int i = 0; i < kCount; ++i) {
      for (int at = 0; at < 32; ++at) {
        int g = at / 4, q = at % 4;
        auto element = [&](int row, int column) -> uint32_t {
          return kTrans ? lanes[8 * i + column]->row[row] : lanes[8 * i + row]->row[column];
        };
        lanes[at]->got[i] = element(g, 2 * q + 1) << 16 | element(g, 2 * q);
      }
    }
  });
}

#define EMULATED_LDMATRIX(count, trans, name) \
  Matrices mine{};                            \
  load_matrices<count, trans>(mine, from, name, place)
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c,
                                                     uint32_t& d, uint32_t from, EMULATED_AT) {
  EMULATED_LDMATRIX(4, false, "ldmatrix.x4");
  a = mine.got[0], b = mine.got[1], c = mine.got[2], d = mine.got[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t& c,
                                                           uint32_t& d, uint32_t from,
                                                           EMULATED_AT) {
  EMULATED_LDMATRIX(4, true, "ldmatrix.x4.trans");
  a = mine.got[0], b = mine.got[1], c = mine.got[2], d = mine.got[3];
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t& a, uint32_t& b, uint32_t from,
                                                     EMULATED_AT) {
  EMULATED_LDMATRIX(2, false, "ldmatrix.x2");
  a = mine.got[0], b = mine.got[1];
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(uint32_t& a, uint32_t& b, uint32_t from,
                                                           EMULATED_AT) {
  EMULATED_LDMATRIX(2, true, "ldmatrix.x2.trans");
  a = mine.got[0], b = mine.got[1];
}
#undef EMULATED_LDMATRIX

inline void movmatrix_sync_aligned_m8n8_trans_b16(uint32_t& to, uint32_t from, EMULATED_AT) {
  uint32_t mine = from;
  meet_as(kAllLanes, "movmatrix", place, mine, [](uint32_t*(&lanes)[32]) {
    uint16_t matrix[8][8];
    for (int at = 0; at < 32; ++at) {
      matrix[at / 4][at % 4 * 2] = static_cast<uint16_t>(*lanes[at]);
      matrix[at / 4][at % 4 * 2 + 1] = static_cast<uint16_t>(*lanes[at] >> 16);
    }
    for (int at = 0; at < 32; ++at) {
      int g = at / 4, column = at % 4 * 2;
      *lanes[at] = uint32_t{matrix[column + 1][g]} << 16 | matrix[column][g];
    }
  });
  to = mine;
}

// D = A B + C, 16 x 8 x (8 kHalves), sums in double, rounded once. Fragments: lane 4 g + q holds
// of A rows g and g + 8, k 2 q and 2 q + 1 (and 8 further); of B the same k of column g; of C and D
// rows g and g + 8, columns 2 q and 2 q + 1.
struct Mma {
  uint32_t a[4], b[2];
  float c[4];
};

typedef double Row __attribute__((vector_size(64)));  // eight, that -O1 puts into registers

template <int kHalves, float (*kValue)(uint16_t)>
void multiply(Mma& mine, const char* what, Place place) {
  meet_as(kAllLanes, what, place, mine, [](Mma*(&lanes)[32]) {
    constexpr int kDepth = 8 * kHalves;
    float a[16][kDepth];
    Row b[kDepth];
    for (int at = 0; at < 32; ++at) {
      int g = at / 4, k = at % 4 * 2;
      for (int half = 0; half < kHalves; ++half) {
        for (int i = 0; i < 2; ++i) {
          auto value = [&](uint32_t pair) { return kValue(static_cast<uint16_t>(pair >> 16 * i)); };
          a[g][8 * half + k + i] = value(lanes[at]->a[2 * half]);
          a[g + 8][8 * half + k + i] = value(lanes[at]->a[2 * half + 1]);
          b[8 * half + k + i][g] = value(lanes[at]->b[half]);
        }
      }
    }
    for (int row = 0; row < 16; ++row) {
      Row sums = {};
      for (int k = 0; k < kDepth; ++k) sums += static_cast<double>(a[row][k]) * b[k];
      for (int n = 0; n < 8; ++n) {
        float& c = lanes[row % 8 * 4 + n / 2]->c[row / 8 * 2 + n % 2];
        c = static_cast<float>(c + sums[n]);
      }
    }
  });
}

#define EMULATED_MMA_K16(name, value)                                                      \
  inline void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1,   \
                   uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0, float c1, \
                   float c2, float c3, EMULATED_AT) {                                      \
    Mma mine{{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}};                                \
    multiply<2, value>(mine, "mma.m16n8k16", place);                                       \
    d0 = mine.c[0], d1 = mine.c[1], d2 = mine.c[2], d3 = mine.c[3];                        \
  }
EMULATED_MMA_K16(mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, half_value)
EMULATED_MMA_K16(mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, bfloat_value)
#undef EMULATED_MMA_K16

#define EMULATED_MMA_K8(name, value)                                                     \
  inline void name(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, \
                   uint32_t b0, float c0, float c1, float c2, float c3, EMULATED_AT) {   \
    Mma mine{{a0, a1}, {b0}, {c0, c1, c2, c3}};                                          \
    multiply<1, value>(mine, "mma.m16n8k8", place);                                      \
    d0 = mine.c[0], d1 = mine.c[1], d2 = mine.c[2], d3 = mine.c[3];                      \
  }
EMULATED_MMA_K8(mma_sync_aligned_m16n8k8_row_col_f32_f16_f16_f32, half_value)
EMULATED_MMA_K8(mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32, bfloat_value)
#undef EMULATED_MMA_K8

}  // namespace emulate::ptx
#undef EMULATED_AT
