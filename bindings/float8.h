// SPDX-License-Identifier: Apache-2.0
// quantize and dequantize of the module.
#pragma once

#include "bindings/call/raise.h"

namespace cuattn::bindings {

void add_float8(nb::module_& m);

}  // namespace cuattn::bindings
