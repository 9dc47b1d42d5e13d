// SPDX-License-Identifier: Apache-2.0
// The cache operations on the GPU against the CPU, every byte of every array: all kernels, calls of
// few rows and of many, rows in order and scattered. Next: cuda/cache/write.cu.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuattn/kv_cache.h"
#include "gpu.h"
#include "test.h"
#include "twin.h"

namespace cuattn::test {
namespace {

struct CacheCase {
  DType dtype;
  bool e4m3;
  KvLayout layout;
  int64_t tokens, heads, half;  // half of the rotated elements; 0: none

  std::string text() const {
    return std::to_string(tokens) + " tokens, " + std::to_string(heads) + " heads, rotated " +
           std::to_string(2 * half);
  }
};

constexpr int64_t kDim = 48, kBlockSize = 16;

Twin cache_of(const CacheCase& c, int64_t blocks, bool is_k) {
  DType dtype = c.e4m3 ? DType::e4m3 : c.dtype;
  int64_t x = 16 / bytes_of(dtype);
  if (c.layout == KvLayout::nhd) return Twin(dtype, {blocks, kBlockSize, c.heads, kDim});
  if (c.layout == KvLayout::hnd) return Twin(dtype, {blocks, c.heads, kBlockSize, kDim});
  if (!is_k) return Twin(dtype, {blocks, c.heads, kDim, kBlockSize});
  return Twin(dtype, {blocks, c.heads, kDim / x, kBlockSize, x});
}

std::vector<int64_t> shuffled(Random& random, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) order[i] = i;
  for (int64_t i = count - 1; i > 0; --i)
    std::swap(order[i], order[random.range(0, static_cast<int>(i))]);
  return order;
}

// Writes, gathers back, and copies blocks, on both sides.
void check_cache(const CacheCase& c, Random& random) {
  int64_t blocks = c.tokens / kBlockSize + 4, places = blocks * kBlockSize;
  Twin k(c.dtype, {c.tokens, c.heads, kDim}), v(c.dtype, {c.tokens, c.heads, kDim});
  Twin k_cache = cache_of(c, blocks, true), v_cache = cache_of(c, blocks, false);
  Twin slots(DType::i64, {c.tokens}), positions(DType::i64, {c.tokens});
  Twin cos(DType::f32, {50, c.half}), sin(DType::f32, {50, c.half});
  for (Twin* rows : {&k, &v}) fill_normal(random, c.dtype, *rows);
  for (Twin* table : {&cos, &sin}) fill_normal(random, DType::f32, *table);
  std::vector<int64_t> order = shuffled(random, blocks), scattered = shuffled(random, places);
  int64_t start = random.range(0, 15);
  bool in_order = random.chance(0.8);
  for (int64_t i = 0; i < c.tokens; ++i) {
    int64_t at = start + i;
    int64_t& slot = slots.data<int64_t>()[i];
    slot = in_order ? order[at / kBlockSize] * kBlockSize + at % kBlockSize : scattered[i];
    if (random.chance(0.02)) slot = -1;
    positions.data<int64_t>()[i] = random.range(0, 49);
  }
  Twin tables(DType::i32, {2, blocks}), ends(DType::i32, {3});
  for (int64_t i = 0; i < 2 * blocks; ++i)
    tables.data<int32_t>()[i] = random.range(0, static_cast<int>(blocks) - 1);
  int32_t cut = random.range(0, static_cast<int>(c.tokens));
  const int32_t cuts[] = {0, cut, static_cast<int32_t>(c.tokens)};
  std::copy_n(cuts, 3, ends.data<int32_t>());
  DType stored = c.e4m3 ? DType::e4m3 : c.dtype;
  Twin k_out(stored, {c.tokens, c.heads, kDim}), v_out(stored, {c.tokens, c.heads, kDim});
  Twin mapping(DType::i64, {2, 2});
  const int64_t pairs[] = {order[0], order[1], order[2], order[3]};
  std::copy_n(pairs, 4, mapping.data<int64_t>());

  Twin* all[] = {&k,   &v,   &k_cache, &v_cache, &slots, &positions,
                 &cos, &sin, &tables,  &ends,    &k_out, &v_out};
  for (Twin* twin : all) twin->upload();
  mapping.upload();
  for (bool gpu : {false, true}) {
    CacheOptions options;
    options.kv_layout = c.layout;
    if (c.half > 0) {
      options.cos = &cos.on(gpu), options.sin = &sin.on(gpu);
      options.positions = &positions.on(gpu);
      options.rope_interleaved = c.tokens % 2 == 1;
    }
    if (c.e4m3) options.k_scale = 0.37;
    reshape_and_cache(k.on(gpu), v.on(gpu), k_cache.on(gpu), v_cache.on(gpu), slots.on(gpu),
                      options);
    CHECK(gather_cache_total(ends.on(gpu)) == c.tokens, c.text());
    gather_cache(k_cache.on(gpu), v_cache.on(gpu), tables.on(gpu), ends.on(gpu), k_out.on(gpu),
                 v_out.on(gpu), c.layout);
    copy_blocks({k_cache.on(gpu)}, {v_cache.on(gpu)}, mapping.on(gpu));
  }
  CUDA_OK(cudaDeviceSynchronize());
  for (size_t i = 0; i < std::size(all); ++i)
    CHECK(all[i]->same(), c.text(), ": array ", i, " differs between CPU and GPU");
}

bool add_cases() {
  const char* layouts[] = {"nhd", "hnd", "vllm"};
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (bool e4m3 : {false, true})
      for (int layout = 0; layout < 3; ++layout) {
        std::string name =
            std::string("cuda_cache_") + name_of(dtype) + (e4m3 ? "_e4m3_" : "_") + layouts[layout];
        auto run = [=] {
          Random random(case_seed(name));
          for (int64_t half : {0, 16, 12, 5})  // rotated by 16 bytes, by fours, and pair by pair
            for (auto [tokens, heads] : {std::pair{37, 3}, {70, 60}, {71, 60}, {73, 450}})
              check_cache({dtype, e4m3, static_cast<KvLayout>(layout), tokens, heads, half},
                          random);
        };
        add_case(name, run, Needs::gpu);
      }
  return true;
}

const bool kAdded = add_cases();

// Scattered blocks by a kernel, and blocks too large for it by the copy engines, both ways.
CUDA_TEST(cuda_blocks_swap_with_pinned_memory) {
  Random random(case_seed("swap"));
  for (int64_t elements : {40, 3000, 200'000}) {
    constexpr int64_t kBlocks = 20;
    Twin out(DType::f32, {kBlocks, elements}), back(DType::f32, {kBlocks, elements});
    fill_normal(random, DType::f32, out);
    out.upload();
    back.upload();
    HostMemory memory(static_cast<size_t>(kBlocks * elements) * 4);
    CHECK(memory.is_pinned(), "elements ", elements);
    std::memset(memory.data(), 0xff, memory.bytes());
    TensorView host(memory.data(), DType::f32, {kBlocks, elements});
    std::vector<int64_t> from = shuffled(random, kBlocks), to = shuffled(random, kBlocks), pairs;
    for (int64_t i = 0; i < kBlocks - 2; ++i) pairs.insert(pairs.end(), {from[i], to[i]});
    TensorView mapping(pairs.data(), DType::i64, {kBlocks - 2, 2});
    swap_blocks({out.on(true)}, {host}, mapping);
    for (int64_t i = 0; i < kBlocks - 2; ++i) pairs[2 * i] = to[i], pairs[2 * i + 1] = from[i];
    swap_blocks({host}, {back.on(true)}, mapping);
    CUDA_OK(cudaDeviceSynchronize());
    for (int64_t i = 0; i < kBlocks - 2; ++i)
      std::copy_n(out.data<float>() + from[i] * elements, elements,
                  back.data<float>() + from[i] * elements);
    CHECK(back.same(), "blocks of ", elements, " elements");
    CHECK(out.same(), "the source of ", elements, " elements");
  }
}

// Captured, a call leaves its work in the graph of the stream that it was given, or nothing.
CUDA_TEST(cuda_paged_calls_go_to_their_stream) {
  cudaStream_t stream;
  CUDA_OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CacheCase c{DType::f16, false, KvLayout::nhd, 40, 2, 0};
  Twin k(c.dtype, {c.tokens, c.heads, kDim}), v(c.dtype, {c.tokens, c.heads, kDim});
  Twin k_cache = cache_of(c, 4, true), v_cache = cache_of(c, 4, false);
  Twin k_other = cache_of(c, 4, true), slots(DType::i64, {c.tokens});
  Twin tables(DType::i32, {2, 4}), ends(DType::i32, {3}), lens(DType::i32, {2});
  Twin q(c.dtype, {2, c.heads, kDim}), out(c.dtype, {2, c.heads, kDim});
  Twin outs(c.dtype, {3, 2, c.heads, kDim}), lses(DType::f32, {3, 2, c.heads});
  Twin lse(DType::f32, {2, c.heads}), workspace(DType::f32, {1 << 16});
  // Of 0xff: slots of -1, no contexts, and ids that are clamped.
  for (Twin* twin : {&k, &v, &k_cache, &v_cache, &k_other, &slots, &tables, &ends, &lens, &q, &out,
                     &outs, &lses, &lse, &workspace})
    twin->upload();
  std::vector<int64_t> pair = {0, 1};
  TensorView mapping(pair.data(), DType::i64, {1, 2});
  PagedOptions options;
  options.partition_size = 256;
  Workspace lent{workspace.on(true).data, static_cast<size_t>(workspace.size()) * sizeof(float)};
  auto captures = [&](const char* name, auto&& call) {
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    std::string error;
    try {
      call();
    } catch (const std::exception& thrown) {
      error = thrown.what();
    }
    cudaGraph_t graph = nullptr;
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0;
    CUDA_OK(cudaGraphGetNodes(graph, nullptr, &nodes));
    CUDA_OK(cudaGraphDestroy(graph));
    CHECK(error.empty() && nodes > 0, name, ": ", nodes, " nodes; ", error);
  };
  captures("reshape_and_cache", [&] {
    reshape_and_cache(k.on(true), v.on(true), k_cache.on(true), v_cache.on(true), slots.on(true),
                      {}, stream);
  });
  captures("gather_cache", [&] {
    gather_cache(k_cache.on(true), v_cache.on(true), tables.on(true), ends.on(true), k.on(true),
                 v.on(true), KvLayout::nhd, stream);
  });
  captures("copy_blocks", [&] { copy_blocks({k_cache.on(true)}, {}, mapping, stream); });
  captures("swap_blocks",
           [&] { swap_blocks({k_cache.on(true)}, {k_other.on(true)}, mapping, stream); });
  captures("merge_states", [&] {
    merge_states(outs.on(true), lses.on(true), out.on(true), nullptr, Layout::nhd, stream);
  });
  captures("merge_states of two", [&] {
    merge_states(q.on(true), lse.on(true), q.on(true), lse.on(true), out.on(true), nullptr,
                 Layout::nhd, stream);
  });
  captures("paged_attention_v1", [&] {
    paged_attention_v1(out.on(true), q.on(true), k_cache.on(true), v_cache.on(true),
                       tables.on(true), lens.on(true), 1, options, stream);
  });
  captures("paged_attention_v2", [&] {
    paged_attention_v2(out.on(true), q.on(true), k_cache.on(true), v_cache.on(true),
                       tables.on(true), lens.on(true), 1, options, lent, stream);
  });
  // The call that reads a length cannot be captured.
  CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
  check_throws<std::invalid_argument>("must be given under stream capture",
                                      [&] { gather_cache_total(ends.on(true), stream); });
  cudaGraph_t graph = nullptr;
  CUDA_OK(cudaStreamEndCapture(stream, &graph));
  CUDA_OK(cudaGraphDestroy(graph));
  CUDA_OK(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace cuattn::test
