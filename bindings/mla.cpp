// SPDX-License-Identifier: Apache-2.0
// Latent attention of the module: arrays and options of each function to the C structs, and back.
// Next: python/cuattn/mla.py.
#include "bindings/mla.h"

#include <iterator>
#include <optional>
#include <string>

#include "bindings/arrays/import.h"
#include "bindings/arrays/optional.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/slots.h"
#include "bindings/arrays/turning.h"
#include "bindings/call/errors.h"
#include "bindings/call/options.h"
#include "bindings/call/unlocked.h"
#include "bindings/paged.h"
#include "cuattn/c_api_mla.h"

namespace cuattn::bindings {
namespace {

nb::handle argument(const nb::dict& arguments, const char* name) {
  return arguments.contains(name) ? nb::handle(PyDict_GetItemString(arguments.ptr(), name))
                                  : nb::handle();
}

bool is_jax(const char* op, const char* name, nb::handle array) {
  return array_type(op, name, array).library == Library::jax;
}

// ---- mla_decode

// The arrays of a call; those not given stay NULL.
struct DecodeArrays {
  std::optional<Array> arrays[9];
  OptionalArrays<std::size(kPagedArrays)> optional;
  cuattn_mla_arrays given{};

  void import(const char* op, const nb::dict& arguments, CallStream& stream) {
    const struct {
      const char* name;
      const DLTensor*& tensor;
    } fields[] = {{"q_nope", given.q_nope},
                  {"q_pe", given.q_pe},
                  {"ckv_cache", given.ckv_cache},
                  {"kpe_cache", given.kpe_cache},
                  {"v_cache", given.v_cache},
                  {"block_tables", given.block_tables},
                  {"context_lens", given.context_lens},
                  {"indices", given.indices},
                  {"topk_lens", given.topk_lens}};
    for (size_t i = 0; i < std::size(fields); ++i) {
      nb::handle source = argument(arguments, fields[i].name);
      if (!is_given(source)) continue;
      Array& array = arrays[i].emplace();
      array.import(op, fields[i].name, source, stream, i == 0 ? nullptr : &*arrays[0]);
      if (i == 0) complete_stream(op, array, stream);
      fields[i].tensor = &array.tensor;
    }
  }
};

nb::object mla_decode(const nb::dict& arguments) {
  const char* op = "mla_decode";
  if (is_jax(op, "q_nope", argument(arguments, "q_nope"))) return nb::borrow(Py_NotImplemented);
  PagedArgs args = read_arguments<PagedAttention>(arguments);
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(op, args.stream);
  cuattn_paged_options options = parse_paged(op, 0, args);
  DecodeArrays arrays;
  arrays.import(op, arguments, stream);
  const Array& q = *arrays.arrays[0];
  arrays.optional.import(op, kPagedArrays, args, stream, q, options);
  bool wants_lse = is_given(args.lse_out) ||
                   (args.return_lse.is_valid() && parse_bool(op, "return_lse", args.return_lse));
  cuattn_attention_call call;
  check(cuattn_mla_decode_prepare(&arrays.given, &options, &call));
  AttentionOutputs outputs(op, call, args, wants_lse, q, stream);
  cuattn_status status;
  {
    Unlocked unlocked;
    status = outputs.run(cuattn_paged_run, call, stream.handle);
  }
  check(status);
  return outputs.object();
}

// ---- mla_write

nb::object mla_write(nb::handle ckv, nb::handle kpe, nb::handle ckv_cache, nb::handle kpe_cache,
                     nb::handle slot_mapping, nb::handle block_tables, nb::handle context_lens,
                     nb::handle cos, nb::handle sin, nb::handle positions,
                     nb::handle rope_interleaved, nb::handle stream_arg) {
  const char* op = "mla_write";
  if (is_jax(op, "ckv", ckv)) return nb::borrow(Py_NotImplemented);
  CallStream stream = parse_stream(op, stream_arg);
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  options.rope_interleaved = parse_bool(op, "rope_interleaved", rope_interleaved);
  Array latents, ropes, latent_cache, rope_cache;
  SlotArrays slots;
  latents.import(op, "ckv", ckv, stream, nullptr);
  complete_stream(op, latents, stream);
  bool has_ropes = !kpe.is_none() || !kpe_cache.is_none();
  if (has_ropes) ropes.import(op, "kpe", kpe, stream, &latents);
  latent_cache.import(op, "ckv_cache", ckv_cache, stream, &latents, true);
  bool is_packed = latent_cache.tensor.dtype.code == kDLUInt && kpe_cache.is_none();
  bool has_rope_cache = has_ropes && !is_packed;
  if (has_rope_cache) rope_cache.import(op, "kpe_cache", kpe_cache, stream, &latents, true);
  slots.import(op, slot_mapping, block_tables, context_lens, stream, latents, options);
  Turning turning;
  turning.import(op, cos, sin, positions, stream, latents, options);
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_mla_write(&latents.tensor, has_ropes ? &ropes.tensor : nullptr,
                              &latent_cache.tensor, has_rope_cache ? &rope_cache.tensor : nullptr,
                              slots.slot_mapping, &options, stream.handle);
  }
  check(status);
  return nb::make_tuple(ckv_cache, kpe_cache);
}

// ---- mla_project

// An array as [batch, rows, heads, columns]. "heads": [heads, columns] behind up to two axes;
// "bhsd": heads before rows; "shared": [batch, rows, columns], the same for `heads` heads.
TensorView as_rows(const char* op, const char* name, const TensorView& view,
                   const std::string& layout, int64_t heads) {
  bool heads_last = layout == "heads";
  int32_t least = heads_last ? 2 : layout == "shared" ? 3 : 4;
  int32_t most = layout == "shared" ? 3 : 4;
  if (view.ndim < least || view.ndim > most) {
    raise(PyExc_ValueError, op, ": ", name, " must have ",
          heads_last   ? "2 to 4"
          : least == 3 ? "3"
                       : "4",
          " axes, got ", view.ndim, "; reshape it");
  }
  TensorView rows = view;
  rows.ndim = 4;
  auto put = [&](int32_t axis, int64_t extent, int64_t stride) {
    rows.shape[axis] = extent;
    rows.strides[axis] = stride;
  };
  int32_t last = view.ndim - 1;
  put(3, view.shape[last], view.strides[last]);
  if (layout == "shared") {
    put(2, heads, 0);
    return rows;
  }
  bool swaps = layout == "bhsd";
  for (int32_t axis = 0; axis < 3; ++axis) {
    int32_t from = axis - 3 + last;
    if (swaps && axis > 0) from = 3 - axis;
    put(axis, from < 0 ? 1 : view.shape[from], from < 0 ? 0 : view.strides[from]);
  }
  return rows;
}

// `apart_arg`: lse_out of mla_attention, if given. `check_only`: out is checked, or allocated, and
// nothing is written.
nb::object mla_project(const char* op, nb::handle x, nb::handle proj, nb::handle tail,
                       nb::handle transpose_arg, const std::string& x_layout,
                       const std::string& tail_layout, const std::string& out_layout,
                       nb::handle out, nb::handle stream_arg, nb::handle apart_arg,
                       bool check_only) {
  if (is_jax(op, "x", x)) return nb::borrow(Py_NotImplemented);
  CallStream stream = parse_stream(op, stream_arg);
  bool transpose = parse_bool(op, "transpose", transpose_arg);
  Array rows;
  std::optional<Array> matrices, behind, apart;
  rows.import(op, "x", x, stream, nullptr);
  complete_stream(op, rows, stream);
  int64_t heads = x_layout == "bhsd" && rows.view.ndim == 4 ? rows.view.shape[1] : 1;
  if (is_given(proj)) {
    matrices.emplace().import(op, "proj", proj, stream, &rows);
    if (matrices->view.ndim != 3)
      raise(PyExc_ValueError, op, ": proj must have axes [heads, latent, head_dim], got ",
            matrices->view.ndim, "; reshape it");
    heads = matrices->view.shape[0];
  }
  TensorView x_view = as_rows(op, "x", rows.view, x_layout, heads), tail_view, out_view;
  int64_t columns = x_view.shape[3];
  if (matrices) columns = matrices->view.shape[transpose ? 1 : 2];
  if (is_given(tail)) {
    behind.emplace().import(op, "tail", tail, stream, &rows);
    tail_view = as_rows(op, "tail", behind->view, tail_layout, heads);
    columns += tail_view.shape[3];
  }
  int64_t shape[4] = {x_view.shape[0], x_view.shape[1], x_view.shape[2], columns};
  if (out_layout == "bhsd") std::swap(shape[1], shape[2]);
  int32_t ndim = x_layout == "heads" ? rows.view.ndim : 4;
  Result result;
  result.provide(op, "out", out, rows, stream, view_of(rows.view.dtype, ndim, shape + 4 - ndim));
  out_view = as_rows(op, "out", TensorView(result.tensor), out_layout, heads);
  if (is_given(apart_arg)) apart.emplace().import(op, "lse_out", apart_arg, stream, &rows, true);
  DLTensor x_tensor = x_view.dl(), tail_tensor = tail_view.dl(), out_tensor = out_view.dl();
  cuattn_mla_projection call{&x_tensor,
                             matrices ? &matrices->tensor : nullptr,
                             behind ? &tail_tensor : nullptr,
                             &out_tensor,
                             transpose,
                             check_only,
                             apart ? &apart->tensor : nullptr};
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_mla_project(&call, stream.handle);
  }
  check(status);
  return result.object;
}

}  // namespace

void add_mla(nb::module_& m) {
  m.def("mla_decode", &mla_decode, nb::arg("arguments"),
        nb::sig("def mla_decode(arguments: dict[str, object]) -> object"),
        "cuattn.mla_decode of its arguments by name; v_cache, and rows without "
        "block_tables, context_lens and indices, are for mla_attention.");
  m.def("mla_write", &mla_write,
        nb::sig("def mla_write(ckv: object, kpe: object, ckv_cache: object, kpe_cache: object, "
                "slot_mapping: object, block_tables: object, context_lens: object, cos: object, "
                "sin: object, positions: object, rope_interleaved: object, stream: object) -> "
                "object"),
        nb::arg("ckv").none(), nb::arg("kpe").none(), nb::arg("ckv_cache").none(),
        nb::arg("kpe_cache").none(), nb::arg("slot_mapping").none(), nb::arg("block_tables").none(),
        nb::arg("context_lens").none(), nb::arg("cos").none(), nb::arg("sin").none(),
        nb::arg("positions").none(), nb::arg("rope_interleaved").none(), nb::arg("stream").none(),
        "cuattn.mla_write.");
  m.def(
      "mla_project",
      [](const std::string& op, nb::handle x, nb::handle proj, nb::handle tail,
         nb::handle transpose, const std::string& x_layout, const std::string& tail_layout,
         const std::string& out_layout, nb::handle out, nb::handle stream, nb::handle apart,
         bool check_only) {
        return mla_project(op.c_str(), x, proj, tail, transpose, x_layout, tail_layout, out_layout,
                           out, stream, apart, check_only);
      },
      nb::sig("def mla_project(op: str, x: object, proj: object, tail: object, transpose: bool, "
              "x_layout: str, tail_layout: str, out_layout: str, out: object, stream: object, "
              "apart: object = None, check_only: bool = False) -> object"),
      nb::arg("op"), nb::arg("x").none(), nb::arg("proj").none(), nb::arg("tail").none(),
      nb::arg("transpose").none(), nb::arg("x_layout"), nb::arg("tail_layout"),
      nb::arg("out_layout"), nb::arg("out").none(), nb::arg("stream").none(),
      nb::arg("apart") = nb::none(), nb::arg("check_only") = false,
      "cuattn.mla_project for arrays of these layouts: heads, bhsd, shared; proj None copies x, "
      "tail goes behind the product. apart, check_only: as in cuattn_mla_projection.");
}

}  // namespace cuattn::bindings
