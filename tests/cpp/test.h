// SPDX-License-Identifier: Apache-2.0
// The harness of cuattn_tests: TEST(name) registers a case, CHECK counts a failure and goes on,
// skip() leaves the case. Cases that are known only at run time (one per compiled kernel) are added
// with add_case(). Next: problem.h.
#pragma once

#include <cstdint>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace cuattn::test {

struct Settings {
  uint64_t seed = 1;
  bool sanitize =
      false;  // one small case per kernel, no guard bands: the sanitizer watches exact allocations
  int gpus = 0;  // devices found; 0 also when the binary was built without CUDA
};
inline Settings& settings() {
  static Settings instance;
  return instance;
}

enum class Needs { nothing, gpu };

struct Case {
  std::string name;
  std::function<void()> run;
  Needs needs;
};
inline std::vector<Case>& cases() {
  static std::vector<Case> list;
  return list;
}
inline bool add_case(std::string name, std::function<void()> run, Needs needs = Needs::nothing) {
  cases().push_back({std::move(name), std::move(run), needs});
  return true;
}

struct Skipped {
  std::string reason;
};
[[noreturn]] inline void skip(std::string reason) { throw Skipped{std::move(reason)}; }

inline int& failures() {  // of the running case; only the main thread checks
  static int count = 0;
  return count;
}

template <class... Parts>
void report_failure(const char* file, int line, const char* condition, const Parts&... parts) {
  if (++failures() > 10) return;  // counted, not printed
  std::ostringstream text;
  text << file << ":" << line << ": " << condition;
  if constexpr (sizeof...(parts) > 0) ((text << ": ") << ... << parts);
  std::cout << "  " << text.str() << "\n";
}

// The seed of one case: the same whatever else runs.
inline uint64_t case_seed(const std::string& name) {
  uint64_t hash = 1469598103934665603ull ^ settings().seed;  // FNV-1a
  for (unsigned char c : name) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

}  // namespace cuattn::test

#define CUATTN_TEST_CASE(name, needs)                                                            \
  static void name();                                                                            \
  static const bool name##_added = ::cuattn::test::add_case(#name, name, ::cuattn::test::needs); \
  static void name()
#define TEST(name) CUATTN_TEST_CASE(name, Needs::nothing)
#define CUDA_TEST(name) CUATTN_TEST_CASE(name, Needs::gpu)

// CHECK(condition, "what was seen: ", value, ...)
#define CHECK(condition, ...)                                                                    \
  do {                                                                                           \
    if (!(condition))                                                                            \
      ::cuattn::test::report_failure(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (0)

namespace cuattn::test {

// `call` must throw Error, whose message contains `what`.
template <class Error, class Call>
void check_throws(const char* what, Call&& call) {
  try {
    call();
    CHECK(false, "no exception: ", what);
  } catch (const Error& error) {
    CHECK(std::string(error.what()).find(what) != std::string::npos, "wanted ", what, ", got ",
          error.what());
  }
}

}  // namespace cuattn::test
