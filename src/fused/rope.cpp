// SPDX-License-Identifier: Apache-2.0
// apply_rope: from borrowed arrays to RotateParams. Next: cuda/fused/rope.cu.
#include <utility>

#include "src/cache/cache.h"
#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/fused/fused.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "apply_rope";

// x or out, whose batch axis may be missing.
Strides strides_of(const TensorView& view) {
  int32_t seq = view.ndim - 3;
  return {seq == 0 ? 0 : stride_of(view, 0), stride_of(view, seq), stride_of(view, seq + 1)};
}

void read_shape(const TensorView& x, RotateParams& p) {
  CUATTN_REQUIRE(x.ndim == 3 || x.ndim == 4, kFunction,
                 ": x must have axes [n, num_heads, head_dim] or [batch, seqlen, num_heads, "
                 "head_dim], got shape ",
                 shape_text(x), "; reshape it");
  int32_t seq = x.ndim - 3;
  p.batch = seq == 0 ? 1 : x.shape[0];
  p.seqlen = checked_length(kFunction, "x", seq == 0 ? "n" : "seqlen", x.shape[seq]);
  p.num_heads = checked_extent(kFunction, "x", "num_heads", x.shape[seq + 1]);
  p.head_dim = checked_extent(kFunction, "x", "head_dim", x.shape[seq + 2]);
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
      offset >= 0 && offset + 2 * cos.shape[1] <= p.head_dim, kFunction,
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

void read_positions(const TensorView& positions, const TensorView& x, DLDevice device,
                    RotateParams& p) {
  const char* name = "positions";
  require_dtype(kFunction, name, positions, DType::i64);
  require_device(kFunction, name, positions, device, "x");
  TensorView tokens = shape_view(x.shape.data(), x.ndim - 2);
  bool same = positions.ndim == tokens.ndim;
  for (int32_t axis = 0; same && axis < tokens.ndim; ++axis)
    same = positions.shape[axis] == tokens.shape[axis];
  CUATTN_REQUIRE(same, kFunction, ": positions must have shape ", shape_text(tokens),
                 " like the tokens of x, got ", shape_text(positions), "; give each token its own");
  require_strided(kFunction, name, positions, false, true);
  p.places.positions = static_cast<const int64_t*>(positions.data);
  p.places.stride_batch = x.ndim == 4 ? stride_of(positions, 0) : 0;
  p.places.stride_seq = stride_of(positions, positions.ndim - 1);
}

// On the CPU, and under CUATTN_CHECK=1: the positions are rows of the tables.
void check_positions(const RotateParams& p, const TensorView* positions, const Backend& backend,
                     DLDevice device, Stream stream) {
  if (positions == nullptr) {
    CUATTN_REQUIRE(p.seqlen <= p.max_position, kFunction, ": cos must have a row for each of the ",
                   p.seqlen, " tokens of a sequence, got ", p.max_position,
                   "; make it longer, or give positions");
    return;
  }
  auto check = [&](int64_t position, int64_t index) {
    CUATTN_REQUIRE(position >= 0 && position < p.max_position, kFunction,
                   ": positions must lie within [0, ", p.max_position, "), got ", position,
                   " at token ", index, "; cos and sin have that many rows");
  };
  int64_t count = p.batch * p.seqlen;
  if (is_cpu(device)) {
    for (int64_t i = 0; i < count; ++i) check(p.places(i / p.seqlen, i % p.seqlen), i);
  } else if (is_dense_from(*positions, 0)) {
    HostCopy<int64_t> copy(backend, device, p.places.positions, count, stream);
    for (int64_t i = 0; copy.data() != nullptr && i < count; ++i) check(copy.data()[i], i);
  }
}

void check_memory(const TensorView& x, const TensorView& cos, const TensorView& sin,
                  const TensorView* positions, const TensorView& out) {
  CallMemory memory(kFunction);
  memory.writes({"out", out});
  if (!is_same_view(out, x)) memory.reads({"x", x});
  memory.reads({"cos", cos});
  memory.reads({"sin", sin});
  if (positions != nullptr) memory.reads({"positions", *positions});
}

}  // namespace

void apply_rope(const TensorView& x, const TensorView& cos, const TensorView& sin,
                const cuattn_rope_options& options, const TensorView& out, Stream stream) {
  RotateParams p{};
  DLDevice device = x.device;
  require_known_device(kFunction, "x", device);
  p.dtype = attention_dtype(kFunction, "x", x);
  read_shape(x, p);
  require_rows(kFunction, "x", x, false, true);
  read_tables(cos, sin, options.offset, device, p);
  std::optional<TensorView> storage;
  const TensorView* positions = optional_view(kFunction, "positions", options.positions, storage);
  if (positions != nullptr) read_positions(*positions, x, device, p);
  p.places.queries = p.places.keys = static_cast<int32_t>(p.seqlen);
  p.interleaved = options.interleaved != 0;
  p.inverse = options.inverse != 0;
  require_output(kFunction, "out", out, p.dtype, shape_view(x.shape.data(), x.ndim), device);
  require_rows(kFunction, "out", out, true, true);
  check_memory(x, cos, sin, positions, out);
  p.x = x.data;
  p.out = out.data;
  p.x_strides = strides_of(x);
  p.out_strides = strides_of(out);
  const Backend& backend = backend_of(kFunction, device);
  if (x.size() == 0) return;
  check_positions(p, positions, backend, device, stream);
  backend.rotate(p, device.device_id, stream);
}

}  // namespace cuattn
