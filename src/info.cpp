// SPDX-License-Identifier: Apache-2.0
// What this build is and where it runs, for `python -m cuattn info` and bug reports.
#include "src/info.h"

#include "cuattn/backend.h"
#include "cuattn/c_api.h"
#include "cuattn/error.h"

#ifndef CUATTN_ARCHS
#define CUATTN_ARCHS ""
#endif
#ifndef CUATTN_SOURCE_HASH
#define CUATTN_SOURCE_HASH "unknown"
#endif

namespace cuattn {

const char* compiled_archs() { return CUATTN_ARCHS; }

std::string info_json() {
  const Backend* cuda = cuda_backend();
  return concat("{\"version\": \"", cuattn_version(), "\", \"source_hash\": \"", CUATTN_SOURCE_HASH,
                "\", \"compiler\": \"", __VERSION__, "\", \"cuda_archs\": \"", compiled_archs(),
                "\", \"num_kernels\": ", cuattn_kernel_count(),
                ", \"cpu\": ", cpu_backend().describe(),
                ", \"cuda\": ", cuda != nullptr ? cuda->describe() : "null", "}");
}

}  // namespace cuattn
