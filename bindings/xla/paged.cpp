// SPDX-License-Identifier: Apache-2.0
// paged_attention, reshape_and_cache and gather_cache as XLA custom calls. Python face:
// python/cuattn/jax/paged.py, cache.py.
#include <string>

#include "bindings/xla/call.h"
#include "bindings/xla/ffi.h"
#include "bindings/xla/options.h"

namespace cuattn::bindings::xla {
namespace {

// Arguments q, k_cache, v_cache, block_tables, context_lens, then those of `present`.
void run_paged(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  std::string backend;
  cuattn_paged_options options;
  read_options(frame, options, backend);

  Arguments arguments(frame, place.device);
  const DLTensor *q = arguments.next(), *k_cache = arguments.next(), *v_cache = arguments.next(),
                 *block_tables = arguments.next(), *context_lens = arguments.next();
  arguments.optional(integer(frame, "present"), options, kPagedArrays);
  cuattn_attention_call call;
  check(cuattn_paged_prepare(q, k_cache, v_cache, block_tables, context_lens, &options, &call));
  AttentionResults(frame, place.device, q->ndim).run(cuattn_paged_run, call, place.stream);
}

constexpr const DLTensor* cuattn_cache_options::* kWriteArrays[] = {
    &cuattn_cache_options::k_scales, &cuattn_cache_options::v_scales, &cuattn_cache_options::cos,
    &cuattn_cache_options::sin};

// Arguments k, v, k_cache, v_cache, slot_mapping, then those of `present`, positions last; results
// k_cache and v_cache in the place of the arguments.
void run_cache_write(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  options.kv_layout = integer32(frame, "kv_layout");
  options.rope_interleaved = integer32(frame, "rope_interleaved");
  options.has_k_scale = integer32(frame, "has_k_scale");
  options.has_v_scale = integer32(frame, "has_v_scale");
  options.k_scale = number(frame, "k_scale");
  options.v_scale = number(frame, "v_scale");

  Arguments arguments(frame, place.device);
  const DLTensor *k = arguments.next(), *v = arguments.next();
  arguments.next();  // the caches, which are the results
  arguments.next();
  const DLTensor* slot_mapping = arguments.next_int64();
  arguments.optional(integer(frame, "present"), options, kWriteArrays);
  if (options.cos != nullptr) options.positions = arguments.next_int64();
  Tensor k_cache, v_cache;
  set_in_place(frame, 2, 0, place.device, k_cache);
  set_in_place(frame, 3, 1, place.device, v_cache);
  check(cuattn_reshape_and_cache(k, v, &k_cache.dl, &v_cache.dl, slot_mapping, &options,
                                 place.stream));
}

// Arguments k_cache, v_cache, block_tables, cu_seqlens, and two of zeros that the results lie on
// where they may have more rows than are gathered.
void run_cache_gather(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  Arguments arguments(frame, place.device);
  const DLTensor *k_cache = arguments.next(), *v_cache = arguments.next(),
                 *block_tables = arguments.next(), *cu_seqlens = arguments.next();
  Tensor k, v;
  k.set(*frame.results.items[0], place.device);
  v.set(*frame.results.items[1], place.device);
  check(cuattn_gather_cache(k_cache, v_cache, block_tables, cu_seqlens, &k.dl, &v.dl,
                            integer32(frame, "kv_layout"), place.stream));
}

}  // namespace

const Handler kPagedAttention = handler<run_paged>("cuattn_paged_attention");
const Handler kReshapeAndCache = handler<run_cache_write>("cuattn_reshape_and_cache");
const Handler kGatherCache = handler<run_cache_gather>("cuattn_gather_cache");

}  // namespace cuattn::bindings::xla
