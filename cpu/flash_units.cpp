// SPDX-License-Identifier: Apache-2.0
// Kernel cpu, the part outside the vectors: picks the instruction set, cuts a call into units of
// rows that read the same keys, and spreads the units over the threads. Next: flash.cpp (one unit),
// parallel.cpp.
#include <algorithm>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "cpu/flash.h"
#include "cpu/flex_tiles.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cuattn/error.h"

namespace cuattn::cpu {

namespace baseline {
extern const FlashKernel kFlashKernel;
}
#if defined(CUATTN_CPU_AVX)
namespace avx2 {
extern const FlashKernel kFlashKernel;
}
namespace avx512 {
extern const FlashKernel kFlashKernel;
}
#endif

namespace {

struct Isa {
  const FlashKernel* kernel;
  bool runs_here;
};

// Fastest first.
std::vector<Isa> instruction_sets() {
  std::vector<Isa> list;
#if defined(CUATTN_CPU_AVX)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
              __builtin_cpu_supports("f16c");
  bool avx512 = avx2 && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("avx512f") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
  list.push_back({&avx512::kFlashKernel, avx512});
  list.push_back({&avx2::kFlashKernel, avx2});
#endif
  list.push_back({&baseline::kFlashKernel, true});
  return list;
}

const FlashKernel& choose_kernel() {
  const char* wanted = std::getenv("CUATTN_CPU_ISA");
  bool any = wanted == nullptr || *wanted == '\0';
  std::string runnable;
  for (const Isa& isa : instruction_sets()) {
    if (!isa.runs_here) continue;
    if (any || std::string(wanted) == isa.kernel->isa) return *isa.kernel;
    runnable += (runnable.empty() ? "" : ", ") + std::string(isa.kernel->isa);
  }
  fail<InvalidArgument>("attention: CUATTN_CPU_ISA must be one of ", runnable,
                        " on this machine, got ", wanted, "; leave it unset for the fastest");
}

// How one call is cut. Rows of a sequence and KV head are numbered query by query, the heads of the
// group inside: neighbours then see nearly the same keys.
struct Cut {
  const AttentionParams& p;
  int32_t group;      // query heads per KV head
  int32_t unit_rows;  // rows of a unit
  // Ragged: units before sequence b are num_heads_kv * first_chunk[b]. Dense: every sequence has
  // dense_chunks.
  std::vector<int64_t> first_chunk;
  int64_t dense_chunks, num_units;
  DropoutParams dropout;
};

int64_t count_chunks(const AttentionParams& p, int32_t b, int32_t group, int32_t unit_rows) {
  return (static_cast<int64_t>(query_span(p, b).stored) * group + unit_rows - 1) / unit_rows;
}

Cut cut_call(const AttentionParams& p, int32_t row_block) {
  Cut cut{p, p.num_heads_q / p.num_heads_kv, row_block, {}, 0, 0, p.dropout.resolved()};
  // Four units a thread even out their lengths, as far as that leaves whole row blocks.
  int64_t rows =
      (p.cu_seqlens_q != nullptr ? p.total_q : static_cast<int64_t>(p.batch) * p.seqlen_q) *
      p.num_heads_q;
  int64_t blocks = rows / (4 * num_threads()) / row_block;
  cut.unit_rows *= static_cast<int32_t>(std::clamp<int64_t>(blocks, 1, kMaxUnitRows / row_block));
  if (p.cu_seqlens_q == nullptr) {
    cut.dense_chunks =
        (static_cast<int64_t>(p.seqlen_q) * cut.group + cut.unit_rows - 1) / cut.unit_rows;
    cut.num_units = cut.dense_chunks * p.batch * p.num_heads_kv;
    return cut;
  }
  cut.first_chunk.assign(static_cast<size_t>(p.batch) + 1, 0);
  for (int32_t b = 0; b < p.batch; ++b) {
    cut.first_chunk[b + 1] = cut.first_chunk[b] + count_chunks(p, b, cut.group, cut.unit_rows);
  }
  cut.num_units = cut.first_chunk[p.batch] * p.num_heads_kv;
  return cut;
}

// Sequence, KV head and chunk of a unit. The last rows of a sequence come first: under a causal
// mask they are the longest, and a region ends sooner when the short units come last.
struct UnitPlace {
  int32_t b, h_kv;
  int64_t chunk;
};

UnitPlace find_unit(const Cut& cut, int64_t index) {
  const AttentionParams& p = cut.p;
  int32_t heads = p.num_heads_kv;
  if (p.cu_seqlens_q == nullptr) {
    int64_t sequences = static_cast<int64_t>(p.batch) * heads, place = index % sequences;
    return {static_cast<int32_t>(place / heads), static_cast<int32_t>(place % heads),
            cut.dense_chunks - 1 - index / sequences};
  }
  auto after = std::upper_bound(cut.first_chunk.begin(), cut.first_chunk.end(), index / heads);
  int32_t b = static_cast<int32_t>(after - cut.first_chunk.begin()) - 1;
  return {b, static_cast<int32_t>(index % heads), cut.first_chunk[b + 1] - 1 - index / heads};
}

const char* element(const void* base, int64_t index, DType dtype) {
  bool is_byte = dtype == DType::boolean || is_code(dtype);
  int64_t bytes = dtype == DType::f32 ? 4 : is_byte ? 1 : 2;
  return static_cast<const char*>(base) + index * bytes;
}

Float8Unit float8_unit(const AttentionParams& p, int32_t b, int32_t h_kv) {
  auto first = [&](const Float8Scale& scale) {
    if (scale.data == nullptr) return &scale.number;
    return scale.data + b * scale.strides[0] + h_kv * scale.strides[1];
  };
  const Float8Scale &k = p.float8.k, &v = p.float8.v;
  return {first(k), first(v), k.strides[2], v.strides[2], first_key(p, b), p.v_channel_stride};
}

void run_unit(const Cut& cut, const FlashKernel& kernel, int64_t index) {
  const AttentionParams& p = cut.p;
  UnitPlace place = find_unit(cut, index);
  Span queries = query_span(p, place.b), keys = key_span(p, place.b);
  int64_t sequence_rows = static_cast<int64_t>(queries.stored) * cut.group;
  int64_t begin = place.chunk * cut.unit_rows;
  int64_t end = std::min(begin + cut.unit_rows, sequence_rows);

  FlashRow rows[kMaxUnitRows];
  for (int64_t x = begin; x < end; ++x) {
    FlashRow& row = rows[x - begin];
    int32_t i = static_cast<int32_t>(x / cut.group),
            h = place.h_kv * cut.group + static_cast<int32_t>(x % cut.group);
    auto offset = [&](const Strides& strides) {
      return place.b * strides.batch + (queries.start + i) * strides.seq + h * strides.head;
    };
    row.q = element(p.q, offset(p.q_strides), p.dtype);
    row.q_scale = p.float8.of_query(place.b, h, i);
    row.out = const_cast<char*>(element(p.out, offset(p.out_strides), p.out_dtype));
    row.lse = p.lse == nullptr ? nullptr : p.lse + offset(p.lse_strides);
    row.max = nullptr;
    row.bias = nullptr;
    if (p.scores.bias != nullptr) {
      int64_t first = place.b * p.scores.bias_stride_batch + h * p.scores.bias_stride_head +
                      i * p.scores.bias_stride_q + first_key(p, place.b) * p.scores.bias_stride_kv;
      row.bias = element(p.scores.bias, first, p.scores.bias_dtype);
    }
    bool used = i < queries.used;
    row.slope = p.scores.slope(place.b, h);
    row.sink = p.scores.sinks == nullptr || !used
                   ? -std::numeric_limits<float>::infinity()
                   : finite_sink(p.scores.sinks[h * p.scores.sinks_stride]);
    row.diagonal = static_cast<int32_t>(int64_t{i} + keys.used - queries.used);
    row.visible = used ? p.mask.visible(i, queries.used, keys.used) : KeyRange{0, 0};
    row.visible = p.rows.limit(row.visible, place.b, h, queries.start + i);
    row.dropout_row = p.dropout.first_row + static_cast<uint32_t>(i);
    row.dropout_head = p.dropout.head(place.b, h);
  }

  FlashUnit unit{};
  unit.rows = rows;
  unit.num_rows = static_cast<int32_t>(end - begin);
  unit.sequence_rows = sequence_rows;
  unit.head_dim = p.head_dim;
  unit.head_dim_v = p.head_dim_v;
  auto first_key = [&](const Strides& strides) {
    return place.b * strides.batch + keys.start * strides.seq + place.h_kv * strides.head;
  };
  unit.k = element(p.k, first_key(p.k_strides), p.dtype);
  unit.v = element(p.v, first_key(p.v_strides), p.dtype);
  unit.k_stride = p.k_strides.seq;
  unit.v_stride = p.v_strides.seq;
  unit.dtype = p.dtype;
  unit.out_dtype = p.out_dtype;
  unit.float8 = float8_unit(p, place.b, place.h_kv);
  unit.bias_dtype = p.scores.bias_dtype;
  unit.bias_stride = p.scores.bias_stride_kv;
  unit.scale = p.scores.scale;
  unit.softcap = p.scores.softcap;
  unit.has_alibi = p.scores.alibi_slopes != nullptr;
  unit.dropout = cut.dropout;
  const auto first_head = static_cast<int32_t>(p.dropout.head(place.b, 0));
  FlexUnit flex{p.flex, place.b, first_head, queries.used, keys.used, nullptr};
  if (p.flex != nullptr) {
    KeyRows read{begin, end, place.h_kv * cut.group, cut.group, keys.used};
    flex.tiles = find_tiles(p.flex->lists, place.b, read);
    unit.flex = &flex;
  }
  unit.scratch = thread_scratch(kernel.scratch_floats(unit.num_rows, p.head_dim, p.head_dim_v));
  kernel.run(unit);
}

}  // namespace

const FlashKernel& flash_kernel() {
  static const FlashKernel& kernel = choose_kernel();
  return kernel;
}

float* thread_scratch(size_t floats) {
  constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlignment); }
  };
  thread_local std::unique_ptr<float, Free> memory;
  thread_local size_t size = 0;
  if (floats > size) {
    memory.reset();
    size = 0;
    memory.reset(static_cast<float*>(::operator new(floats * sizeof(float), kAlignment)));
    size = floats;
  }
  return memory.get();
}

const char* isa_name() { return flash_kernel().isa; }

void flash_attention(const AttentionParams& p) {
  const FlashKernel& kernel = flash_kernel();
  Cut cut = cut_call(p, kernel.row_block);
  int64_t queries =
      p.cu_seqlens_q != nullptr ? p.total_q : static_cast<int64_t>(p.batch) * p.seqlen_q;
  double flops = 2.0 * queries * p.num_heads_q * p.seqlen_kv * (p.head_dim + p.head_dim_v);
  parallel_for(cut.num_units, flops, [&](int64_t index) { run_unit(cut, kernel, index); });
}

}  // namespace cuattn::cpu
