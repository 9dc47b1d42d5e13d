// SPDX-License-Identifier: Apache-2.0
// Paged attention of the module: arrays and options of each function to the C structs, and back.
// Next: call/options.h, python/cuattn/paged.py.
#include "bindings/paged.h"

#include <iterator>

#include "bindings/arrays/import.h"
#include "bindings/arrays/optional.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/shapes.h"
#include "bindings/call/errors.h"
#include "bindings/call/front.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {

const char* paged_function(int32_t version) {
  return version == 1   ? "paged_attention_v1"
         : version == 2 ? "paged_attention_v2"
                        : "paged_attention";
}

cuattn_paged_options parse_paged(const char* op, int32_t version, const PagedArgs& args) {
  cuattn_paged_options options;
  cuattn_paged_options_init(&options, sizeof options);
  options.version = version;
  if (version != 0) options.kv_layout = CUATTN_KV_VLLM;  // their default
  parse_options(op, args, options);
  if (is_given(args.max_context_len) && options.max_context_len < 0)
    raise(PyExc_ValueError, op, ": max_context_len must be >= 0, got ", options.max_context_len,
          "; pass None for what block_tables can name");
  return options;
}

namespace {

struct PagedArrays {
  Array q, k_cache, v_cache, block_tables, context_lens;
  OptionalArrays<std::size(kPagedArrays)> optional;

  void import(const char* op, int32_t version, const PagedArgs& args, CallStream& stream,
              cuattn_paged_options& options) {
    q.import(op, "q", args.q, stream, nullptr);
    complete_stream(op, q, stream);
    k_cache.import(op, version == 0 ? "k_cache" : "key_cache", args.k_cache, stream, &q);
    v_cache.import(op, version == 0 ? "v_cache" : "value_cache", args.v_cache, stream, &q);
    block_tables.import(op, "block_tables", args.block_tables, stream, &q);
    context_lens.import(op, "context_lens", args.context_lens, stream, &q);
    optional.import(op, kPagedArrays, args, stream, q, options);
  }
};

bool is_jax(const char* op, const char* name, nb::handle array) {
  return array_type(op, name, array).library == Library::jax;
}

// JAX arrays, which only XLA may write, go through cuattn.jax or not at all.
void refuse_jax(const char* op, const char* name, nb::handle array, const char* way_out) {
  if (!is_jax(op, name, array)) return;
  raise(PyExc_NotImplementedError, op, ": ", name,
        " is a JAX array, which this function does not take; ", way_out);
}

// `write`, where valid, is called once nothing is left that could be refused, and before the run.
nb::object run_paged(int32_t version, const PagedArgs& args, nb::handle write = {}) {
  const char* op = paged_function(version);
  if (version == 0 && is_jax(op, "q", args.q)) return nb::borrow(Py_NotImplemented);
  refuse_jax(op, "q", args.q, "use paged_attention, which returns a new one");
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(op, args.stream);
  cuattn_paged_options options = parse_paged(op, version, args);
  bool wants_lse = is_given(args.lse_out) ||
                   (args.return_lse.is_valid() && parse_bool(op, "return_lse", args.return_lse));
  PagedArrays arrays;
  arrays.import(op, version, args, stream, options);

  cuattn_attention_call call;
  check(cuattn_paged_prepare(&arrays.q.tensor, &arrays.k_cache.tensor, &arrays.v_cache.tensor,
                             &arrays.block_tables.tensor, &arrays.context_lens.tensor, &options,
                             &call));
  AttentionOutputs outputs(op, call, args, wants_lse, arrays.q, stream);
  if (write.is_valid()) {
    check(outputs.run(cuattn_paged_check, call, stream.handle));
    write();
  }
  cuattn_status status;
  {
    Unlocked unlocked;
    status = outputs.run(cuattn_paged_run, call, stream.handle);
  }
  check(status);
  return outputs.object();
}

template <int32_t kVersion>
nb::object run_version(PagedArgs& args) {
  return run_paged(kVersion, args);
}

nb::object write_and_attend(const nb::dict& arguments, nb::handle write) {
  return run_paged(0, read_arguments<PagedAttention>(arguments), write);
}

nb::object paged_plan(PagedArgs& args) {
  const char* op = "paged_plan";
  for (nb::handle extent : {args.num_heads_q, args.num_heads_kv, args.head_dim, args.block_size}) {
    if (!extent.is_valid()) return nb::borrow(Py_NotImplemented);  // Python says that it is missing
  }
  refuse_jax(op, "context_lens", args.context_lens,
             "use paged_attention without plan=, which makes one inside the call");
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(op, args.stream);
  cuattn_paged_options options = parse_paged(op, 0, args);
  cuattn_paged_shape shape{
      args.q_len.is_valid() ? parse_int(op, "q_len", args.q_len) : 1,
      parse_int(op, "num_heads_q", args.num_heads_q),
      parse_int(op, "num_heads_kv", args.num_heads_kv),
      parse_int(op, "head_dim", args.head_dim),
      parse_int(op, "block_size", args.block_size),
      args.dtype.is_valid() ? dtype_named(op, args.dtype) : dl_dtype(DType::bf16)};
  Array lens, tables;
  lens.import(op, "context_lens", args.context_lens, stream, nullptr);
  complete_stream(op, lens, stream);
  tables.import(op, "block_tables", args.block_tables, stream, &lens);
  cuattn_attention_call call;
  check(cuattn_paged_plan_prepare(&tables.tensor, &lens.tensor, &shape, &options, &call));
  Result plan;
  plan.provide(op, "out", args.out, lens, stream,
               view_of(call.out_dtype, call.out_ndim, call.out_shape));
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_paged_plan_run(&call, &plan.tensor, stream.handle);
  }
  check(status);
  return plan.object;
}

}  // namespace

void add_paged(nb::module_& m) {
  add_function<PagedAttention, run_version<0>>(m);
  add_function<PagedAttentionV1, run_version<1>>(m);
  add_function<PagedAttentionV2, run_version<2>>(m);
  add_function<PagedPlan, paged_plan>(m);
  m.def("write_and_attend", &write_and_attend, nb::arg("arguments"), nb::arg("write"),
        nb::sig("def write_and_attend(arguments: dict[str, object], write: object) -> object"),
        "paged_attention of its arguments by name, with a call of `write` between the checks and "
        "the attention: it\nwrites to the caches, and is not called where anything is refused.");
}

}  // namespace cuattn::bindings
