// SPDX-License-Identifier: Apache-2.0
// Paged attention of the module: arrays and options of each function to the C structs, and back.
// Next: python/cuattn/paged.py.
#include "bindings/paged.h"

#include <optional>
#include <string>
#include <utility>

#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/call/errors.h"
#include "bindings/call/front.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "bindings/explain.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

// The arguments of the three functions; an invalid handle is one that the function does not have.
struct PagedArgs {
  nb::handle q, k_cache, v_cache, block_tables, context_lens;
  nb::handle kv_layout, scale, causal, window, softcap, alibi_slopes, sinks, k_scale, v_scale;
  nb::handle kv_dtype, plan, num_splits, batch_invariant, return_lse;
  nb::handle out, lse_out, workspace, backend, stream;
  nb::handle exp_sums{}, max_logits{}, tmp_out{}, partition_size{}, max_context_len{};
};

const char* function_of(int32_t version) {
  return version == 1   ? "paged_attention_v1"
         : version == 2 ? "paged_attention_v2"
                        : "paged_attention";
}

int32_t parse_kv_dtype(const char* op, nb::handle value) {
  if (!is_given(value)) return CUATTN_KV_DTYPE_AUTO;
  const char* text = parse_text(op, "kv_dtype", value);
  if (std::strcmp(text, "float8_e4m3fn") == 0) return CUATTN_KV_DTYPE_E4M3;
  raise(PyExc_ValueError, op, ": kv_dtype must be None or 'float8_e4m3fn', got '", text,
        "'; it says what uint8 caches hold, other caches say so themselves");
}

void parse_mask(const char* op, const PagedArgs& args, cuattn_paged_options& o) {
  if (args.causal.is_valid()) o.causal = parse_bool(op, "causal", args.causal);
  if (!args.window.is_valid()) return;
  cuattn_attention_options sides;
  parse_window(op, args.window, sides);
  o.window_left = sides.window_left;
  o.window_right = sides.window_right;
}

cuattn_paged_options parse_paged(const char* op, int32_t version, const PagedArgs& args) {
  cuattn_paged_options o;
  cuattn_paged_options_init(&o, sizeof o);
  o.version = version;
  if (args.kv_layout.is_valid()) o.kv_layout = parse_kv_layout(op, args.kv_layout);
  o.kv_dtype = parse_kv_dtype(op, args.kv_dtype);
  parse_mask(op, args, o);
  o.has_scale = is_given(args.scale);
  if (o.has_scale) o.scale = parse_double(op, "scale", args.scale);
  if (args.softcap.is_valid()) o.softcap = parse_double(op, "softcap", args.softcap);
  if (args.num_splits.is_valid()) o.num_splits = parse_int32(op, "num_splits", args.num_splits);
  if (args.batch_invariant.is_valid())
    o.batch_invariant = parse_bool(op, "batch_invariant", args.batch_invariant);
  if (args.partition_size.is_valid())
    o.partition_size = parse_int(op, "partition_size", args.partition_size);
  if (is_given(args.max_context_len)) {
    o.max_context_len = parse_int(op, "max_context_len", args.max_context_len);
    if (o.max_context_len < 0)
      raise(PyExc_ValueError, op, ": max_context_len must be >= 0, got ", o.max_context_len,
            "; pass None for what block_tables can name");
  }
  if (args.backend.is_valid()) o.backend = parse_text(op, "backend", args.backend);
  return o;
}

struct PagedArrays {
  Array q, k_cache, v_cache, block_tables, context_lens;
  std::optional<Array> alibi_slopes, sinks, k_scale, v_scale, plan, exp_sums, max_logits, tmp_out;

  void import(const char* op, int32_t version, const PagedArgs& args, CallStream& stream,
              cuattn_paged_options& o) {
    q.import(op, "q", args.q, stream, nullptr);
    complete_stream(op, q, stream);
    k_cache.import(op, version == 0 ? "k_cache" : "key_cache", args.k_cache, stream, &q);
    v_cache.import(op, version == 0 ? "v_cache" : "value_cache", args.v_cache, stream, &q);
    block_tables.import(op, "block_tables", args.block_tables, stream, &q);
    context_lens.import(op, "context_lens", args.context_lens, stream, &q);
    optional(op, "alibi_slopes", args.alibi_slopes, stream, alibi_slopes, o.alibi_slopes);
    optional(op, "sinks", args.sinks, stream, sinks, o.sinks);
    optional(op, "plan", args.plan, stream, plan, o.plan);
    scale(op, "k_scale", args.k_scale, stream, k_scale, o.k_scale, o.k_scales);
    scale(op, "v_scale", args.v_scale, stream, v_scale, o.v_scale, o.v_scales);
    optional(op, "exp_sums", args.exp_sums, stream, exp_sums, o.exp_sums, true);
    optional(op, "max_logits", args.max_logits, stream, max_logits, o.max_logits, true);
    optional(op, "tmp_out", args.tmp_out, stream, tmp_out, o.tmp_out, true);
  }

 private:
  void optional(const char* op, const char* name, nb::handle source, const CallStream& stream,
                std::optional<Array>& array, const DLTensor*& option, bool output = false) {
    if (!is_given(source)) return;
    array.emplace().import(op, name, source, stream, &q, output);
    option = &array->tensor;
  }

  // A number, or an array of numbers.
  void scale(const char* op, const char* name, nb::handle source, const CallStream& stream,
             std::optional<Array>& array, double& number, const DLTensor*& option) {
    if (!is_given(source)) return;
    if (nb::hasattr(source, "__dlpack__")) {
      optional(op, name, source, stream, array, option);
    } else {
      number = parse_double(op, name, source);
    }
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

nb::object run_paged(int32_t version, const PagedArgs& args) {
  const char* op = function_of(version);
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
  Result output;
  std::optional<Result> lse;
  output.provide(op, "out", args.out, arrays.q, stream,
                 view_of(call.out_dtype, call.out_ndim, call.out_shape));
  if (wants_lse) {
    lse.emplace().provide(op, "lse_out", args.lse_out, arrays.q, stream,
                          view_of({kDLFloat, 32, 1}, call.lse_ndim, call.lse_shape));
  }
  CallWorkspace memory;
  memory.place(op, args.workspace, arrays.q, call.workspace_bytes, stream);
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_paged_run(&call, &output.tensor, wants_lse ? &lse->tensor : nullptr,
                              memory.data, memory.bytes, stream.handle);
  }
  check(status);
  if (!wants_lse) return output.object;
  return nb::make_tuple(output.object, lse->object);
}

nb::object paged_attention(nb::handle q, nb::handle k_cache, nb::handle v_cache,
                           nb::handle block_tables, nb::handle context_lens, nb::handle kv_layout,
                           nb::handle scale, nb::handle causal, nb::handle window,
                           nb::handle softcap, nb::handle alibi_slopes, nb::handle sinks,
                           nb::handle k_scale, nb::handle v_scale, nb::handle kv_dtype,
                           nb::handle plan, nb::handle num_splits, nb::handle batch_invariant,
                           nb::handle return_lse, nb::handle out, nb::handle lse_out,
                           nb::handle workspace, nb::handle backend, nb::handle stream) {
  PagedArgs args{q,          k_cache, v_cache,  block_tables, context_lens, kv_layout,
                 scale,      causal,  window,   softcap,      alibi_slopes, sinks,
                 k_scale,    v_scale, kv_dtype, plan,         num_splits,   batch_invariant,
                 return_lse, out,     lse_out,  workspace,    backend,      stream};
  return run_paged(0, args);
}

nb::object paged_attention_given(PagedArgs& args) { return run_paged(0, args); }

nb::object paged_attention_front(nb::object python_function, const std::string& doc) {
  using A = PagedArgs;
  return Front<A, paged_attention_given>::make(std::move(python_function), doc,
                                               {{"q", &A::q},
                                                {"k_cache", &A::k_cache},
                                                {"v_cache", &A::v_cache},
                                                {"block_tables", &A::block_tables},
                                                {"context_lens", &A::context_lens}},
                                               {{"out", &A::out},
                                                {"workspace", &A::workspace},
                                                {"plan", &A::plan},
                                                {"scale", &A::scale},
                                                {"kv_layout", &A::kv_layout},
                                                {"causal", &A::causal},
                                                {"window", &A::window},
                                                {"softcap", &A::softcap},
                                                {"sinks", &A::sinks},
                                                {"alibi_slopes", &A::alibi_slopes},
                                                {"k_scale", &A::k_scale},
                                                {"v_scale", &A::v_scale},
                                                {"kv_dtype", &A::kv_dtype},
                                                {"num_splits", &A::num_splits},
                                                {"batch_invariant", &A::batch_invariant},
                                                {"return_lse", &A::return_lse},
                                                {"lse_out", &A::lse_out},
                                                {"backend", &A::backend},
                                                {"stream", &A::stream}});
}

nb::object paged_attention_v1(nb::handle out, nb::handle q, nb::handle key_cache,
                              nb::handle value_cache, nb::handle block_tables,
                              nb::handle context_lens, nb::handle scale, nb::handle kv_layout,
                              nb::handle alibi_slopes, nb::handle k_scale, nb::handle v_scale,
                              nb::handle stream) {
  PagedArgs args{};
  args.out = out;
  args.q = q;
  args.k_cache = key_cache;
  args.v_cache = value_cache;
  args.block_tables = block_tables;
  args.context_lens = context_lens;
  args.scale = scale;
  args.kv_layout = kv_layout;
  args.alibi_slopes = alibi_slopes;
  args.k_scale = k_scale;
  args.v_scale = v_scale;
  args.stream = stream;
  return run_paged(1, args);
}

nb::object paged_attention_v2(nb::handle out, nb::handle q, nb::handle key_cache,
                              nb::handle value_cache, nb::handle block_tables,
                              nb::handle context_lens, nb::handle scale, nb::handle exp_sums,
                              nb::handle max_logits, nb::handle tmp_out, nb::handle partition_size,
                              nb::handle max_context_len, nb::handle kv_layout,
                              nb::handle alibi_slopes, nb::handle k_scale, nb::handle v_scale,
                              nb::handle stream) {
  PagedArgs args{};
  args.out = out;
  args.q = q;
  args.k_cache = key_cache;
  args.v_cache = value_cache;
  args.block_tables = block_tables;
  args.context_lens = context_lens;
  args.scale = scale;
  args.exp_sums = exp_sums;
  args.max_logits = max_logits;
  args.tmp_out = tmp_out;
  args.partition_size = partition_size;
  args.max_context_len = max_context_len;
  args.kv_layout = kv_layout;
  args.alibi_slopes = alibi_slopes;
  args.k_scale = k_scale;
  args.v_scale = v_scale;
  args.stream = stream;
  return run_paged(2, args);
}

nb::object paged_plan(nb::handle block_tables, nb::handle context_lens, nb::handle num_heads_q,
                      nb::handle num_heads_kv, nb::handle head_dim, nb::handle block_size,
                      nb::handle q_len, nb::handle dtype, nb::handle kv_layout, nb::handle kv_dtype,
                      nb::handle causal, nb::handle window, nb::handle out, nb::handle backend,
                      nb::handle stream_arg) {
  const char* op = "paged_plan";
  refuse_jax(op, "context_lens", context_lens,
             "use paged_attention without plan=, which makes one inside the call");
  CallStream stream = parse_stream(op, stream_arg);
  PagedArgs args{};
  args.kv_layout = kv_layout;
  args.kv_dtype = kv_dtype;
  args.causal = causal;
  args.window = window;
  args.backend = backend;
  cuattn_paged_options options = parse_paged(op, 0, args);
  cuattn_paged_shape shape{parse_int(op, "q_len", q_len),
                           parse_int(op, "num_heads_q", num_heads_q),
                           parse_int(op, "num_heads_kv", num_heads_kv),
                           parse_int(op, "head_dim", head_dim),
                           parse_int(op, "block_size", block_size),
                           parse_dtype(op, dtype)};
  Array lens, tables;
  lens.import(op, "context_lens", context_lens, stream, nullptr);
  complete_stream(op, lens, stream);
  tables.import(op, "block_tables", block_tables, stream, &lens);
  cuattn_attention_call call;
  check(cuattn_paged_plan_prepare(&tables.tensor, &lens.tensor, &shape, &options, &call));
  Result plan;
  plan.provide(op, "out", out, lens, stream,
               view_of(call.out_dtype, call.out_ndim, call.out_shape));
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_paged_plan_run(&call, &plan.tensor, stream.handle);
  }
  check(status);
  return plan.object;
}

nb::dict explain_paged(int32_t version, const nb::tuple& given, const nb::dict& options,
                       nb::handle dtype, int shapes_on, nb::handle device) {
  const char* op = function_of(version);
  PagedArgs args{};
  for (auto [name, field] : {std::pair("kv_layout", &PagedArgs::kv_layout),
                             {"scale", &PagedArgs::scale},
                             {"causal", &PagedArgs::causal},
                             {"window", &PagedArgs::window},
                             {"softcap", &PagedArgs::softcap},
                             {"kv_dtype", &PagedArgs::kv_dtype},
                             {"num_splits", &PagedArgs::num_splits},
                             {"batch_invariant", &PagedArgs::batch_invariant},
                             {"partition_size", &PagedArgs::partition_size},
                             {"max_context_len", &PagedArgs::max_context_len},
                             {"backend", &PagedArgs::backend}}) {
    args.*field = options[name];
  }
  cuattn_paged_options c = parse_paged(op, version, args);
  DLDataType scalars = parse_dtype(op, dtype), f32 = dl_dtype(DType::f32),
             i32 = dl_dtype(DType::i32);
  DLDataType caches = c.kv_dtype == CUATTN_KV_DTYPE_E4M3 ? dl_dtype(DType::e4m3) : scalars;
  DLDevice place = shapes_on < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, shapes_on};
  struct Item {
    const char* name;
    DLDataType dtype;
    const DLTensor** field;
  };
  const DLTensor* positional[5];
  const Item items[] = {{"q", scalars, &positional[0]},
                        {"k_cache", caches, &positional[1]},
                        {"v_cache", caches, &positional[2]},
                        {"block_tables", i32, &positional[3]},
                        {"context_lens", i32, &positional[4]},
                        {"alibi_slopes", f32, &c.alibi_slopes},
                        {"sinks", f32, &c.sinks},
                        {"plan", i32, &c.plan}};
  Array arrays[std::size(items)], scales[2];
  for (size_t i = 0; i < std::size(items); ++i) {
    nb::object value = i < 5 ? nb::object(given[i]) : nb::object(options[items[i].name]);
    if (i >= 5 && value.is_none()) continue;
    import_shape(op, items[i].name, value, items[i].dtype, place, arrays[i]);
    *items[i].field = &arrays[i].tensor;
  }
  auto read_scale = [&](const char* name, Array& array, double& number, const DLTensor*& field) {
    nb::object value = options[name];
    if (value.is_none()) return;
    if (PyTuple_Check(value.ptr()) || nb::hasattr(value, "__dlpack__")) {
      import_shape(op, name, value, f32, place, array);
      field = &array.tensor;
    } else {
      number = parse_double(op, name, value);
    }
  };
  read_scale("k_scale", scales[0], c.k_scale, c.k_scales);
  read_scale("v_scale", scales[1], c.v_scale, c.v_scales);
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_paged_explain(positional[0], positional[1], positional[2], positional[3],
                             positional[4], &c, device.is_none() ? nullptr : &made_up, &plan));
  return plan_dict(plan);
}

}  // namespace

void add_paged(nb::module_& m) {
  m.def("paged_attention", &paged_attention,
        nb::sig("def paged_attention(q: object, k_cache: object, v_cache: object, block_tables: "
                "object, context_lens: object, kv_layout: str, scale: float | None, causal: bool, "
                "window: tuple[int, int], softcap: float, alibi_slopes: object, sinks: object, "
                "k_scale: object, v_scale: object, kv_dtype: str | None, plan: object, num_splits: "
                "int, batch_invariant: bool, return_lse: bool, out: object, lse_out: object, "
                "workspace: object, backend: str, stream: object) -> object"),
        nb::arg("q").none(), nb::arg("k_cache").none(), nb::arg("v_cache").none(),
        nb::arg("block_tables").none(), nb::arg("context_lens").none(), nb::arg("kv_layout").none(),
        nb::arg("scale").none(), nb::arg("causal").none(), nb::arg("window").none(),
        nb::arg("softcap").none(), nb::arg("alibi_slopes").none(), nb::arg("sinks").none(),
        nb::arg("k_scale").none(), nb::arg("v_scale").none(), nb::arg("kv_dtype").none(),
        nb::arg("plan").none(), nb::arg("num_splits").none(), nb::arg("batch_invariant").none(),
        nb::arg("return_lse").none(), nb::arg("out").none(), nb::arg("lse_out").none(),
        nb::arg("workspace").none(), nb::arg("backend").none(), nb::arg("stream").none(),
        "cuattn.paged_attention with every argument in its place.");
  m.def("paged_attention_front", &paged_attention_front, nb::arg("python_function"), nb::arg("doc"),
        nb::sig("def paged_attention_front(python_function: object, doc: str) -> object"),
        "The builtin cuattn.paged_attention, as `attention_front` makes that of attention.");
  m.def("paged_attention_v1", &paged_attention_v1,
        nb::sig("def paged_attention_v1(out: object, q: object, key_cache: object, value_cache: "
                "object, block_tables: object, context_lens: object, scale: float, kv_layout: str, "
                "alibi_slopes: object, k_scale: object, v_scale: object, stream: object) -> "
                "object"),
        nb::arg("out").none(), nb::arg("q").none(), nb::arg("key_cache").none(),
        nb::arg("value_cache").none(), nb::arg("block_tables").none(),
        nb::arg("context_lens").none(), nb::arg("scale").none(), nb::arg("kv_layout").none(),
        nb::arg("alibi_slopes").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
        nb::arg("stream").none(), "cuattn.paged_attention_v1 with every argument in its place.");
  m.def("paged_attention_v2", &paged_attention_v2,
        nb::sig("def paged_attention_v2(out: object, q: object, key_cache: object, value_cache: "
                "object, block_tables: object, context_lens: object, scale: float, exp_sums: "
                "object, max_logits: object, tmp_out: object, partition_size: int, "
                "max_context_len: int | None, kv_layout: str, alibi_slopes: object, k_scale: "
                "object, v_scale: object, stream: object) -> object"),
        nb::arg("out").none(), nb::arg("q").none(), nb::arg("key_cache").none(),
        nb::arg("value_cache").none(), nb::arg("block_tables").none(),
        nb::arg("context_lens").none(), nb::arg("scale").none(), nb::arg("exp_sums").none(),
        nb::arg("max_logits").none(), nb::arg("tmp_out").none(), nb::arg("partition_size").none(),
        nb::arg("max_context_len").none(), nb::arg("kv_layout").none(),
        nb::arg("alibi_slopes").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
        nb::arg("stream").none(), "cuattn.paged_attention_v2 with every argument in its place.");
  m.def("paged_plan", &paged_plan,
        nb::sig("def paged_plan(block_tables: object, context_lens: object, num_heads_q: int, "
                "num_heads_kv: int, head_dim: int, block_size: int, q_len: int, dtype: str, "
                "kv_layout: str, kv_dtype: str | None, causal: bool, window: tuple[int, int], out: "
                "object, backend: str, stream: object) -> object"),
        nb::arg("block_tables").none(), nb::arg("context_lens").none(),
        nb::arg("num_heads_q").none(), nb::arg("num_heads_kv").none(), nb::arg("head_dim").none(),
        nb::arg("block_size").none(), nb::arg("q_len").none(), nb::arg("dtype").none(),
        nb::arg("kv_layout").none(), nb::arg("kv_dtype").none(), nb::arg("causal").none(),
        nb::arg("window").none(), nb::arg("out").none(), nb::arg("backend").none(),
        nb::arg("stream").none(), "cuattn.paged_plan with every argument in its place.");
  m.def("explain_paged", &explain_paged,
        nb::sig("def explain_paged(version: int, arrays: tuple[object, ...], options: dict[str, "
                "object], dtype: str, shapes_on: int, device: dict[str, object] | None) -> "
                "dict[str, object]"),
        nb::arg("version"), nb::arg("arrays"), nb::arg("options"), nb::arg("dtype").none(),
        nb::arg("shapes_on"), nb::arg("device").none(),
        "The plan of a call of paged attention, as `explain` gives that of attention.");
}

}  // namespace cuattn::bindings
