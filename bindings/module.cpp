// SPDX-License-Identifier: Apache-2.0
// The Python module cuattn._core: every function that the package calls, each a thin frame around
// the C ABI: import the arrays, prepare, allocate in the caller's library, run. Users see
// cuattn.attention and friends instead. Next: python/cuattn/attention.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays/allocate.h"
#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/backward.h"
#include "bindings/block_pool.h"
#include "bindings/cache.h"
#include "bindings/call/errors.h"
#include "bindings/call/front.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "bindings/explain.h"
#include "bindings/paged.h"
#include "bindings/unlinked_file.h"
#include "bindings/xla/ffi.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

// The arrays of one attention call.
struct AttentionArrays {
  Array q, k, v;
  std::optional<Array> alibi_slopes, sinks, bias, seqused_q, seqused_k, cu_seqlens_q, cu_seqlens_k,
      block_tables;

  void import(const char* op, const AttentionArgs& args, CallStream& stream,
              cuattn_attention_options& options) {
    q.import(op, "q", args.q, stream, nullptr);
    complete_stream(op, q, stream);
    k.import(op, "k", args.k, stream, &q);
    v.import(op, "v", args.v, stream, &q);
    optional(op, "alibi_slopes", args.alibi_slopes, stream, alibi_slopes, options.alibi_slopes);
    optional(op, "sinks", args.sinks, stream, sinks, options.sinks);
    optional(op, "bias", args.bias, stream, bias, options.bias);
    optional(op, "seqused_q", args.seqused_q, stream, seqused_q, options.seqused_q);
    optional(op, "seqused_k", args.seqused_k, stream, seqused_k, options.seqused_k);
    optional(op, "cu_seqlens_q", args.cu_seqlens_q, stream, cu_seqlens_q, options.cu_seqlens_q);
    optional(op, "cu_seqlens_k", args.cu_seqlens_k, stream, cu_seqlens_k, options.cu_seqlens_k);
    optional(op, "block_tables", args.block_tables, stream, block_tables, options.block_tables);
  }

 private:
  void optional(const char* op, const char* name, nb::handle source, const CallStream& stream,
                std::optional<Array>& array, const DLTensor*& option) {
    if (!is_given(source)) return;
    array.emplace().import(op, name, source, stream, &q);
    option = &array->tensor;
  }
};

// A call on the CPU that is over sooner than another thread could take the interpreter lock.
bool is_short(const Array& q, const Array& k) {
  constexpr int64_t kElements = 512;
  return !q.is_cuda() && q.view.size() <= kElements && k.view.size() <= kElements;
}

nb::object run_attention(const char* op, AttentionArgs& args) {
  if (array_type(op, "q", args.q).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream;
  if (is_given(args.stream)) stream = parse_stream(op, args.stream);
  cuattn_attention_options options = parse_options(op, args);
  if (is_given(args.lse_out)) options.return_lse = 1;
  AttentionArrays arrays;
  arrays.import(op, args, stream, options);

  cuattn_attention_call call;
  check(cuattn_attention_prepare(&arrays.q.tensor, &arrays.k.tensor, &arrays.v.tensor, &options,
                                 &call));

  Result output;
  std::optional<Result> lse;
  output.provide(op, "out", args.out, arrays.q, stream,
                 view_of(call.out_dtype, call.out_ndim, call.out_shape));
  if (options.return_lse) {
    lse.emplace().provide(op, "lse_out", args.lse_out, arrays.q, stream,
                          view_of({kDLFloat, 32, 1}, call.lse_ndim, call.lse_shape));
  }
  CallWorkspace memory;
  memory.place(op, args.workspace, arrays.q, call.workspace_bytes, stream);
  cuattn_status status;
  {
    // The CPU computes here, and a CUDA launch may wait for a full queue.
    std::optional<Unlocked> unlocked;
    if (!is_short(arrays.q, arrays.k)) unlocked.emplace();
    status =
        cuattn_attention_run(&call, &output.tensor, options.return_lse ? &lse->tensor : nullptr,
                             memory.data, memory.bytes, stream.handle);
  }
  check(status);
  if (!options.return_lse) return output.object;
  return nb::make_tuple(output.object, lse->object);
}

nb::object attention(nb::handle q, nb::handle k, nb::handle v, nb::handle layout, nb::handle causal,
                     nb::handle window, nb::handle scale, nb::handle softcap,
                     nb::handle alibi_slopes, nb::handle sinks, nb::handle bias,
                     nb::handle seqused_q, nb::handle seqused_k, nb::handle num_splits,
                     nb::handle batch_invariant, nb::handle return_lse, nb::handle out,
                     nb::handle lse_out, nb::handle workspace, nb::handle backend,
                     nb::handle stream) {
  nb::handle absent;
  AttentionArgs args{
      q,      k,         v,         absent,     absent,          absent,       absent,
      layout, causal,    window,    scale,      softcap,         alibi_slopes, sinks,
      bias,   seqused_q, seqused_k, num_splits, batch_invariant, return_lse,   backend,
      out,    lse_out,   workspace, stream};
  return run_attention("attention", args);
}

// A named cuBLAS has to be found first, which is Python's work.
bool names_cublas(const char* op, nb::handle backend) {
  return backend.is_valid() && std::strcmp(parse_text(op, "backend", backend), "cublas") == 0;
}

// The builtin cuattn.attention.
nb::object attention_given(AttentionArgs& args) {
  if (names_cublas("attention", args.backend)) return nb::borrow(Py_NotImplemented);
  return run_attention("attention", args);
}

// The builtin cuattn.attention_varlen; what it would refuse is left to Python.
nb::object attention_varlen_given(AttentionArgs& args) {
  const char* op = "attention_varlen";
  bool is_paged = is_given(args.block_tables);
  bool has_lengths = is_given(args.cu_seqlens_q) && (is_paged || is_given(args.cu_seqlens_k)) &&
                     is_given(args.max_seqlen_q) && is_given(args.max_seqlen_k);
  bool is_usual = has_lengths && (is_paged || !args.kv_layout.is_valid());
  if (!is_usual || names_cublas(op, args.backend)) return nb::borrow(Py_NotImplemented);
  return run_attention(op, args);
}

// What attention and attention_varlen take by name.
std::vector<Argument<AttentionArgs>> attention_keywords() {
  using A = AttentionArgs;
  return {{"causal", &A::causal},
          {"out", &A::out},
          {"scale", &A::scale},
          {"window", &A::window},
          {"return_lse", &A::return_lse},
          {"softcap", &A::softcap},
          {"sinks", &A::sinks},
          {"alibi_slopes", &A::alibi_slopes},
          {"bias", &A::bias},
          {"seqused_q", &A::seqused_q},
          {"seqused_k", &A::seqused_k},
          {"lse_out", &A::lse_out},
          {"num_splits", &A::num_splits},
          {"batch_invariant", &A::batch_invariant},
          {"workspace", &A::workspace},
          {"backend", &A::backend},
          {"stream", &A::stream}};
}

nb::object attention_front(nb::object python_function, const std::string& doc) {
  using A = AttentionArgs;
  std::vector<Argument<A>> keywords = attention_keywords();
  keywords.push_back({"layout", &A::layout});
  return Front<A, attention_given>::make(std::move(python_function), doc,
                                         {{"q", &A::q}, {"k", &A::k}, {"v", &A::v}},
                                         std::move(keywords));
}

nb::object attention_varlen_front(nb::object python_function, const std::string& doc) {
  using A = AttentionArgs;
  std::vector<Argument<A>> keywords = attention_keywords();
  keywords.push_back({"block_tables", &A::block_tables});
  keywords.push_back({"kv_layout", &A::kv_layout});
  return Front<A, attention_varlen_given>::make(std::move(python_function), doc,
                                                {{"q", &A::q},
                                                 {"k", &A::k},
                                                 {"v", &A::v},
                                                 {"cu_seqlens_q", &A::cu_seqlens_q},
                                                 {"cu_seqlens_k", &A::cu_seqlens_k},
                                                 {"max_seqlen_q", &A::max_seqlen_q},
                                                 {"max_seqlen_k", &A::max_seqlen_k}},
                                                std::move(keywords));
}

nb::object attention_varlen(nb::handle q, nb::handle k, nb::handle v, nb::handle cu_seqlens_q,
                            nb::handle cu_seqlens_k, nb::handle max_seqlen_q,
                            nb::handle max_seqlen_k, nb::handle block_tables, nb::handle kv_layout,
                            nb::handle causal, nb::handle window, nb::handle scale,
                            nb::handle softcap, nb::handle alibi_slopes, nb::handle sinks,
                            nb::handle bias, nb::handle seqused_q, nb::handle seqused_k,
                            nb::handle num_splits, nb::handle batch_invariant,
                            nb::handle return_lse, nb::handle out, nb::handle lse_out,
                            nb::handle workspace, nb::handle backend, nb::handle stream) {
  for (auto [name, value] :
       {std::pair("max_seqlen_q", max_seqlen_q), {"max_seqlen_k", max_seqlen_k}})
    parse_int("attention_varlen", name, value);  // None, which explain may leave, is no length here
  nb::handle layout;  // ragged arrays have one layout, which the library does not ask for
  AttentionArgs args{
      q,      k,         v,         cu_seqlens_q, cu_seqlens_k,    max_seqlen_q, max_seqlen_k,
      layout, causal,    window,    scale,        softcap,         alibi_slopes, sinks,
      bias,   seqused_q, seqused_k, num_splits,   batch_invariant, return_lse,   backend,
      out,    lse_out,   workspace, stream,       block_tables,    kv_layout};
  return run_attention("attention_varlen", args);
}

nb::object merge_states(nb::handle out_a, nb::handle lse_a, nb::handle out_b, nb::handle lse_b,
                        nb::handle layout_arg, nb::handle out, nb::handle lse_out,
                        nb::handle stream_arg) {
  const char* op = "merge_states";
  bool stacked = out_b.is_none();
  const char* out_name = stacked ? "outs" : "out_a";
  const char* lse_name = stacked ? "lses" : "lse_a";
  if (array_type(op, out_name, out_a).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream = parse_stream(op, stream_arg);
  Array a, la, b, lb;
  a.import(op, out_name, out_a, stream, nullptr);
  complete_stream(op, a, stream);
  la.import(op, lse_name, lse_a, stream, &a);
  if (!stacked) {
    b.import(op, "out_b", out_b, stream, &a);
    lb.import(op, "lse_b", lse_b, stream, &a);
  }
  int skip = stacked ? 1 : 0;  // the axis of the parts
  int32_t ndim = a.view.ndim - skip;
  if (ndim != 3 && ndim != 4) {
    raise(PyExc_ValueError, op, ": ", out_name, " must have ", 3 + skip, " or ", 4 + skip,
          " axes, got ", a.view.ndim, "; reshape it");
  }
  if (la.view.ndim != a.view.ndim - 1) {
    raise(PyExc_ValueError, op, ": ", lse_name, " must have one axis less than ", out_name, " (",
          a.view.ndim - 1, "), got ", la.view.ndim, "; reshape it");
  }
  int32_t layout = ndim == 4 ? CUATTN_LAYOUT_BSHD : CUATTN_LAYOUT_NHD;
  if (!layout_arg.is_none()) layout = parse_layout(op, layout_arg);

  Result merged, lse;
  merged.provide(op, "out", out, a, stream,
                 view_of(a.view.dtype, ndim, a.view.shape.data() + skip));
  lse.provide(op, "lse_out", lse_out, a, stream,
              view_of({kDLFloat, 32, 1}, ndim - 1, la.view.shape.data() + skip));
  cuattn_status status;
  {
    Unlocked unlocked;
    status = stacked ? cuattn_merge_many(&a.tensor, &la.tensor, &merged.tensor, &lse.tensor, layout,
                                         stream.handle)
                     : cuattn_merge_states(&a.tensor, &la.tensor, &b.tensor, &lb.tensor,
                                           &merged.tensor, &lse.tensor, layout, stream.handle);
  }
  check(status);
  return nb::make_tuple(merged.object, lse.object);
}

nb::dict explain(nb::handle q, nb::handle k, nb::handle v, nb::dict options, nb::handle dtype,
                 int shapes_on, nb::handle device) {
  nb::object cu_q = options["cu_seqlens_q"], cu_k = options["cu_seqlens_k"];
  const char* op = cu_q.is_none() ? "attention" : "attention_varlen";
  nb::handle none = Py_None;
  AttentionArgs args{q,
                     k,
                     v,
                     none,
                     none,
                     options["max_seqlen_q"],
                     options["max_seqlen_k"],
                     options["layout"],
                     options["causal"],
                     options["window"],
                     options["scale"],
                     options["softcap"],
                     none,
                     none,
                     none,
                     none,
                     none,
                     options["num_splits"],
                     options["batch_invariant"],
                     options["return_lse"],
                     options["backend"],
                     none,
                     none,
                     none,
                     none,
                     none,
                     options["kv_layout"]};
  cuattn_attention_options c = parse_options(op, args);
  DLDataType scalars = parse_dtype(op, dtype);
  DLDevice place = shapes_on < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, shapes_on};
  Array arrays[3 + 8];
  import_shape(op, "q", q, scalars, place, arrays[0]);
  import_shape(op, "k", k, scalars, place, arrays[1]);
  import_shape(op, "v", v, scalars, place, arrays[2]);
  struct Optional {
    const char* name;
    DLDataType dtype;
    const DLTensor** field;
  };
  DLDataType f32 = dl_dtype(DType::f32), i32 = dl_dtype(DType::i32);
  const Optional optionals[] = {{"alibi_slopes", f32, &c.alibi_slopes},
                                {"sinks", f32, &c.sinks},
                                {"bias", scalars, &c.bias},
                                {"seqused_q", i32, &c.seqused_q},
                                {"seqused_k", i32, &c.seqused_k},
                                {"cu_seqlens_q", i32, &c.cu_seqlens_q},
                                {"cu_seqlens_k", i32, &c.cu_seqlens_k},
                                {"block_tables", i32, &c.block_tables}};
  Array* array = arrays + 3;
  for (const Optional& optional : optionals) {
    nb::object value = options[optional.name];
    if (!value.is_none()) {
      import_shape(op, optional.name, value, optional.dtype, place, *array);
      *optional.field = &array->tensor;
    }
    ++array;
  }
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_attention_explain(&arrays[0].tensor, &arrays[1].tensor, &arrays[2].tensor, &c,
                                 device.is_none() ? nullptr : &made_up, &plan));
  return plan_dict(plan);
}

nb::list kernels() {
  nb::list list;
  int32_t count = cuattn_kernel_count();
  for (int32_t i = 0; i < count; ++i) {
    cuattn_kernel_info info;
    check(cuattn_kernel_at(i, &info));
    nb::dict row;
    row["op"] = info.op;
    row["kernel"] = info.kernel;
    row["arch"] = info.arch;
    row["dtype"] = info.dtype;
    row["head_dim"] = info.head_dim;
    row["head_dim_v"] = info.head_dim_v;
    row["mask"] = info.mask;
    row["score"] = info.score;
    list.append(row);
  }
  return list;
}

nb::dict xla_handlers() {
  nb::dict cpu, cuda;
  for (const xla::Handler* handler : {&xla::kAttention, &xla::kMergeStates, &xla::kPagedAttention,
                                      &xla::kReshapeAndCache, &xla::kGatherCache}) {
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
  add_block_pool(m);
  add_unlinked_file(m);
  add_backward(m);
  add_paged(m);
  add_cache(m);

  m.def(
      "attention", &attention,
      nb::sig(
          "def attention(q: object, k: object, v: object, layout: str, causal: bool, window: "
          "tuple[int, int], "
          "scale: float | None, softcap: float, alibi_slopes: object, sinks: object, bias: object, "
          "seqused_q: object, seqused_k: object, num_splits: int, batch_invariant: bool, "
          "return_lse: bool, "
          "out: object, lse_out: object, workspace: object, backend: str, stream: object) -> "
          "object"),
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("layout").none(),
      nb::arg("causal").none(), nb::arg("window").none(), nb::arg("scale").none(),
      nb::arg("softcap").none(), nb::arg("alibi_slopes").none(), nb::arg("sinks").none(),
      nb::arg("bias").none(), nb::arg("seqused_q").none(), nb::arg("seqused_k").none(),
      nb::arg("num_splits").none(), nb::arg("batch_invariant").none(), nb::arg("return_lse").none(),
      nb::arg("out").none(), nb::arg("lse_out").none(), nb::arg("workspace").none(),
      nb::arg("backend").none(), nb::arg("stream").none(),
      "cuattn.attention with every argument in its place. Returns out or (out, lse) in q's "
      "library, or NotImplemented\n"
      "for JAX arrays, which go through cuattn.jax.");
  m.def("attention_front", &attention_front, nb::arg("python_function"), nb::arg("doc"),
        nb::sig("def attention_front(python_function: object, doc: str) -> object"),
        "The builtin cuattn.attention, which serves what it can and leaves the rest to "
        "`python_function`.");
  m.def("attention_varlen_front", &attention_varlen_front, nb::arg("python_function"),
        nb::arg("doc"),
        nb::sig("def attention_varlen_front(python_function: object, doc: str) -> object"),
        "The builtin cuattn.attention_varlen, in the same way.");
  m.def("attention_varlen", &attention_varlen,
        nb::sig(
            "def attention_varlen(q: object, k: object, v: object, cu_seqlens_q: object, "
            "cu_seqlens_k: object, "
            "max_seqlen_q: int, max_seqlen_k: int, block_tables: object, kv_layout: str, causal: "
            "bool, window: tuple[int, int], scale: "
            "float | None, "
            "softcap: float, alibi_slopes: object, sinks: object, bias: object, seqused_q: object, "
            "seqused_k: object, num_splits: int, batch_invariant: bool, return_lse: bool, out: "
            "object, "
            "lse_out: object, workspace: object, backend: str, stream: object) -> object"),
        nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("cu_seqlens_q").none(), nb::arg("cu_seqlens_k").none(),
        nb::arg("max_seqlen_q").none(), nb::arg("max_seqlen_k").none(),
        nb::arg("block_tables").none(), nb::arg("kv_layout").none(), nb::arg("causal").none(),
        nb::arg("window").none(), nb::arg("scale").none(), nb::arg("softcap").none(),
        nb::arg("alibi_slopes").none(), nb::arg("sinks").none(), nb::arg("bias").none(),
        nb::arg("seqused_q").none(), nb::arg("seqused_k").none(), nb::arg("num_splits").none(),
        nb::arg("batch_invariant").none(), nb::arg("return_lse").none(), nb::arg("out").none(),
        nb::arg("lse_out").none(), nb::arg("workspace").none(), nb::arg("backend").none(),
        nb::arg("stream").none(),
        "cuattn.attention_varlen with every argument in its place; results as in `attention`.");
  m.def("merge_states", &merge_states,
        nb::sig("def merge_states(out_a: object, lse_a: object, out_b: object, lse_b: object, "
                "layout: str | None, "
                "out: object, lse_out: object, stream: object) -> object"),
        nb::arg("out_a").none(), nb::arg("lse_a").none(), nb::arg("out_b").none(),
        nb::arg("lse_b").none(), nb::arg("layout").none(), nb::arg("out").none(),
        nb::arg("lse_out").none(), nb::arg("stream").none(),
        "cuattn.merge_states; out_b = lse_b = None: the parts are stacked on the first axis of "
        "out_a and lse_a.");
  m.def("explain", &explain,
        nb::sig("def explain(q: object, k: object, v: object, options: dict[str, object], dtype: "
                "str, shapes_on: int, "
                "device: dict[str, object] | None) -> dict[str, object]"),
        nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("options").none(),
        nb::arg("dtype").none(), nb::arg("shapes_on").none(), nb::arg("device").none(),
        "The plan of an attention call. Each array may be a tuple of extents, which then is a "
        "contiguous array of\n"
        "`dtype` on CUDA device `shapes_on` (-1: the CPU). `device` describes a GPU other than the "
        "arrays' own.");
  m.def("kernels", &kernels, nb::sig("def kernels() -> list[dict[str, object]]"),
        "Every compiled kernel instance.");
  m.def(
      "info_json",
      [] {
        std::string text = cuattn_info_json();
        if (text == "{}") check(CUATTN_INVALID_ARGUMENT);  // an environment variable
        return text;
      },
      "Version, build, CPU and every GPU as a JSON object.");
  m.def("version", [] { return std::string(cuattn_version()); }, "The version of libcuattn.");
  m.def("xla_handlers", &xla_handlers,
        nb::sig("def xla_handlers() -> dict[str, dict[str, object]]"),
        "The XLA FFI handlers by platform and name, as jax.ffi.register_ffi_target takes them.");
}
