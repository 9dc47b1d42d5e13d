// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds mla_decode, mla_write and mla_project.
void add_mla(nanobind::module_& m);

}  // namespace cuattn::bindings
