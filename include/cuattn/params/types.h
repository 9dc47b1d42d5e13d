// SPDX-License-Identifier: Apache-2.0
// The words that all params share: dtypes, kinds of masks and scores, strides. Every header of this
// folder is clean under NVRTC, which has no standard library. Next: rows.h.
#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
#define offsetof(type, member) reinterpret_cast<uint64_t>(&static_cast<type*>(nullptr)->member)
#else
#include <cstdint>
#endif

#ifdef __CUDACC__
#define CUATTN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CUATTN_HOST_DEVICE inline
#endif

namespace cuattn {

enum class DType : int32_t { f32, f16, bf16, e4m3, boolean, i32, i64, i8 };
// causal: right limit 0, no left limit; rows: an interval of keys of each row (params/flex.h).
enum class MaskKind : int32_t { none, causal, window, rows };
// See ScoreParams. dropped: identity with dropout; of sm90 alone, for scored kernels have it elsewhere.
// fast: identity over float8, whose sums have one level; of sm90 alone.
enum class ScoreKind : int32_t { identity, scored, dropped, fast, parts };

constexpr int64_t kUnlimited = -1;  // a window side without limit

// Strides in elements. Ragged tensors have no batch axis: batch = 0 and rows are found through
// cu_seqlens.
struct Strides {
  int64_t batch, seq, head;
};

}  // namespace cuattn
