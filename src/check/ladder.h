// SPDX-License-Identifier: Apache-2.0
// What the ladders of attention (attention/plan.cpp) and paged attention (paged/plan.cpp) say of
// their rungs.
#pragma once

#include <string>

#include "cuattn/error.h"
#include "cuattn/plan.h"

namespace cuattn {

// nullptr where the rung is on the side of the device, else why it cannot run.
inline const char* wrong_side(bool rung_on_cuda, bool device_is_cuda) {
  if (rung_on_cuda == device_is_cuda) return nullptr;
  return device_is_cuda ? "it runs on CPU arrays, these are on a CUDA device"
                        : "it runs on CUDA arrays, these are on the CPU";
}

[[noreturn]] inline void refuse_backend(const char* function, const char* backend, const char* why,
                                        Kernel other) {
  fail<NotImplemented>(function, ": backend '", backend, "' cannot run this call: ", why,
                       "; use backend='", kernel_name(other), "' or 'auto'");
}

// One rung of the ladder that explain() shows. `why`: nullptr, or why it cannot run; `may`: what a
// rung that could run, and does not, is called.
inline std::string rung_line(Kernel kernel, bool chosen, const char* why, const char* may,
                             const char* merit, const std::string& clause = {}) {
  return concat(chosen ? "* " : "  ", kernel_name(kernel), ": ",
                why != nullptr ? "cannot: "
                : chosen       ? "runs: "
                               : may,
                why != nullptr ? why : merit, clause, "\n");
}

// A line more, where codes of q alone become numbers before the kernel.
constexpr const char* kQueriesFirst =
    "* dequantize: runs: codes of q become numbers of 16 bits first\n";

}  // namespace cuattn
