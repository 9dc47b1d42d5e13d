// SPDX-License-Identifier: Apache-2.0
// Exceptions used inside libcuattn; src/c_api.cpp turns each into one status code, the bindings
// into one Python type. A message names the function, the argument, the rule, the value given and
// the way out.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace cuattn {

// The caller passed something no kernel could ever take: ValueError in Python.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A valid request that no compiled kernel serves; the message names the nearest that does:
// NotImplementedError.
struct NotImplemented : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The device is not one that this build can run on: RuntimeError.
struct UnsupportedDevice : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A CUDA call failed; the message holds the call, the error's name and its text.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The workspace is missing or too small: MemoryError.
struct OutOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <class Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(concat(parts...));
}

}  // namespace cuattn

// The caller's fault: CUATTN_REQUIRE(rule, "function: argument must ..., got ", value, "; way
// out").
#define CUATTN_REQUIRE(condition, ...)                                        \
  do {                                                                        \
    if (!(condition)) ::cuattn::fail<::cuattn::InvalidArgument>(__VA_ARGS__); \
  } while (0)

// Our fault: a broken invariant of the library itself.
#define CUATTN_ASSERT(condition, ...)                                                        \
  do {                                                                                       \
    if (!(condition))                                                                        \
      ::cuattn::fail<std::logic_error>("cuattn internal error at ", __FILE__, ":", __LINE__, \
                                       ": " #condition ": ", __VA_ARGS__);                   \
  } while (0)
