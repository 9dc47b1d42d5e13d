// SPDX-License-Identifier: Apache-2.0
// add_residual: from borrowed arrays to AddParams. Next: cuda/fused/add.cu.
#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/fused/fused.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "add_residual";

Strides strides_of(const TensorView& view) {
  return {view.ndim == 4 ? stride_of(view, 0) : 0, stride_of(view, view.ndim - 3),
          stride_of(view, view.ndim - 2)};
}

}  // namespace

void add_residual(const TensorView& x, const TensorView& residual, const TensorView& out,
                  bool checks_only, Stream stream) {
  AddParams p{};
  require_known_device(kFunction, "x", x.device);
  CUATTN_REQUIRE(x.ndim == 3 || x.ndim == 4, kFunction,
                 ": x must have axes [n, num_heads, head_dim] or [batch, seqlen, num_heads, "
                 "head_dim], got shape ",
                 shape_text(x), "; reshape it");
  p.dtype = attention_dtype(kFunction, "out", out);
  p.x_dtype = x.is(DType::f32) ? DType::f32 : p.dtype;
  require_dtype(kFunction, "x", x, p.x_dtype, "out");
  require_dtype(kFunction, "residual", residual, p.dtype, "out");
  require_output(kFunction, "residual", residual, p.dtype, x, x.device);
  require_output(kFunction, "out", out, p.dtype, x, x.device);
  auto read = [](const char* name, const TensorView& view, bool output) {
    require_strided(kFunction, name, view, output, true);
    require_last_axis(kFunction, name, view);
    return strides_of(view);
  };
  p.x_strides = read("x", x, false);
  p.residual_strides = read("residual", residual, false);
  p.out_strides = read("out", out, true);
  p.batch = x.ndim == 4 ? x.shape[0] : 1;
  p.seqlen = x.shape[x.ndim - 3];
  p.num_heads = checked_extent(kFunction, "x", "num_heads", x.shape[x.ndim - 2]);
  p.head_dim = checked_extent(kFunction, "x", "head_dim", x.shape[x.ndim - 1]);
  p.x = x.data;
  p.residual = residual.data;
  p.out = out.data;
  CallMemory memory(kFunction);
  memory.writes({"out", out});
  if (!is_same_view(out, x)) memory.reads({"x", x});
  if (!is_same_view(out, residual)) memory.reads({"residual", residual});
  const Backend& backend = backend_of(kFunction, x.device);
  if (!checks_only && out.size() > 0) backend.add(p, x.device.device_id, stream);
}

}  // namespace cuattn
