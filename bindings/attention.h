// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds attention and attention_varlen.
void add_attention(nanobind::module_& m);

}  // namespace cuattn::bindings
