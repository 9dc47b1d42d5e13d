// SPDX-License-Identifier: Apache-2.0
// The cache operations in plain loops: rows into slots (rotated and quantised on the way),
// sequences out of their blocks, and whole blocks from place to place. Rotary embedding:
// arXiv:2104.09864. Next: cuda/cache/write.cu.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "cpu/convert.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cuattn/plan.h"

namespace cuattn::cpu {
namespace {

constexpr int32_t kMaxHeadDim = 1024;

// Work of one byte moved, in the units of parallel_for.
constexpr double kFlopsPerByte = 0.25;

char* at(const void* data, int64_t element, int64_t size) {
  return static_cast<char*>(const_cast<void*>(data)) + element * size;
}

// (a, b) becomes (a cos - b sin, b cos + a sin).
void rotate(const RopeParams& rope, int64_t position, float* x) {
  const float* cos = rope.cos + position * rope.cos_stride;
  const float* sin = rope.sin + position * rope.sin_stride;
  int32_t half = rope.rotary_dim / 2;
  for (int32_t i = 0; i < half; ++i) {
    float& first = x[rope.interleaved ? 2 * i : i];
    float& second = x[rope.interleaved ? 2 * i + 1 : i + half];
    float a = first, b = second;
    first = a * cos[i] - b * sin[i];
    second = b * cos[i] + a * sin[i];
  }
}

// One head of one token into its place.
void write_head(const CacheWriteParams& p, const CacheSide& side, int64_t token, int64_t head,
                int64_t place) {
  bool rotates = &side == &p.k && p.rope.cos != nullptr;
  int64_t row = side.row(token, head);
  if (!rotates && p.cache_dtype == p.dtype) {
    int64_t size = itemsize(p.dtype);
    for (int32_t d = 0; d < side.head_dim; d += side.run) {
      std::memcpy(at(side.cache, place + side.run_of(d), size), at(side.rows, row + d, size),
                  static_cast<size_t>(side.run * size));
    }
    return;
  }
  float x[kMaxHeadDim];
  for (int32_t d = 0; d < side.head_dim; ++d) x[d] = load_element(side.rows, row + d, p.dtype);
  if (rotates) rotate(p.rope, rope_position(p, token), x);
  if (p.cache_dtype == DType::e4m3) {
    float inverse = 1.0f / side.scale_of(head);
    for (int32_t d = 0; d < side.head_dim; ++d) x[d] *= inverse;
  }
  for (int32_t d = 0; d < side.head_dim; ++d)
    store_element(side.cache, place + side.run_of(d), p.cache_dtype, x[d]);
}

// One token of a cache of packed latents.
void write_packed(const CacheWriteParams& p, int64_t token, char* to) {
  using Packed = PackedLatent;
  for (int32_t first = 0; first < Packed::kLatent; first += Packed::kScaled) {
    float x[Packed::kScaled], largest = 0.0f;
    for (int32_t i = 0; i < Packed::kScaled; ++i) {
      x[i] = load_element(p.v.rows, p.v.row(token, 0) + first + i, p.dtype);
      largest = std::fmax(largest, std::fabs(x[i]));
    }
    float scale = Packed::scale(largest);
    for (int32_t i = 0; i < Packed::kScaled; ++i)
      to[first + i] = static_cast<char>(float_to_e4m3(x[i] / scale));
    std::memcpy(to + Packed::kScalesAt + first / Packed::kScaled * 4, &scale, 4);
  }
  std::memcpy(to + Packed::kRopeAt, at(p.k.rows, p.k.row(token, 0), 2), Packed::kRope * 2);
}

void copy_pairs(const CacheList& list, const BlockCopyParams& p) {
  double work = kFlopsPerByte * static_cast<double>(p.num_pairs) * list.block_bytes * list.count;
  parallel_for(p.num_pairs * list.count, work, [&](int64_t index) {
    char* cache = static_cast<char*>(list.data[index / p.num_pairs]);
    const int64_t* pair = p.pairs + 2 * (index % p.num_pairs);
    if (!is_copy(pair[0], pair[1], p.num_blocks)) return;
    std::memcpy(cache + pair[1] * list.block_stride, cache + pair[0] * list.block_stride,
                static_cast<size_t>(list.block_bytes));
  });
}

}  // namespace

void cache_write(const CacheWriteParams& p) {
  double work = kFlopsPerByte * static_cast<double>(p.num_tokens) * p.num_heads *
                (p.k.head_dim + p.v.head_dim) * itemsize(p.dtype);
  parallel_for(p.num_tokens, work, [&](int64_t token) {
    int64_t slot = slot_of(p, token);
    if (slot < 0) return;
    int64_t block = slot / p.block_size, place = slot % p.block_size;
    if (p.is_packed) return write_packed(p, token, at(p.v.cache, p.v.place(block, place, 0), 1));
    for (int64_t head = 0; head < p.num_heads; ++head) {
      write_head(p, p.k, token, head, p.k.place(block, place, head));
      write_head(p, p.v, token, head, p.v.place(block, place, head));
    }
  });
}

namespace {

// One head of one token out of its place, as numbers.
void read_head(const CacheGatherParams& p, const CacheSide& side, float scale, int64_t place,
               int64_t row) {
  for (int32_t d = 0; d < side.head_dim; ++d) {
    float code = load_element(side.cache, place + side.run_of(d), p.dtype);
    store_element(side.rows, row + d, p.number_dtype, code * scale);
  }
}

}  // namespace

void cache_gather(const CacheGatherParams& p) {
  int64_t size = itemsize(p.dtype);
  double work = kFlopsPerByte * static_cast<double>(p.num_tokens) * p.num_heads *
                (p.k.head_dim + p.v.head_dim) * size;
  parallel_for(p.num_tokens, work, [&](int64_t token) {
    CachedToken from = cached_token(p, token);
    if (from.seq < 0) return;
    for (const CacheSide* side : {&p.k, &p.v}) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        int64_t row = side->row(token, head), place = side->place(from.block, from.at, head);
        if (p.makes_numbers) {
          const Float8Scale& scale = side == &p.k ? p.k_scale : p.v_scale;
          read_head(p, *side, scale.at(from.seq, static_cast<int32_t>(head), 0), place, row);
          continue;
        }
        for (int32_t d = 0; d < side->head_dim; d += side->run) {
          std::memcpy(at(side->rows, row + d, size), at(side->cache, place + side->run_of(d), size),
                      static_cast<size_t>(side->run * size));
        }
      }
    }
  });
}

void copy_blocks(const BlockCopyParams& p) {
  copy_pairs(p.k, p);
  copy_pairs(p.v, p);
}

void swap_blocks(const BlockSwapParams& p) {
  double work = kFlopsPerByte * static_cast<double>(p.num_pairs) * p.block_bytes;
  parallel_for(p.num_pairs, work, [&](int64_t i) {
    std::memcpy(at(p.dst, p.pairs[2 * i + 1], p.dst_stride),
                at(p.src, p.pairs[2 * i], p.src_stride), static_cast<size_t>(p.block_bytes));
  });
}

}  // namespace cuattn::cpu
