// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/call/options.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {

// Adds paged_attention, paged_attention_v1, paged_attention_v2 and paged_plan.
void add_paged(nanobind::module_& m);

// The function of a version of cuattn_paged_options, and its options.
const char* paged_function(int32_t version);
cuattn_paged_options parse_paged(const char* op, int32_t version, const PagedArgs& args);

}  // namespace cuattn::bindings
