// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace cuattn {

// The architectures that this build holds code for, "80;90;90-ptx"; "" without CUDA.
const char* compiled_archs();

// Version, build and what each backend says of itself, as a JSON object.
std::string info_json();

}  // namespace cuattn
