// SPDX-License-Identifier: Apache-2.0
// apply_rope: from borrowed arrays to RotateParams. Next: cuda/fused/rope.cu.
#include <algorithm>
#include <utility>

#include "src/cache/cache.h"
#include "src/check/arrays.h"
#include "src/check/axes.h"
#include "src/check/overlap.h"
#include "src/fused/fused.h"
#include "src/options.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "apply_rope";

// The axes of x and out.
Axes checked_axes(const TensorView& x, int32_t layout) {
  CUATTN_REQUIRE(x.ndim == 3 || x.ndim == 4, kFunction,
                 ": x must have axes [n, num_heads, head_dim] or [batch, seqlen, num_heads, "
                 "head_dim], got shape ",
                 shape_text(x), "; reshape it");
  CUATTN_REQUIRE(layout == CUATTN_LAYOUT_BSHD || layout == CUATTN_LAYOUT_BHSD, kFunction,
                 ": layout must be 'bshd' or 'bhsd', got ", layout_text(layout),
                 "; choose one of these");
  return axes_of(x.ndim == 3, layout);
}

void read_shape(const TensorView& x, const Axes& axes, RotateParams& p) {
  p.batch = axes.batch < 0 ? 1 : x.shape[axes.batch];
  p.seqlen = checked_length(kFunction, "x", axes.batch < 0 ? "n" : "seqlen", x.shape[axes.seq]);
  p.num_heads = checked_extent(kFunction, "x", "num_heads", x.shape[axes.head]);
  p.head_dim = checked_extent(kFunction, "x", "head_dim", x.shape[x.ndim - 1]);
}

void read_tables(const TensorView& cos, const TensorView& sin, int64_t offset, DLDevice device,
                 RotateParams& p) {
  for (const auto& [name, view] : {std::pair{"cos", cos}, std::pair{"sin", sin}}) {
    require_rank(kFunction, name, view, 2, "[max_position, rotary_dim / 2]");
    require_dtype(kFunction, name, view, DType::f32);
    require_device(kFunction, name, view, device, "x");
    require_strided(kFunction, name, view, false, true);
    require_last_axis(kFunction, name, view);
  }
  require_extent(kFunction, "sin", "max_position", sin.shape[0], cos.shape[0], "cos");
  require_extent(kFunction, "sin", "rotary_dim / 2", sin.shape[1], cos.shape[1], "cos");
  CUATTN_REQUIRE(cos.shape[0] >= 1, kFunction,
                 ": cos must have at least one row, got 0; give one for each position");
  CUATTN_REQUIRE(cos.shape[1] >= 1 && 2 * cos.shape[1] <= p.head_dim, kFunction,
                 ": cos must have rotary_dim / 2 from 1 to head_dim / 2 = ", p.head_dim / 2,
                 ", got ", cos.shape[1], "; only rotary_dim elements of a row are turned");
  CUATTN_REQUIRE(
      offset >= 0 && offset <= p.head_dim - 2 * cos.shape[1], kFunction,
      ": offset must be from 0 to head_dim - rotary_dim = ", p.head_dim - 2 * cos.shape[1],
      ", got ", offset, "; the turned elements lie within a row");
  p.cos = static_cast<const float*>(cos.data);
  p.sin = static_cast<const float*>(sin.data);
  p.cos_stride = stride_of(cos, 0);
  p.sin_stride = stride_of(sin, 0);
  p.max_position = cos.shape[0];
  p.rotary_dim = static_cast<int32_t>(2 * cos.shape[1]);
  p.offset = static_cast<int32_t>(offset);
}

void read_positions(const TensorView& positions, bool has_batch, DLDevice device, RotateParams& p) {
  const char* name = "positions";
  require_dtype(kFunction, name, positions, DType::i64);
  require_device(kFunction, name, positions, device, "x");
  int64_t shape[2] = {has_batch ? p.batch : p.seqlen, p.seqlen};
  TensorView tokens = shape_view(shape, has_batch ? 2 : 1);
  bool same = positions.ndim == tokens.ndim;
  for (int32_t axis = 0; same && axis < tokens.ndim; ++axis)
    same = positions.shape[axis] == tokens.shape[axis];
  CUATTN_REQUIRE(same, kFunction, ": positions must have shape ", shape_text(tokens),
                 " like the tokens of x, got ", shape_text(positions), "; give each token its own");
  require_strided(kFunction, name, positions, false, true);
  p.places.positions = static_cast<const int64_t*>(positions.data);
  p.places.stride_batch = has_batch ? stride_of(positions, 0) : 0;
  p.places.stride_seq = stride_of(positions, positions.ndim - 1);
}

// The lengths that places follow from where there are no positions.
void read_lengths(const cuattn_rope_options& o, bool has_batch, DLDevice device, RotateParams& p) {
  TokenPlaces& places = p.places;
  CUATTN_REQUIRE(o.seqlen_k >= -1 && o.seqlen_k <= kMaxLength, kFunction,
                 ": seqlen_k must be -1 (as x), or from 0 to ", kMaxLength, ", got ", o.seqlen_k,
                 "; it is how many keys a sequence has");
  places.queries = static_cast<int32_t>(p.seqlen);
  places.keys = static_cast<int32_t>(o.seqlen_k < 0 ? p.seqlen : o.seqlen_k);
  places.total_q = places.total_k = INT64_MAX;
  CUATTN_REQUIRE(o.cu_seqlens_q == nullptr || !has_batch, kFunction,
                 ": cu_seqlens_q must be NULL for x of 4 axes, got an array; its sequences lie end "
                 "to end");
  int64_t num_seqs = p.batch;
  bool asks_queries = false;  // a sequence has as many keys as tokens, as cu_seqlens_q says
  if (o.cu_seqlens_q != nullptr) {
    num_seqs = view_of(kFunction, "cu_seqlens_q", o.cu_seqlens_q).size() - 1;
    int64_t least = p.seqlen == 0 ? 0 : 1;
    CUATTN_REQUIRE(num_seqs >= least, kFunction, ": cu_seqlens_q must have at least ", least + 1,
                   " elements, got ", num_seqs + 1, "; element i is where sequence i begins");
    places.keys = o.seqlen_k < 0 ? kMaxLength : places.keys;
    asks_queries = o.seqlen_k < 0 && o.cu_seqlens_k == nullptr && o.seqused_k == nullptr;
  }
  places.num_seqs = checked_extent(kFunction, "x", "sequences", num_seqs);
  auto read = [&](const char* name, const DLTensor* tensor, int64_t extent) {
    if (tensor == nullptr) return static_cast<const int32_t*>(nullptr);
    TensorView view = view_of(kFunction, name, tensor);
    return static_cast<const int32_t*>(
        read_vector(kFunction, name, view, DType::i32, extent, "num_seqs", device, "x", true));
  };
  places.cu_seqlens_q = read("cu_seqlens_q", o.cu_seqlens_q, num_seqs + 1);
  places.cu_seqlens_k =
      asks_queries ? places.cu_seqlens_q : read("cu_seqlens_k", o.cu_seqlens_k, num_seqs + 1);
  places.seqused_q = read("seqused_q", o.seqused_q, num_seqs);
  places.seqused_k = asks_queries ? places.seqused_q : read("seqused_k", o.seqused_k, num_seqs);
}

// On the CPU, and under CUATTN_CHECK=1: the positions are rows of the tables.
void check_positions(const RotateParams& p, const TensorView* positions, const Backend& backend,
                     DLDevice device, Stream stream) {
  auto check = [&](int64_t position, int64_t index) {
    CUATTN_REQUIRE(position >= 0 && position < p.max_position, kFunction,
                   ": positions must lie within [0, ", p.max_position, "), got ", position,
                   " at token ", index, "; cos and sin have that many rows");
  };
  int64_t count = p.batch * p.seqlen;
  const TokenPlaces& places = p.places;
  if (positions == nullptr) {
    bool is_known = places.cu_seqlens_q == nullptr && places.seqused_k == nullptr;
    CUATTN_REQUIRE(!is_known || places.keys <= p.max_position, kFunction,
                   ": cos must have a row for each of the ", places.keys,
                   " tokens of a sequence, got ", p.max_position,
                   "; make it longer, or give positions");
    for (int64_t i = 0; !is_known && is_cpu(device) && i < count; ++i) {
      int64_t b = i / p.seqlen, row = i % p.seqlen;
      CUATTN_REQUIRE(!places.is_read(b, row) || places(b, row) < p.max_position, kFunction,
                     ": cos must have a row for each place, got ", p.max_position, " for place ",
                     places(b, row), " of token ", i, "; make it longer, or give positions");
    }
  } else if (is_cpu(device)) {
    for (int64_t i = 0; i < count; ++i) check(places(i / p.seqlen, i % p.seqlen), i);
  } else if (is_dense_from(*positions, 0)) {
    HostCopy<int64_t> copy(backend, device, places.positions, count, stream);
    for (int64_t i = 0; copy.data() != nullptr && i < count; ++i) check(copy.data()[i], i);
  }
}

void check_memory(const TensorView& x, const TensorView& cos, const TensorView& sin,
                  const TensorView* positions, const cuattn_rope_options& o,
                  const TensorView& out) {
  CallMemory memory(kFunction);
  memory.writes({"out", out});
  if (!is_same_view(out, x)) memory.reads({"x", x});
  memory.reads({"cos", cos});
  memory.reads({"sin", sin});
  if (positions != nullptr) memory.reads({"positions", *positions});
  for (const auto& [name, tensor] :
       {std::pair{"cu_seqlens_q", o.cu_seqlens_q}, std::pair{"cu_seqlens_k", o.cu_seqlens_k},
        std::pair{"seqused_q", o.seqused_q}, std::pair{"seqused_k", o.seqused_k}}) {
    if (tensor != nullptr) memory.reads({name, view_of(kFunction, name, tensor)});
  }
}

}  // namespace

void apply_rope(const TensorView& x, const TensorView& cos, const TensorView& sin,
                const cuattn_rope_options& options, const TensorView& out, Stream stream) {
  RotateParams p{};
  DLDevice device = x.device;
  require_known_device(kFunction, "x", device);
  p.dtype = attention_dtype(kFunction, "x", x);
  require_nothing_reserved(kFunction, options.reserved);
  Axes axes = checked_axes(x, options.layout);
  read_shape(x, axes, p);
  require_rows(kFunction, "x", x, false, true);
  read_tables(cos, sin, options.offset, device, p);
  std::optional<TensorView> storage;
  const TensorView* positions = optional_view(kFunction, "positions", options.positions, storage);
  if (positions != nullptr) {
    read_positions(*positions, axes.batch >= 0, device, p);
  } else {
    read_lengths(options, axes.batch >= 0, device, p);
  }
  p.interleaved = options.interleaved != 0;
  p.inverse = options.inverse != 0;
  require_output(kFunction, "out", out, p.dtype, shape_view(x.shape.data(), x.ndim), device);
  require_rows(kFunction, "out", out, true, true);
  check_memory(x, cos, sin, positions, options, out);
  p.x = x.data;
  p.out = out.data;
  p.x_strides = strides_of(x, axes);
  p.out_strides = strides_of(out, axes);
  const Backend& backend = backend_of(kFunction, device);
  if (x.size() == 0) return;
  check_positions(p, positions, backend, device, stream);
  backend.rotate(p, device.device_id, stream);
}

}  // namespace cuattn
