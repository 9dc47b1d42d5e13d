// SPDX-License-Identifier: Apache-2.0
// What the functions of latent attention share. Next: decode.cpp, project.cpp.
#pragma once

#include <cstdint>

namespace cuattn {

constexpr int32_t kMaxLatent = 1024;  // columns

}  // namespace cuattn
