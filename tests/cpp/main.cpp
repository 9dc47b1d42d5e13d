// SPDX-License-Identifier: Apache-2.0
// cuattn_tests [test|perf] [--sanitize] [--filter TEXT] [--seed N] [--list]: one binary for all checks of the C++ side.
// Without a GPU the cases that need one are counted as skipped. The last line is "N passed, N failed, N skipped".
#include <chrono>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>

#include "suite.h"
#include "test.h"

namespace {

using namespace cuattn::test;

enum class Outcome { passed, failed, skipped };

Outcome run_case(const Case& test) {
  failures() = 0;
  try {
    if (test.needs == Needs::gpu && settings().gpus == 0) return Outcome::skipped;
    test.run();
  } catch (const Skipped& reason) {
    if (failures() == 0) {
      std::cout << "SKIP " << test.name << ": " << reason.reason << "\n";
      return Outcome::skipped;
    }
  } catch (const std::exception& error) {
    report_failure(test.name.c_str(), 0, "no exception", error.what());
  }
  return failures() == 0 ? Outcome::passed : Outcome::failed;
}

int run_all(const std::string& filter) {
  int counts[3] = {0, 0, 0};
  for (const Case& test : cases()) {
    if (test.name.find(filter) == std::string::npos) continue;
    if (settings().sanitize && test.needs != Needs::gpu) continue;
    auto begin = std::chrono::steady_clock::now();
    Outcome outcome = run_case(test);
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    ++counts[static_cast<int>(outcome)];
    if (outcome == Outcome::failed) {
      std::cout << "FAIL " << test.name << " (--seed " << settings().seed << " --filter " << test.name << ")\n";
    }
    if (seconds > 10) std::cout << "slow: " << test.name << " took " << seconds << " s\n";
    std::cout << std::flush;
    if (outcome == Outcome::failed && device_is_lost()) {
      std::cout << "the device is lost: stopping here\n";
      break;
    }
  }
  if (settings().gpus == 0) std::cout << "no CUDA device: the cases that need one were skipped\n";
  std::cout << counts[0] << " passed, " << counts[1] << " failed, " << counts[2] << " skipped" << std::endl;
  return counts[1] == 0 && counts[0] + counts[2] > 0 ? 0 : 1;
}

int usage(const std::string& argument) {
  std::cerr << "cuattn_tests: unknown argument '" << argument
            << "'; usage: cuattn_tests [test|perf] [--sanitize] [--filter TEXT] [--seed N] [--list]\n";
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  std::string filter;
  bool list = false, perf = false;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    bool has_value = i + 1 < argc;
    if (argument == "test") perf = false;
    else if (argument == "perf") perf = true;
    else if (argument == "--sanitize") settings().sanitize = true;
    else if (argument == "--list") list = true;
    else if (argument == "--filter" && has_value) filter = argv[++i];
    else if (argument == "--seed" && has_value) settings().seed = std::strtoull(argv[++i], nullptr, 10);
    else return usage(argument);
  }
  settings().gpus = count_gpus();
  add_kernel_cases();
  if (list) {
    for (const Case& test : cases()) {
      if (test.name.find(filter) != std::string::npos) std::cout << test.name << "\n";
    }
    return 0;
  }
  return perf ? run_perf(filter) : run_all(filter);
}
