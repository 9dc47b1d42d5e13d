// SPDX-License-Identifier: Apache-2.0
// What main.cpp needs of the parts that exist only with CUDA; no_cuda.cpp answers for a build
// without it.
#pragma once

#include <string>

namespace cuattn::test {

int count_gpus();
bool device_is_lost();    // after an illegal access every later result is worthless
void release_device();    // ends the CUDA context, so that memcheck reports what was not freed
void add_kernel_cases();  // one case per kernel instance that libcuattn lists
int run_perf(const std::string& filter);
// Does what `tool` (memcheck, racecheck, initcheck, synccheck) must report, to show that it
// watches; `watchdog`: a wait in vain, 0 when a build with CUATTN_WATCHDOG ended it.
int plant_fault(const std::string& tool);

}  // namespace cuattn::test
