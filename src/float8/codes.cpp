// SPDX-License-Identifier: Apache-2.0
#include "src/float8/codes.h"

namespace cuattn {

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
  backend.dequantize(to, device_id, stream);
  return to.out.strides;
}

}  // namespace cuattn
