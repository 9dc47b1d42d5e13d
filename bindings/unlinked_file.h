// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds the class UnlinkedFile.
void add_unlinked_file(nanobind::module_& m);

}  // namespace cuattn::bindings
