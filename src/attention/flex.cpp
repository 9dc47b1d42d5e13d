// SPDX-License-Identifier: Apache-2.0
// flex_attention: holds row ranges, lists and programs against their rules, so that no kernel can
// leave its arrays by them. Next: python/cuattn/flex/program.py, which writes programs.
#include "src/attention/flex.h"

#include <cstdint>
#include <cstdlib>

#include "src/check/arrays.h"

namespace cuattn {
namespace {

void require_host(const char* fn, const char* name, const TensorView& view) {
  CUATTN_REQUIRE(is_cpu(view.device), fn, ": ", name, " must lie on the CPU, got device ",
                 static_cast<int>(view.device.device_type), "; it is read when the call is made");
}

// 1. Row ranges

// Strides of an array that broadcasts to the shape of lse.
Strides row_strides(const AttentionCall& call, const char* name, const TensorView& view) {
  const char* fn = call.function();
  const AttentionParams& p = call.params;
  int64_t dense[3] = {p.batch, p.num_heads_q, p.seqlen_q}, ragged[2] = {p.num_heads_q, p.total_q};
  TensorView full = call.ragged ? shape_view(ragged, 2) : shape_view(dense, 3);
  int64_t strides[3] = {0, 0, 0};
  bool fits = view.ndim == full.ndim;
  for (int32_t axis = 0; fits && axis < full.ndim; ++axis) {
    fits = view.shape[axis] == full.shape[axis] || view.shape[axis] == 1;
    strides[axis + 3 - full.ndim] = stride_of(view, axis);
  }
  CUATTN_REQUIRE(fits, fn, ": ", name, " must have the shape of lse ", shape_text(full), ", got ",
                 shape_text(view), "; an axis that is shared has extent 1");
  return {strides[0], strides[2], strides[1]};
}

void read_rows(AttentionCall& call, const cuattn_flex_options& o, bool check_data) {
  if (o.row_begin == nullptr && o.row_end == nullptr) return;
  const char* fn = call.function();
  CUATTN_REQUIRE(o.row_begin != nullptr && o.row_end != nullptr, fn,
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
    TensorView view = view_of(fn, sides[i].name, sides[i].tensor);
    require_dtype(fn, sides[i].name, view, DType::i32);
    require_device(fn, sides[i].name, view, call.device);
    require_strided(fn, sides[i].name, view, false, check_data);
    strides[i] = row_strides(call, sides[i].name, view);
    *sides[i].data = static_cast<const int32_t*>(view.data);
  }
  CUATTN_REQUIRE(strides[0].batch == strides[1].batch && strides[0].seq == strides[1].seq &&
                     strides[0].head == strides[1].head,
                 fn, ": row_begin and row_end must have the same strides; copy one of them");
  rows.strides = strides[0];
}

// 2. Captured arrays

FlexArray read_array(const AttentionCall& call, const TensorView& view, bool check_data) {
  const char *fn = call.function(), *name = "a captured array";
  FlexArray array{};
  array.dtype = view.is(DType::boolean) ? DType::boolean
                : view.is(DType::i32)   ? DType::i32
                                        : DType::f32;
  require_dtype(fn, name, view, array.dtype);
  require_device(fn, name, view, call.device);
  require_strided(fn, name, view, false, check_data);
  CUATTN_REQUIRE(view.ndim <= 2, fn, ": ", name, " must have at most 2 axes, got ", view.ndim,
                 "; reshape it");
  array.data = view.data;
  array.rank = view.ndim;
  int64_t last = 0;  // element
  for (int32_t axis = 0; axis < view.ndim; ++axis) {
    CUATTN_REQUIRE(view.shape[axis] >= 1, fn, ": ", name, " must have elements, got shape ",
                   shape_text(view), "; none can be read");
    array.extents[axis] = checked_extent(fn, name, "an axis", view.shape[axis]);
    array.strides[axis] = stride_of(view, axis);
    last += (view.shape[axis] - 1) * std::abs(array.strides[axis]);
  }
  CUATTN_REQUIRE(is_cpu(call.device) || last <= INT32_MAX, fn, ": ", name,
                 " must span at most 2147483647 elements on CUDA, got ", last,
                 "; copy the part that is read");
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
    case FlexCode::give: return 1 + (op.number < 0 ? 0 : flex.arrays[op.number].rank);
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

// Which program it is, and what that may read.
struct ProgramRules {
  const char *fn, *name;
  int32_t num_arrays;
  bool has_score;
  const FlexGradient* gradient;  // of the program of one, or nullptr

  bool may_give(int32_t number) const {
    if (gradient == nullptr || number < -1 || number >= num_arrays) return false;
    return number < 0 || gradient->arrays[number].data != nullptr;
  }
};

// Whether an operation is one; `known` learns what it leaves.
bool is_sound(const FlexOp& op, const FlexParams& flex, const ProgramRules& rules,
              Registers& known) {
  if (op.code < 0 || op.code > static_cast<int32_t>(FlexCode::give)) return false;
  FlexCode code = static_cast<FlexCode>(op.code);
  if (code == FlexCode::load && (op.number < 0 || op.number >= rules.num_arrays)) return false;
  if (code == FlexCode::score && !rules.has_score) return false;
  if (code == FlexCode::give && !rules.may_give(op.number)) return false;
  const int32_t sources[3] = {op.a, op.b, op.c};
  for (int32_t r : {op.to, op.a, op.b, op.c}) {
    if (r < 0 || r >= kMaxFlexRegisters) return false;
  }
  bool is_row = code != FlexCode::k && code != FlexCode::score && code != FlexCode::give;
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

FlexProgram read_program(const DLTensor* tensor, const FlexParams& flex,
                         const ProgramRules& rules) {
  if (tensor == nullptr) return {};
  const auto [fn, name] = std::pair(rules.fn, rules.name);
  TensorView view = view_of(fn, name, tensor);
  require_host(fn, name, view);
  require_dtype(fn, name, view, DType::i32);
  CUATTN_REQUIRE(
      view.ndim == 2 && view.shape[1] == 6 && view.shape[0] >= 1 && view.shape[0] <= kMaxFlexOps,
      fn, ": ", name, " must have shape (n, 6), n from 1 to ", kMaxFlexOps, ", got ",
      shape_text(view), "; write a simpler function");
  require_contiguous(fn, name, view, true);
  FlexProgram program{static_cast<const FlexOp*>(view.data), static_cast<int32_t>(view.shape[0]),
                      0};
  Registers known;
  int32_t front = 0;
  for (int32_t i = 0; i < program.count; ++i) {
    CUATTN_REQUIRE(is_sound(program.ops[i], flex, rules, known), fn, ": ", name,
                   " holds no operation at row ", i, ", got code ", program.ops[i].code,
                   "; params/flex.h has the codes");
    if (front == i && known.is_row[program.ops[i].to]) ++front;
  }
  program.row_count = count_row_ops(program, front);
  return program;
}

// 4. Lists of blocks

void check_entries(const char* fn, const FlexLists& lists, const TensorView& starts, int64_t count,
                   int64_t key_blocks) {
  const int32_t* all = lists.starts;
  for (int64_t list = 0; list < starts.shape[0] * starts.shape[1]; ++list) {
    all = lists.starts + list / starts.shape[1] * stride_of(starts, 0) +
          list % starts.shape[1] * stride_of(starts, 1);
    for (int32_t row = 0; row < lists.query_blocks; ++row) {
      int32_t begin = all[row], end = all[row + 1];
      CUATTN_REQUIRE(begin >= 0 && begin <= end && end <= count, fn,
                     ": block_starts must rise within [0, ", count, "], got ", begin, " and ", end,
                     " at query block ", row, "; they are running counts");
      for (int32_t i = begin; i < end; ++i) {
        int32_t entry = lists.entries[i];
        CUATTN_REQUIRE(entry >= 0 && entry / 2 < key_blocks, fn,
                       ": block_entries must name one of ", key_blocks, " key blocks, got ",
                       entry / 2, " at query block ", row, "; an entry is 2 * block + is_partial");
        CUATTN_REQUIRE(i == begin || entry / 2 < lists.entries[i - 1] / 2, fn,
                       ": block_entries must fall within a query block, got ",
                       lists.entries[i - 1] / 2, " and then ", entry / 2, " at query block ", row,
                       "; sort them from the last to the first, each once");
      }
    }
  }
}

void read_lists(AttentionCall& call, const cuattn_flex_options& o, bool check_data) {
  if (o.block_starts == nullptr && o.block_entries == nullptr) return;
  const char* fn = call.function();
  const AttentionParams& p = call.params;
  CUATTN_REQUIRE(o.block_starts != nullptr && o.block_entries != nullptr, fn,
                 ": block_starts and block_entries must both be given, got one");
  CUATTN_REQUIRE(!call.ragged, fn,
                 ": block_starts must not be given with cu_seqlens_q, as blocks count from the "
                 "start of a sequence; pass the mask function alone");
  CUATTN_REQUIRE(o.query_block > 0 && o.key_block > 0, fn,
                 ": query_block and key_block must be > 0, got ", o.query_block, " and ",
                 o.key_block, "; pass the queries and keys of a block");
  TensorView starts = view_of(fn, "block_starts", o.block_starts),
             entries = view_of(fn, "block_entries", o.block_entries);
  FlexLists& lists = call.flex.lists;
  int64_t query_blocks = (int64_t{p.seqlen_q} + o.query_block - 1) / o.query_block;
  int64_t key_blocks = (int64_t{p.seqlen_kv} + o.key_block - 1) / o.key_block;
  require_dtype(fn, "block_starts", starts, DType::i32);
  require_device(fn, "block_starts", starts, call.device);
  require_strided(fn, "block_starts", starts, false, check_data);
  bool fits = starts.ndim == 3 && (starts.shape[0] == 1 || starts.shape[0] == p.batch) &&
              (starts.shape[1] == 1 || starts.shape[1] == p.num_heads_q) &&
              starts.shape[2] == query_blocks + 1 && stride_of(starts, 2) <= 1;
  CUATTN_REQUIRE(fits, fn, ": block_starts must have shape (", p.batch, " or 1, ", p.num_heads_q,
                 " or 1, ", query_blocks + 1, "), got ", shape_text(starts),
                 "; make the mask for these lengths and heads");
  lists.entries = static_cast<const int32_t*>(read_vector(fn, "block_entries", entries, DType::i32,
                                                          entries.shape[0], "entries", call.device,
                                                          "q", check_data));
  lists.starts = static_cast<const int32_t*>(starts.data);
  lists.stride_batch = starts.shape[0] == 1 ? 0 : stride_of(starts, 0);
  lists.stride_head = starts.shape[1] == 1 ? 0 : stride_of(starts, 1);
  lists.query_blocks = static_cast<int32_t>(query_blocks);
  lists.query_block = o.query_block;
  lists.key_block = o.key_block;
  if (check_data && is_cpu(call.device))
    check_entries(fn, lists, starts, entries.shape[0], key_blocks);
}

// 5. What was compiled for CUDA

// The heads that share a tile are those of a group, and what a tile skips is the same for them.
void require_packed(const AttentionCall& call) {
  const AttentionParams& p = call.params;
  const int32_t packed = call.flex.form.packed_heads;
  if (packed <= 1) return;
  const char* fn = call.function();
  CUATTN_REQUIRE(packed * p.num_heads_kv == p.num_heads_q, fn, ": functor packs the rows of ",
                 packed, " query heads, got ", p.num_heads_q, " over ", p.num_heads_kv,
                 " key heads; compile it for this group");
  CUATTN_REQUIRE(
      call.flex.lists.stride_head == 0 && p.rows.strides.head == 0, fn,
      ": functor packs the rows of ", packed,
      " query heads, which lists and row ranges must share, got some of each head; compile "
      "it for 1");
}

void read_functor(AttentionCall& call, const cuattn_flex_options& o) {
  if (o.functor == 0) return;
  const char *fn = call.function(), *name = "numbers";
  CUATTN_REQUIRE(is_cuda(call.device), fn, ": functor must not be given on the CPU, which runs ",
                 "score_program and mask_program; leave it out");
  call.flex.functor = o.functor;
  if (const Backend* cuda = cuda_backend()) call.flex.form = cuda->functor_form(o.functor);
  require_packed(call);
  if (o.numbers == nullptr) return;
  TensorView view = view_of(fn, name, o.numbers);
  require_host(fn, name, view);
  require_dtype(fn, name, view, DType::i32);
  CUATTN_REQUIRE(view.ndim == 1 && view.shape[0] <= kMaxFlexNumbers, fn, ": functions may read ",
                 kMaxFlexNumbers, " numbers together, got shape ", shape_text(view),
                 "; put them into an array that they capture");
  require_contiguous(fn, name, view, true);
  const int32_t* numbers = static_cast<const int32_t*>(view.data);
  for (int64_t i = 0; i < view.shape[0]; ++i) call.flex.numbers[i] = numbers[i];
}

}  // namespace

void read_flex(AttentionCall& call, const cuattn_flex_options& o, bool check_data) {
  const char* fn = call.function();
  read_rows(call, o, check_data);
  CUATTN_REQUIRE(o.num_arrays >= 0 && o.num_arrays <= kMaxFlexArrays, fn,
                 ": a mask and a score function may capture ", kMaxFlexArrays,
                 " arrays together, got ", o.num_arrays, "; stack some of them on a new axis");
  int32_t num_arrays = static_cast<int32_t>(o.num_arrays);
  for (int32_t i = 0; i < num_arrays; ++i) {
    CUATTN_REQUIRE(o.arrays != nullptr, fn, ": arrays must not be NULL");
    TensorView view = view_of(fn, "a captured array", o.arrays[i]);
    call.flex.arrays[i] = read_array(call, view, check_data);
  }
  ProgramRules score{fn, "score_program", num_arrays, true, nullptr};
  ProgramRules mask{fn, "mask_program", num_arrays, false, nullptr};
  call.flex.score = read_program(o.score_program, call.flex, score);
  call.flex.mask = read_program(o.mask_program, call.flex, mask);
  read_lists(call, o, check_data);
  read_functor(call, o);
  call.has_programs = call.flex.score.count > 0 || call.flex.mask.count > 0 ||
                      call.flex.lists.starts != nullptr || call.flex.functor != 0;
  if (call.flex.score.count > 0) call.params.scores.kind = ScoreKind::scored;
  // The kernels of paged_attention know nothing of a user's masks and scores.
  if (call.has_programs || call.params.rows.begin != nullptr) call.may_step = false;
}

void read_flex_gradient(BackwardCall& call, const cuattn_flex_options& o, bool check_data) {
  const char* fn = call.function();
  const FlexParams& flex = call.forward.flex;
  FlexGradient& gradient = call.gradient;
  CUATTN_REQUIRE((flex.score.count > 0) == (o.score_gradient != nullptr), fn,
                 ": score_gradient must be given where score_program is, and nowhere else; it is "
                 "the program of its derivative");
  for (int64_t i = 0; o.array_gradients != nullptr && i < o.num_arrays; ++i) {
    if (o.array_gradients[i] == nullptr) continue;
    const char* name = "the gradient of a captured array";
    const FlexArray& array = flex.arrays[i];
    TensorView view = view_of(fn, name, o.array_gradients[i]);
    CUATTN_REQUIRE(array.dtype == DType::f32, fn, ": ", name, " must be of one of floats, got ",
                   "array ", i, " of whole numbers or bool; leave it out");
    int64_t shape[2] = {array.extents[0], array.extents[1]};
    require_output(fn, name, view, DType::f32, shape_view(shape, array.rank), call.forward.device);
    require_strided(fn, name, view, true, check_data);
    if (is_cuda(call.forward.device)) require_contiguous(fn, name, view, check_data);
    FlexArrayGradient& to = gradient.arrays[i];
    to.data = static_cast<float*>(view.data);
    to.first = gradient.num_sums;
    int64_t count = 1;
    for (int32_t axis = 0; axis < array.rank; ++axis) {
      to.strides[axis] = stride_of(view, axis);
      count *= array.extents[axis];
    }
    gradient.num_sums += count;
  }
  ProgramRules rules{fn, "score_gradient", static_cast<int32_t>(o.num_arrays), true, &gradient};
  gradient.program = read_program(o.score_gradient, flex, rules);
}

void check_array_gradients(const BackwardCall& call, CallMemory& memory) {
  for (int32_t i = 0; i < kMaxFlexArrays; ++i) {
    const FlexArrayGradient& to = call.gradient.arrays[i];
    const FlexArray& array = call.forward.flex.arrays[i];
    if (to.data == nullptr) continue;
    int64_t first = array.rank > 0 ? array.extents[0] : 1;
    int64_t second = array.rank > 1 ? array.extents[1] : 1;
    memory.writes({"the gradient of a captured array",
                   to.data,
                   4,
                   {{first, to.strides[0]}, {second, to.strides[1]}}});
  }
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
