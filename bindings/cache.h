// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds the cache operations and the class HostMemory.
void add_cache(nanobind::module_& m);

}  // namespace cuattn::bindings
