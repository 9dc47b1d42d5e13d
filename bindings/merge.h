// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds merge_states.
void add_merge(nanobind::module_& m);

}  // namespace cuattn::bindings
