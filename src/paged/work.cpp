// SPDX-License-Identifier: Apache-2.0
// The choice of a kernel for a paged call, how it cuts rows and keys, and the workspace. Next:
// plan.cpp (the choice), call.cpp (the run).
#include "src/paged/work.h"

#include <algorithm>

#include "cuattn/plan.h"
#include "src/check/arrays.h"
#include "src/options.h"

namespace cuattn {

PagedRequest request_of(const PagedCall& call, const cuattn_paged_options& o) {
  const PagedParams& p = call.params;
  PagedRequest r{};
  r.dtype = p.dtype;
  r.kv_dtype = p.kv_dtype;
  r.kv_layout = p.kv_layout;
  r.num_seqs = p.work.num_seqs;
  r.q_len = p.work.q_len;
  r.num_heads_q = p.num_heads_q;
  r.num_heads_kv = p.work.num_heads_kv;
  r.head_dim = p.head_dim;
  r.block_size = p.pages.block_size;
  r.capacity = p.work.capacity;
  r.has_deal = o.plan != nullptr;
  r.num_splits = o.num_splits;
  r.partition_size = o.version == 2 ? static_cast<int32_t>(o.partition_size) : 0;
  r.one_pass = o.version == 1;
  r.batch_invariant = o.batch_invariant != 0;
  r.latent = call.params.latent.is_used;
  r.own_values = p.latent.own_values;
  r.rope_dim = p.latent.rope_dim;
  r.has_lists = p.latent.queries > 0;
  r.are_rows = call.are_rows;
  r.are_alike = call.are_alike;
  if (r.are_rows) {  // what lies outside a window is no work
    int32_t first = p.work.mask.visible(0, r.q_len, r.capacity).begin;
    r.capacity = std::max(p.work.mask.visible(r.q_len - 1, r.q_len, r.capacity).end - first, 0);
  }
  return r;
}

void require_contiguous(const PagedCall& call, const char* name, const TensorView& view,
                        DType dtype, std::initializer_list<int64_t> shape, bool output) {
  const char* fn = call.function;
  require_output(fn, name, view, dtype, TensorView(nullptr, dtype, shape), call.device);
  CUATTN_REQUIRE(view.size() == 0 || is_dense_from(view, 0), fn, ": ", name,
                 " must be contiguous, got strides ", strides_text(view),
                 "; make a contiguous copy");
  require_strided(fn, name, view, output, true);
}

namespace {

void read_deal(PagedCall& call, const DLTensor* tensor) {
  if (tensor == nullptr) return;
  PagedWork& w = call.params.work;
  TensorView view = view_of(call.function, "plan", tensor);
  require_dtype(call.function, "plan", view, DType::i32);
  CUATTN_REQUIRE(view.ndim == 1 && view.shape[0] == PagedDeal::size(w), call.function,
                 ": plan must have ", PagedDeal::size(w), " entries for backend '",
                 kernel_name(call.plan.kernel), "', got shape ", shape_text(view),
                 "; make it with paged_plan for the shapes, kv_layout and backend of this call");
  require_contiguous(call, "plan", view, DType::i32, {PagedDeal::size(w)}, false);
  w.deal = static_cast<const int32_t*>(view.data);
}

void read_partitions(PagedCall& call, const cuattn_paged_options& o) {
  PagedParams& p = call.params;
  int64_t seqs = p.work.num_seqs, heads = p.num_heads_q, partitions = p.work.num_splits;
  auto read = [&](const char* name, const DLTensor* tensor, DType dtype,
                  std::initializer_list<int64_t> shape) -> void* {
    if (tensor == nullptr) return nullptr;
    TensorView view = view_of(call.function, name, tensor);
    require_contiguous(call, name, view, dtype, shape, true);
    return view.data;
  };
  std::initializer_list<int64_t> per_partition = {seqs, heads, partitions};
  p.exp_sums = static_cast<float*>(read("exp_sums", o.exp_sums, DType::f32, per_partition));
  p.max_logits = static_cast<float*>(read("max_logits", o.max_logits, DType::f32, per_partition));
  p.tmp_out = read("tmp_out", o.tmp_out, p.dtype, {seqs, heads, partitions, p.head_dim});
}

// Takes 256-byte aligned pieces of the workspace; with a base of nullptr only their sizes count.
class Pieces {
 public:
  explicit Pieces(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t count, int64_t itemsize) {
    void* piece = base_ == nullptr ? nullptr : base_ + used_;
    used_ += whole_pieces(static_cast<size_t>(count) * static_cast<size_t>(itemsize));
    return piece;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

}  // namespace

size_t place_workspace(PagedCall& call, void* base) {
  PagedParams& p = call.params;
  PagedWork& w = p.work;
  Pieces pieces(base);
  if (call.has_equal_lens) {
    p.latent.own_lens = static_cast<int32_t*>(pieces.take(w.num_seqs, sizeof(int32_t)));
    w.context_lens = p.latent.own_lens;
  }
  if (w.num_splits == 0 && !call.request.has_deal) {
    p.own_deal = static_cast<int32_t*>(pieces.take(PagedDeal::size(w), sizeof(int32_t)));
    w.deal = p.own_deal;
  }
  if (call.request.partition_size > 0) {
    int64_t partials = int64_t{w.num_seqs} * p.num_heads_q * w.num_splits;
    auto provide = [&](auto*& buffer, int64_t bytes) {
      using Pointer = std::remove_reference_t<decltype(buffer)>;
      if (buffer == nullptr) buffer = static_cast<Pointer>(pieces.take(partials, bytes));
    };
    provide(p.exp_sums, sizeof(float));
    provide(p.max_logits, sizeof(float));
    provide(p.tmp_out, int64_t{p.head_dim} * itemsize(p.dtype));
  } else {
    int64_t rows = num_paged_slots(w) * w.rows;
    p.partial_out = static_cast<float*>(pieces.take(rows * p.head_dim, sizeof(float)));
    p.partial_lse = static_cast<float*>(pieces.take(rows, sizeof(float)));
  }
  return pieces.used();
}

void cut_work(PagedCall& call) {
  PagedWork& w = call.params.work;
  int32_t rows = w.q_len * w.group;
  w.rows = std::max(std::min(rows, call.plan.tile.m), 1);
  w.row_groups = rows == 0 ? 0 : (rows - 1) / w.rows + 1;
  w.tile = call.plan.tile.n;
  w.cluster = call.plan.cluster;
  w.in_parts = call.plan.in_parts;
  w.num_splits = call.plan.num_splits;
  w.split_keys = call.plan.split_keys;
  w.num_workers = call.plan.num_workers;
  w.tracks = call.plan.tracks;
  call.params.stages = call.plan.tile.stages;
}

namespace {

// Splits of all units, and what a deal holds, are counted in 32 bits.
void check_work(const PagedCall& call) {
  const PagedWork& w = call.params.work;
  double seqs = w.num_seqs, units = seqs * head_groups(w);
  if (w.num_splits > 0) {
    CUATTN_REQUIRE(units * w.num_splits <= INT32_MAX, call.function, ": q must make at most ",
                   INT32_MAX, " splits of its sequences and heads, got ", units * w.num_splits,
                   "; split the call");
    return;
  }
  double tiles = (w.capacity - 1.0) / w.tile + 1.0;
  double most = std::max(seqs * tiles, units * tiles / std::max(w.num_workers, 1));
  CUATTN_REQUIRE(most <= INT32_MAX, call.function, ": block_tables must name at most ", INT32_MAX,
                 " tiles of ", w.tile, " keys in all, got ", most,
                 "; narrow it to the longest context, or split the call");
}

}  // namespace

void plan_paged(PagedCall& call, const cuattn_paged_options& o, const DeviceInfo& device) {
  call.plan = select_paged(call.function, call.request, device, o.backend);
  cut_work(call);
  check_work(call);
  read_deal(call, o.plan);
  if (o.version == 2) read_partitions(call, o);
  call.plan.workspace_bytes = place_workspace(call, nullptr);
  if (!call.has_codes) return;
  const PagedParams& p = call.params;
  call.plan.numbers_bytes =
      whole_pieces(checked_bytes(call.function, {p.work.num_seqs, p.work.q_len, p.num_heads_q,
                                                 p.head_dim, itemsize(p.dtype)}));
  call.plan.workspace_bytes += call.plan.numbers_bytes;
}

Plan plan_step(PagedCall call, int32_t num_splits, bool batch_invariant, const DeviceInfo& device) {
  auto options = default_options<cuattn_paged_options>();
  options.num_splits = num_splits;
  options.batch_invariant = batch_invariant;
  call.request = request_of(call, options);
  plan_paged(call, options, device);
  return call.plan;
}

std::string ladder_of_step(const PagedCall& call, const DeviceInfo& device, const Plan& plan) {
  auto options = default_options<cuattn_paged_options>();
  return explain_paged(request_of(call, options), device, plan.kernel);
}

}  // namespace cuattn
