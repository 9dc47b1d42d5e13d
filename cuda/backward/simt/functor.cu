// SPDX-License-Identifier: Apache-2.0
// Launches passes.cuh as NVRTC compiled them with masks and scores of a user. Before: ../functor.cu,
// which launches those of 16-bit types.
#include <algorithm>
#include <iterator>

#include "cuda/backward/functor.cuh"
#include "cuda/backward/simt/backward.cuh"

namespace cuattn::backward {
namespace {

bool gives(const FunctorGradientParams& functor) {
  return std::any_of(std::begin(functor.gradients), std::end(functor.gradients),
                     [](const FlexArrayGradient& to) { return to.data != nullptr; });
}

template <int kHeadDim>
void launch_passes(const FunctorPasses& passes) {
  using Queries = SimtTiles<kHeadDim, false>;
  using Keys = SimtTiles<kHeadDim, true>;
  static_assert(Queries::kThreads == kFunctorThreads && Keys::kThreads == kFunctorThreads);
  constexpr int kQueriesBytes = sizeof(typename Queries::Shared);
  constexpr int kKeysBytes = sizeof(typename Keys::Shared);
  constexpr bool kMakesOne = simt_keys_makes_one(kHeadDim);
  const FunctorBackwardParams& p = passes.params;
  const Memory& memory = passes.memory;
  launch_row_states(p, memory.rows, passes.stream);
  int32_t tiles = device::ceil_div(p.forward.seqlen_q, Queries::kTile.m);
  if (p.needs(kNeedDq | kNeedDslopes) || gives(p.functor))
    passes.launch("cuattn_queries", passes.query_blocks(tiles), kQueriesBytes, memory, tiles);
  tiles = device::ceil_div(p.forward.seqlen_kv, Keys::kTile.m);
  if (p.needs(kMakesOne ? kNeedDk : kNeedDk | kNeedDv))
    passes.launch("cuattn_keys", passes.key_blocks(tiles), kKeysBytes, memory, tiles);
  if (kMakesOne && p.needs(kNeedDv))
    passes.launch("cuattn_values", passes.key_blocks(tiles), kKeysBytes, memory, tiles);
  if (p.needs(kNeedDbias)) {
    passes.launch("cuattn_bias", bias_blocks(p, Queries::kTile), kQueriesBytes, memory,
                  bias_parts(p));
  }
}

}  // namespace

void launch_functor_passes_simt(const FunctorPasses& passes) {
  switch (passes.plan.head_dim) {
    case 64: return launch_passes<64>(passes);
    case 128: return launch_passes<128>(passes);
    default: return launch_passes<256>(passes);
  }
}

}  // namespace cuattn::backward
