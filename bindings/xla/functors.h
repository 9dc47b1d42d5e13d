// SPDX-License-Identifier: Apache-2.0
// Machine code of masks and scores under names that are the same in every process, as programs of
// XLA outlive the numbers of one. Next: flex.cpp.
#pragma once

#include <cstdint>
#include <string>

namespace cuattn::bindings::xla {

// Keeps the number that cuattn_flex_add_functor gave to machine code, for the life of the process.
void name_functor(const std::string& name, int64_t functor);

}  // namespace cuattn::bindings::xla
