// SPDX-License-Identifier: Apache-2.0
// What filled the state of a call, in its last word: a run refuses a call that another function
// prepared, or none did, and reads nothing of it.
#pragma once

#include <cstdint>
#include <iterator>

#include "cuattn/c_api.h"
#include "cuattn/error.h"

namespace cuattn {

enum class Prepared : uint64_t {
  nothing = 0,  // others are no words that lie about in memory
  attention = 0x9d3f5b1c6e28a471,
  paged,
  plan,
  backward
};

// The call is of nobody until a prepare has come to its end.
template <class Call>
void mark(Call& call, Prepared kind) {
  *std::rbegin(call.state) = static_cast<uint64_t>(kind);
}

template <class Call>
void require_prepared(const char* fn, const Call& call, Prepared kind, const char* by) {
  CUATTN_REQUIRE(
      *std::rbegin(call.state) == static_cast<uint64_t>(kind), fn,
      ": call must have been prepared by ", by,
      ", got one that it did not prepare, or refused; prepare it, and look at the status");
}

}  // namespace cuattn
