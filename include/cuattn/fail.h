// SPDX-License-Identifier: Apache-2.0
// How the library refuses: rules and their messages, without std::string, whose header costs a CUDA
// source more than ours together. Next: error.h, what is thrown.
#pragma once

#include <cstddef>
#include <type_traits>

namespace cuattn {

struct InvalidArgument;
struct NotImplemented;
struct UnsupportedDevice;
struct CudaError;
struct OutOfMemory;
struct OutOfBlocks;
struct InternalError;

// A part of a message: text or a number.
struct MessagePart {
  enum class Kind { text, letter, whole, natural, real };
  Kind kind;
  size_t size = 0;
  union {
    const char* text;
    char letter;
    long long whole;
    unsigned long long natural;
    double real;
  };

  MessagePart(const char* text) : kind(Kind::text), size(__builtin_strlen(text)), text(text) {}
  MessagePart(char letter) : kind(Kind::letter), letter(letter) {}
  template <class Text, class = decltype(static_cast<const Text*>(nullptr)->c_str())>
  MessagePart(const Text& text) : kind(Kind::text), size(text.size()), text(text.data()) {}
  template <class Number, std::enable_if_t<std::is_arithmetic_v<Number>, int> = 0>
  MessagePart(Number number) {
    if constexpr (std::is_floating_point_v<Number>) {
      kind = Kind::real;
      real = number;
    } else if constexpr (std::is_signed_v<Number>) {
      kind = Kind::whole;
      whole = number;
    } else {
      kind = Kind::natural;
      natural = number;
    }
  }
};

// Throws Error, one of those above, with the parts as its text. error.h.
template <class Error>
[[noreturn]] void throw_error(const MessagePart* parts, size_t number);

template <class Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  const MessagePart all[] = {MessagePart(parts)...};
  throw_error<Error>(all, sizeof...(parts));
}

}  // namespace cuattn

// The caller's fault: CUATTN_REQUIRE(rule, "function: argument must ..., got ", value, "; way
// out").
#define CUATTN_REQUIRE(condition, ...)                                        \
  do {                                                                        \
    if (!(condition)) ::cuattn::fail<::cuattn::InvalidArgument>(__VA_ARGS__); \
  } while (0)

// Our fault: a broken invariant of the library itself.
#define CUATTN_ASSERT(condition, ...)                                                       \
  do {                                                                                      \
    if (!(condition))                                                                       \
      ::cuattn::fail<::cuattn::InternalError>("cuattn internal error at ", __FILE__, ":",   \
                                              __LINE__, ": " #condition ": ", __VA_ARGS__); \
  } while (0)
