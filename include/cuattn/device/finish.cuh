// SPDX-License-Identifier: Apache-2.0
// The end of a row of attention, once all its keys are summed: the sink, the division by the sum,
// lse, and rows that saw no key. Next: scores.cuh (what comes before the sum).
#pragma once

#include "cuattn/device/math.cuh"
#include "cuattn/params/scores.h"

namespace cuattn::device {

// What the accumulated values of a row are multiplied by, and its lse. A row that is not alive saw
// no key, or is not in use: its result is 0, whatever was accumulated, and its lse -inf.
struct RowEnd {
  float factor, lse;
  bool alive;
};

// Ends the rows of one head, whose sink is read once: one more logit in the denominator, without a value.
struct Finish {
  bool has_sink;
  float sink;  // base 2

  __device__ __forceinline__ Finish(const ScoreParams& scores, int32_t head, bool counts = true)
      : has_sink(counts && scores.sinks != nullptr),
        sink(has_sink ? sink_in_base2(scores.sinks[head * scores.sinks_stride])
                      : negative_infinity()) {}

  // `maximum` is in base 2, `sum` that of the exponentials relative to it, over all keys of the
  // row. A NaN is alive: it reaches out and lse.
  __device__ __forceinline__ RowEnd end(float maximum, float sum, bool in_use = true) const {
    float factor = 1.0f;
    if (has_sink) {
      float larger = fmaxf(maximum, sink);
      float reference = larger == negative_infinity() ? 0.0f : larger;
      factor = exp2_approx(maximum - reference);
      sum = fmaf(sum, factor, exp2_approx(sink - reference));
      maximum = larger;
    }
    bool alive = in_use && sum != 0.0f;
    float lse = alive ? (maximum + log2_approx(sum)) * kLn2 : negative_infinity();
    return {factor / sum, lse, alive};
  }
};

}  // namespace cuattn::device
