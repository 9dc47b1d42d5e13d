// SPDX-License-Identifier: Apache-2.0
// mla_project: from borrowed arrays to ProjectParams. Next: cpu/project.cpp, cuda/mla/project.cu.
#include <optional>

#include "cuattn/c_api_mla.h"
#include "src/check/arrays.h"
#include "src/check/overlap.h"
#include "src/guarded.h"
#include "src/mla/mla.h"

namespace cuattn {
namespace {

constexpr const char* kName = "mla_project";
constexpr const char* kAxes = "[batch, rows, heads, columns]";

Strides strides_of(const TensorView& view) {
  return {stride_of(view, 0), stride_of(view, 1), stride_of(view, 2)};
}

void check_columns(const char* name, const char* axis, int64_t got) {
  CUATTN_REQUIRE(got >= 8 && got <= kMaxLatent && got % 8 == 0, kName, ": ", name, " must have ",
                 axis, " a multiple of 8 up to ", kMaxLatent, ", got ", got, "; pad it with zeros");
}

// Rows of all heads, like those of x.
void read_rows(const char* name, const TensorView& view, const TensorView& x, DType dtype,
               bool output) {
  require_rank(kName, name, view, 4, kAxes);
  require_dtype(kName, name, view, dtype, "x");
  require_device(kName, name, view, x.device, "x");
  require_rows(kName, name, view, output, true);
  require_extent(kName, name, "batch", view.shape[0], x.shape[0], "x");
  require_extent(kName, name, "rows", view.shape[1], x.shape[1], "x");
  require_extent(kName, name, "heads", view.shape[2], x.shape[2], "x");
}

void read_proj(ProjectParams& p, const TensorView& proj, const TensorView& x) {
  require_rank(kName, "proj", proj, 3, "[heads, latent, head_dim]");
  require_dtype(kName, "proj", proj, p.dtype, "x");
  require_device(kName, "proj", proj, x.device, "x");
  require_rows(kName, "proj", proj, false, true);
  require_extent(kName, "proj", "heads", proj.shape[0], x.shape[2], "x");
  check_columns("proj", "latent", proj.shape[1]);
  check_columns("proj", "head_dim", proj.shape[2]);
  require_extent(kName, "proj", p.transpose ? "head_dim" : "latent",
                 proj.shape[p.transpose ? 2 : 1], x.shape[3], "the columns of x");
  p.proj = proj.data;
  p.proj_stride_head = stride_of(proj, 0);
  p.proj_stride_row = stride_of(proj, 1);
  p.outer = static_cast<int32_t>(proj.shape[p.transpose ? 1 : 2]);
}

// Rows of several batch entries as those of one, where they lie so: tiles of many rows.
void merge_batch(ProjectParams& p) {
  auto joins = [&](const Strides& s) {
    return p.rows == 1 || p.batch == 1 || s.batch == p.rows * s.seq;
  };
  if (!joins(p.x_strides) || !joins(p.out_strides) || !joins(p.tail_strides)) return;
  if (int64_t{p.batch} * p.rows > kMaxLength) return;
  for (Strides* s : {&p.x_strides, &p.out_strides, &p.tail_strides}) {
    if (p.rows == 1) s->seq = s->batch;
    s->batch = 0;
  }
  p.rows *= p.batch;
  p.batch = 1;
}

// `apart`: cuattn_mla_projection has the words.
void project(const TensorView& x, const TensorView* proj, const TensorView* tail,
             const TensorView& out, const TensorView* apart, bool transpose, bool check_only,
             Stream stream) {
  ProjectParams p{};
  require_known_device(kName, "x", x.device);
  p.dtype = attention_dtype(kName, "x", x);
  p.transpose = transpose;
  require_rank(kName, "x", x, 4, kAxes);
  require_rows(kName, "x", x, false, true);
  check_columns("x", "columns", x.shape[3]);
  p.batch = checked_extent(kName, "x", "batch", x.shape[0]);
  p.rows = checked_length(kName, "x", "rows", x.shape[1]);
  p.num_heads = checked_extent(kName, "x", "heads", x.shape[2]);
  p.inner = p.outer = static_cast<int32_t>(x.shape[3]);
  p.x = x.data;
  p.x_strides = strides_of(x);
  if (proj != nullptr) read_proj(p, *proj, x);
  if (tail != nullptr) {
    read_rows("tail", *tail, x, p.dtype, false);
    check_columns("tail", "columns", tail->shape[3]);
    p.tail = tail->data;
    p.tail_strides = strides_of(*tail);
    p.tail_dim = static_cast<int32_t>(tail->shape[3]);
  }
  read_rows("out", out, x, p.dtype, true);
  require_extent(kName, "out", "columns", out.shape[3], p.outer + p.tail_dim, "the product");
  p.out = out.data;
  p.out_strides = strides_of(out);
  CallMemory memory(kName);
  memory.writes({"out", out});
  if (apart != nullptr) memory.writes({"lse_out", *apart});
  memory.reads({"x", x});
  if (proj != nullptr) memory.reads({"proj", *proj});
  if (tail != nullptr) memory.reads({"tail", *tail});
  const Backend& backend = backend_of(kName, x.device);
  require_supported(kName, backend.device_info(x.device.device_id, false));
  merge_batch(p);
  if (out.size() > 0 && !check_only) backend.project(p, x.device.device_id, stream);
}

}  // namespace
}  // namespace cuattn

using namespace cuattn;

cuattn_status cuattn_mla_project(const cuattn_mla_projection* projection, void* stream) {
  return guarded([&] {
    require_given(kName, "projection", projection);
    std::optional<TensorView> proj, tail, apart;
    const TensorView* proj_view = optional_view(kName, "proj", projection->proj, proj);
    const TensorView* tail_view = optional_view(kName, "tail", projection->tail, tail);
    const TensorView* apart_view = optional_view(kName, "apart", projection->apart, apart);
    project(view_of(kName, "x", projection->x), proj_view, tail_view,
            view_of(kName, "out", projection->out), apart_view, projection->transpose != 0,
            projection->check_only != 0, stream);
  });
}
