// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds paged_attention, paged_attention_v1, paged_attention_v2, paged_plan and explain_paged.
void add_paged(nanobind::module_& m);

}  // namespace cuattn::bindings
