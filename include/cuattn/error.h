// SPDX-License-Identifier: Apache-2.0
// Exceptions used inside libcuattn; src/abi/c_api.cpp turns each into one status code, the bindings
// into one Python type. A message names the function, the argument, the rule, the value given and
// the way out.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

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

// A block pool has fewer free blocks than asked for: OutOfBlocksError, a MemoryError.
struct OutOfBlocks : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void append_text(std::string& text, const std::string& part) { text += part; }
inline void append_text(std::string& text, const char* part) { text += part; }
inline void append_text(std::string& text, char part) { text += part; }

template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
void append_text(std::string& text, Number part) {
  if constexpr (std::is_floating_point_v<Number>) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%g", static_cast<double>(part));
    text += digits;
  } else {
    text += std::to_string(part);
  }
}

// Note: no iostream. Where a toolchain links libstdc++ statically, each shared object has locales
// of its own, and a stream of one may read the facets of another.
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append_text(text, parts), ...);
  return text;
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
