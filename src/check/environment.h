// SPDX-License-Identifier: Apache-2.0
// What environment variables of the library say.
#pragma once

#include <cstring>

namespace cuattn {

// Whether a switch is on: it is off where it is unset, empty or 0.
inline bool is_on(const char* value) {
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace cuattn
