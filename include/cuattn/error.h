// SPDX-License-Identifier: Apache-2.0
// Exceptions used inside libcuattn; src/abi/c_api.cpp turns each into one status code, the bindings
// into one Python type. A message names the function, the argument, the rule, the value given and
// the way out.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

#include "cuattn/fail.h"

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

// A broken invariant of the library itself.
struct InternalError : std::logic_error {
  using std::logic_error::logic_error;
};

// Note: no iostream. Where a toolchain links libstdc++ statically, each shared object has locales
// of its own, and a stream of one may read the facets of another.
inline std::string join(const MessagePart* parts, size_t number) {
  std::string text;
  for (const MessagePart* part = parts; part != parts + number; ++part) {
    char digits[32];
    switch (part->kind) {
      case MessagePart::Kind::text: text.append(part->text, part->size); break;
      case MessagePart::Kind::letter: text += part->letter; break;
      case MessagePart::Kind::whole: text += std::to_string(part->whole); break;
      case MessagePart::Kind::natural: text += std::to_string(part->natural); break;
      case MessagePart::Kind::real:
        std::snprintf(digits, sizeof(digits), "%g", part->real);
        text += digits;
    }
  }
  return text;
}

template <class... Parts>
std::string concat(const Parts&... parts) {
  const MessagePart all[] = {MessagePart(parts)...};
  return join(all, sizeof...(parts));
}

template <class Error>
[[noreturn]] void throw_error(const MessagePart* parts, size_t number) {
  throw Error(join(parts, number));
}

}  // namespace cuattn
