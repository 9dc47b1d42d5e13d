// SPDX-License-Identifier: Apache-2.0
// Float8 arrays of attention and of quantisation: their scales, and values whose sequence axis is
// the contiguous one. Next: attention/validate.cpp (the caller).
#pragma once

#include "cuattn/params/float8.h"
#include "src/check/arrays.h"
#include "src/check/overlap.h"

namespace cuattn {

// What a scale of one array may be. Of the shapes with three axes a call has at most one.
struct ScaleShape {
  const char* name;
  int64_t batch, heads;       // [heads] and [batch, heads]: the key heads
  int64_t full_heads, parts;  // [batch, full_heads, parts]
  const char* full_text;      // how that shape is spelled; nullptr: there is none
  int32_t group;              // heads of the array for each of `heads`
};

// Refuses a number beside an array that stands for it.
void require_one_scale(const char* function, const char* name, bool has_number, double number,
                       const DLTensor* tensor);

// `tensor` where it is given, else `number`, which is finite and not negative.
Float8Scale read_float8_scale(const char* function, const ScaleShape& shape, double number,
                              const DLTensor* tensor, DLDevice device, bool check_data);

// The dtype of an out over codes of the dtype of q.
DType float8_out_dtype(const char* function, const TensorView& out, DType q);

// The elements of a scale that is an array, as a call reads or writes them.
Footprint scale_footprint(const char* name, const Float8Scale& scale);

// Values [.., head_dim_v]: as rows (require_rows), or with the axis `seq` contiguous and all others
// a multiple of 16 bytes apart. The stride of the channels is returned.
int64_t require_values(const char* function, const char* argument, const TensorView& view,
                       int32_t seq, bool output, bool check_data);

}  // namespace cuattn
