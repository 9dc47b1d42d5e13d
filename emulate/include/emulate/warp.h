// SPDX-License-Identifier: Apache-2.0
// The functions of CUDA C++ that kernels call: collectives of a warp, barriers of a block, integer
// and float intrinsics, atomics.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>

// Collectives. `Place`: the line that calls, which all lanes of the mask must share.
namespace emulate {

template <class T>
struct Shuffle {
  T value;
  int from;
};

template <class T>
T shuffle(uint32_t mask, T value, int from, const char* what, Place place) {
  Shuffle<T> mine{value, from};
  meet_as(mask, what, place, mine, [](Shuffle<T>*(&lanes)[32]) {
    T given[32] = {};
    for (int i = 0; i < 32; ++i) {
      if (lanes[i] != nullptr) given[i] = lanes[i]->value;
    }
    for (Shuffle<T>* reader : lanes) {
      if (reader == nullptr) continue;
      if (lanes[reader->from] == nullptr) fail("a shuffle reads a lane that takes no part in it");
      reader->value = given[reader->from];
    }
  });
  return mine.value;
}

struct Vote {
  bool predicate;
  uint32_t ballot;
};

inline uint32_t ballot(uint32_t mask, bool predicate, const char* what, Place place) {
  Vote mine{predicate, 0};
  meet_as(mask, what, place, mine, [](Vote*(&lanes)[32]) {
    uint32_t all = 0;
    for (int i = 0; i < 32; ++i) all |= uint32_t{lanes[i] != nullptr && lanes[i]->predicate} << i;
    for (Vote* vote : lanes) {
      if (vote != nullptr) vote->ballot = all;
    }
  });
  return mine.ballot;
}

template <class T, class Function>
T reduce(uint32_t mask, T value, const char* what, Place place, Function) {
  meet_as(mask, what, place, value, [](T*(&lanes)[32]) {
    T* first = *std::find_if(lanes, lanes + 32, [](T* lane) { return lane != nullptr; });
    T all = *first;
    for (T* lane : lanes) {
      if (lane != nullptr && lane != first) all = Function()(all, *lane);
    }
    for (T* lane : lanes) {
      if (lane != nullptr) *lane = all;
    }
  });
  return value;
}

}  // namespace emulate

using EmulatedPlace = emulate::Place;
#define EMULATED_PLACE EmulatedPlace place = EmulatedPlace::here()

template <class T>
T __shfl_sync(uint32_t mask, T value, int from, int width = 32, EMULATED_PLACE) {
  int mine = emulate::lane();
  return emulate::shuffle(mask, value, (mine & -width) + (from & (width - 1)), "__shfl_sync",
                          place);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned by, int width = 32, EMULATED_PLACE) {
  int mine = emulate::lane(), from = mine - static_cast<int>(by);
  return emulate::shuffle(mask, value, from < (mine & -width) ? mine : from, "__shfl_up_sync",
                          place);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned by, int width = 32, EMULATED_PLACE) {
  int mine = emulate::lane(), from = mine + static_cast<int>(by);
  return emulate::shuffle(mask, value, from >= (mine & -width) + width ? mine : from,
                          "__shfl_down_sync", place);
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32, EMULATED_PLACE) {
  int mine = emulate::lane(), from = mine ^ bits;
  return emulate::shuffle(mask, value, from >= (mine & -width) + width ? mine : from,
                          "__shfl_xor_sync", place);
}
inline uint32_t __ballot_sync(uint32_t mask, bool predicate, EMULATED_PLACE) {
  return emulate::ballot(mask, predicate, "__ballot_sync", place);
}
inline int __any_sync(uint32_t mask, bool predicate, EMULATED_PLACE) {
  return emulate::ballot(mask, predicate, "__any_sync", place) != 0;
}
inline int __all_sync(uint32_t mask, bool predicate, EMULATED_PLACE) {
  return emulate::ballot(mask, !predicate, "__all_sync", place) == 0;
}
#define EMULATED_REDUCE(name, T, formula)                                                \
  inline T name(uint32_t mask, T value, EMULATED_PLACE) {                                \
    return emulate::reduce(mask, value, #name, place, [](T a, T b) { return formula; }); \
  }
EMULATED_REDUCE(__reduce_max_sync, int, std::max(a, b))
EMULATED_REDUCE(__reduce_max_sync, unsigned, std::max(a, b))
EMULATED_REDUCE(__reduce_min_sync, int, std::min(a, b))
EMULATED_REDUCE(__reduce_min_sync, unsigned, std::min(a, b))
EMULATED_REDUCE(__reduce_add_sync, int, a + b)
EMULATED_REDUCE(__reduce_add_sync, unsigned, a + b)
EMULATED_REDUCE(__reduce_or_sync, unsigned, a | b)
EMULATED_REDUCE(__reduce_and_sync, unsigned, a& b)
#undef EMULATED_REDUCE

template <class T>
uint32_t __match_any_sync(uint32_t mask, T value, EMULATED_PLACE) {
  struct Lane {
    T value;
    uint32_t same;
  } mine{value, 0};
  emulate::meet_as(mask, "__match_any_sync", place, mine, [](Lane*(&lanes)[32]) {
    for (Lane* a : lanes) {
      for (int i = 0; a != nullptr && i < 32; ++i)
        a->same |= uint32_t{lanes[i] != nullptr && lanes[i]->value == a->value} << i;
    }
  });
  return mine.same;
}
// Lanes may come from several lines here.
inline void __syncwarp(uint32_t mask = emulate::kAllLanes) {
  emulate::meet(mask, "__syncwarp", {nullptr, 0}, nullptr, [](void*(&)[32]) {});
}

// Barriers of the block.
inline void __syncthreads(EMULATED_PLACE) { emulate::barrier(0, 0, 0, "__syncthreads", place); }
inline int __syncthreads_count(int predicate, EMULATED_PLACE) {
  return emulate::barrier(0, 0, predicate != 0, "__syncthreads_count", place);
}
inline int __syncthreads_or(int predicate, EMULATED_PLACE) {
  return emulate::barrier(0, 0, predicate != 0, "__syncthreads_or", place) != 0;
}
inline int __syncthreads_and(int predicate, EMULATED_PLACE) {
  return emulate::barrier(0, 0, predicate == 0, "__syncthreads_and", place) == 0;
}
inline void __threadfence() {}  // memory is in order here
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// Bits.
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<uint32_t>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<uint32_t>(x)) + 1; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  uint64_t bytes = uint64_t{y} << 32 | x;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t pick = selector >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return emulate::shared_address(pointer);
}
template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}

// Arithmetic with a rounding of its own.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float x) { return std::exp(x); }
inline float __fmul_rz(float a, float b) {
  double exact = static_cast<double>(a) * b;
  float near = static_cast<float>(exact);
  return std::fabs(static_cast<double>(near)) > std::fabs(exact) ? std::nextafter(near, 0.0f)
                                                                 : near;
}
// What no int holds becomes the nearest that one does, NaN 0.
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return 0x7fffffff;
  return x <= -0x1p31f ? -0x7fffffff - 1 : static_cast<int>(std::nearbyint(x));
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
template <class A, class B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(b) < static_cast<C>(a) ? static_cast<C>(b) : static_cast<C>(a);
}
template <class A, class B>
  requires std::is_arithmetic_v<A> && std::is_arithmetic_v<B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  using C = std::common_type_t<A, B>;
  return static_cast<C>(a) < static_cast<C>(b) ? static_cast<C>(b) : static_cast<C>(a);
}

// Atomics: only one fiber runs at a time.
template <class T>
T atomicAdd(T* at, std::type_identity_t<T> x) {
  T before = *at;
  *at = before + x;
  return before;
}
template <class T>
T atomicMax(T* at, std::type_identity_t<T> x) {
  T before = *at;
  *at = std::max(before, x);
  return before;
}
template <class T>
T atomicMin(T* at, std::type_identity_t<T> x) {
  T before = *at;
  *at = std::min(before, x);
  return before;
}
template <class T>
T atomicExch(T* at, std::type_identity_t<T> x) {
  return std::exchange(*at, x);
}
template <class T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> x) {
  T before = *at;
  if (before == expected) *at = x;
  return before;
}
