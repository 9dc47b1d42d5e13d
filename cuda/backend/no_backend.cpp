// SPDX-License-Identifier: Apache-2.0
// Stands for backend.cu in a build without CUDA.
#include "cuattn/backend.h"

namespace cuattn {

const Backend* cuda_backend() { return nullptr; }

}  // namespace cuattn
