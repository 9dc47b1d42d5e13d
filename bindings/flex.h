// SPDX-License-Identifier: Apache-2.0
// flex_attention of the module. Next: flex.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds flex_attention.
void add_flex(nanobind::module_& m);

}  // namespace cuattn::bindings
