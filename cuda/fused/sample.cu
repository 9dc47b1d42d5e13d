// SPDX-License-Identifier: Apache-2.0
// sample and speculative_verify: a block takes a row of logits or probabilities and draws from it.
// The thresholds of top_k and top_p are found exactly, digit by digit of the ordered bits of the
// logits, by histograms of counts or of masses; a mass is an integer, so no result depends on who
// adds first. Source of the filters: arXiv:1904.09751, arXiv:2407.01082; of the chain:
// arXiv:2211.17192. The same on the CPU: cpu/sampling.cpp.
#include "cuattn/params/sampling.h"
#include "cuda/fused/rows.cuh"
#include "cuda/host/launchers.h"

namespace cuattn {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kEach = 4;                 // neighbours that a thread takes of a tile
constexpr int kTile = kThreads * kEach;  // tokens
constexpr int kTiles = kMaxVocabulary / kTile;
constexpr int kBins = 2048;  // digits of 11, 11 and 10 bits

struct Shared {
  union {
    struct {
      uint32_t low[kBins], high[kBins];  // words of a count or a mass
    } bins;
    unsigned long long tiles[kTiles];  // the mass of each tile
  };
  uint64_t warps[kWarps];
  uint64_t found, rest;
};

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t x, int lanes) {
  uint32_t low = __shfl_xor_sync(0xffffffffu, static_cast<uint32_t>(x), lanes);
  uint32_t high = __shfl_xor_sync(0xffffffffu, static_cast<uint32_t>(x >> 32), lanes);
  return low | static_cast<uint64_t>(high) << 32;
}
__device__ __forceinline__ uint64_t shuffle_up(uint64_t x, int lanes) {
  uint32_t low = __shfl_up_sync(0xffffffffu, static_cast<uint32_t>(x), lanes);
  uint32_t high = __shfl_up_sync(0xffffffffu, static_cast<uint32_t>(x >> 32), lanes);
  return low | static_cast<uint64_t>(high) << 32;
}
__device__ __forceinline__ uint64_t warp_sum(uint64_t x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  return x;
}

// Over the threads of the block, in their order: what comes before each, and all together.
struct Prefix {
  uint64_t before, all;
};
__device__ __forceinline__ Prefix block_prefix(uint64_t x, Shared& shared) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint64_t upto = x;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    uint64_t other = shuffle_up(upto, lanes);
    if (lane >= lanes) upto += other;
  }
  __syncthreads();  // all have read what stood there
  if (lane == 31) shared.warps[warp] = upto;
  __syncthreads();
  uint64_t before = warp_sum(lane < warp ? shared.warps[lane] : 0);
  uint64_t all = warp_sum(shared.warps[lane]);
  return {before + upto - x, all};
}

__device__ __forceinline__ uint64_t block_max(uint64_t x, Shared& shared) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = max(x, shuffle_xor(x, lanes));
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = shared.warps[threadIdx.x % 32];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x = max(x, shuffle_xor(x, lanes));
  return x;
}

// The tokens of a row, of which a thread takes kEach neighbours at a time; f(token, value).
template <class T>
struct Row {
  const T* data;
  int vocabulary;
  bool aligned;

  template <class F>
  __device__ __forceinline__ void each_of(int first, F&& f) const {
    if (aligned && first + kEach <= vocabulary) {
      auto four = load_piece<kEach>(data + first);
#pragma unroll
      for (int i = 0; i < kEach; ++i) f(first + i, to_float(four.x[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i)
        if (first + i < vocabulary) f(first + i, to_float(data[first + i]));
    }
  }
  template <class F>
  __device__ __forceinline__ void each(F&& f) const {
#pragma unroll 2
    for (int first = threadIdx.x * kEach; first < vocabulary; first += kTile) each_of(first, f);
  }
};

// Draws a token: the first whose weight, with those before it, is above a random number below their
// sum. visit(first, f) calls f(token, weight) for the kEach tokens from `first` on. -1: no weight.
template <class Visit>
__device__ __forceinline__ int draw(int vocabulary, const Visit& visit, uint64_t bits,
                                    Shared& shared) {
  int tiles = ceil_div(vocabulary, kTile);
  __syncthreads();
  for (int tile = threadIdx.x; tile < kTiles; tile += kThreads) shared.tiles[tile] = 0;
  __syncthreads();
  for (int tile = 0; tile < tiles; ++tile) {
    uint64_t mass = 0;
    int first = tile * kTile + threadIdx.x * kEach;
    if (first < vocabulary) visit(first, [&](int, uint64_t weight) { mass += weight; });
    mass = warp_sum(mass);
    if (threadIdx.x % 32 == 0 && mass > 0)
      atomicAdd(&shared.tiles[tile], static_cast<unsigned long long>(mass));
  }
  __syncthreads();
  uint64_t mine = shared.tiles[threadIdx.x];
  Prefix sums = block_prefix(mine, shared);
  if (sums.all == 0) return -1;
  uint64_t wanted = below(bits, sums.all);
  if (wanted >= sums.before && wanted - sums.before < mine) {
    shared.found = threadIdx.x;
    shared.rest = wanted - sums.before;
  }
  __syncthreads();
  int first = static_cast<int>(shared.found) * kTile + threadIdx.x * kEach;
  wanted = shared.rest;
  uint64_t weights = 0;
  if (first < vocabulary) visit(first, [&](int, uint64_t weight) { weights += weight; });
  sums = block_prefix(weights, shared);
  if (wanted >= sums.before && wanted - sums.before < weights) {
    uint64_t sum = sums.before;
    visit(first, [&](int token, uint64_t weight) {
      if (wanted >= sum && wanted - sum < weight) shared.found = static_cast<uint64_t>(token);
      sum += weight;
    });
  }
  __syncthreads();
  return static_cast<int>(shared.found);
}

// Adds to a bin; the low word of the sum says by itself when it overflows.
__device__ __forceinline__ void add_to_bin(Shared& shared, uint32_t bin, uint64_t x) {
  uint32_t low = static_cast<uint32_t>(x), high = static_cast<uint32_t>(x >> 32);
  if (atomicAdd(&shared.bins.low[bin], low) + low < low) ++high;
  if (high != 0) atomicAdd(&shared.bins.high[bin], high);
}

// The largest key that, with all above it, measures `target` at least; of the keys from `least` on.
// visit(f) calls f(key, measure) for every token.
template <class Visit>
__device__ __forceinline__ uint32_t nth_key(const Visit& visit, uint64_t target, uint32_t least,
                                            Shared& shared) {
  uint32_t prefix = 0;
  int shift = 32;
#pragma unroll 1
  for (int width : {11, 11, 10}) {
    shift -= width;
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += kThreads)
      shared.bins.low[bin] = shared.bins.high[bin] = 0;
    __syncthreads();
    visit([&](uint32_t key, uint64_t measure) {
      bool matches = shift + width == 32 || key >> (shift + width) == prefix;
      if (matches && key >= least && measure > 0)
        add_to_bin(shared, key >> shift & ((1u << width) - 1), measure);
    });
    __syncthreads();
    // The thread with rank 0 has the bins of the largest keys.
    uint64_t sums[2];
    int top = (1 << width) - 1 - 2 * static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      sums[i] = top - i < 0 ? 0
                            : shared.bins.low[top - i] |
                                  static_cast<uint64_t>(shared.bins.high[top - i]) << 32;
    uint64_t before = block_prefix(sums[0] + sums[1], shared).before;
#pragma unroll
    for (int i = 0; i < 2; before += sums[i++]) {
      if (before < target && target - before <= sums[i]) {
        shared.found = static_cast<uint64_t>(top - i);
        shared.rest = target - before;
      }
    }
    __syncthreads();
    prefix = prefix << width | static_cast<uint32_t>(shared.found);
    target = shared.rest;
  }
  return prefix;
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, 1) sample(const __grid_constant__ SampleParams p) {
  using T = Element<kType>;
  __shared__ Shared shared;
  int64_t index = blockIdx.x;
  int vocabulary = static_cast<int>(p.vocabulary);
  const T* data = static_cast<const T*>(p.logits) + index * p.stride;
  Row<T> row{data, vocabulary, reinterpret_cast<uintptr_t>(data) % (kEach * sizeof(T)) == 0};
  RowFilter filter = filter_of(p, index);
  int32_t* out = p.out + index * p.out_stride;

  // The largest, the first of its kind: smaller tokens have larger low words.
  uint64_t best = 0;
  row.each([&](int token, float x) {
    uint64_t key = x == x ? ordered_bits(x) : 0xffffffffu;
    best = max(best, key << 32 | (0xffffffffu - static_cast<uint32_t>(token)));
  });
  best = block_max(best, shared);
  uint32_t largest = static_cast<uint32_t>(best >> 32);
  bool is_row = largest > kOrderedMinusInfinity && largest < kOrderedInfinity;
  if (!is_row || filter.greedy) {
    if (threadIdx.x == 0)
      *out = is_row ? static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(best)) : -1;
    return;
  }
  float maximum = to_float(data[0xffffffffu - static_cast<uint32_t>(best)]);
  auto weight_of = [&](float x) {
    return weight_of_power(__fmul_rn(__fsub_rn(x, maximum), filter.scale));
  };

  uint32_t least = 0;
  auto keys_and_weights = [&](auto&& f) {
    row.each([&](int, float x) { f(ordered_bits(x), weight_of(x)); });
  };
  if (filter.has_top_k()) {
    auto keys = [&](auto&& f) { row.each([&](int, float x) { f(ordered_bits(x), 1); }); };
    least = nth_key(keys, static_cast<uint64_t>(filter.top_k), 0, shared);
  }
  if (filter.has_top_p()) {
    uint32_t floor = p.joint ? 0 : least;
    uint64_t mass = 0;
    keys_and_weights([&](uint32_t key, uint64_t weight) { mass += key >= floor ? weight : 0; });
    uint64_t target = filter.target(block_prefix(mass, shared).all);
    least = max(least, nth_key(keys_and_weights, target, floor, shared));
  }
  auto kept = [&](int first, auto&& f) {
    row.each_of(first, [&](int token, float x) {
      uint64_t weight = ordered_bits(x) >= least ? weight_of(x) : 0;
      f(token, weight >= filter.least ? weight : 0);
    });
  };
  uint64_t bits = random_bits(p.random, index, 0, DrawFor::sample);
  int token = draw(vocabulary, kept, bits, shared);
  if (threadIdx.x == 0) *out = token;
}

__global__ void __launch_bounds__(kThreads, 1) verify(const __grid_constant__ VerifyParams p) {
  __shared__ Shared shared;
  int64_t index = blockIdx.x;
  int vocabulary = static_cast<int>(p.vocabulary);
  const float* draft = p.draft + index * p.draft_stride_row;
  const float* target = p.target + index * p.target_stride_row;
  const int32_t* tokens = p.draft_tokens + index * p.tokens_stride;
  int32_t accepted = 0;  // the same in all threads
  while (accepted < p.drafts) {
    int32_t token = tokens[accepted];
    if (token < 0 || token >= vocabulary) break;
    float old_p = draft[accepted * p.draft_stride_token + token];
    float new_p = target[accepted * p.target_stride_token + token];
    if (!is_accepted(p.random, index, accepted, old_p, new_p)) break;
    ++accepted;
  }
  Row<float> row{target + accepted * p.target_stride_token, vocabulary, false};
  const float* less = accepted < p.drafts ? draft + accepted * p.draft_stride_token : nullptr;
  auto weights = [&](int first, auto&& f) {
    row.each_of(first, [&](int token, float x) {
      uint64_t weight = weight_of_probability(x);
      uint64_t taken = less == nullptr ? 0 : weight_of_probability(less[token]);
      f(token, weight > taken ? weight - taken : 0);
    });
  };
  DrawFor purpose = less == nullptr ? DrawFor::sample : DrawFor::residual;
  uint64_t bits = random_bits(p.random, index, accepted, purpose);
  int token = draw(vocabulary, weights, bits, shared);
  if (token < 0 &&
      less != nullptr) {  // target is nowhere above draft: they are equal but for noise
    less = nullptr;
    token = draw(vocabulary, weights, bits, shared);
  }
  int32_t* out = p.tokens + index * p.out_stride;
  for (int i = threadIdx.x; i <= p.drafts; i += kThreads)
    out[i] = i < accepted ? tokens[i] : i == accepted ? token : -1;
  if (threadIdx.x == 0) p.accepted[index * p.accepted_stride] = accepted;
}

}  // namespace

void launch_sample(const SampleParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  unsigned blocks = blocks_of("sample", p.rows);
  with_dtype("sample", p.dtype, [&]<DType kType>() {
    sample<kType><<<blocks, kThreads, 0, stream>>>(p);
    CUATTN_CUDA_TRY(cudaGetLastError());
  });
}

void launch_verify(const VerifyParams& p, cudaStream_t stream) {
  if (p.rows == 0) return;
  verify<<<blocks_of("speculative_verify", p.rows), kThreads, 0, stream>>>(p);
  CUATTN_CUDA_TRY(cudaGetLastError());
}

}  // namespace cuattn
