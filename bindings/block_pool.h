// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds the class BlockPool.
void add_block_pool(nanobind::module_& m);

}  // namespace cuattn::bindings
