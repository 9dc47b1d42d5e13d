// SPDX-License-Identifier: Apache-2.0
#include "src/float8/codes.h"

namespace cuattn {

namespace {

// A thread block of dequantize takes up to 128 rows of one head: of a decode step, which has a row for
// each sequence and head, it would take one. So rows of all sequences become rows of one, where the
// sequences share their scales and lie evenly; else the heads that share a scale become rows of one head.
void fill_blocks(QuantizeParams& to) {
  if (to.part != ScalePart::none || to.rows >= kScaleRows) return;
  bool is_even = to.rows == 1 || to.x.strides.batch == to.rows * to.x.strides.seq;
  if (to.batch > 1 && to.scale.extents[0] == 1 && is_even) {
    for (QuantizeArray* array : {&to.x, &to.out}) {
      if (to.rows == 1) array->strides.seq = array->strides.batch;
      array->strides.batch = 0;
    }
    to.rows = to.out_rows = to.rows * to.batch;
    to.batch = 1;
  } else if (to.rows == 1) {
    for (QuantizeArray* array : {&to.x, &to.out}) {
      array->strides.seq = array->strides.head;
      array->strides.head *= to.scale.group;
    }
    to.rows = to.out_rows = to.scale.group;
    to.heads /= to.scale.group;
    to.scale.group = 1;
  }
}

}  // namespace

Strides make_numbers(const Codes& from, DType numbers, void* place, const Backend& backend,
                     int32_t device_id, Stream stream) {
  const int64_t token = int64_t{from.heads} * from.dim;
  QuantizeParams to{};
  to.x = {const_cast<void*>(from.data), from.dtype, from.strides, from.channel};
  to.out = {place, numbers, {from.batch > 1 ? from.rows * token : 0, token, from.dim}, 1};
  to.batch = from.batch;
  to.heads = from.heads;
  to.dim = from.dim;
  to.rows = to.out_rows = from.rows;
  to.scale = from.scale;
  to.part = from.scale.extents[2] > 1 ? from.part : ScalePart::none;
  const Strides strides = to.out.strides;
  fill_blocks(to);
  backend.dequantize(to, device_id, stream);
  return strides;
}

}  // namespace cuattn
