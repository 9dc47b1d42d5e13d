// SPDX-License-Identifier: Apache-2.0
// Reads /proc/self/cgroup and the quotas of the cgroups that it names. Next: parallel.cpp.
#include "cpu/cgroup.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <vector>

namespace cuattn::cpu {
namespace {

// Nothing where the file cannot be read.
std::vector<std::string> lines_of(const std::string& path) {
  std::vector<std::string> lines;
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return lines;
  char line[8192];  // PATH_MAX twice
  while (std::fgets(line, sizeof(line), file) != nullptr) {
    lines.emplace_back(line);
    if (lines.back().back() == '\n') lines.back().pop_back();
  }
  std::fclose(file);
  return lines;
}

std::string first_line(const std::string& path) {
  std::vector<std::string> lines = lines_of(path);
  return lines.empty() ? "" : lines.front();
}

// The CPUs of "quota period" in microseconds; the quota "max" or -1 is none.
int32_t cpus_of(const std::string& text) {
  long long quota = 0, period = 0;
  if (!(std::istringstream(text) >> quota >> period) || quota <= 0 || period <= 0) return INT32_MAX;
  return static_cast<int32_t>(std::min<long long>((quota - 1) / period + 1, INT32_MAX));
}

// The fewest CPUs of the cgroup at mount + path and of all that hold it. In a container the path may
// be the host's and its own cgroup the root of the mount: what does not exist sets no limit.
template <class QuotaAndPeriod>
int32_t smallest(const std::string& mount, std::string path, QuotaAndPeriod&& text_of) {
  int32_t cpus = INT32_MAX;
  for (;;) {
    cpus = std::min(cpus, cpus_of(text_of(mount + path)));
    size_t slash = path.rfind('/');
    if (slash == std::string::npos) return cpus;
    path.resize(slash);
  }
}

}  // namespace

int32_t cgroup_cpus(const std::string& root) {
  int32_t cpus = INT32_MAX;
  for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {
    // "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      cpus = std::min(cpus, smallest(root + "/sys/fs/cgroup", path, [](const std::string& folder) {
                        return first_line(folder + "/cpu.max");
                      }));
    } else if (controllers.find(",cpu,") != std::string::npos) {
      auto text_of = [](const std::string& folder) {
        return first_line(folder + "/cpu.cfs_quota_us") + " " +
               first_line(folder + "/cpu.cfs_period_us");
      };
      cpus = std::min(cpus, smallest(root + "/sys/fs/cgroup/cpu", path, text_of));
    }
  }
  return cpus;
}

}  // namespace cuattn::cpu
