// SPDX-License-Identifier: Apache-2.0
// mla_decode and mla_write as XLA custom calls. Python face: python/cuattn/jax/mla.py, which passes
// arguments, results and attributes in these orders.
#include <string>

#include "bindings/xla/call.h"
#include "bindings/xla/ffi.h"
#include "bindings/xla/options.h"
#include "cuattn/c_api_mla.h"

namespace cuattn::bindings::xla {
namespace {

constexpr const DLTensor* cuattn_mla_arrays::* kDecodeArrays[] = {
    &cuattn_mla_arrays::q_pe,         &cuattn_mla_arrays::kpe_cache,    &cuattn_mla_arrays::v_cache,
    &cuattn_mla_arrays::block_tables, &cuattn_mla_arrays::context_lens, &cuattn_mla_arrays::indices,
    &cuattn_mla_arrays::topk_lens};

// Arguments q_nope, ckv_cache, then those of `present`, the sinks of bit 7 last.
void run_mla_decode(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  std::string backend;
  cuattn_paged_options options;
  read_options(frame, options, backend);
  Arguments arguments(frame, place.device);
  cuattn_mla_arrays given{};
  given.q_nope = arguments.next();
  given.ckv_cache = arguments.next();
  int64_t present = integer(frame, "present");
  arguments.optional(present, given, kDecodeArrays);
  if ((present & 128) != 0) options.sinks = arguments.next();
  cuattn_attention_call call;
  check(cuattn_mla_decode_prepare(&given, &options, &call));
  AttentionResults(frame, place.device, given.q_nope->ndim)
      .run(cuattn_paged_run, call, place.stream);
}

// Arguments ckv, ckv_cache, slot_mapping, then by the bits of `present` kpe and kpe_cache, cos, sin
// and positions; results the caches, in the place of the arguments.
void run_mla_write(const CallFrame& frame, Platform platform) {
  Place place(frame, platform);
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  options.rope_interleaved = integer32(frame, "rope_interleaved");
  int64_t present = integer(frame, "present");
  Arguments arguments(frame, place.device);
  const DLTensor *ckv = arguments.next(), *kpe = nullptr;
  arguments.next();  // the caches, which are the results
  const DLTensor* slot_mapping = arguments.next_int64();
  Tensor ckv_cache, kpe_cache;
  set_in_place(frame, 1, 0, place.device, ckv_cache);
  if ((present & 1) != 0) {
    kpe = arguments.next();
    arguments.next();
    set_in_place(frame, 4, 1, place.device, kpe_cache);
  }
  if ((present & 2) != 0) {
    options.cos = arguments.next();
    options.sin = arguments.next();
    options.positions = arguments.next_int64();
  }
  check(cuattn_mla_write(ckv, kpe, &ckv_cache.dl, kpe == nullptr ? nullptr : &kpe_cache.dl,
                         slot_mapping, &options, place.stream));
}

}  // namespace

const Handler kMlaDecode = handler<run_mla_decode>("cuattn_mla_decode");
const Handler kMlaWrite = handler<run_mla_write>("cuattn_mla_write");

}  // namespace cuattn::bindings::xla
