// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

namespace cuattn::bindings {

// Adds apply_rope, rms_norm, layer_norm, act_mul, bias_act, sample and speculative_verify.
void add_fused(nanobind::module_& m);

}  // namespace cuattn::bindings
