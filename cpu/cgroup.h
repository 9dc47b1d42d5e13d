// SPDX-License-Identifier: Apache-2.0
// The CPU time that a container or a service manager grants, which the affinity mask does not show.
// Next: parallel.cpp, which starts no more threads than this.
#pragma once

#include <cstdint>
#include <string>

namespace cuattn::cpu {

// The smallest CPU quota (cpu.max, or cpu.cfs_quota_us of version 1) of this process's cgroup and
// of those around it, in CPUs, rounded up; INT32_MAX where there is none. `root` stands before
// every path; tests put a folder there.
int32_t cgroup_cpus(const std::string& root = "");

}  // namespace cuattn::cpu
