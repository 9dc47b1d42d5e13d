// SPDX-License-Identifier: Apache-2.0
// Masks and scores that a user wrote: the keys of each row, lists of blocks that hold a visible
// key, and programs that compute a score or a condition from its indices. Made by
// python/cuattn/flex/. Next: attention.h, cpu/flex.h (what a program means).
#pragma once

#include "cuattn/params/rows.h"

namespace cuattn {

// A register holds an int32, a float, or a condition (-1 or 0). `a`, `b` and `c` are registers,
// `to` the one written; an f behind a name is the operation on floats.
#define CUATTN_FLEX_CODES(X)                                                                  \
  X(q)                                                                                        \
  X(k) X(b) X(h) X(q_len) X(kv_len) X(score) /* what the indices are                  */      \
      X(number)                              /* the bits of `number`                  */      \
      X(load)                                /* of array `number` at [a], [a, b] or []*/      \
      X(add) X(sub) X(mul) X(min) X(max) X(neg) X(abs) X(floordiv)                            \
          X(mod) /* by a positive number, rounded down, as in Python                   */     \
      X(lt) X(le) X(eq) X(ne) X(addf) X(subf) X(mulf) X(divf) X(minf) X(maxf) X(negf) X(absf) \
          X(ltf) X(lef) X(eqf) X(nef) X(exp) X(log) X(tanh) X(sqrt) X(float_) X(and_) X(or_)  \
              X(xor_) X(not_) X(where) /* a ? b : c */

enum class FlexCode : int32_t {
#define CUATTN_FLEX_CODE(name) name,
  CUATTN_FLEX_CODES(CUATTN_FLEX_CODE)
#undef CUATTN_FLEX_CODE
};

struct FlexOp {
  int32_t code, to, a, b, c, number;
};

constexpr int32_t kMaxFlexRegisters = 24, kMaxFlexArrays = 16, kMaxFlexOps = 4096;

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

struct FlexParams {
  FlexProgram score, mask;
  FlexLists lists;
  FlexArray arrays[kMaxFlexArrays];
};

// Keys [begin, end) that each row sees at most, beside what the other masks hide.
struct RowRanges {
  const int32_t *begin, *end;  // [batch, num_heads_q, seqlen_q], ragged [num_heads_q, total_q]
  Strides strides;             // of both; 0 where one serves all

  // `row` counts from the first stored row (Span::start), of a dense batch from its sequence's.
  CUATTN_HOST_DEVICE KeyRange limit(KeyRange keys, int32_t b, int32_t h, int64_t row) const {
    if (begin == nullptr) return keys;
    int64_t at = b * strides.batch + h * strides.head + row * strides.seq;
    if (begin[at] > keys.begin) keys.begin = begin[at];
    if (end[at] < keys.end) keys.end = end[at];
    if (keys.end < keys.begin) keys.end = keys.begin;
    return keys;
  }
};

}  // namespace cuattn
