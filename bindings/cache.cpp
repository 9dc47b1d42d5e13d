// SPDX-License-Identifier: Apache-2.0
// reshape_and_cache, gather_cache, copy_blocks, swap_blocks, and host memory for the last: each a
// thin frame around the C ABI. Next: python/cuattn/kv_cache.py.
#include "bindings/cache.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/arrays/import.h"
#include "bindings/arrays/results.h"
#include "bindings/arrays/shapes.h"
#include "bindings/arrays/slots.h"
#include "bindings/arrays/turning.h"
#include "bindings/call/errors.h"
#include "bindings/call/parse.h"
#include "bindings/call/unlocked.h"
#include "cuattn/c_api.h"

namespace cuattn::bindings {
namespace {

// A number or an array.
struct Scale {
  std::optional<Array> array;

  void import(const char* op, const char* name, nb::handle value, const CallStream& stream,
              const Array& home, int32_t& has_number, double& number, const DLTensor*& tensor) {
    if (!is_given(value)) return;
    if (!nb::hasattr(value, "__dlpack__")) {
      number = parse_double(op, name, value);
      has_number = 1;
    } else {
      array.emplace().import(op, name, value, stream, &home);
      tensor = &array->tensor;
    }
  }
};

nb::object reshape_and_cache(nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache,
                             nb::handle slot_mapping, nb::handle block_tables,
                             nb::handle context_lens, nb::handle kv_layout, nb::handle k_scale,
                             nb::handle v_scale, nb::handle cos, nb::handle sin,
                             nb::handle positions, nb::handle rope_interleaved,
                             nb::handle stream_arg) {
  const char* op = "reshape_and_cache";
  if (array_type(op, "k", k).library == Library::jax) return nb::borrow(Py_NotImplemented);
  CallStream stream = parse_stream(op, stream_arg);
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  options.kv_layout = parse_kv_layout(op, kv_layout);
  options.rope_interleaved = parse_bool(op, "rope_interleaved", rope_interleaved);
  Array rows_k, rows_v, cache_k, cache_v;
  SlotArrays slots;
  rows_k.import(op, "k", k, stream, nullptr);
  complete_stream(op, rows_k, stream);
  rows_v.import(op, "v", v, stream, &rows_k);
  cache_k.import(op, "k_cache", k_cache, stream, &rows_k, true);
  cache_v.import(op, "v_cache", v_cache, stream, &rows_k, true);
  slots.import(op, slot_mapping, block_tables, context_lens, stream, rows_k, options);
  Scale scale_k, scale_v;
  scale_k.import(op, "k_scale", k_scale, stream, rows_k, options.has_k_scale, options.k_scale,
                 options.k_scales);
  scale_v.import(op, "v_scale", v_scale, stream, rows_k, options.has_v_scale, options.v_scale,
                 options.v_scales);
  Turning turning;
  turning.import(op, cos, sin, positions, stream, rows_k, options);
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_reshape_and_cache(&rows_k.tensor, &rows_v.tensor, &cache_k.tensor,
                                      &cache_v.tensor, slots.slot_mapping, &options, stream.handle);
  }
  check(status);
  return nb::make_tuple(k_cache, v_cache);
}

// What reshape_and_cache would refuse, told from dtypes and shapes. `arrays` are those of the call
// by name, each as explain takes it.
void check_reshape_and_cache(const nb::dict& arrays, nb::handle kv_layout, nb::handle k_scale,
                             nb::handle v_scale, nb::handle rope_interleaved, int shapes_on) {
  const char* op = "reshape_and_cache";
  cuattn_cache_options options;
  cuattn_cache_options_init(&options, sizeof options);
  options.kv_layout = parse_kv_layout(op, kv_layout);
  options.rope_interleaved = parse_bool(op, "rope_interleaved", rope_interleaved);
  options.has_k_scale = is_given(k_scale);
  options.has_v_scale = is_given(v_scale);
  if (options.has_k_scale) options.k_scale = parse_double(op, "k_scale", k_scale);
  if (options.has_v_scale) options.v_scale = parse_double(op, "v_scale", v_scale);
  DLDevice place = shapes_on < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, shapes_on};
  const DLTensor* positional[5] = {};
  const std::pair<const char*, const DLTensor**> fields[] = {{"k", &positional[0]},
                                                             {"v", &positional[1]},
                                                             {"k_cache", &positional[2]},
                                                             {"v_cache", &positional[3]},
                                                             {"slot_mapping", &positional[4]},
                                                             {"k_scale", &options.k_scales},
                                                             {"v_scale", &options.v_scales},
                                                             {"cos", &options.cos},
                                                             {"sin", &options.sin},
                                                             {"positions", &options.positions}};
  Array views[std::size(fields)];
  for (size_t i = 0; i < std::size(fields); ++i) {
    auto [name, field] = fields[i];
    if (!arrays.contains(name)) continue;
    import_shape(op, name, nb::object(arrays[name]), {}, place, views[i]);
    *field = &views[i].tensor;
  }
  check(cuattn_reshape_and_cache_check(positional[0], positional[1], positional[2], positional[3],
                                       positional[4], &options));
}

// The rows that `total` tokens of a cache make.
TensorView rows_of(const char* name, const TensorView& cache, bool is_k, nb::handle kv_layout_arg,
                   int64_t total) {
  const char* op = "gather_cache";
  int32_t kv_layout = parse_kv_layout(op, kv_layout_arg);
  int32_t head = kv_layout == CUATTN_KV_NHD ? 2 : 1, dim = kv_layout == CUATTN_KV_VLLM ? 2 : 3;
  bool grouped = is_k && kv_layout == CUATTN_KV_VLLM;
  int32_t ndim = grouped ? 5 : 4;
  if (cache.ndim != ndim)
    raise(PyExc_ValueError, op, ": ", name, " must have ", ndim, " axes in kv_layout '",
          text_of(kv_layout_arg), "', got ", cache.ndim, "; reshape it");
  int64_t shape[3] = {total, cache.shape[head], cache.shape[dim] * (grouped ? cache.shape[4] : 1)};
  return view_of(cache.dtype, 3, shape);
}

nb::object gather_cache(nb::handle k_cache, nb::handle v_cache, nb::handle block_tables,
                        nb::handle cu_seqlens, nb::handle kv_layout_arg, nb::handle k_out,
                        nb::handle v_out, nb::handle stream_arg) {
  const char* op = "gather_cache";
  if (array_type(op, "k_cache", k_cache).library == Library::jax)
    return nb::borrow(Py_NotImplemented);
  CallStream stream = parse_stream(op, stream_arg);
  int32_t kv_layout = parse_kv_layout(op, kv_layout_arg);
  Array cache_k, cache_v, tables, ends;
  cache_k.import(op, "k_cache", k_cache, stream, nullptr);
  complete_stream(op, cache_k, stream);
  cache_v.import(op, "v_cache", v_cache, stream, &cache_k);
  tables.import(op, "block_tables", block_tables, stream, &cache_k);
  ends.import(op, "cu_seqlens", cu_seqlens, stream, &cache_k);

  int64_t total = 0;
  if (!is_given(k_out) || !is_given(v_out)) {
    cuattn_status counted;
    {
      Unlocked unlocked;  // on CUDA it waits for the stream
      counted = cuattn_gather_cache_total(&ends.tensor, stream.handle, &total);
    }
    check(counted);
  }
  Result rows_k, rows_v;
  rows_k.provide(op, "k_out", k_out, cache_k, stream,
                 rows_of("k_cache", cache_k.view, true, kv_layout_arg, total));
  rows_v.provide(op, "v_out", v_out, cache_k, stream,
                 rows_of("v_cache", cache_v.view, false, kv_layout_arg, total));
  if (is_given(k_out) != is_given(v_out)) {
    bool is_k = is_given(k_out);
    const DLTensor& given = is_k ? rows_k.tensor : rows_v.tensor;
    if (given.ndim > 0 && given.shape[0] != total)
      raise(PyExc_ValueError, op, ": ", is_k ? "k_out" : "v_out",
            " must have cu_seqlens[-1] = ", total, " rows where ", is_k ? "v_out" : "k_out",
            " is left out, got ", given.shape[0], "; pass both of them, or neither");
  }
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_gather_cache(&cache_k.tensor, &cache_v.tensor, &tables.tensor, &ends.tensor,
                                 &rows_k.tensor, &rows_v.tensor, kv_layout, stream.handle);
  }
  check(status);
  return nb::make_tuple(rows_k.object, rows_v.object);
}

// The same for gather_cache into `total` rows. Returns the shapes of k and v.
nb::object check_gather_cache(nb::handle k_cache, nb::handle v_cache, nb::handle block_tables,
                              nb::handle cu_seqlens, nb::handle kv_layout, nb::handle total,
                              int shapes_on) {
  const char* op = "gather_cache";
  DLDevice place = shapes_on < 0 ? DLDevice{kDLCPU, 0} : DLDevice{kDLCUDA, shapes_on};
  int64_t num_tokens = parse_int(op, "total", total);
  if (num_tokens < 0)
    raise(PyExc_ValueError, op, ": total must be >= 0, got ", num_tokens,
          "; pass the rows of the result");
  Array cache_k, cache_v, tables, ends;
  import_shape(op, "k_cache", k_cache, {}, place, cache_k);
  import_shape(op, "v_cache", v_cache, {}, place, cache_v);
  import_shape(op, "block_tables", block_tables, {}, place, tables);
  import_shape(op, "cu_seqlens", cu_seqlens, {}, place, ends);
  TensorView rows[2] = {rows_of("k_cache", cache_k.view, true, kv_layout, num_tokens),
                        rows_of("v_cache", cache_v.view, false, kv_layout, num_tokens)};
  nb::list shapes;
  for (TensorView& view : rows) {
    view.device = place;
    view.strides[2] = 1;
    view.strides[1] = view.shape[2];
    view.strides[0] = view.shape[1] * view.shape[2];
    shapes.append(nb::make_tuple(view.shape[0], view.shape[1], view.shape[2]));
  }
  DLTensor k_out = rows[0].dl(), v_out = rows[1].dl();
  check(cuattn_gather_cache_check(&cache_k.tensor, &cache_v.tensor, &tables.tensor, &ends.tensor,
                                  &k_out, &v_out, parse_kv_layout(op, kv_layout)));
  return nb::tuple(shapes);
}

// A list of per-layer caches, or one cache.
struct CacheArrays {
  std::vector<std::unique_ptr<Array>> arrays;
  std::vector<const DLTensor*> tensors;

  void import(const char* op, const char* name, nb::handle source, const CallStream& stream,
              const Array* home, bool output) {
    auto add = [&](const std::string& item_name, nb::handle item) {
      if (array_type(op, item_name.c_str(), item).library == Library::jax)
        raise(PyExc_NotImplementedError, op, ": ", item_name,
              " is a JAX array, which cannot be written in place; use "
              "cache.at[destinations].set(cache[sources])");
      Array& array = *arrays.emplace_back(std::make_unique<Array>());
      array.import(op, item_name.c_str(), item, stream, home, output);
      if (home == nullptr) home = &array;
      tensors.push_back(&array.tensor);
    };
    if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr())) {
      auto items = nb::borrow<nb::sequence>(source);
      int i = 0;
      for (nb::handle item : items) add(concat(name, "[", i++, "]"), item);
    } else {
      add(concat(name, "[0]"), source);
    }
  }
  const Array* first() const { return arrays.empty() ? nullptr : arrays[0].get(); }
  int32_t count() const { return static_cast<int32_t>(tensors.size()); }
};

void copy_blocks(nb::handle k_caches, nb::handle v_caches, nb::handle block_mapping,
                 nb::handle stream_arg) {
  const char* op = "copy_blocks";
  CallStream stream = parse_stream(op, stream_arg);
  CacheArrays k, v;
  k.import(op, "k_caches", k_caches, stream, nullptr, true);
  if (k.first() != nullptr) complete_stream(op, *k.first(), stream);
  if (is_given(v_caches)) v.import(op, "v_caches", v_caches, stream, k.first(), true);
  Array mapping;
  mapping.import(op, "block_mapping", block_mapping, stream, k.first());
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_copy_blocks(k.tensors.data(), k.count(), v.tensors.data(), v.count(),
                                &mapping.tensor, stream.handle);
  }
  check(status);
}

void swap_blocks(nb::handle src, nb::handle dst, nb::handle block_mapping, nb::handle stream_arg) {
  const char* op = "swap_blocks";
  CallStream stream = parse_stream(op, stream_arg);
  CacheArrays from, to;
  from.import(op, "src", src, stream, nullptr, false);
  const Array* home = from.first();
  bool from_cuda = home != nullptr && home->is_cuda();
  if (from_cuda) complete_stream(op, *home, stream);
  to.import(op, "dst", dst, stream, from_cuda ? home : nullptr, true);
  if (!from_cuda && to.first() != nullptr) {
    home = to.first();
    complete_stream(op, *home, stream);
  }
  Array mapping;
  mapping.import(op, "block_mapping", block_mapping, stream, home);
  cuattn_status status;
  {
    Unlocked unlocked;
    status = cuattn_swap_blocks(from.tensors.data(), from.count(), to.tensors.data(), to.count(),
                                &mapping.tensor, stream.handle);
  }
  check(status);
}

// Bytes of host memory, which numpy views through the array interface and keeps alive.
class HostMemory {
 public:
  explicit HostMemory(nb::handle num_bytes)
      : bytes_(parse_int("pinned_empty", "shape", num_bytes)) {
    check(cuattn_host_alloc(static_cast<size_t>(bytes_), &memory_, &is_pinned_));
  }
  HostMemory(const HostMemory&) = delete;
  ~HostMemory() { cuattn_host_free(memory_, is_pinned_); }

  nb::dict array_interface() const {
    nb::dict fields;
    fields["shape"] = nb::make_tuple(bytes_);
    fields["typestr"] = "|u1";
    fields["data"] = nb::make_tuple(reinterpret_cast<uintptr_t>(memory_), false);
    fields["version"] = 3;
    return fields;
  }
  bool is_pinned() const { return is_pinned_ != 0; }

 private:
  int64_t bytes_;
  void* memory_ = nullptr;
  int32_t is_pinned_ = 0;
};

}  // namespace

void add_cache(nb::module_& m) {
  m.def("reshape_and_cache", &reshape_and_cache,
        nb::sig("def reshape_and_cache(k: object, v: object, k_cache: object, v_cache: object, "
                "slot_mapping: object, block_tables: object, context_lens: object, kv_layout: str, "
                "k_scale: object, v_scale: object, cos: object, sin: object, positions: object, "
                "rope_interleaved: bool, stream: object) -> object"),
        nb::arg("k").none(), nb::arg("v").none(), nb::arg("k_cache").none(),
        nb::arg("v_cache").none(), nb::arg("slot_mapping").none(), nb::arg("block_tables").none(),
        nb::arg("context_lens").none(), nb::arg("kv_layout").none(), nb::arg("k_scale").none(),
        nb::arg("v_scale").none(), nb::arg("cos").none(), nb::arg("sin").none(),
        nb::arg("positions").none(), nb::arg("rope_interleaved").none(), nb::arg("stream").none(),
        "cuattn.reshape_and_cache with every argument in its place.");
  m.def("check_reshape_and_cache", &check_reshape_and_cache,
        nb::sig("def check_reshape_and_cache(arrays: dict[str, object], kv_layout: str, k_scale: "
                "float | None, v_scale: float | None, rope_interleaved: bool, shapes_on: int) -> "
                "None"),
        nb::arg("arrays"), nb::arg("kv_layout").none(), nb::arg("k_scale").none(),
        nb::arg("v_scale").none(), nb::arg("rope_interleaved").none(), nb::arg("shapes_on"),
        "Raises what reshape_and_cache would, for arrays given as tuples of dtype and extents on "
        "CUDA device\n"
        "`shapes_on` (-1: the CPU).");
  m.def("check_gather_cache", &check_gather_cache,
        nb::sig("def check_gather_cache(k_cache: object, v_cache: object, block_tables: object, "
                "cu_seqlens: object, kv_layout: str, total: int, shapes_on: int) -> "
                "tuple[tuple[int, int, int], tuple[int, int, int]]"),
        nb::arg("k_cache").none(), nb::arg("v_cache").none(), nb::arg("block_tables").none(),
        nb::arg("cu_seqlens").none(), nb::arg("kv_layout").none(), nb::arg("total").none(),
        nb::arg("shapes_on"),
        "The same for gather_cache into `total` rows; returns the shapes of k and v.");
  m.def("gather_cache", &gather_cache,
        nb::sig("def gather_cache(k_cache: object, v_cache: object, block_tables: object, "
                "cu_seqlens: object, kv_layout: str, k_out: object, v_out: object, stream: object) "
                "-> object"),
        nb::arg("k_cache").none(), nb::arg("v_cache").none(), nb::arg("block_tables").none(),
        nb::arg("cu_seqlens").none(), nb::arg("kv_layout").none(), nb::arg("k_out").none(),
        nb::arg("v_out").none(), nb::arg("stream").none(),
        "cuattn.gather_cache with every argument in its place.");
  m.def("copy_blocks", &copy_blocks,
        nb::sig("def copy_blocks(k_caches: object, v_caches: object, block_mapping: object, "
                "stream: object) -> None"),
        nb::arg("k_caches").none(), nb::arg("v_caches").none(), nb::arg("block_mapping").none(),
        nb::arg("stream").none(), "cuattn.copy_blocks with every argument in its place.");
  m.def("swap_blocks", &swap_blocks,
        nb::sig("def swap_blocks(src: object, dst: object, block_mapping: object, stream: object) "
                "-> None"),
        nb::arg("src").none(), nb::arg("dst").none(), nb::arg("block_mapping").none(),
        nb::arg("stream").none(), "cuattn.swap_blocks with every argument in its place.");
  nb::class_<HostMemory>(m, "HostMemory", "Bytes of host memory for cuattn.pinned_empty.")
      .def(nb::init<nb::handle>(), nb::arg("num_bytes"),
           nb::sig("def __init__(self, num_bytes: int) -> None"))
      .def_prop_ro("__array_interface__", &HostMemory::array_interface)
      .def_prop_ro("is_pinned", &HostMemory::is_pinned);
}

}  // namespace cuattn::bindings
