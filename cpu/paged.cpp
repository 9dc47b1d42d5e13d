// SPDX-License-Identifier: Apache-2.0
// Paged attention on the CPU. The keys of a unit are gathered block by block into contiguous rows,
// at most kChunk at a time, and attended by the vector kernel of flash.cpp; chunks, and then
// splits, are merged by their log-sum-exp. Source: vLLM, arXiv:2309.06180; split keys,
// Flash-Decoding (Dao et al., 2023). Next: params/deal.h (units and splits), flash.cpp.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/convert.h"
#include "cpu/flash.h"
#include "cpu/kernels.h"
#include "cpu/latents.h"
#include "cpu/parallel.h"
#include "cuattn/error.h"

namespace cuattn::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.693147180559945309f;

constexpr int32_t kChunk = 512;  // keys; with head_dim 128 and float32 K and V fill 512 KB of L2
constexpr int32_t kLatentChunk = 128;  // of 512 + 64 columns: 288 KB

// Keys [begin, end) for the rows of one (sequence, kv head, row group), and where the result goes.
struct Task {
  int32_t b, head_group;
  int32_t begin, end;
  int64_t slot;   // of the partial result; -1: the output itself
  int32_t split;  // V2's partition
};

struct Rows {
  int32_t h_kv, first, count;  // row = query * group + head in the group
};

Rows rows_of(const PagedWork& w, int32_t head_group) {
  int32_t first = head_group % w.row_groups * w.rows;
  return {head_group / w.row_groups, first, std::min(w.rows, w.q_len * w.group - first)};
}

// 1. Gathering: tokens [first, first + count) of one kv head as rows of q's dtype

// The bits of every e4m3 number in a 16-bit type, which holds all of them exactly.
std::array<uint16_t, 256> e4m3_table(DType dtype) {
  std::array<uint16_t, 256> table;
  for (int32_t x = 0; x < 256; ++x) {
    float value = e4m3_to_float(static_cast<uint8_t>(x));
    table[x] = dtype == DType::f16 ? float_to_f16(value) : float_to_bf16(value);
  }
  return table;
}

const uint16_t* e4m3_in(DType dtype) {
  static const std::array<uint16_t, 256> f16 = e4m3_table(DType::f16),
                                         bf16 = e4m3_table(DType::bf16);
  return (dtype == DType::f16 ? f16 : bf16).data();
}

// Whole rows of head_dim elements: nhd and hnd.
struct CopyRow {
  const PagedParams& p;
  void operator()(const char* from, char* to) const {
    if (p.kv_dtype == p.dtype) {
      std::memcpy(to, from, static_cast<size_t>(p.head_dim) * bytes_of(p.dtype));
      return;
    }
    const uint16_t* table = e4m3_in(p.dtype);
    for (int32_t d = 0; d < p.head_dim; ++d)
      reinterpret_cast<uint16_t*>(to)[d] = table[static_cast<uint8_t>(from[d])];
  }
};

// `to[d] = from[offset(d)]` for elements that do not lie side by side: vllm.
template <class Offset>
void gather_row(const PagedParams& p, const char* from, char* to, Offset&& offset) {
  if (p.kv_dtype == DType::e4m3) {
    const uint16_t* table = e4m3_in(p.dtype);
    for (int32_t d = 0; d < p.head_dim; ++d)
      reinterpret_cast<uint16_t*>(to)[d] = table[static_cast<uint8_t>(from[offset(d)])];
  } else if (p.dtype == DType::f32) {
    for (int32_t d = 0; d < p.head_dim; ++d)
      reinterpret_cast<uint32_t*>(to)[d] = reinterpret_cast<const uint32_t*>(from)[offset(d)];
  } else {
    for (int32_t d = 0; d < p.head_dim; ++d)
      reinterpret_cast<uint16_t*>(to)[d] = reinterpret_cast<const uint16_t*>(from)[offset(d)];
  }
}

void gather(const PagedParams& p, int32_t b, int32_t h_kv, int32_t first, int32_t count, char* k,
            char* v) {
  int64_t itemsize = bytes_of(p.kv_dtype), row_bytes = int64_t{p.head_dim} * bytes_of(p.dtype);
  const int32_t x = static_cast<int32_t>(16 / itemsize), block_size = p.pages.block_size;
  auto at = [&](const void* cache, const CacheStrides& strides, int64_t block, int64_t token) {
    int64_t index = block * strides.block + h_kv * strides.head + token * strides.token;
    return static_cast<const char*>(cache) + index * itemsize;
  };
  CopyRow copy{p};
  for (int32_t i = 0; i < count; ++i, k += row_bytes, v += row_bytes) {
    int64_t block = p.pages.block(b, (first + i) / block_size), token = (first + i) % block_size;
    const char* from_k = at(p.k_cache, p.k_strides, block, token);
    const char* from_v = at(p.v_cache, p.v_strides, block, token);
    if (p.kv_layout == KvLayout::vllm) {
      gather_row(p, from_k, k, [&](int32_t d) { return d / x * block_size * x + d % x; });
      gather_row(p, from_v, v, [&](int32_t d) { return d * block_size; });
    } else {
      copy(from_k, k);
      copy(from_v, v);
    }
  }
}

// 2. The state of some rows over the keys so far

struct States {
  int32_t rows, head_dim;
  std::vector<float> out;       // [rows][head_dim], normalised
  std::vector<float> max, lse;  // natural logarithm; -inf without a key

  States(int32_t rows, int32_t head_dim)
      : rows(rows),
        head_dim(head_dim),
        out(static_cast<size_t>(rows) * head_dim),
        max(rows, -kInfinity),
        lse(rows, -kInfinity) {}
  float* row(int32_t r) { return out.data() + static_cast<int64_t>(r) * head_dim; }
};

// (out, lse) takes in another part; -inf on either side is a part without keys.
void merge_part(float* out, float& lse, const float* other, float other_lse, int32_t head_dim) {
  if (other_lse == -kInfinity) return;
  if (lse == -kInfinity) {
    std::copy(other, other + head_dim, out);
    lse = other_lse;
    return;
  }
  float top = std::fmax(lse, other_lse);
  float mine = std::exp(lse - top), theirs = std::exp(other_lse - top), sum = mine + theirs;
  for (int32_t d = 0; d < head_dim; ++d) out[d] = (out[d] * mine + other[d] * theirs) / sum;
  lse = top + std::log(sum);
}

// The sink takes its share of the denominator, once; then a row is written.
void write_row(const PagedParams& p, int32_t b, int32_t h_kv, int32_t row, const float* out,
               float lse) {
  int64_t query = query_row(p, b, row / p.work.group);
  if (query < 0) return;
  int32_t h = h_kv * p.work.group + row % p.work.group;
  float factor = lse == -kInfinity ? 0.0f : 1.0f;
  if (p.scores.sinks != nullptr) {
    float sink = finite_sink(p.scores.sinks[h * p.scores.sinks_stride]), top = std::fmax(lse, sink);
    if (top != -kInfinity) {
      float sum = std::exp(lse - top) + std::exp(sink - top);
      factor *= std::exp(lse - top) / sum;
      lse = top + std::log(sum);
    }
  }
  int64_t to = row_offset(p, p.out_strides, b, query, h);
  for (int32_t d = 0; d < p.head_dim; ++d) {
    store_element(p.out, to + d, p.out_dtype, factor == 0.0f ? 0.0f : out[d] * factor);
  }
  if (p.lse != nullptr) {
    p.lse[row_offset(p, p.lse_strides, b, query, h)] = lse;
  }
}

// 3. One task

float scale_of(float number, const float* array, int64_t stride_batch, int64_t stride_head,
               int32_t b, int32_t h_kv) {
  return array == nullptr ? number : array[b * stride_batch + h_kv * stride_head];
}

void fill_row(const PagedParams& p, const Task& task, int32_t context, int32_t row, int32_t h_kv,
              FlashRow& r) {
  int32_t query = row / p.work.group, h = h_kv * p.work.group + row % p.work.group;
  int64_t place = std::max<int64_t>(query_row(p, task.b, query), 0);  // no query: its row is junk
  int64_t q = row_offset(p, p.q_strides, task.b, place, h);
  r.q = static_cast<const char*>(p.q) + q * bytes_of(p.dtype);
  r.bias = nullptr;
  r.slope = p.scores.slope(task.b, h);
  r.sink = -kInfinity;
  r.diagonal = static_cast<int32_t>(int64_t{query} + context - p.work.q_len);
  r.visible = p.work.mask.visible(query, p.work.q_len, context);
}

// Queries of mla_decode, the parts of a row side by side.
std::vector<char> join_queries(const PagedParams& p, const Task& task, std::vector<FlashRow>& rows,
                               int32_t first) {
  int64_t itemsize = bytes_of(p.dtype), head_bytes = p.head_dim * itemsize;
  int64_t rope_bytes = p.latent.rope_dim * itemsize, row_bytes = head_bytes + rope_bytes;
  std::vector<char> joined(rows.size() * static_cast<size_t>(row_bytes));
  for (size_t r = 0; r < rows.size(); ++r) {
    char* to = joined.data() + r * row_bytes;
    std::memcpy(to, rows[r].q, static_cast<size_t>(head_bytes));
    rows[r].q = to;
    if (rope_bytes == 0) continue;
    int32_t row = first + static_cast<int32_t>(r);
    int64_t at = row_offset(p, p.latent.q_strides, task.b, row / p.work.group, row % p.work.group);
    std::memcpy(to + head_bytes, static_cast<const char*>(p.latent.q_rope) + at * itemsize,
                static_cast<size_t>(rope_bytes));
  }
  return joined;
}

// Chunks lie at multiples of their length, wherever the task begins.
States attend(const PagedParams& p, const Task& task) {
  const FlashKernel& kernel = flash_kernel();
  Rows rows = rows_of(p.work, task.head_group);
  int32_t context = context_of(p.work, task.b);
  States states(rows.count, p.head_dim), chunk(rows.count, p.head_dim);
  std::vector<FlashRow> whole(rows.count), part(rows.count);
  for (int32_t r = 0; r < rows.count; ++r) {
    fill_row(p, task, context, rows.first + r, rows.h_kv, whole[r]);
    whole[r].out = chunk.row(r);
    whole[r].lse = &chunk.lse[r];
    whole[r].max = &chunk.max[r];
  }
  std::vector<char> queries;
  if (p.latent.is_used) queries = join_queries(p, task, whole, rows.first);

  int32_t key_dim = p.head_dim + p.latent.rope_dim;
  int32_t chunk_keys = p.latent.is_used ? kLatentChunk : kChunk;
  size_t flash_floats = (kernel.scratch_floats(rows.count, key_dim, p.head_dim) + 15) / 16 * 16;
  size_t tile_floats = static_cast<size_t>(chunk_keys) * key_dim;
  FlashUnit unit{};
  unit.scratch = thread_scratch(flash_floats + 2 * tile_floats);
  unit.k = unit.scratch + flash_floats;
  unit.v = unit.scratch + flash_floats + tile_floats;
  unit.k_stride = unit.head_dim = key_dim;
  unit.v_stride = unit.head_dim_v = p.head_dim;
  if (p.latent.is_used && !p.latent.own_values) {
    unit.v = unit.k;
    unit.v_stride = key_dim;
  }
  unit.rows = part.data();
  unit.num_rows = rows.count;
  unit.sequence_rows = static_cast<int64_t>(p.work.q_len) * p.work.group;
  unit.dtype = p.dtype;
  unit.out_dtype = DType::f32;
  unit.scale = p.scores.scale * scale_of(p.k_scale, p.k_scales, p.k_scales_stride_batch,
                                         p.k_scales_stride_head, task.b, rows.h_kv);
  unit.softcap = p.scores.softcap;
  unit.has_alibi = p.scores.alibi_slopes != nullptr;

  for (int32_t first = task.begin; first < task.end;) {
    int32_t until = std::min(task.end - first, chunk_keys - first % chunk_keys) + first;
    char* keys = const_cast<char*>(static_cast<const char*>(unit.k));
    char* values = const_cast<char*>(static_cast<const char*>(unit.v));
    int32_t last = until;
    if (p.latent.is_used) {
      last = first + gather_latents(p, task.b, first, until - first, keys, values);
    } else {
      gather(p, task.b, rows.h_kv, first, until - first, keys, values);
    }
    for (int32_t r = 0; r < rows.count; ++r) {
      part[r] = whole[r];
      part[r].diagonal -= first;
      int32_t begin = std::clamp(whole[r].visible.begin, first, last) - first;
      int32_t end = std::clamp(whole[r].visible.end, first, last) - first;
      part[r].visible = {begin, std::max(begin, end)};
    }
    kernel.run(unit);
    for (int32_t r = 0; r < rows.count; ++r) {
      merge_part(states.row(r), states.lse[r], chunk.row(r), chunk.lse[r], p.head_dim);
      states.max[r] = std::fmax(states.max[r], chunk.max[r]);
    }
    first = until;
  }

  float v_scale = scale_of(p.v_scale, p.v_scales, p.v_scales_stride_batch, p.v_scales_stride_head,
                           task.b, rows.h_kv);
  if (v_scale != 1.0f) {
    for (float& x : states.out) x *= v_scale;
  }
  return states;
}

void write_partition(const PagedParams& p, const Task& task, int32_t h, float* out, float max,
                     float lse) {
  int64_t at = (int64_t{task.b} * p.num_heads_q + h) * p.work.num_splits + task.split;
  p.max_logits[at] = max;
  p.exp_sums[at] = std::exp(lse - max);
  for (int32_t d = 0; d < p.head_dim; ++d)
    store_element(p.tmp_out, at * p.head_dim + d, p.dtype, out[d]);
}

void run_task(const PagedParams& p, const Task& task) {
  States states = attend(p, task);
  Rows rows = rows_of(p.work, task.head_group);
  for (int32_t r = 0; r < rows.count; ++r) {
    if (p.exp_sums != nullptr && task.begin < task.end) {
      write_partition(p, task, rows.h_kv * p.work.group + rows.first + r, states.row(r),
                      states.max[r], states.lse[r]);
    } else if (task.slot >= 0) {
      int64_t at = task.slot * p.work.rows + r;
      std::copy(states.row(r), states.row(r) + p.head_dim, p.partial_out + at * p.head_dim);
      p.partial_lse[at] = states.lse[r] * kLog2e;
    } else {
      write_row(p, task.b, rows.h_kv, rows.first + r, states.row(r), states.lse[r]);
    }
  }
}

// 4. Combining the parts of a unit, in the order of the keys

void combine(const PagedParams& p, int32_t b, int32_t head_group, const PagedSlots& slots) {
  Rows rows = rows_of(p.work, head_group);
  std::vector<float> out(p.head_dim);
  for (int32_t r = 0; r < rows.count; ++r) {
    float lse = -kInfinity;
    for (int32_t part = 0; part < slots.count; ++part) {
      int64_t at = slots.slot(part) * p.work.rows + r;
      merge_part(out.data(), lse, p.partial_out + at * p.head_dim, p.partial_lse[at] * kLn2,
                 p.head_dim);
    }
    write_row(p, b, rows.h_kv, rows.first + r, out.data(), lse);
  }
}

// V2: from its own buffers, in the dtype that they have.
void reduce(const PagedParams& p, int32_t b, int32_t head_group, const PagedSplits& splits) {
  Rows rows = rows_of(p.work, head_group);
  std::vector<float> out(p.head_dim), part(p.head_dim);
  for (int32_t r = rows.first; r < rows.first + rows.count; ++r) {
    float lse = -kInfinity;
    int64_t h = int64_t{b} * p.num_heads_q + rows.h_kv * p.work.group + r;
    int64_t first = h * p.work.num_splits + splits.first;
    for (int64_t at = first; at < first + splits.count; ++at) {
      for (int32_t d = 0; d < p.head_dim; ++d)
        part[d] = load_element(p.tmp_out, at * p.head_dim + d, p.dtype);
      merge_part(out.data(), lse, part.data(), p.max_logits[at] + std::log(p.exp_sums[at]),
                 p.head_dim);
    }
    write_row(p, b, rows.h_kv, r, out.data(), lse);
  }
}

// 5. The tasks of a call

void add_splits(const PagedWork& w, int32_t b, int32_t head_group, std::vector<Task>& tasks) {
  PagedSpan span = paged_span(w, b);
  PagedSplits splits = paged_splits(w, span);
  int64_t first_slot = (int64_t{b} * head_groups(w) + head_group) * w.num_splits;
  for (int32_t s = splits.first; s < splits.first + splits.count; ++s) {
    auto begin = std::max<int64_t>(span.begin, splits.begin_of(s));
    auto end = std::min<int64_t>(span.end, splits.begin_of(s + 1));
    tasks.push_back({b, head_group, static_cast<int32_t>(begin), static_cast<int32_t>(end),
                     splits.count == 1 ? -1 : first_slot + s, s});
  }
}

void add_planned(const PagedWork& w, int32_t worker, std::vector<Task>& tasks) {
  PagedWalk walk(w, worker);
  for (PagedTask task; walk.next(w, task);) {
    PagedSpan span = paged_span(w, task.b);
    int64_t begin = span.begin + int64_t{task.tile} * w.tile;
    int64_t end = std::min<int64_t>(span.end, begin + int64_t{task.count} * w.tile);
    begin = std::min<int64_t>(begin, span.end);
    tasks.push_back({task.b, task.head_group, static_cast<int32_t>(begin),
                     static_cast<int32_t>(end), task.slot, 0});
  }
}

std::vector<Task> list_tasks(const PagedWork& w) {
  std::vector<Task> tasks;
  if (w.num_splits == 0) {
    for (int32_t worker = 0; worker < w.num_workers; ++worker) add_planned(w, worker, tasks);
  } else {
    for (int32_t b = 0; b < w.num_seqs; ++b) {
      for (int32_t head_group = 0; head_group < head_groups(w); ++head_group)
        add_splits(w, b, head_group, tasks);
    }
  }
  return tasks;
}

}  // namespace

void paged_deal(const PagedWork& work, int32_t* deal) {
  PagedWork w = work;
  w.deal = deal;
  int32_t* first_tile = deal + PagedDeal::first_tile(w, 0);
  int64_t tiles = 0, longest = 0;
  for (int32_t b = 0; b < w.num_seqs; ++b) {
    first_tile[b] = static_cast<int32_t>(tiles);
    int64_t of_sequence = paged_tiles(w, paged_span(w, b));
    tiles += of_sequence;
    longest = std::max(longest, of_sequence);
  }
  CUATTN_REQUIRE(tiles <= 0x7fffffff, "paged_plan: context_lens must make at most 2147483647 ",
                 "tiles of ", w.tile, " keys, got ", tiles, "; split the batch");
  first_tile[w.num_seqs] = static_cast<int32_t>(tiles);
  int64_t step = tiles_per_worker(w, tiles, longest);
  deal[PagedDeal::kTiles] = static_cast<int32_t>(tiles);
  deal[PagedDeal::kTilesPerWorker] = static_cast<int32_t>(step);
  deal[PagedDeal::kTile] = w.tile;
  deal[PagedDeal::kNumWorkers] = w.num_workers;
  deal[PagedDeal::kTracks] = w.tracks;
  for (int32_t worker = 0; worker < w.num_workers; ++worker) {
    int32_t* entry = deal + PagedDeal::worker(worker);
    PagedStart start = worker_start(w, first_tile, step, worker);
    entry[PagedDeal::kWorkerHead] = start.head_group;
    entry[PagedDeal::kWorkerSeq] = start.b;
    entry[PagedDeal::kWorkerTile] = start.tile;
    entry[PagedDeal::kWorkerCount] = start.count;
  }
}

void paged_attention(const PagedParams& p) {
  const PagedWork& w = p.work;
  if (p.latent.own_lens != nullptr)
    std::fill_n(p.latent.own_lens, w.num_seqs, std::numeric_limits<int32_t>::max());
  if (p.own_deal != nullptr) paged_deal(w, p.own_deal);
  std::vector<Task> tasks = list_tasks(w);
  double flops = 0.0;
  for (const Task& task : tasks) flops += 4.0 * (task.end - task.begin) * w.rows * p.head_dim;
  parallel_for(static_cast<int64_t>(tasks.size()), flops,
               [&](int64_t index) { run_task(p, tasks[index]); });
  parallel_for(int64_t{w.num_seqs} * head_groups(w), flops / 32, [&](int64_t index) {
    int32_t b = static_cast<int32_t>(index / head_groups(w));
    int32_t head_group = static_cast<int32_t>(index % head_groups(w));
    PagedSpan span = paged_span(w, b);
    if (p.exp_sums != nullptr) {
      if (span.begin < span.end) reduce(p, b, head_group, paged_splits(w, span));
      return;
    }
    PagedSlots slots = paged_slots(w, b, head_group);
    if (slots.count > 1) combine(p, b, head_group, slots);
  });
}

static void check_lens(const char* function, const char* name, const PagedWork& w,
                       const char* rule) {
  for (int32_t b = 0; b < w.num_seqs; ++b) {
    CUATTN_REQUIRE(w.context_lens[b] >= 0 && w.context_lens[b] <= w.capacity, function, ": ", name,
                   " must lie within [0, ", w.capacity, "], got ", w.context_lens[b], " at index ",
                   b, "; ", rule);
  }
}

void check_context_lens(const char* function, const PagedWork& w) {
  check_lens(function, "context_lens", w,
             "the table names max_blocks_per_seq * block_size tokens, and a max_context_len may "
             "allow fewer");
}

static void check_scales(const char* function, const char* name, const PagedWork& w,
                         const float* scales, int64_t batch_stride, int64_t head_stride) {
  if (scales == nullptr) return;
  for (int32_t b = 0; b < w.num_seqs; ++b) {
    for (int32_t h = 0; h < w.num_heads_kv; ++h) {
      float scale = scales[b * batch_stride + h * head_stride];
      CUATTN_REQUIRE(std::isfinite(scale) && scale >= 0.0f, function, ": ", name,
                     " must hold finite numbers that are not negative, got ", scale,
                     " for sequence ", b, " and head ", h, "; value = stored * scale");
    }
  }
}

void check_paged(const char* function, const PagedParams& p) {
  bool has_lists = p.latent.queries > 0;  // of tokens, which may hold anything
  if (has_lists && p.work.context_lens == nullptr) return;
  if (has_lists) return check_lens(function, "topk_lens", p.work, "a list has topk entries");
  check_context_lens(function, p.work);
  check_scales(function, "k_scale", p.work, p.k_scales, p.k_scales_stride_batch,
               p.k_scales_stride_head);
  check_scales(function, "v_scale", p.work, p.v_scales, p.v_scales_stride_batch,
               p.v_scales_stride_head);
  for (int32_t b = 0; b < p.work.num_seqs; ++b) {
    const int32_t* ids = p.pages.entry(b, 0);
    int64_t blocks =
        (int64_t{p.work.context_lens[b]} + p.pages.block_size - 1) / p.pages.block_size;
    for (int64_t i = 0; i < blocks; ++i) {
      CUATTN_REQUIRE(ids[i] >= 0 && ids[i] < p.pages.num_blocks, function,
                     ": block_tables must hold block ids within [0, ", p.pages.num_blocks - 1,
                     "], got ", ids[i], " at (", b, ", ", i,
                     "); entries past the context may be anything");
    }
  }
  if (p.work.deal == nullptr || p.own_deal != nullptr) return;
  std::vector<int32_t> want(PagedDeal::size(p.work));
  paged_deal(p.work, want.data());
  CUATTN_REQUIRE(std::equal(want.begin(), want.end(), p.work.deal), function,
                 ": plan must be what paged_plan makes of these context_lens, got another; make "
                 "it anew in every step, with the options of this call");
}

}  // namespace cuattn::cpu
