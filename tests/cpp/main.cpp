// SPDX-License-Identifier: Apache-2.0
// cuattn_tests: one binary for all checks of the C++ side; usage below.
// Without a GPU the cases that need one are counted as skipped. The last line is "N passed, N
// failed, N skipped".
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

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

struct Selection {
  std::vector<std::vector<std::string>> filters;  // of each, one part must occur in the name
  std::vector<std::string> exclude;               // none of these may
  int shard = 0, shards = 1;  // every shards-th case, for several processes at once

  static bool contains(const std::string& name, const std::vector<std::string>& parts) {
    return std::any_of(parts.begin(), parts.end(), [&](const std::string& part) {
      return name.find(part) != std::string::npos;
    });
  }

  std::vector<const Case*> cases() const {
    std::vector<const Case*> chosen;
    int index = 0;
    for (const Case& test : cuattn::test::cases()) {
      if (settings().sanitize && test.needs != Needs::gpu) continue;
      if (!std::all_of(filters.begin(), filters.end(),
                       [&](const auto& filter) { return contains(test.name, filter); }))
        continue;
      if (contains(test.name, exclude)) continue;
      if (index++ % shards == shard) chosen.push_back(&test);
    }
    return chosen;
  }
};

int run_all(const std::vector<const Case*>& chosen) {
  int counts[3] = {0, 0, 0};
  for (const Case* chosen_case : chosen) {
    const Case& test = *chosen_case;
    auto begin = std::chrono::steady_clock::now();
    Outcome outcome = run_case(test);
    double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    ++counts[static_cast<int>(outcome)];
    if (outcome == Outcome::failed) {
      std::cout << "FAIL " << test.name << " (--seed " << settings().seed << " --filter "
                << test.name << ")\n";
    }
    if (seconds > 10) std::cout << "slow: " << test.name << " took " << seconds << " s\n";
    std::cout << std::flush;
    if (outcome == Outcome::failed && device_is_lost()) {
      std::cout << "the device is lost: stopping here\n";
      break;
    }
  }
  if (settings().gpus == 0) std::cout << "no CUDA device: the cases that need one were skipped\n";
  std::cout << counts[0] << " passed, " << counts[1] << " failed, " << counts[2] << " skipped"
            << std::endl;
  return counts[1] == 0 && counts[0] + counts[2] > 0 ? 0 : 1;
}

constexpr const char* kUsage =
    "usage: cuattn_tests [test|perf|plant TOOL] [options]\n"
    "  test             run the cases (the default)\n"
    "  perf             time the CUDA kernels; --filter chooses among backends\n"
    "  plant TOOL       make the error that memcheck, racecheck, initcheck, synccheck or the\n"
    "                   watchdog of a CUATTN_WATCHDOG build must report\n"
    "  --filter TEXT,TEXT  only cases whose name contains one of these; given twice, both hold\n"
    "  --exclude TEXT,TEXT  not these\n"
    "  --seed N         of the random problems, default 1         --list          print the names\n"
    "  --shard I/N      every N-th case, from the I-th            --sanitize      small GPU cases "
    "for compute-sanitizer\n";

std::vector<std::string> parts_of(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

int usage(const std::string& argument) {
  std::cerr << "cuattn_tests: unknown argument '" << argument << "'\n" << kUsage;
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  Selection selection;
  std::string backends;  // of perf
  bool list = false, perf = false;
  for (int i = 1; i < argc; ++i) {
    std::string argument = argv[i];
    bool has_value = i + 1 < argc;
    if (argument == "test") {
      perf = false;
    } else if (argument == "perf") {
      perf = true;
    } else if (argument == "plant" && has_value) {
      return plant_fault(argv[++i]);
    } else if (argument == "--sanitize") {
      settings().sanitize = true;
    } else if (argument == "--list") {
      list = true;
    } else if (argument == "--filter" && has_value) {
      backends = argv[++i];
      selection.filters.push_back(parts_of(backends));
    } else if (argument == "--exclude" && has_value) {
      for (std::string& part : parts_of(argv[++i])) selection.exclude.push_back(std::move(part));
    } else if (argument == "--seed" && has_value) {
      settings().seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (argument == "--shard" && has_value) {
      if (std::sscanf(argv[++i], "%d/%d", &selection.shard, &selection.shards) != 2 ||
          selection.shards < 1) {
        return usage(argument + " " + argv[i]);
      }
    } else {
      return usage(argument);
    }
  }
  settings().gpus = count_gpus();
  add_kernel_cases();
  if (list) {
    for (const Case* test : selection.cases()) std::cout << test->name << "\n";
    return 0;
  }
  int status = perf ? run_perf(backends) : run_all(selection.cases());
  release_device();
  return status;
}
