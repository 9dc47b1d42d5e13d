// SPDX-License-Identifier: Apache-2.0
// Kernel cpu of the backward pass, the part outside the vectors. A unit is some keys of one KV head
// with all its queries: dk and dv are whole in it, dq is a part that is added to the others in
// order. Units are cut by shapes alone, so bits do not depend on the number of threads. Next:
// backward_flash.cpp (one tile), params/backward.h (the workspace).
#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "cpu/backward_flash.h"
#include "cpu/flash.h"
#include "cpu/flex.h"
#include "cpu/flex_tiles.h"
#include "cpu/gradients.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cuattn/error.h"

namespace cuattn::cpu {

namespace baseline {
extern const BackwardKernel kBackwardKernel;
}
#if defined(CUATTN_CPU_AVX)
namespace avx2 {
extern const BackwardKernel kBackwardKernel;
}
namespace avx512 {
extern const BackwardKernel kBackwardKernel;
}
#endif

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const BackwardKernel& backward_kernel() {
  std::string_view isa = isa_name();
#if defined(CUATTN_CPU_AVX)
  if (isa == avx512::kBackwardKernel.isa) return avx512::kBackwardKernel;
  if (isa == avx2::kBackwardKernel.isa) return avx2::kBackwardKernel;
#endif
  CUATTN_ASSERT(isa == baseline::kBackwardKernel.isa, "each instruction set has both kernels");
  return baseline::kBackwardKernel;
}

// One call.
struct Pass {
  const BackwardParams& p;
  const AttentionParams& f;
  const BackwardSchedule& schedule;
  const BackwardKernel& kernel;
  BackwardLayout layout;
  float* memory;
  DropoutParams dropout;
  int32_t group;  // query heads per KV head
  bool sums_dbias;

  float* delta() const { return memory + layout.delta; }
  float* slope_sums(int32_t chunk) const {
    return memory + layout.slope_sums + chunk * layout.rows;
  }
  float* dbias_sums(int32_t chunk) const {
    return memory + layout.dbias + chunk * layout.dbias_size;
  }
  double* array_sums(int64_t part) const {
    return reinterpret_cast<double*>(memory + layout.array_sums) + part * p.flex->num_sums;
  }
  // Where query `row` of a head stands in arrays of the workspace with an entry for each.
  int64_t row_index(const Span& queries, int32_t b, int32_t h, int32_t row) const {
    if (f.cu_seqlens_q != nullptr) return h * f.total_q + queries.start + row;
    return (int64_t{b} * f.num_heads_q + h) * f.seqlen_q + row;
  }
  // The part of dq that a chunk of keys gives a query.
  float* dq_row(const Span& queries, int32_t b, int32_t h, int32_t row, int32_t chunk) const {
    if (layout.dq_in_place) return static_cast<float*>(p.dq) + at(p.dq_strides, queries, b, h, row);
    int64_t index = chunk * layout.rows + row_index(queries, b, h, row);
    return memory + layout.dq + index * f.head_dim;
  }
  static int64_t at(const Strides& strides, const Span& span, int32_t b, int32_t h, int32_t row) {
    return b * strides.batch + (span.start + row) * strides.seq + h * strides.head;
  }
};

// delta of one head's queries; 0 for a dead row, of which nothing is read.
void find_deltas(const Pass& pass, int32_t b, int32_t h) {
  const BackwardParams& p = pass.p;
  const AttentionParams& f = pass.f;
  Span queries = query_span(f, b);
  for (int32_t row = 0; row < queries.used; ++row) {
    float delta = 0.0f;
    if (f.lse[Pass::at(f.lse_strides, queries, b, h, row)] != -kInfinity) {
      delta =
          pass.kernel.dot(element(p.dout, Pass::at(p.dout_strides, queries, b, h, row), f.dtype),
                          element(static_cast<const void*>(f.out),
                                  Pass::at(f.out_strides, queries, b, h, row), f.dtype),
                          f.head_dim_v, f.dtype);
      if (p.dlse != nullptr) delta -= p.dlse[Pass::at(p.dlse_strides, queries, b, h, row)];
    }
    pass.delta()[pass.row_index(queries, b, h, row)] = delta;
  }
}

// What is the same for all rows and keys of a KV head.
BackwardUnit unit_of(const Pass& pass, int32_t b, int32_t h_kv) {
  const BackwardParams& p = pass.p;
  const AttentionParams& f = pass.f;
  Span keys = key_span(f, b);
  BackwardUnit unit{};
  unit.head_dim = f.head_dim;
  unit.head_dim_v = f.head_dim_v;
  unit.k = element(f.k, Pass::at(f.k_strides, keys, b, h_kv, 0), f.dtype);
  unit.v = element(f.v, Pass::at(f.v_strides, keys, b, h_kv, 0), f.dtype);
  unit.k_stride = f.k_strides.seq;
  unit.v_stride = f.v_strides.seq;
  if (p.dk != nullptr)
    unit.dk = element(p.dk, Pass::at(p.dk_strides, keys, b, h_kv, 0), p.dk_dtype);
  if (p.dv != nullptr)
    unit.dv = element(p.dv, Pass::at(p.dv_strides, keys, b, h_kv, 0), p.dv_dtype);
  unit.dk_stride = p.dk_strides.seq;
  unit.dv_stride = p.dv_strides.seq;
  unit.dk_dtype = p.dk_dtype;
  unit.dv_dtype = p.dv_dtype;
  unit.dtype = f.dtype;
  unit.bias_dtype = f.scores.bias_dtype;
  unit.bias_stride = f.scores.bias_stride_kv;
  unit.adds_dbias = pass.sums_dbias;
  unit.dbias_stride = pass.sums_dbias ? (p.dbias.extents[3] > 1 ? 1 : 0) : p.dbias.strides[3];
  unit.has_alibi = f.scores.alibi_slopes != nullptr;
  unit.scale = f.scores.scale;
  unit.softcap = f.scores.softcap;
  unit.dropout = pass.dropout;
  unit.scratch = thread_scratch(pass.kernel.scratch_floats(f.head_dim, f.head_dim_v));
  return unit;
}

// The element of the first key in dbias of query i, or in its sums; nullptr: not needed.
void* dbias_row(const Pass& pass, int32_t b, int32_t h, int32_t i, int32_t chunk) {
  const BiasGradient& bias = pass.p.dbias;
  if (!pass.p.needs(kNeedDbias)) return nullptr;
  auto index = [&](int32_t axis, int64_t at) { return bias.extents[axis] > 1 ? at : 0; };
  int64_t at_b = index(0, b), at_h = index(1, h), at_i = index(2, i);
  int64_t at_j = index(3, first_key(pass.f, b));
  if (pass.sums_dbias) {
    int64_t row = (at_b * bias.extents[1] + at_h) * bias.extents[2] + at_i;
    return pass.dbias_sums(chunk) + row * bias.extents[3] + at_j;
  }
  int64_t offset = at_b * bias.strides[0] + at_h * bias.strides[1] + at_i * bias.strides[2] +
                   at_j * bias.strides[3];
  return element(bias.data, offset, pass.f.scores.bias_dtype);
}

BackwardRow row_of(const Pass& pass, const Span& queries, const Span& keys, int32_t b, int32_t h,
                   int32_t i, int32_t chunk) {
  const BackwardParams& p = pass.p;
  const AttentionParams& f = pass.f;
  BackwardRow row{};
  row.q = element(f.q, Pass::at(f.q_strides, queries, b, h, i), f.dtype);
  row.dout = element(p.dout, Pass::at(p.dout_strides, queries, b, h, i), f.dtype);
  if (p.dq != nullptr) row.dq = pass.dq_row(queries, b, h, i, chunk);
  if (f.scores.bias != nullptr) {
    int64_t first = b * f.scores.bias_stride_batch + h * f.scores.bias_stride_head +
                    i * f.scores.bias_stride_q + first_key(f, b) * f.scores.bias_stride_kv;
    DType dtype = f.scores.bias_dtype;
    row.bias = dtype == DType::boolean ? static_cast<const char*>(f.scores.bias) + first
                                       : element(f.scores.bias, first, dtype);
  }
  row.dbias = dbias_row(pass, b, h, i, chunk);
  int64_t index = pass.row_index(queries, b, h, i);
  if (p.needs(kNeedDslopes)) row.slope_sum = pass.slope_sums(chunk) + index;
  float lse = f.lse[Pass::at(f.lse_strides, queries, b, h, i)];
  bool dead = lse == -kInfinity;
  row.lse = dead ? kInfinity : lse;
  row.delta = pass.delta()[index];
  row.slope = f.scores.slope(b, h);
  row.diagonal = static_cast<int32_t>(int64_t{i} + keys.used - queries.used);
  row.visible = dead ? KeyRange{0, 0} : f.mask.visible(i, queries.used, keys.used);
  row.visible = f.rows.limit(row.visible, b, h, queries.start + i);
  row.dropout_row = f.dropout.first_row + static_cast<uint32_t>(i);
  row.dropout_head = f.dropout.head(b, h);
  return row;
}

// Whether lists hide the keys [first, last) from some rows; `first` begins a tile.
bool all_hidden(const uint8_t* tiles, int64_t first, int64_t last) {
  if (tiles == nullptr) return false;
  for (int64_t key = first; key < last; key += kFlexTile) {
    if (tiles[key / kFlexTile] != kTileHidden) return false;
  }
  return true;
}

// The keys of one chunk of a KV head against all its queries. `array_sums` of the part of the work.
void run_unit(const Pass& pass, int32_t chunk, int32_t b, int32_t h_kv, double* array_sums) {
  const AttentionParams& f = pass.f;
  Span queries = query_span(f, b), keys = key_span(f, b);
  int64_t begin = int64_t{chunk} * pass.schedule.chunk_keys;
  int64_t end = std::min<int64_t>(begin + pass.schedule.chunk_keys, keys.used);
  if (begin >= end && chunk > 0) return;
  // Rows are numbered query by query, the heads of the group inside: neighbours see nearly the same
  // keys.
  int64_t num_rows = int64_t{queries.used} * pass.group;
  auto row_at = [&](int64_t x) {
    return row_of(pass, queries, keys, b, h_kv * pass.group + static_cast<int32_t>(x % pass.group),
                  static_cast<int32_t>(x / pass.group), chunk);
  };
  for (int32_t h = h_kv * pass.group; h < (h_kv + 1) * pass.group; ++h) {
    for (int32_t i = 0; i < queries.used; ++i) {
      if (pass.p.dq != nullptr) std::fill_n(pass.dq_row(queries, b, h, i, chunk), f.head_dim, 0.0f);
      if (pass.p.needs(kNeedDslopes))
        pass.slope_sums(chunk)[pass.row_index(queries, b, h, i)] = 0.0f;
    }
  }
  BackwardUnit unit = unit_of(pass, b, h_kv);
  const auto first_head = static_cast<int32_t>(f.dropout.head(b, 0));
  FlexUnit flex{f.flex, b, first_head, queries.used, keys.used, nullptr};
  unit.flex = f.flex == nullptr ? nullptr : &flex;
  unit.gradient = pass.p.flex;
  unit.array_sums = array_sums;
  std::vector<BackwardRow> rows(static_cast<size_t>(pass.kernel.row_block));
  for (int64_t key = begin; key < end; key += kBackwardKeys) {
    unit.first_key = static_cast<int32_t>(key);
    unit.num_keys = static_cast<int32_t>(std::min<int64_t>(kBackwardKeys, end - key));
    pass.kernel.begin_keys(unit);
    for (int64_t x = 0; x < num_rows; x += pass.kernel.row_block) {
      int64_t count = std::min<int64_t>(pass.kernel.row_block, num_rows - x);
      auto visible = [&](int64_t row) {  // neither end of the range ever falls from row to row
        return f.mask.visible(static_cast<int32_t>(row / pass.group), queries.used, keys.used);
      };
      if (visible(x).begin >= key + unit.num_keys || visible(x + count - 1).end <= key) continue;
      if (f.flex != nullptr)
        flex.tiles =
            find_tiles(f.flex->lists, b, {x, x + count, h_kv * pass.group, pass.group, keys.used});
      if (all_hidden(flex.tiles, key, key + unit.num_keys)) continue;
      for (int64_t i = 0; i < count; ++i) rows[static_cast<size_t>(i)] = row_at(x + i);
      pass.kernel.add_rows(unit, rows.data(), static_cast<int32_t>(count));
    }
    pass.kernel.end_keys(unit);
  }
}

// After the units: the sums of the chunks in order, in the bias's dtype.
void store_dbias(const Pass& pass) {
  const BiasGradient& bias = pass.p.dbias;
  const int64_t* extents = bias.extents;
  for (int64_t row = 0; row < extents[0] * extents[1] * extents[2]; ++row) {
    int64_t to = bias_row(bias, row);
    for (int64_t j = 0; j < extents[3]; ++j) {
      float sum = 0.0f;
      for (int32_t chunk = 0; chunk < pass.schedule.num_chunks; ++chunk)
        sum += pass.dbias_sums(chunk)[row * extents[3] + j];
      store_element(bias.data, to + j * bias.strides[3], pass.f.scores.bias_dtype, sum);
    }
  }
}

int32_t chunks_of(const Pass& pass, const Span& keys) {
  int64_t chunks = (int64_t{keys.used} + pass.schedule.chunk_keys - 1) / pass.schedule.chunk_keys;
  return static_cast<int32_t>(std::max<int64_t>(chunks, 1));
}

// After the units: dq of one head from its parts, and the head's share of dsinks and dslopes.
HeadSums finish_head(const Pass& pass, int32_t b, int32_t h) {
  const BackwardParams& p = pass.p;
  const AttentionParams& f = pass.f;
  Span queries = query_span(f, b);
  int32_t chunks = chunks_of(pass, key_span(f, b));
  HeadSums sums{};
  bool has_sink = p.needs(kNeedDsinks);
  double sink = has_sink ? finite_sink(f.scores.sinks[h * f.scores.sinks_stride]) : 0.0;
  for (int32_t i = 0; i < queries.used; ++i) {
    if (p.dq != nullptr && !pass.layout.dq_in_place) {
      float* row = pass.dq_row(queries, b, h, i, 0);
      for (int32_t chunk = 1; chunk < chunks; ++chunk) {
        const float* part = pass.dq_row(queries, b, h, i, chunk);
        for (int32_t d = 0; d < f.head_dim; ++d) row[d] += part[d];
      }
      void* to = element(p.dq, Pass::at(p.dq_strides, queries, b, h, i), f.dtype);
      pass.kernel.store(row, f.head_dim, f.dtype, to);
    }
    int64_t index = pass.row_index(queries, b, h, i);
    if (has_sink) {
      float lse = f.lse[Pass::at(f.lse_strides, queries, b, h, i)];
      if (lse != -kInfinity) sums.sink -= std::exp(sink - lse) * pass.delta()[index];
    }
    for (int32_t chunk = 0; p.needs(kNeedDslopes) && chunk < chunks; ++chunk)
      sums.slope -= pass.slope_sums(chunk)[index];
  }
  return sums;
}

}  // namespace

void flash_backward(const BackwardParams& p, const BackwardSchedule& schedule) {
  const AttentionParams& f = p.forward;
  clear_unused(p);
  if (f.num_heads_q == 0 || f.batch == 0) {
    clear_dbias(p);
    if (p.flex != nullptr) store_array_gradients(*f.flex, *p.flex, nullptr, 0);
    return store_head_sums(p, {});
  }
  Pass pass{p,
            f,
            schedule,
            backward_kernel(),
            layout_of(p, schedule.num_chunks),
            static_cast<float*>(schedule.workspace),
            f.dropout.resolved(),
            f.num_heads_q / f.num_heads_kv,
            p.needs(kNeedDbias) && sums_bias(p)};
  if (pass.sums_dbias) {  // ds are added to zeros there, else stored where keys are seen
    std::fill_n(pass.dbias_sums(0), schedule.num_chunks * pass.layout.dbias_size, 0.0f);
  } else {
    clear_dbias(p);
  }
  int64_t heads = int64_t{f.batch} * f.num_heads_q;
  double row_flops = 2.0 * static_cast<double>(pass.layout.rows) * f.head_dim_v;
  parallel_for(heads, row_flops, [&](int64_t index) {
    find_deltas(pass, static_cast<int32_t>(index / f.num_heads_q),
                static_cast<int32_t>(index % f.num_heads_q));
  });

  // Units that add to the same dbias follow each other on one thread.
  bool batch_inside = pass.sums_dbias && p.dbias.extents[0] == 1;
  bool heads_inside = pass.sums_dbias && p.dbias.extents[1] == 1;
  int64_t outer_batch = batch_inside ? 1 : f.batch, outer_heads = heads_inside ? 1 : f.num_heads_kv;
  double flops = 10.0 * static_cast<double>(pass.layout.rows) * f.seqlen_kv *
                 std::max(f.head_dim, f.head_dim_v);
  // The first chunk first: under a causal mask it has the most rows.
  int64_t items = schedule.num_chunks * outer_batch * outer_heads;
  auto run_item = [&](int64_t index, double* array_sums) {
    int64_t chunk = index / (outer_batch * outer_heads),
            place = index % (outer_batch * outer_heads);
    int64_t b = place / outer_heads, h_kv = place % outer_heads;
    int64_t b_end = batch_inside ? f.batch : b + 1;
    int64_t h_end = heads_inside ? f.num_heads_kv : h_kv + 1;
    for (int64_t at_b = b; at_b < b_end; ++at_b) {
      for (int64_t at_h = h_kv; at_h < h_end; ++at_h) {
        run_unit(pass, static_cast<int32_t>(chunk), static_cast<int32_t>(at_b),
                 static_cast<int32_t>(at_h), array_sums);
      }
    }
  };
  int64_t parts = pass.layout.array_parts;  // those of a part follow each other on one thread
  if (parts == 0) {
    parallel_for(items, flops, [&](int64_t index) { run_item(index, nullptr); });
  } else {
    parallel_for(parts, flops, [&](int64_t part) {
      double* sums = pass.array_sums(part);
      std::fill_n(sums, p.flex->num_sums, 0.0);
      for (int64_t index = part * items / parts; index < (part + 1) * items / parts; ++index)
        run_item(index, sums);
    });
    store_array_gradients(*f.flex, *p.flex, pass.array_sums(0), parts);
  }
  if (pass.sums_dbias) store_dbias(pass);
  std::vector<HeadSums> sums(static_cast<size_t>(heads));
  parallel_for(heads, row_flops, [&](int64_t index) {
    sums[static_cast<size_t>(index)] =
        finish_head(pass, static_cast<int32_t>(index / f.num_heads_q),
                    static_cast<int32_t>(index % f.num_heads_q));
  });
  store_head_sums(p, sums);
}

}  // namespace cuattn::cpu
