// SPDX-License-Identifier: Apache-2.0
// Programs that a user's mask or score became, in plain loops: what each operation means. For the
// plain kernels, with flex_score of naive.h. Next: flex_vectors.h (the same over strips of vectors), params/flex.h.
#pragma once

#include "cpu/naive.h"

namespace cuattn::cpu {

// Whether the lists and the mask program leave a key to a query.
bool flex_sees(const AttentionParams& p, const Head& head, int32_t row, int32_t key);

}  // namespace cuattn::cpu
