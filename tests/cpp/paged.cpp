// SPDX-License-Identifier: Apache-2.0
// Paged problems: random inputs, the call, and the formula in double precision.
#include "paged.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include "cuattn/explain.h"

namespace cuattn::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
// Sums of one row over the keys that it sees.
struct Row {
  double largest = -kInf, sum = 0;
  std::vector<double> scores, values;
};

Row attend(const PagedProblem& p, int b, int query, int head) {
  Row row;
  row.values.assign(p.head_dim, 0);
  int kv_head = head / (p.heads_q / p.heads_kv);
  int diagonal = query + p.context(b) - p.q_len;
  int64_t q = ((int64_t{b} * p.q_len + query) * p.heads_q + head) * p.head_dim;
  int first = p.window_left < 0 ? 0 : std::max(0, diagonal - p.window_left);
  for (int key = first; key <= diagonal; ++key) {
    double dot = 0;
    for (int d = 0; d < p.head_dim; ++d) {
      dot +=
          double{p.q.get(q + d)} * p.stored(true, p.block(b, key), key % p.block_size, kv_head, d);
    }
    double score = dot / std::sqrt(static_cast<double>(p.head_dim));
    if (p.alibi) score -= double{p.alibi_slopes.get(head)} * (diagonal - key);
    row.scores.push_back(score);
    row.largest = std::max(row.largest, score);
  }
  if (p.sinks) row.largest = std::max<double>(row.largest, p.sink_logits.get(head));
  if (row.largest == -kInf) return row;
  if (p.sinks) row.sum = std::exp(p.sink_logits.get(head) - row.largest);
  for (size_t i = 0; i < row.scores.size(); ++i) {
    double weight = std::exp(row.scores[i] - row.largest);
    int key = first + static_cast<int>(i);
    row.sum += weight;
    for (int d = 0; d < p.head_dim; ++d) {
      row.values[d] += weight * p.stored(false, p.block(b, key), key % p.block_size, kv_head, d);
    }
  }
  return row;
}

}  // namespace

float e4m3_value(uint8_t bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

Array paged_cache(DType dtype, KvLayout layout, bool is_k, int64_t blocks, int64_t block_size,
                  int64_t heads, int64_t head_dim) {
  int64_t x = 16 / bytes_of(dtype);
  if (layout == KvLayout::nhd) return Array(dtype, {blocks, block_size, heads, head_dim});
  if (layout == KvLayout::hnd) return Array(dtype, {blocks, heads, block_size, head_dim});
  if (!is_k) return Array(dtype, {blocks, heads, head_dim, block_size});
  return Array(dtype, {blocks, heads, head_dim / x, block_size, x});
}

int64_t cache_place(const Array& cache, KvLayout layout, bool is_k, int64_t block, int64_t token,
                    int64_t head, int64_t d) {
  const std::vector<int64_t>& s = cache.strides();
  if (layout == KvLayout::nhd) return block * s[0] + token * s[1] + head * s[2] + d;
  if (layout == KvLayout::hnd) return block * s[0] + head * s[1] + token * s[2] + d;
  if (!is_k) return block * s[0] + head * s[1] + d * s[2] + token;
  int64_t x = cache.shape()[4];
  return block * s[0] + head * s[1] + d / x * s[2] + token * s[3] + d % x;
}

int64_t PagedProblem::place(bool is_k, int block, int token, int head, int d) const {
  return cache_place(is_k ? k : v, layout, is_k, block, token, head, d);
}

int PagedProblem::context(int b) const {
  return std::clamp(context_lens.i32(b), 0, width() * block_size);
}

int PagedProblem::block(int b, int key) const {
  int last = static_cast<int>(k.shape()[0]) - 1;
  return std::clamp(tables.i32(b * width() + key / block_size), 0, last);
}

int64_t PagedProblem::lse_place(int b, int query, int head) const {
  int64_t seqs = static_cast<int64_t>(lens.size());
  return packed ? (head * seqs + b) * q_len + query : (int64_t{b} * heads_q + head) * q_len + query;
}

float PagedProblem::stored(bool is_k, int block, int token, int head, int d) const {
  const Array& cache = is_k ? k : v;
  int64_t at = place(is_k, block, token, head, d);
  return e4m3 ? e4m3_value(static_cast<const uint8_t*>(cache.data())[at]) : cache.get(at);
}

void PagedProblem::fill(Random& random) {
  auto draw = [&](Array& cache, int64_t at) {
    if (e4m3) {  // finite: the exponent is below 15
      static_cast<uint8_t*>(cache.data())[at] =
          static_cast<uint8_t>(random.range(0, 1) << 7 | random.range(0, 0x3f));
    } else {
      cache.set(at, random.normal());
    }
  };
  int seqs = static_cast<int>(lens.size()), width = 1, blocks = 1;
  for (int length : lens) {
    int count = (length + block_size - 1) / block_size;
    width = std::max(width, count + 1);
    blocks += count;
  }
  DType kv = e4m3 ? DType::e4m3 : dtype;
  k = paged_cache(kv, layout, true, blocks, block_size, heads_kv, head_dim);
  v = paged_cache(kv, layout, false, blocks, block_size, heads_kv, head_dim);
  q = Array(dtype, {seqs, q_len, heads_q, head_dim});
  tables = Array(DType::i32, {seqs, width});
  context_lens = Array(DType::i32, {seqs});
  alibi_slopes = Array(DType::f32, {heads_q});
  sink_logits = Array(DType::f32, {heads_q});
  out = Array(dtype, q.shape());
  lse = Array(DType::f32, {seqs, heads_q, q_len});
  if (packed) lse = Array(DType::f32, {heads_q, seqs * q_len});
  ends = Array(DType::i32, {seqs + 1});
  for (int b = 0; b <= seqs; ++b) ends.i32(b) = b * q_len;
  q.for_each_offset([&](int64_t i) { q.set(i, random.normal()); });
  alibi_slopes.for_each_offset([&](int64_t i) { alibi_slopes.set(i, 0.01f * (i + 1)); });
  sink_logits.for_each_offset([&](int64_t i) { sink_logits.set(i, random.normal()); });
  std::vector<int> ids(blocks);
  for (int i = 0; i < blocks; ++i) ids[i] = i;
  for (int i = blocks - 1; i > 0; --i) std::swap(ids[i], ids[random.range(0, i)]);
  for (int b = 0; b < seqs; ++b) {
    context_lens.i32(b) = lens[b];
    for (int i = 0; i < width; ++i) tables.i32(b * width + i) = random.pick<int>({-1, 1 << 30, 0});
    for (int key = 0; key < lens[b]; ++key) {
      int32_t& id = tables.i32(b * width + key / block_size);
      if (key % block_size == 0) {
        id = ids.back();
        ids.pop_back();
      }
      for (int i = 0; i < 2 * heads_kv * head_dim; ++i) {
        bool is_k = i % 2 == 0;
        int head = i / 2 / head_dim, d = i / 2 % head_dim;
        draw(is_k ? k : v, place(is_k, id, key % block_size, head, d));
      }
    }
  }
  if (version == 2) {
    int64_t partitions = (width * block_size + kPartition - 1) / kPartition;
    exp_sums = max_logits = Array(DType::f32, {seqs, heads_q, partitions});
    tmp_out = Array(dtype, {seqs, heads_q, partitions, head_dim});
  }
  if (!wrong) return;
  for (Array* cache : {&k, &v}) cache->for_each_offset([&](int64_t i) { draw(*cache, i); });
  const std::vector<int> wrong_ids = {-1, blocks, INT32_MAX, INT32_MIN};
  context_lens.i32(0) = INT32_MIN, context_lens.i32(1) = INT32_MAX;
  for (int b = 1; b < seqs; ++b) tables.i32(b * width) = random.pick(wrong_ids);
}

std::string PagedProblem::text() const {
  std::ostringstream text;
  text << name_of(dtype) << (e4m3 ? " over e4m3" : "") << " layout " << static_cast<int>(layout)
       << " block " << block_size << " heads " << heads_q << "/" << heads_kv << " dim " << head_dim
       << " q_len " << q_len << " splits " << num_splits << " window " << window_left
       << (packed ? " packed" : "") << (planned ? " planned" : "")
       << (batch_invariant ? " invariant" : "") << (alibi ? " alibi" : "")
       << (sinks ? " sinks" : "") << (wrong ? " wrong" : "") << " version " << version;
  return text.str();
}

PagedCall::PagedCall(PagedProblem& p, DLDevice device, const Arguments::Address& address,
                     const char* backend)
    : shape_{p.heads_q, p.heads_kv, p.head_dim, p.block_size, p.q_len, p.dtype} {
  auto view = [&](Array& array) { return array.view(address(array), device); };
  q_ = view(p.q), k_ = view(p.k), v_ = view(p.v), tables_ = view(p.tables);
  context_lens_ = view(p.context_lens), out_ = view(p.out), lse_ = view(p.lse);
  alibi_ = view(p.alibi_slopes), sinks_ = view(p.sink_logits);
  options_.kv_layout = p.layout;
  options_.kv_dtype = p.e4m3 ? KvDtype::e4m3 : KvDtype::automatic;
  if (p.e4m3 && p.layout != KvLayout::hnd)  // the same bytes by another name
    k_.dtype = v_.dtype = {kDLUInt, 8, 1};
  options_.window_left = p.window_left;
  options_.alibi_slopes = p.alibi ? &alibi_ : nullptr;
  options_.sinks = p.sinks ? &sinks_ : nullptr;
  options_.lse = &lse_;
  options_.batch_invariant = p.batch_invariant;
  options_.num_splits = p.num_splits;
  options_.backend = backend;
  options_.version = p.version;
  if (p.version != 0) {  // without an axis of queries
    int64_t seqs = static_cast<int64_t>(p.lens.size());
    q_ = TensorView(q_.data, p.dtype, {seqs, p.heads_q, p.head_dim}, device);
    out_ = TensorView(out_.data, p.dtype, {seqs, p.heads_q, p.head_dim}, device);
    lse_ = TensorView(lse_.data, DType::f32, {seqs, p.heads_q}, device);
  }
  if (p.version == 2) {
    exp_sums_ = view(p.exp_sums), max_logits_ = view(p.max_logits), tmp_out_ = view(p.tmp_out);
    options_.partition_size = kPartition;
    options_.exp_sums = &exp_sums_;
    options_.max_logits = &max_logits_;
    options_.tmp_out = &tmp_out_;
  }
  int64_t rows = static_cast<int64_t>(p.lens.size()) * p.q_len;
  packed_ = p.packed;
  packed_q_ = TensorView(q_.data, p.dtype, {rows, p.heads_q, p.head_dim}, device);
  packed_out_ = TensorView(out_.data, p.dtype, {rows, p.heads_q, p.head_dim}, device);
  ends_ = view(p.ends);
  prefill_.causal = true;
  prefill_.window_left = p.window_left;
  prefill_.alibi_slopes = options_.alibi_slopes;
  prefill_.sinks = options_.sinks;
  prefill_.seqused_k = &context_lens_;
  prefill_.lse = &lse_;
  prefill_.block_tables = &tables_;
  prefill_.kv_layout = p.layout;
  prefill_.batch_invariant = p.batch_invariant;
  prefill_.backend = backend;
  longest_q_ = p.q_len;
  longest_kv_ = *std::max_element(p.lens.begin(), p.lens.end()) + 3;  // a bound
}

int64_t PagedCall::plan_size() const {
  return paged_plan_size(tables_, context_lens_, shape_, options_);
}

size_t PagedCall::workspace_bytes() const {
  if (packed_) {
    return attention_varlen_workspace_bytes(packed_q_, k_, v_, ends_, {}, longest_q_, longest_kv_,
                                            prefill_);
  }
  if (options_.version == 2) {
    return paged_attention_v2_workspace_bytes(q_, k_, v_, tables_, context_lens_, options_);
  }
  return paged_attention_workspace_bytes(q_, k_, v_, tables_, context_lens_, options_);
}

cuattn_plan PagedCall::explain(const cuattn_device* made_up) const {
  if (!packed_)
    return paged_attention_explain(q_, k_, v_, tables_, context_lens_, options_, made_up);
  return attention_varlen_explain(packed_q_, k_, v_, ends_, {}, longest_q_, longest_kv_, prefill_,
                                  made_up);
}

void PagedCall::make_plan(void* plan, void* stream) {
  plan_ = TensorView(plan, DType::i32, {plan_size()}, q_.device);
  paged_plan(tables_, context_lens_, shape_, plan_, options_, stream);
  options_.plan = &plan_;
}

void PagedCall::run(Workspace workspace, void* stream) const {
  if (packed_) {
    attention_varlen(packed_q_, k_, v_, ends_, {}, longest_q_, longest_kv_, packed_out_, prefill_,
                     workspace, stream);
  } else if (options_.version == 1) {
    paged_attention_v1(out_, q_, k_, v_, tables_, context_lens_, options_.scale, options_, stream);
  } else if (options_.version == 2) {
    paged_attention_v2(out_, q_, k_, v_, tables_, context_lens_, options_.scale, options_,
                       workspace, stream);
  } else {
    paged_attention(q_, k_, v_, tables_, context_lens_, out_, options_, workspace, stream);
  }
}

std::vector<PagedProblem> paged_problems(DType dtype, bool e4m3, KvLayout layout, int head_dim) {
  PagedProblem base;
  base.dtype = dtype, base.e4m3 = e4m3, base.layout = layout, base.head_dim = head_dim;
  base.lens = {40, 0, 1, 150};
  std::vector<PagedProblem> list(7, base);
  list[1].num_splits = 3, list[1].alibi = true;
  list[2].planned = true, list[2].sinks = true;
  list[3].q_len = 3, list[3].window_left = 20;
  list[4].batch_invariant = true, list[4].lens = {700}, list[4].heads_kv = 4;
  list[5].heads_q = 20, list[5].heads_kv = 1, list[5].q_len = 2;
  list[6].batch_invariant = true, list[6].heads_kv = 4;  // more than clusters are made for
  list[6].lens.resize(40, 3);
  if (layout != KvLayout::vllm) list[0].block_size = 1, list[4].block_size = 48;
  if (layout == KvLayout::vllm) list[0].block_size = 8, list[4].block_size = 32;
  return list;
}

std::vector<PagedProblem> version_problems(DType dtype, bool e4m3, KvLayout layout, int head_dim) {
  PagedProblem base;
  base.dtype = dtype, base.e4m3 = e4m3, base.layout = layout, base.head_dim = head_dim;
  base.lens = {40, 0, 1, 2 * kPartition + 9};
  std::vector<PagedProblem> list(7, base);
  list[0].version = 1, list[0].alibi = true;
  list[1].version = 2, list[1].alibi = true;
  list[2].version = 2, list[2].heads_q = 20, list[2].heads_kv = 1;
  for (int i = 3; i < 7; ++i) list[i].wrong = true;
  list[3].version = 1;
  list[4].version = 2;
  list[5].planned = true;
  list[6].num_splits = 3, list[6].q_len = 2;
  return list;
}

std::vector<PagedProblem> prefill_problems(DType dtype, KvLayout layout, int head_dim) {
  PagedProblem base;
  base.dtype = dtype, base.layout = layout, base.head_dim = head_dim, base.packed = true;
  base.lens = {90, 0, 33, 150};
  base.q_len = 40;
  std::vector<PagedProblem> list(5, base);
  list[1].sinks = true, list[1].block_size = 8;
  list[2].window_left = 20, list[2].block_size = layout == KvLayout::vllm ? 32 : 48;
  list[3].q_len = 2, list[3].alibi = true;
  list[4].q_len = 1, list[4].batch_invariant = true;
  return list;
}

std::string judge_paged(const PagedProblem& p) {
  double out_limit = p.dtype == DType::f32 ? 1e-5 : 4 * epsilon(p.dtype);
  std::ostringstream text;
  for (int b = 0; b < static_cast<int>(p.lens.size()); ++b)
    for (int query = 0; query < p.q_len; ++query)
      for (int head = 0; head < p.heads_q; ++head) {
        Row row = attend(p, b, query, head);
        double lse = row.sum > 0 ? row.largest + std::log(row.sum) : -kInf;
        double got = p.lse.get(p.lse_place(b, query, head));
        bool right = lse == got || std::abs(lse - got) < 1e-3 * std::max(1.0, std::abs(lse));
        int64_t at = ((int64_t{b} * p.q_len + query) * p.heads_q + head) * p.head_dim;
        for (int d = 0; d < p.head_dim; ++d) {
          double want = row.sum > 0 ? row.values[d] / row.sum : 0;
          double error = std::abs(p.out.get(at + d) - want);
          right = right && error <= out_limit * std::max(1.0, std::abs(want));
        }
        if (!right) text << "sequence " << b << " query " << query << " head " << head << "; ";
      }
  return text.str().empty() ? "" : p.text() + ": " + text.str();
}

}  // namespace cuattn::test
