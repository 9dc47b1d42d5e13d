// SPDX-License-Identifier: Apache-2.0
// flex_attention: the arrays and options of attention, and what a mask or score function became.
// Next: python/cuattn/flex/attention.py.
#include "bindings/flex.h"

#include <deque>
#include <iterator>
#include <optional>
#include <vector>

#include "bindings/arrays/import.h"
#include "bindings/arrays/optional.h"
#include "bindings/arrays/results.h"
#include "bindings/call/errors.h"
#include "bindings/call/options.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

constexpr const char* kOp = "flex_attention";

nb::handle argument(const nb::dict& arguments, const char* name) {
  return PyDict_GetItemString(arguments.ptr(), name);  // borrowed; nullptr: not there
}

// What Python found in the functions, by name; what is None or missing stays NULL.
struct FlexArrays {
  cuattn_flex_options options;
  std::deque<Array> storage;  // never moves what it holds
  std::vector<const DLTensor*> captured;

  const DLTensor* import(const char* name, nb::handle source, const CallStream& stream,
                         const Array& home) {
    Array& array = storage.emplace_back();
    array.import(kOp, name, source, stream, &home);
    return &array.tensor;
  }

  void import(const nb::dict& found, const CallStream& stream, const Array& home) {
    cuattn_flex_options_init(&options, sizeof options);
    const struct {
      const char* name;
      const DLTensor* cuattn_flex_options::* field;
    } kArrays[] = {{"row_begin", &cuattn_flex_options::row_begin},
                   {"row_end", &cuattn_flex_options::row_end},
                   {"score_program", &cuattn_flex_options::score_program},
                   {"mask_program", &cuattn_flex_options::mask_program},
                   {"block_starts", &cuattn_flex_options::block_starts},
                   {"block_entries", &cuattn_flex_options::block_entries}};
    for (const auto& [name, field] : kArrays) {
      nb::handle source = argument(found, name);
      if (is_given(source)) options.*field = import(name, source, stream, home);
    }
    nb::handle arrays = argument(found, "arrays");
    if (is_given(arrays)) {
      for (nb::handle source : arrays)
        captured.push_back(import("a captured array", source, stream, home));
    }
    options.arrays = captured.data();
    options.num_arrays = static_cast<int64_t>(captured.size());
    nb::handle query_block = argument(found, "query_block");
    nb::handle key_block = argument(found, "key_block");
    if (is_given(query_block)) options.query_block = parse_int32(kOp, "query_block", query_block);
    if (is_given(key_block)) options.key_block = parse_int32(kOp, "key_block", key_block);
  }
};

nb::object flex_attention(const nb::dict& arguments, const nb::dict& found) {
  AttentionArgs args = read_arguments<Attention>(arguments);
  if (array_type(kOp, "q", args.q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(kOp, args.stream);
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  parse_options(kOp, args, options);
  if (is_given(args.lse_out)) options.return_lse = 1;
  Array q, k, v;
  q.import(kOp, "q", args.q, stream, nullptr);
  complete_stream(kOp, q, stream);
  k.import(kOp, "k", args.k, stream, &q);
  v.import(kOp, "v", args.v, stream, &q);
  OptionalArrays<std::size(kAttentionArrays)> optional;
  optional.import(kOp, kAttentionArrays, args, stream, q, options);
  FlexArrays flex;
  flex.import(found, stream, q);

  cuattn_attention_call call;
  check(cuattn_flex_prepare(&q.tensor, &k.tensor, &v.tensor, &options, &flex.options, &call));
  Result output;
  std::optional<Result> lse;
  output.provide(kOp, "out", args.out, q, stream,
                 view_of(call.out_dtype, call.out_ndim, call.out_shape));
  if (options.return_lse) {
    lse.emplace().provide(kOp, "lse_out", args.lse_out, q, stream,
                          view_of({kDLFloat, 32, 1}, call.lse_ndim, call.lse_shape));
  }
  CallWorkspace memory;
  memory.place(kOp, args.workspace, q, call.workspace_bytes, stream);
  cuattn_status status;
  {
    Unlocked unlocked;
    status =
        cuattn_attention_run(&call, &output.tensor, options.return_lse ? &lse->tensor : nullptr,
                             memory.data, memory.bytes, stream.handle);
  }
  check(status);
  if (!options.return_lse) return output.object;
  return nb::make_tuple(output.object, lse->object);
}

}  // namespace

void add_flex(nb::module_& m) {
  m.def("flex_attention", &flex_attention, nb::arg("arguments"), nb::arg("found"),
        nb::sig("def flex_attention(arguments: dict[str, object], found: dict[str, object]) -> "
                "object"),
        "cuattn.flex_attention of its arguments by name, and of what its functions became. "
        "NotImplemented for JAX arrays.");
}

}  // namespace cuattn::bindings
