// SPDX-License-Identifier: Apache-2.0
#include "src/check/bias.h"

#include <cstring>

#include "src/check/arrays.h"

namespace cuattn {
namespace {

// The values seen so far, each given by its bits; `other` where one is neither 0 nor 1.
struct Seen {
  bool zero = false, one = false, other = false;

  template <class Bits>
  void look(const char* element, Bits one_bits) {
    Bits bits;
    std::memcpy(&bits, element, sizeof bits);
    bool is_zero = static_cast<Bits>(bits << 1) == 0;  // -0 too
    zero |= is_zero;
    one |= bits == one_bits;
    other = !is_zero && bits != one_bits;
  }
};

void look(const TensorView& view, int32_t axis, const char* data, Seen& seen) {
  if (axis == view.ndim) {
    if (view.is(DType::f32)) return seen.look<uint32_t>(data, 0x3f800000);
    return seen.look<uint16_t>(data, view.is(DType::f16) ? 0x3c00 : 0x3f80);
  }
  int64_t step = stride_of(view, axis) * (view.dtype.bits / 8);
  for (int64_t i = 0; i < view.shape[axis] && !seen.other; ++i)
    look(view, axis + 1, data + i * step, seen);
}

}  // namespace

void refuse_zero_one(const char* function, const TensorView& bias) {
  Seen seen;
  look(bias, 0, static_cast<const char*>(bias.data), seen);
  CUATTN_REQUIRE(seen.other || !seen.zero || !seen.one, function,
                 ": bias holds 0 and 1 alone, got ", text(bias.dtype),
                 ", which is added to the scores and hides no key; pass a mask as bool (True keeps "
                 "the key), or leave out CUATTN_CHECK if this is meant");
}

}  // namespace cuattn
