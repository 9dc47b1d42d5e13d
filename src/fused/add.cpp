// SPDX-License-Identifier: Apache-2.0
// add_residual: from borrowed arrays to AddParams. Next: cuda/fused/add.cu.
#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/fused/fused.h"

namespace cuattn {
namespace {

Strides strides_of(const TensorView& view) {
  return {view.ndim == 4 ? stride_of(view, 0) : 0, stride_of(view, view.ndim - 3),
          stride_of(view, view.ndim - 2)};
}

AddParams validated(const char* fn, const TensorView& x, const TensorView& residual,
                    const TensorView& out, bool check_data) {
  AddParams p{};
  require_known_device(fn, "x", x.device);
  CUATTN_REQUIRE(x.ndim == 3 || x.ndim == 4, fn,
                 ": x must have axes [n, num_heads, head_dim] or [batch, seqlen, num_heads, "
                 "head_dim], got shape ",
                 shape_text(x), "; reshape it");
  p.dtype = attention_dtype(fn, "out", out);
  p.x_dtype = x.is(DType::f32) ? DType::f32 : p.dtype;
  require_dtype(fn, "x", x, p.x_dtype, "out");
  require_dtype(fn, "residual", residual, p.dtype, "out");
  require_output(fn, "residual", residual, p.dtype, x, x.device);
  require_output(fn, "out", out, p.dtype, x, x.device);
  auto read = [&](const char* name, const TensorView& view, bool output) {
    require_strided(fn, name, view, output, check_data);
    require_last_axis(fn, name, view);
    return strides_of(view);
  };
  p.x_strides = read("x", x, false);
  p.residual_strides = read("residual", residual, false);
  p.out_strides = read("out", out, true);
  p.batch = x.ndim == 4 ? x.shape[0] : 1;
  p.seqlen = x.shape[x.ndim - 3];
  p.num_heads = checked_extent(fn, "x", "num_heads", x.shape[x.ndim - 2]);
  p.head_dim = checked_extent(fn, "x", "head_dim", x.shape[x.ndim - 1]);
  p.x = x.data;
  p.residual = residual.data;
  p.out = out.data;
  return p;
}

// Before the sum other arrays have been written: `memory` has them.
void check_memory(CallMemory& memory, const TensorView& x, const TensorView& residual,
                  const TensorView& out) {
  memory.writes({"out", out});
  if (!is_same_view(out, x)) memory.reads({"x", x});
  if (!is_same_view(out, residual)) memory.reads({"residual", residual});
}

}  // namespace

void add_residual(const TensorView& x, const TensorView& residual, const TensorView& out,
                  Stream stream) {
  const char* fn = "add_residual";
  AddParams p = validated(fn, x, residual, out, true);
  CallMemory memory(fn);
  check_memory(memory, x, residual, out);
  const Backend& backend = backend_of(fn, x.device);
  if (out.size() > 0) backend.add(p, x.device.device_id, stream);
}

void check_residual(const char* function, const TensorView& x, const TensorView& residual,
                    const TensorView& out, const TensorView* lse_out, const TensorView* workspace) {
  bool check_data = x.data != nullptr || x.size() == 0;
  validated(function, x, residual, out, check_data);
  if (!check_data) return;
  CallMemory memory(function);
  if (lse_out != nullptr) memory.writes({"lse_out", *lse_out});
  if (workspace != nullptr) memory.writes({"workspace", *workspace});
  check_memory(memory, x, residual, out);
  backend_of(function, x.device);
}

}  // namespace cuattn
