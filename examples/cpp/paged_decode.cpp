// SPDX-License-Identifier: Apache-2.0
// Decoding over a paged cache from C++: prompts go into blocks of a pool, one sequence is forked,
// and each step appends a token to every sequence and attends over its blocks; all results are held
// against the formula in double precision over plain arrays. For device memory pass {kDLCUDA,
// device} as the views' device, a workspace there, and a cudaStream_t as the last argument of each
// call.
#include <cuattn/block_pool.h>
#include <cuattn/kv_cache.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

constexpr int64_t kHeadsQ = 4, kHeadsKv = 2, kDim = 64, kBlockSize = 16, kNumBlocks = 24;
constexpr int64_t kMaxBlocks = 8, kMaxSeqs = 4, kSteps = 40;
constexpr int64_t kRow = kHeadsKv * kDim;  // numbers of one token in K, or in V

std::mt19937 generator(1);

std::vector<float> normal(int64_t count) {
  std::normal_distribution<float> distribution;
  std::vector<float> numbers(count);
  for (float& x : numbers) x = distribution(generator);
  return numbers;
}

struct Sequence {
  std::vector<int32_t> blocks;
  std::vector<float> k, v;  // what the blocks should hold, for the reference

  int64_t length() const { return static_cast<int64_t>(k.size()) / kRow; }
};

class Decoder {
 public:
  // The slot of the next token: in the last block, which must be this sequence's own, or in a new
  // one.
  int64_t append(Sequence& sequence, const float* k, const float* v) {
    int64_t at = sequence.length() % kBlockSize;
    if (at == 0) {
      sequence.blocks.push_back(pool_.allocate(1)[0]);
    } else {
      int32_t shared = sequence.blocks.back(), own = pool_.make_writable(shared);
      if (own != shared) {
        int64_t pair[] = {shared, own};
        cuattn::copy_blocks({k_cache_}, {v_cache_}, {pair, cuattn::DType::i64, {1, 2}});
        sequence.blocks.back() = own;
      }
    }
    sequence.k.insert(sequence.k.end(), k, k + kRow);
    sequence.v.insert(sequence.v.end(), v, v + kRow);
    return sequence.blocks.back() * kBlockSize + at;
  }

  // Row i of k and v is the next token of rows[i].
  void write(const std::vector<Sequence*>& rows, std::vector<float>& k, std::vector<float>& v) {
    int64_t count = static_cast<int64_t>(rows.size());
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < count; ++i)
      slots.push_back(append(*rows[i], &k[i * kRow], &v[i * kRow]));
    cuattn::reshape_and_cache({k.data(), cuattn::DType::f32, {count, kHeadsKv, kDim}},
                              {v.data(), cuattn::DType::f32, {count, kHeadsKv, kDim}}, k_cache_,
                              v_cache_, {slots.data(), cuattn::DType::i64, {count}});
  }

  // The sequence once more, over the same blocks.
  Sequence fork(const Sequence& sequence) {
    pool_.fork(sequence.blocks);
    return sequence;
  }

  // Row b of q and out, [kMaxSeqs, num_heads_q, head_dim], is the newest token of sequence b; rows
  // beyond the batch have no keys. The shapes stay the same, so one workspace serves every step.
  void attend(const std::vector<Sequence>& batch, std::vector<float>& q, std::vector<float>& out) {
    for (size_t b = 0; b < batch.size(); ++b) {
      std::copy(batch[b].blocks.begin(), batch[b].blocks.end(), &tables_[b * kMaxBlocks]);
      lengths_[b] = static_cast<int32_t>(batch[b].length());
    }
    cuattn::TensorView queries(q.data(), cuattn::DType::f32, {kMaxSeqs, kHeadsQ, kDim});
    cuattn::TensorView result(out.data(), cuattn::DType::f32, {kMaxSeqs, kHeadsQ, kDim});
    cuattn::TensorView tables(tables_.data(), cuattn::DType::i32, {kMaxSeqs, kMaxBlocks});
    cuattn::TensorView lengths(lengths_.data(), cuattn::DType::i32, {kMaxSeqs});
    workspace_.resize(
        cuattn::paged_attention_workspace_bytes(queries, k_cache_, v_cache_, tables, lengths));
    cuattn::paged_attention(queries, k_cache_, v_cache_, tables, lengths, result, {},
                            {workspace_.data(), workspace_.size()});
  }

  int64_t free_blocks() const { return pool_.stats().free_blocks; }

 private:
  cuattn::BlockPool pool_{kNumBlocks, kBlockSize};
  std::vector<float> k_numbers_ = std::vector<float>(kNumBlocks * kBlockSize * kRow, NAN);
  std::vector<float> v_numbers_ = k_numbers_;
  cuattn::TensorView k_cache_{
      k_numbers_.data(), cuattn::DType::f32, {kNumBlocks, kBlockSize, kHeadsKv, kDim}};
  cuattn::TensorView v_cache_{
      v_numbers_.data(), cuattn::DType::f32, {kNumBlocks, kBlockSize, kHeadsKv, kDim}};
  std::vector<int32_t> tables_ = std::vector<int32_t>(kMaxSeqs * kMaxBlocks, -1);
  std::vector<int32_t> lengths_ = std::vector<int32_t>(kMaxSeqs, 0);
  std::vector<char> workspace_;
};

// The largest difference from softmax(q k^T / sqrt(head_dim)) v in double precision.
double error_of(const Sequence& sequence, const float* q, const float* out) {
  double worst = 0;
  for (int64_t h = 0; h < kHeadsQ; ++h) {
    int64_t kv = h / (kHeadsQ / kHeadsKv) * kDim;
    std::vector<double> want(kDim, 0.0);
    double sum = 0;
    for (int64_t j = 0; j < sequence.length(); ++j) {
      const float *k = &sequence.k[j * kRow + kv], *v = &sequence.v[j * kRow + kv];
      double score = 0;
      for (int64_t d = 0; d < kDim; ++d) score += double(q[h * kDim + d]) * k[d];
      double weight = std::exp(score / std::sqrt(double(kDim)));
      sum += weight;
      for (int64_t d = 0; d < kDim; ++d) want[d] += weight * v[d];
    }
    for (int64_t d = 0; d < kDim; ++d) {
      double error = std::abs(out[h * kDim + d] - want[d] / sum);
      worst = std::isnan(error) ? INFINITY : std::max(worst, error);
    }
  }
  return worst;
}

double decode() {
  Decoder decoder;
  std::vector<Sequence> batch(3);
  std::vector<Sequence*> rows;
  const int64_t prompts[] = {20, 37, 1};
  for (int64_t b = 0; b < 3; ++b) rows.insert(rows.end(), prompts[b], &batch[b]);
  std::vector<float> k = normal(rows.size() * kRow), v = normal(rows.size() * kRow);
  decoder.write(rows, k, v);

  double worst = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    if (step == 7) batch.push_back(decoder.fork(batch[1]));  // they share blocks from here on
    rows.clear();
    for (Sequence& sequence : batch) rows.push_back(&sequence);
    k = normal(rows.size() * kRow), v = normal(rows.size() * kRow);
    decoder.write(rows, k, v);
    std::vector<float> q = normal(kMaxSeqs * kHeadsQ * kDim), out(q.size(), NAN);
    decoder.attend(batch, q, out);
    for (size_t b = 0; b < batch.size(); ++b) {
      size_t row = b * kHeadsQ * kDim;
      worst = std::max(worst, error_of(batch[b], &q[row], &out[row]));
    }
  }
  std::printf("cuattn %s: %lld steps of %zu sequences, %lld of %lld blocks free, ",
              cuattn_version(), static_cast<long long>(kSteps), batch.size(),
              static_cast<long long>(decoder.free_blocks()), static_cast<long long>(kNumBlocks));
  return worst;
}

}  // namespace

int main() {
  try {
    double worst = decode();
    std::printf("largest error %.1e\n", worst);
    return worst < 1e-5 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
