// SPDX-License-Identifier: Apache-2.0
// Programs that a user's mask or score became, in plain loops: what each operation means. For the
// plain kernels, with flex_score of naive.h. Next: flex_vectors.h (the same over strips of vectors), params/flex.h.
#pragma once

#include "cpu/naive.h"

namespace cuattn::cpu {

// Whether the lists and the mask program leave a key to a query.
bool flex_sees(const AttentionParams& p, const Head& head, int32_t row, int32_t key);

// The derivative of the score program by the score that it took; ds times its derivatives by
// captured arrays are added to `sums`, unless that is nullptr.
float flex_slope(const AttentionParams& p, const FlexGradient& gradient, const Head& head,
                 int32_t row, int32_t key, float score, float ds, double* sums);

// Stores the sums of captured arrays' gradients, those of all `parts` added up in order.
void store_array_gradients(const FlexParams& flex, const FlexGradient& gradient, const double* sums,
                           int64_t parts);

}  // namespace cuattn::cpu
