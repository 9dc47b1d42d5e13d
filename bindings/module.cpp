// SPDX-License-Identifier: Apache-2.0
// The Python module cuattn._core: every function that the package calls, each a thin frame around
// the C ABI: import the arrays, prepare, allocate in the caller's library, run. Users see
// cuattn.attention and friends instead. Next: attention.cpp, python/cuattn/attention.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/attention.h"
#include "bindings/backward.h"
#include "bindings/block_pool.h"
#include "bindings/cache.h"
#include "bindings/call/errors.h"
#include "bindings/explain.h"
#include "bindings/flex.h"
#include "bindings/float8.h"
#include "bindings/fused.h"
#include "bindings/merge.h"
#include "bindings/mla.h"
#include "bindings/paged.h"
#include "bindings/unlinked_file.h"
#include "bindings/xla/ffi.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

nb::dict xla_handlers() {
  nb::dict cpu, cuda;
  for (const xla::Handler* handler :
       {&xla::kAttention, &xla::kAttentionBackward, &xla::kMergeStates, &xla::kPagedAttention,
        &xla::kReshapeAndCache, &xla::kGatherCache, &xla::kApplyRope, &xla::kNorm,
        &xla::kActivation, &xla::kSample, &xla::kVerify, &xla::kMlaDecode, &xla::kMlaWrite,
        &xla::kFlex, &xla::kFlexBackward}) {
    cpu[handler->name] = nb::capsule(reinterpret_cast<void*>(handler->cpu));
    cuda[handler->name] = nb::capsule(reinterpret_cast<void*>(handler->cuda));
  }
  nb::dict platforms;
  platforms["cpu"] = cpu;
  platforms["CUDA"] = cuda;
  return platforms;
}

}  // namespace
}  // namespace cuattn::bindings

NB_MODULE(_core, m) {
  using namespace cuattn::bindings;  // NOLINT: the module is this namespace
  m.doc() = "The compiled part of cuattn; use the functions of the package itself.";

  nb::set_leak_warnings(false);  // threads that the interpreter's end stops keep what they hold

  make_exceptions(m);
  add_attention(m);
  add_backward(m);
  add_block_pool(m);
  add_cache(m);
  add_explain(m);
  add_flex(m);
  add_float8(m);
  add_fused(m);
  add_merge(m);
  add_mla(m);
  add_paged(m);
  add_unlinked_file(m);
  m.def("version", [] { return std::string(cuattn_version()); }, "The version of libcuattn.");
  m.def("xla_handlers", &xla_handlers,
        nb::sig("def xla_handlers() -> dict[str, dict[str, object]]"),
        "The XLA FFI handlers by platform and name, as jax.ffi.register_ffi_target takes them.");
}
