// SPDX-License-Identifier: Apache-2.0
// Masks and scores that a user wrote: the keys of each row, lists of blocks that hold a visible
// key, and programs that compute a score or a condition from its indices. Made by
// python/cuattn/flex/. Next: attention.h, cpu/flex.h (what a program means).
#pragma once

#include "cuattn/params/rows.h"

namespace cuattn {

// A register holds an int32, a float, or a condition (-1 or 0). `a`, `b` and `c` are registers,
// `to` the one written.
enum class FlexCode : int32_t {
  // what the indices are
  q,
  k,
  b,
  h,
  q_len,
  kv_len,
  score,
  // the bits of `number`; the element of array `number` at [], [a] or [a, b]
  number,
  load,
  // whole numbers; the last two by a positive one, rounded down as in Python
  add,
  sub,
  mul,
  min,
  max,
  neg,
  abs,
  floordiv,
  mod,
  // conditions of them
  lt,
  le,
  eq,
  ne,
  // the same of floats
  addf,
  subf,
  mulf,
  divf,
  minf,
  maxf,
  negf,
  absf,
  ltf,
  lef,
  eqf,
  nef,
  // floats; of a whole number
  exp,
  log,
  tanh,
  sqrt,
  // NOLINTBEGIN(readability-identifier-naming): without the line they are keywords
  float_,
  // conditions; a ? b : c
  and_,
  or_,
  xor_,
  not_,
  // NOLINTEND(readability-identifier-naming)
  where,
  // of a gradient's program: adds ds times a to the gradient of array `number` at [], [b] or [b, c],
  // unless `number` is -1; gives a
  give,
};

struct FlexOp {
  int32_t code, to, a, b, c, number;
};

constexpr int32_t kMaxFlexRegisters = 24, kMaxFlexArrays = 16, kMaxFlexOps = 4096,
                  kMaxFlexNumbers = 32;

struct FlexProgram {
  const FlexOp* ops;  // the last one's register is the result
  int32_t count;      // 0: there is none
  int32_t row_count;  // the first ones, which neither the key nor the score enters
};

// An array that programs read. An index beyond it reads its nearest element.
struct FlexArray {
  const void* data;  // boolean, i32 or f32
  DType dtype;
  int32_t rank;  // 0 to 2
  int32_t extents[2];
  int64_t strides[2];  // in elements
};

// Of each query block the key blocks with a visible key, from the last to the first: 2 * block, and
// 1 more where the mask is yet to be asked. What is not listed is not seen.
struct FlexLists {
  const int32_t* starts;   // [batch or 1, num_heads_q or 1, query blocks + 1], or nullptr: no lists
  const int32_t* entries;  // those of query block i are [starts[i], starts[i + 1])
  int64_t stride_batch, stride_head;             // of starts
  int32_t query_blocks, query_block, key_block;  // how many; queries and keys of a block
};

// For which calls of sm90 a functor was compiled.
struct FunctorForm {
  int32_t packed_heads;  // query heads of a group that share a tile; 1: none do
  bool reads_blocks;     // keys may lie in the blocks of a cache
};

struct FlexParams {
  FlexProgram score, mask;  // run by the CPU
  FlexLists lists;
  FlexArray arrays[kMaxFlexArrays];
  int64_t functor;  // the programs compiled for CUDA; 0: they are not
  FunctorForm form;
  int32_t numbers[kMaxFlexNumbers];  // that it reads, as bits
};

// The gradient of a captured array of float32, of its extents.
struct FlexArrayGradient {
  float* data;         // or nullptr: not asked for
  int64_t strides[2];  // in elements
  int64_t first;       // where its sums begin
};

// What the backward pass asks of a score program.
struct FlexGradient {
  FlexProgram
      program;  // of the score that the score program took; the result is the derivative by it
  FlexArrayGradient arrays[kMaxFlexArrays];
  int64_t num_sums;  // elements of the arrays that are asked for

  // Memory for sums of one part of the work: so many parts at most, by shapes alone.
  CUATTN_HOST_DEVICE int64_t parts(int64_t units) const {
    constexpr int64_t kMostSums = int64_t{1} << 24, kMostParts = 32;
    if (num_sums == 0) return 0;
    int64_t most = kMostSums / num_sums;
    most = most < 1 ? 1 : most > kMostParts ? kMostParts : most;
    return units < most ? units : most;
  }
};

// Keys [begin, end) that each row sees at most, beside what the other masks hide.
struct RowRanges {
  const int32_t *begin, *end;  // [batch, num_heads_q, seqlen_q], ragged [num_heads_q, total_q]
  Strides strides;             // of both; 0 where one serves all

  // `row` counts from the first stored row (Span::start), of a dense batch from its sequence's.
  CUATTN_HOST_DEVICE KeyRange limit(KeyRange keys, int32_t b, int32_t h, int64_t row) const {
    return begin == nullptr ? keys : at(keys, first(b, h, row));
  }
  CUATTN_HOST_DEVICE int64_t first(int32_t b, int32_t h, int64_t row) const {
    return b * strides.batch + h * strides.head + row * strides.seq;
  }
  CUATTN_HOST_DEVICE KeyRange at(KeyRange keys, int64_t at) const {
    if (begin[at] > keys.begin) keys.begin = begin[at];
    if (end[at] < keys.end) keys.end = end[at];
    if (keys.end < keys.begin) keys.end = keys.begin;
    return keys;
  }
};

}  // namespace cuattn
