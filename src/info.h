// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace cuattn {

// Version, build and what each backend says of itself, as a JSON object.
std::string info_json();

}  // namespace cuattn
