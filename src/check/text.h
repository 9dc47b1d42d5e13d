// SPDX-License-Identifier: Apache-2.0
// How messages spell devices, dtypes, shapes and layouts. Next: arrays.h.
#pragma once

#include <string>

#include "cuattn/tensor.h"

namespace cuattn {

std::string text(DLDevice device);          // "cpu", "cuda:0"
std::string text(DLDataType dtype);         // "float32", "int64"
std::string shape_text(const TensorView&);  // "(2, 3, 4, 8)"
std::string strides_text(const TensorView&);
std::string layout_text(int32_t layout);  // "'nhd'"

}  // namespace cuattn
