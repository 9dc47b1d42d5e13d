// SPDX-License-Identifier: Apache-2.0
// The CPU backend's thread pool, in a copy of its own (the library exports none of it): exceptions,
// nested and simultaneous regions, and how many CPUs a cgroup grants.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/cgroup.h"
#include "cpu/parallel.h"
#include "test.h"

namespace {

using cuattn::cpu::cgroup_cpus;
using cuattn::cpu::parallel_for;

constexpr double kMuch = 1e12;  // work that no caller keeps to itself
constexpr int64_t kCount = 1000;

// Whatever machine this is; the variable is read once, so the library does not see it.
void use_four_threads() {
  static const int32_t threads = [] {
    const char* before = std::getenv("CUATTN_NUM_THREADS");
    std::string kept = before != nullptr ? before : "";
    setenv("CUATTN_NUM_THREADS", "4", 1);
    int32_t four = cuattn::cpu::num_threads();
    before != nullptr ? setenv("CUATTN_NUM_THREADS", kept.c_str(), 1)
                      : unsetenv("CUATTN_NUM_THREADS");
    return four;
  }();
  CHECK(threads == 4, threads);
}

void wait_for(const std::atomic<bool>& event) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!event && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

int64_t sum_of_indices() {
  std::atomic<int64_t> sum{0};
  parallel_for(kCount, kMuch, [&](int64_t i) { sum += i; });
  return sum;
}

void check_exception(bool of_a_worker) {
  use_four_threads();
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> thrown{false};
  std::string caught;
  try {
    parallel_for(kCount, kMuch, [&](int64_t) {
      if ((std::this_thread::get_id() != caller) == of_a_worker) {
        thrown = true;
        throw std::runtime_error("from a body");
      }
      wait_for(thrown);
    });
  } catch (const std::runtime_error& error) {
    caught = error.what();
  }
  CHECK(thrown);
  CHECK(caught == "from a body", caught);
  CHECK(sum_of_indices() == kCount * (kCount - 1) / 2);  // the pool is as it was
}

TEST(parallel_for_rethrows_what_a_worker_threw) { check_exception(true); }
TEST(parallel_for_rethrows_what_the_caller_threw) { check_exception(false); }

TEST(parallel_for_within_a_body_stays_on_its_thread) {
  use_four_threads();
  std::atomic<int64_t> runs{0}, strayed{0};
  parallel_for(kCount, kMuch, [&](int64_t) {
    std::thread::id outer = std::this_thread::get_id();
    parallel_for(3, kMuch, [&](int64_t) {
      ++runs;
      strayed += std::this_thread::get_id() != outer;
    });
  });
  CHECK(runs == 3 * kCount, runs.load());
  CHECK(strayed == 0, strayed.load());
}

TEST(parallel_for_serves_several_callers_at_once) {
  use_four_threads();
  std::atomic<int32_t> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) wrong += sum_of_indices() != kCount * (kCount - 1) / 2;
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0, wrong.load());
}

using Files = std::vector<std::pair<std::string, std::string>>;  // path and content

int32_t cpus_with(const Files& files) {
  std::string folder = std::filesystem::temp_directory_path() / "cuattn_cgroup_XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr, folder);
  for (const auto& [path, content] : files) {
    std::filesystem::path file = folder + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content;
  }
  int32_t cpus = cgroup_cpus(folder);
  std::filesystem::remove_all(folder);
  return cpus;
}

TEST(cgroup_quota_of_version_2_is_rounded_up) {
  const std::string self = "/proc/self/cgroup", max = "/sys/fs/cgroup/a/b/cpu.max";
  CHECK(cpus_with({{self, "0::/a/b\n"}, {max, "200000 100000\n"}}) == 2);
  CHECK(cpus_with({{self, "0::/a/b\n"}, {max, "200001 100000\n"}}) == 3);
  CHECK(cpus_with({{self, "0::/a/b\n"}, {max, "5000 100000\n"}}) == 1);
  CHECK(cpus_with({{self, "0::/a/b\n"}, {max, "max 100000\n"}}) == INT32_MAX);
  CHECK(cpus_with({{self, "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "300000 100000\n"}}) == 3);
}

TEST(cgroup_quota_of_version_1_is_rounded_up) {
  auto cpus = [](const std::string& quota) {
    return cpus_with({{"/proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/a\n3:cpuset:/s\n0::/x\n"},
                      {"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota},
                      {"/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "50000\n"},
                      {"/sys/fs/cgroup/cpu/s/cpu.cfs_quota_us", "100\n"},
                      {"/sys/fs/cgroup/cpu/s/cpu.cfs_period_us", "50000\n"}});
  };
  CHECK(cpus("100000\n") == 2);
  CHECK(cpus("100001\n") == 3);
  CHECK(cpus("-1\n") == INT32_MAX);
}

TEST(cgroup_quota_is_the_smallest_up_to_the_root) {
  auto cpus = [](const std::string& inner, const std::string& middle, const std::string& root) {
    return cpus_with({{"/proc/self/cgroup", "0::/a/b\n"},
                      {"/sys/fs/cgroup/a/b/cpu.max", inner},
                      {"/sys/fs/cgroup/a/cpu.max", middle},
                      {"/sys/fs/cgroup/cpu.max", root}});
  };
  CHECK(cpus("800000 100000\n", "max 100000\n", "max 100000\n") == 8);
  CHECK(cpus("800000 100000\n", "400000 100000\n", "max 100000\n") == 4);
  CHECK(cpus("800000 100000\n", "400000 100000\n", "200000 100000\n") == 2);
  // A container that sees the host's path, and its own cgroup as the root.
  CHECK(cpus_with({{"/proc/self/cgroup", "4:cpu:/docker/id\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"}}) == 2);
}

TEST(cgroup_files_that_are_missing_or_odd_set_no_limit) {
  CHECK(cpus_with({}) == INT32_MAX);
  for (std::string text : {"", "0::\n", "nonsense\n", "0:\n", "1:name=systemd:/a\n"})
    CHECK(cpus_with({{"/proc/self/cgroup", text}}) == INT32_MAX, text);
  for (std::string text : {"", "100000\n", "-5 100000\n", "100000 0\n", "a b\n"}) {
    Files files = {{"/proc/self/cgroup", "0::/a\n"}, {"/sys/fs/cgroup/a/cpu.max", text}};
    CHECK(cpus_with(files) == INT32_MAX, text);
  }
  CHECK(cgroup_cpus() >= 1);
}

}  // namespace
