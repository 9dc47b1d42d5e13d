// SPDX-License-Identifier: Apache-2.0
// The C ABI of quantisation. Next: float8/quantize.h, guarded.h.
#include "src/check/arrays.h"
#include "src/float8/quantize.h"
#include "src/guarded.h"
#include "src/options.h"

using namespace cuattn;

extern "C" {

void cuattn_quantize_options_init(cuattn_quantize_options* options, size_t struct_size) {
  init_options("quantize", options, struct_size);
}

cuattn_status cuattn_quantize(const DLTensor* x, const DLTensor* out, const DLTensor* scale,
                              const cuattn_quantize_options* options, void* stream) {
  return guarded([&] {
    const char* fn = "quantize";
    cuattn_quantize_options room;
    quantize(view_of(fn, "x", x), view_of(fn, "out", out), view_of(fn, "scale", scale),
             known_options(fn, options, room), stream);
  });
}

cuattn_status cuattn_dequantize(const DLTensor* x, const DLTensor* out, const DLTensor* scale,
                                const cuattn_quantize_options* options, void* stream) {
  return guarded([&] {
    const char* fn = "dequantize";
    cuattn_quantize_options room;
    dequantize(view_of(fn, "x", x), view_of(fn, "out", out), view_of(fn, "scale", scale),
               known_options(fn, options, room), stream);
  });
}

}  // extern "C"
