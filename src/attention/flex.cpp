// SPDX-License-Identifier: Apache-2.0
// flex_attention: holds row ranges, lists and programs against their rules, so that no kernel can
// leave its arrays by them. Next: python/cuattn/flex/program.py, which writes programs.
#include "src/attention/flex.h"

#include <algorithm>

#include "src/check/arrays.h"

namespace cuattn {
namespace {

constexpr const char* kFunction = "flex_attention";

void require_host(const char* name, const TensorView& view) {
  CUATTN_REQUIRE(is_cpu(view.device), kFunction, ": ", name, " must lie on the CPU, got device ",
                 static_cast<int>(view.device.device_type), "; it is read when the call is made");
}

// 1. Row ranges

// Strides of an array that broadcasts to the shape of lse.
Strides row_strides(const AttentionCall& call, const char* name, const TensorView& view) {
  const AttentionParams& p = call.params;
  int64_t dense[3] = {p.batch, p.num_heads_q, p.seqlen_q}, ragged[2] = {p.num_heads_q, p.total_q};
  TensorView full = call.ragged ? shape_view(ragged, 2) : shape_view(dense, 3);
  int64_t strides[3] = {0, 0, 0};
  bool fits = view.ndim == full.ndim;
  for (int32_t axis = 0; fits && axis < full.ndim; ++axis) {
    fits = view.shape[axis] == full.shape[axis] || view.shape[axis] == 1;
    strides[axis + 3 - full.ndim] = stride_of(view, axis);
  }
  CUATTN_REQUIRE(fits, kFunction, ": ", name, " must have the shape of lse ", shape_text(full),
                 ", got ", shape_text(view), "; an axis that is shared has extent 1");
  return {strides[0], strides[2], strides[1]};
}

void read_rows(AttentionCall& call, const cuattn_flex_options& o, bool check_data) {
  if (o.row_begin == nullptr && o.row_end == nullptr) return;
  CUATTN_REQUIRE(o.row_begin != nullptr && o.row_end != nullptr, kFunction,
                 ": row_begin and row_end must both be given, got one; a row sees the keys "
                 "[begin, end)");
  RowRanges& rows = call.params.rows;
  const struct {
    const char* name;
    const DLTensor* tensor;
    const int32_t** data;
  } sides[] = {{"row_begin", o.row_begin, &rows.begin}, {"row_end", o.row_end, &rows.end}};
  Strides strides[2];
  for (int i = 0; i < 2; ++i) {
    TensorView view = view_of(kFunction, sides[i].name, sides[i].tensor);
    require_dtype(kFunction, sides[i].name, view, DType::i32);
    require_device(kFunction, sides[i].name, view, call.device);
    require_strided(kFunction, sides[i].name, view, false, check_data);
    strides[i] = row_strides(call, sides[i].name, view);
    *sides[i].data = static_cast<const int32_t*>(view.data);
  }
  CUATTN_REQUIRE(strides[0].batch == strides[1].batch && strides[0].seq == strides[1].seq &&
                     strides[0].head == strides[1].head,
                 kFunction, ": row_begin and row_end must have the same strides; copy one of them");
  rows.strides = strides[0];
}

// 2. Captured arrays

FlexArray read_array(const AttentionCall& call, const TensorView& view, bool check_data) {
  const char* name = "a captured array";
  FlexArray array{};
  array.dtype = view.is(DType::boolean) ? DType::boolean
                : view.is(DType::i32)   ? DType::i32
                                        : DType::f32;
  require_dtype(kFunction, name, view, array.dtype);
  require_device(kFunction, name, view, call.device);
  require_strided(kFunction, name, view, false, check_data);
  CUATTN_REQUIRE(view.ndim <= 2, kFunction, ": ", name, " must have at most 2 axes, got ",
                 view.ndim, "; reshape it");
  array.data = view.data;
  array.rank = view.ndim;
  for (int32_t axis = 0; axis < view.ndim; ++axis) {
    CUATTN_REQUIRE(view.shape[axis] >= 1, kFunction, ": ", name, " must have elements, got shape ",
                   shape_text(view), "; none can be read");
    array.extents[axis] = checked_extent(kFunction, name, "an axis", view.shape[axis]);
    array.strides[axis] = stride_of(view, axis);
  }
  return array;
}

// 3. Programs

int32_t operands(FlexCode code, const FlexParams& flex, const FlexOp& op) {
  switch (code) {
    case FlexCode::q:
    case FlexCode::k:
    case FlexCode::b:
    case FlexCode::h:
    case FlexCode::q_len:
    case FlexCode::kv_len:
    case FlexCode::score:
    case FlexCode::number: return 0;
    case FlexCode::load: return flex.arrays[op.number].rank;
    case FlexCode::neg:
    case FlexCode::abs:
    case FlexCode::negf:
    case FlexCode::absf:
    case FlexCode::exp:
    case FlexCode::log:
    case FlexCode::tanh:
    case FlexCode::sqrt:
    case FlexCode::float_:
    case FlexCode::not_: return 1;
    case FlexCode::where: return 3;
    default: return 2;
  }
}

// What is known of each register at a place of a program.
struct Registers {
  bool is_set[kMaxFlexRegisters] = {}, is_divisor[kMaxFlexRegisters] = {},
       is_row[kMaxFlexRegisters] = {};
};

// Whether an operation is one; `known` learns what it leaves.
bool is_sound(const FlexOp& op, const FlexParams& flex, int32_t num_arrays, bool has_score,
              Registers& known) {
  if (op.code < 0 || op.code > static_cast<int32_t>(FlexCode::where)) return false;
  FlexCode code = static_cast<FlexCode>(op.code);
  if (code == FlexCode::load && (op.number < 0 || op.number >= num_arrays)) return false;
  if (code == FlexCode::score && !has_score) return false;
  const int32_t sources[3] = {op.a, op.b, op.c};
  for (int32_t r : {op.to, op.a, op.b, op.c}) {
    if (r < 0 || r >= kMaxFlexRegisters) return false;
  }
  bool is_row = code != FlexCode::k && code != FlexCode::score;
  for (int32_t i = 0; i < operands(code, flex, op); ++i) {
    if (!known.is_set[sources[i]]) return false;
    is_row &= known.is_row[sources[i]];
  }
  bool divides = code == FlexCode::floordiv || code == FlexCode::mod;
  if (divides && !known.is_divisor[op.b]) return false;
  known.is_set[op.to] = true;
  known.is_row[op.to] = is_row;
  known.is_divisor[op.to] = code == FlexCode::number && op.number > 0;
  return true;
}

// Operations at the front that neither the key nor the score enters, and whose registers no later
// one writes.
int32_t count_row_ops(const FlexProgram& program, int32_t front) {
  bool is_written[kMaxFlexRegisters] = {};
  for (int32_t i = front; i < program.count; ++i) is_written[program.ops[i].to] = true;
  while (front > 0) {
    bool is_kept = true;
    for (int32_t i = 0; i < front; ++i) is_kept &= !is_written[program.ops[i].to];
    if (is_kept) break;
    is_written[program.ops[--front].to] = true;
  }
  return front;
}

FlexProgram read_program(const char* name, const DLTensor* tensor, const FlexParams& flex,
                         int32_t num_arrays, bool has_score) {
  if (tensor == nullptr) return {};
  TensorView view = view_of(kFunction, name, tensor);
  require_host(name, view);
  require_dtype(kFunction, name, view, DType::i32);
  CUATTN_REQUIRE(
      view.ndim == 2 && view.shape[1] == 6 && view.shape[0] >= 1 && view.shape[0] <= kMaxFlexOps,
      kFunction, ": ", name, " must have shape (n, 6), n from 1 to ", kMaxFlexOps, ", got ",
      shape_text(view), "; write a simpler function");
  require_contiguous(kFunction, name, view, true);
  FlexProgram program{static_cast<const FlexOp*>(view.data), static_cast<int32_t>(view.shape[0]),
                      0};
  Registers known;
  int32_t front = 0;
  for (int32_t i = 0; i < program.count; ++i) {
    CUATTN_REQUIRE(is_sound(program.ops[i], flex, num_arrays, has_score, known), kFunction, ": ",
                   name, " holds no operation at row ", i, ", got code ", program.ops[i].code,
                   "; params/flex.h has the codes");
    if (front == i && known.is_row[program.ops[i].to]) ++front;
  }
  program.row_count = count_row_ops(program, front);
  return program;
}

// 4. Lists of blocks

void check_entries(const FlexLists& lists, const TensorView& starts, int64_t count,
                   int64_t key_blocks) {
  const int32_t* all = lists.starts;
  for (int64_t list = 0; list < starts.shape[0] * starts.shape[1]; ++list) {
    all = lists.starts + list / starts.shape[1] * stride_of(starts, 0) +
          list % starts.shape[1] * stride_of(starts, 1);
    for (int32_t row = 0; row < lists.query_blocks; ++row) {
      int32_t begin = all[row], end = all[row + 1];
      CUATTN_REQUIRE(begin >= 0 && begin <= end && end <= count, kFunction,
                     ": block_starts must rise within [0, ", count, "], got ", begin, " and ", end,
                     " at query block ", row, "; they are running counts");
      for (int32_t i = begin; i < end; ++i) {
        int32_t entry = lists.entries[i];
        CUATTN_REQUIRE(entry >= 0 && entry / 2 < key_blocks, kFunction,
                       ": block_entries must name one of ", key_blocks, " key blocks, got ",
                       entry / 2, " at query block ", row, "; an entry is 2 * block + is_partial");
        CUATTN_REQUIRE(i == begin || entry / 2 < lists.entries[i - 1] / 2, kFunction,
                       ": block_entries must fall within a query block, got ",
                       lists.entries[i - 1] / 2, " and then ", entry / 2, " at query block ", row,
                       "; sort them from the last to the first, each once");
      }
    }
  }
}

void read_lists(AttentionCall& call, const cuattn_flex_options& o, bool check_data) {
  if (o.block_starts == nullptr && o.block_entries == nullptr) return;
  const AttentionParams& p = call.params;
  CUATTN_REQUIRE(o.block_starts != nullptr && o.block_entries != nullptr, kFunction,
                 ": block_starts and block_entries must both be given, got one");
  CUATTN_REQUIRE(!call.ragged, kFunction,
                 ": block_starts must not be given with cu_seqlens_q, as blocks count from the "
                 "start of a sequence; pass the mask function alone");
  CUATTN_REQUIRE(o.query_block > 0 && o.key_block > 0, kFunction,
                 ": query_block and key_block must be > 0, got ", o.query_block, " and ",
                 o.key_block, "; pass the queries and keys of a block");
  TensorView starts = view_of(kFunction, "block_starts", o.block_starts),
             entries = view_of(kFunction, "block_entries", o.block_entries);
  FlexLists& lists = call.flex.lists;
  int64_t query_blocks = (int64_t{p.seqlen_q} + o.query_block - 1) / o.query_block;
  int64_t key_blocks = (int64_t{p.seqlen_kv} + o.key_block - 1) / o.key_block;
  require_dtype(kFunction, "block_starts", starts, DType::i32);
  require_device(kFunction, "block_starts", starts, call.device);
  require_strided(kFunction, "block_starts", starts, false, check_data);
  bool fits = starts.ndim == 3 && (starts.shape[0] == 1 || starts.shape[0] == p.batch) &&
              (starts.shape[1] == 1 || starts.shape[1] == p.num_heads_q) &&
              starts.shape[2] == query_blocks + 1 && stride_of(starts, 2) <= 1;
  CUATTN_REQUIRE(fits, kFunction, ": block_starts must have shape (", p.batch, " or 1, ",
                 p.num_heads_q, " or 1, ", query_blocks + 1, "), got ", shape_text(starts),
                 "; make the mask for these lengths and heads");
  lists.entries = static_cast<const int32_t*>(read_vector(kFunction, "block_entries", entries,
                                                          DType::i32, entries.shape[0], "entries",
                                                          call.device, "q", check_data));
  lists.starts = static_cast<const int32_t*>(starts.data);
  lists.stride_batch = starts.shape[0] == 1 ? 0 : stride_of(starts, 0);
  lists.stride_head = starts.shape[1] == 1 ? 0 : stride_of(starts, 1);
  lists.query_blocks = static_cast<int32_t>(query_blocks);
  lists.query_block = o.query_block;
  lists.key_block = o.key_block;
  if (check_data && is_cpu(call.device)) check_entries(lists, starts, entries.shape[0], key_blocks);
}

}  // namespace

void read_flex(AttentionCall& call, const cuattn_flex_options& o, bool check_data) {
  read_rows(call, o, check_data);
  CUATTN_REQUIRE(o.num_arrays >= 0 && o.num_arrays <= kMaxFlexArrays, kFunction,
                 ": a mask and a score function may capture ", kMaxFlexArrays,
                 " arrays together, got ", o.num_arrays, "; stack some of them on a new axis");
  int32_t num_arrays = static_cast<int32_t>(o.num_arrays);
  for (int32_t i = 0; i < num_arrays; ++i) {
    CUATTN_REQUIRE(o.arrays != nullptr, kFunction, ": arrays must not be NULL");
    TensorView view = view_of(kFunction, "a captured array", o.arrays[i]);
    call.flex.arrays[i] = read_array(call, view, check_data);
  }
  call.flex.score = read_program("score_program", o.score_program, call.flex, num_arrays, true);
  call.flex.mask = read_program("mask_program", o.mask_program, call.flex, num_arrays, false);
  read_lists(call, o, check_data);
  call.has_programs =
      call.flex.score.count > 0 || call.flex.mask.count > 0 || call.flex.lists.starts != nullptr;
  if (call.flex.score.count > 0) call.params.scores.kind = ScoreKind::scored;
}

void check_flex_inputs(const AttentionCall& call, const CallMemory& memory) {
  const AttentionParams& p = call.params;
  const RowRanges& rows = p.rows;
  int64_t batch = call.ragged ? 1 : p.batch, count = call.ragged ? p.total_q : p.seqlen_q;
  for (auto [name, data] : {std::pair("row_begin", rows.begin), {"row_end", rows.end}}) {
    memory.reads({name,
                  data,
                  4,
                  {{batch, rows.strides.batch},
                   {p.num_heads_q, rows.strides.head},
                   {count, rows.strides.seq}}});
  }
  for (const FlexArray& array : call.flex.arrays) {
    int64_t first = array.rank > 0 ? array.extents[0] : 1;
    int64_t second = array.rank > 1 ? array.extents[1] : 1;
    memory.reads({"a captured array",
                  array.data,
                  itemsize(array.dtype),
                  {{first, array.strides[0]}, {second, array.strides[1]}}});
  }
}

}  // namespace cuattn
