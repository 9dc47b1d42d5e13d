// SPDX-License-Identifier: Apache-2.0
// Which kernel a call would run: options and arrays, or shapes in their place, to a plan. Next:
// python/cuattn/_explain/__init__.py.
#include "bindings/explain.h"

#include <nanobind/stl/string.h>

#include <cstring>
#include <iterator>
#include <string>

#include "bindings/arrays/import.h"
#include "bindings/arrays/shapes.h"
#include "bindings/backward.h"
#include "bindings/call/errors.h"
#include "bindings/call/options.h"
#include "bindings/paged.h"
#include "cuattn/c_api.h"
#include "cuattn/c_api_mla.h"

namespace cuattn::bindings {
namespace {

cuattn_device parse_device(nb::handle fields) {
  cuattn_device device{};
  device.is_cuda = nb::cast<bool>(nb::object(fields["is_cuda"]));
  device.major = nb::cast<int32_t>(nb::object(fields["major"]));
  device.minor = nb::cast<int32_t>(nb::object(fields["minor"]));
  device.num_sms = nb::cast<int32_t>(nb::object(fields["num_sms"]));
  device.smem_per_block_optin = nb::cast<int32_t>(nb::object(fields["smem_per_block_optin"]));
  device.native = nb::cast<int32_t>(nb::object(fields["native"]));
  device.has_cublas = nb::cast<bool>(nb::object(fields["has_cublas"]));
  std::strncpy(device.name, nb::cast<std::string>(nb::object(fields["name"])).c_str(),
               sizeof device.name - 1);
  return device;
}

nb::dict plan_dict(const cuattn_plan& plan) {
  nb::dict result;
  result["kernel"] = plan.kernel;
  result["mask"] = plan.mask;
  result["score"] = plan.score;
  result["tile_m"] = plan.tile_m;
  result["tile_n"] = plan.tile_n;
  result["stages"] = plan.stages;
  result["warps"] = plan.warps;
  result["head_dim"] = plan.head_dim;
  result["head_dim_v"] = plan.head_dim_v;
  result["num_splits"] = plan.num_splits;
  result["cluster"] = plan.cluster;
  result["packed_heads"] = plan.packed_heads;
  result["schedule"] = plan.schedule;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["reason"] = plan.reason;
  result["ladder"] = plan.ladder;
  return result;
}

// What shapes mean: the dtype of q, and where they lie.
struct Shapes {
  DLDataType scalars;
  DLDevice place;
  bool has_gradient;

  Shapes(const char* op, nb::handle dtype, int device, bool has_gradient = false)
      : scalars(dtype_named(op, dtype)),
        place(device < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, device}),
        has_gradient(has_gradient) {}

  // Shapes beside an array as q are like it.
  void follow(const Array& q, nb::handle source) {
    if (PyTuple_Check(source.ptr())) return;
    place = q.view.device;
    if (q.view.dtype.bits > 8) scalars = q.view.dtype;
  }

  DLDataType of(Holds holds) const {
    switch (holds) {
      case Holds::float32: return dl_dtype(DType::f32);
      case Holds::int32: return dl_dtype(DType::i32);
      case Holds::int64: return dl_dtype(DType::i64);
      default: return scalars;
    }
  }
};

// The optional arrays of a call; they have to live as long as `options`.
template <class Args, class Options, size_t kCount>
void import_shapes(const char* op, const ArrayOption<Args, Options> (&list)[kCount],
                   const Args& args, const Shapes& shapes, Array (&arrays)[kCount],
                   Options& options) {
  for (size_t i = 0; i < kCount; ++i) {
    nb::handle source = args.*list[i].source;
    if (!is_given(source)) continue;
    bool is_array = PyTuple_Check(source.ptr()) || nb::hasattr(source, "__dlpack__");
    if (list[i].number != nullptr && !is_array) {
      options.*list[i].number = parse_double(op, list[i].name, source);
      continue;
    }
    import_shape(op, list[i].name, source, shapes.of(list[i].holds), shapes.place, arrays[i],
                 shapes.has_gradient);
    options.*list[i].tensor = &arrays[i].tensor;
  }
}

nb::dict explain(const nb::dict& arguments, nb::handle dtype, int shapes_on, nb::handle device) {
  AttentionArgs args = read_arguments<Attention>(arguments);
  const char* op = is_given(args.cu_seqlens_q) ? "attention_varlen" : "attention";
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  parse_options(op, args, options);
  Shapes shapes(op, dtype, shapes_on, true);
  if (shapes.scalars.code == kDLFloat8_e4m3fn) options.dtype = CUATTN_KV_DTYPE_E4M3;
  Array q, k, v, arrays[std::size(kAttentionArrays)];
  import_shape(op, "q", args.q, shapes.scalars, shapes.place, q, true);
  shapes.follow(q, args.q);
  import_shape(op, "k", args.k, shapes.scalars, shapes.place, k, true);
  import_shape(op, "v", args.v, shapes.scalars, shapes.place, v, true);
  import_shapes(op, kAttentionArrays, args, shapes, arrays, options);
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_attention_explain(&q.tensor, &k.tensor, &v.tensor, &options,
                                 device.is_none() ? nullptr : &made_up, &plan));
  return plan_dict(plan);
}

nb::dict explain_backward(const nb::dict& arguments, nb::handle dtype, int shapes_on,
                          nb::handle device) {
  BackwardArguments args(arguments);
  const char* op = args.op;
  Shapes shapes(op, dtype, shapes_on, true);
  DLDataType f32 = dl_dtype(DType::f32);
  Array dout, q, k, v, out, lse, dlse, options[std::size(kAttentionArrays)];
  import_shape(op, "q", args.forward.q, shapes.scalars, shapes.place, q, true);
  shapes.follow(q, args.forward.q);
  import_shape(op, "dout", args.own.dout, shapes.scalars, shapes.place, dout, true);
  import_shape(op, "k", args.forward.k, shapes.scalars, shapes.place, k, true);
  import_shape(op, "v", args.forward.v, shapes.scalars, shapes.place, v, true);
  import_shape(op, "out", args.own.out, shapes.scalars, shapes.place, out, true);
  import_shape(op, "lse", args.own.lse, f32, shapes.place, lse, true);
  import_shapes(op, kAttentionArrays, args.forward, shapes, options, args.options);
  if (is_given(args.own.dlse)) {
    import_shape(op, "dlse", args.own.dlse, f32, shapes.place, dlse, true);
    args.backward_options.dlse = &dlse.tensor;
  }
  cuattn_backward_arrays arrays{&dout.tensor, &q.tensor,   &k.tensor,
                                &v.tensor,    &out.tensor, &lse.tensor};
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_attention_backward_explain(&arrays, &args.options, &args.backward_options,
                                          device.is_none() ? nullptr : &made_up, &plan));
  return plan_dict(plan);
}

nb::dict explain_paged(int32_t version, const nb::dict& arguments, nb::handle dtype, int shapes_on,
                       nb::handle device) {
  const char* op = paged_function(version);
  PagedArgs args = read_arguments<PagedAttention>(arguments);
  cuattn_paged_options options = parse_paged(op, version, args);
  Shapes shapes(op, dtype, shapes_on);
  DLDataType i32 = dl_dtype(DType::i32);
  Array q, k_cache, v_cache, block_tables, context_lens, arrays[std::size(kPagedArrays)];
  import_shape(op, "q", args.q, shapes.scalars, shapes.place, q);
  shapes.follow(q, args.q);
  DLDataType caches =
      options.kv_dtype == CUATTN_KV_DTYPE_E4M3 ? dl_dtype(DType::e4m3) : shapes.scalars;
  import_shape(op, "k_cache", args.k_cache, caches, shapes.place, k_cache);
  import_shape(op, "v_cache", args.v_cache, caches, shapes.place, v_cache);
  import_shape(op, "block_tables", args.block_tables, i32, shapes.place, block_tables);
  import_shape(op, "context_lens", args.context_lens, i32, shapes.place, context_lens);
  import_shapes(op, kPagedArrays, args, shapes, arrays, options);
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_paged_explain(&q.tensor, &k_cache.tensor, &v_cache.tensor, &block_tables.tensor,
                             &context_lens.tensor, &options, device.is_none() ? nullptr : &made_up,
                             &plan));
  return plan_dict(plan);
}

nb::dict explain_mla(const nb::dict& arguments, nb::handle dtype, int shapes_on,
                     nb::handle device) {
  const char* op = "mla_decode";
  PagedArgs args = read_arguments<PagedAttention>(arguments);
  cuattn_paged_options options = parse_paged(op, 0, args);
  Shapes shapes(op, dtype, shapes_on);
  cuattn_mla_arrays given{};
  const struct {
    const char* name;
    const DLTensor*& tensor;
    Holds holds;
  } fields[] = {{"q_nope", given.q_nope, Holds::like_q},
                {"q_pe", given.q_pe, Holds::like_q},
                {"ckv_cache", given.ckv_cache, Holds::like_q},
                {"kpe_cache", given.kpe_cache, Holds::like_q},
                {"v_cache", given.v_cache, Holds::like_q},
                {"block_tables", given.block_tables, Holds::int32},
                {"context_lens", given.context_lens, Holds::int32},
                {"indices", given.indices, Holds::int32},
                {"topk_lens", given.topk_lens, Holds::int32}};
  Array arrays[std::size(fields)], optional[std::size(kPagedArrays)];
  for (size_t i = 0; i < std::size(fields); ++i) {
    if (!arguments.contains(fields[i].name)) continue;
    nb::object source(arguments[fields[i].name]);
    if (!is_given(source)) continue;
    import_shape(op, fields[i].name, source, shapes.of(fields[i].holds), shapes.place, arrays[i]);
    fields[i].tensor = &arrays[i].tensor;
  }
  import_shapes(op, kPagedArrays, args, shapes, optional, options);
  cuattn_device made_up;
  if (!device.is_none()) made_up = parse_device(device);
  cuattn_plan plan;
  check(cuattn_mla_decode_explain(&given, &options, device.is_none() ? nullptr : &made_up, &plan));
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

}  // namespace

void add_explain(nb::module_& m) {
  m.def("explain", &explain, nb::arg("arguments"), nb::arg("dtype").none(), nb::arg("shapes_on"),
        nb::arg("device").none(),
        nb::sig("def explain(arguments: dict[str, object], dtype: str, shapes_on: int, device: "
                "dict[str, object] | None) -> dict[str, object]"),
        "The plan of an attention call. Each array may be a tuple of extents, which then is a "
        "contiguous array of\n"
        "`dtype` on CUDA device `shapes_on` (-1: the CPU). `device` describes a GPU other than the "
        "arrays' own.");
  m.def("explain_backward", &explain_backward, nb::arg("arguments"), nb::arg("dtype").none(),
        nb::arg("shapes_on"), nb::arg("device").none(),
        nb::sig("def explain_backward(arguments: dict[str, object], dtype: str, shapes_on: int, "
                "device: dict[str, object] | None) -> dict[str, object]"),
        "The plan of a backward pass, as `explain` gives that of attention.");
  m.def("explain_paged", &explain_paged, nb::arg("version"), nb::arg("arguments"),
        nb::arg("dtype").none(), nb::arg("shapes_on"), nb::arg("device").none(),
        nb::sig("def explain_paged(version: int, arguments: dict[str, object], dtype: str, "
                "shapes_on: int, device: dict[str, object] | None) -> dict[str, object]"),
        "The plan of a call of paged attention, as `explain` gives that of attention.");
  m.def("explain_mla", &explain_mla, nb::arg("arguments"), nb::arg("dtype").none(),
        nb::arg("shapes_on"), nb::arg("device").none(),
        nb::sig("def explain_mla(arguments: dict[str, object], dtype: str, shapes_on: int, "
                "device: dict[str, object] | None) -> dict[str, object]"),
        "The plan of a call of mla_decode, as `explain` gives that of attention.");
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
}

}  // namespace cuattn::bindings
