// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds explain, explain_backward, explain_paged, kernels and info_json.
void add_explain(nanobind::module_& m);

}  // namespace cuattn::bindings
