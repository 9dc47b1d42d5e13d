// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds attention_backward and explain_backward.
void add_backward(nanobind::module_& m);

}  // namespace cuattn::bindings
