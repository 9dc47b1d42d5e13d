// SPDX-License-Identifier: Apache-2.0
// Programs compiled against an older or a newer header than the library: structs of options of
// other sizes, through the C ABI. Next: src/options.h.
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuattn/c_api_fused.h"
#include "problem.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr size_t kMostBytes = 4096;
using Result = std::vector<float>;

// A struct as another header has it: `bytes` of its own memory, so that a sanitizer sees what is
// read or written behind them.
template <class Options>
struct Sized {
  explicit Sized(size_t bytes) : bytes(bytes), memory(new char[bytes]) {}
  Options* get() { return reinterpret_cast<Options*>(memory.get()); }
  void set_size(size_t value) { std::memcpy(memory.get(), &value, sizeof value); }

  size_t bytes;
  std::unique_ptr<char[]> memory;  // aligned as new aligns: for any field
};

// One struct of options and a call that takes it.
template <class Options>
struct Abi {
  const char* init_name;
  void (*init)(Options*, size_t);
  std::function<cuattn_status(const Options*, Result&)> call;
  size_t old_bytes;                           // of an older header ...
  std::function<void(Options&)> set;          // ... which has the fields that this sets
  std::function<void(Options&)> set_unknown;  // a field behind old_bytes: changes the result
};

template <class Options>
Result run(const Abi<Options>& abi, const Options* options) {
  Result result;
  CHECK(abi.call(options, result) == CUATTN_OK, abi.init_name, ": ", cuattn_last_error());
  return result;
}

template <class Options>
void refuses_size(const Abi<Options>& abi, const Options* options, size_t bytes) {
  Result result;
  std::string wanted = std::string("options must be initialised by ") + abi.init_name +
                       ", got struct_size " + std::to_string(bytes);
  CHECK(abi.call(options, result) == CUATTN_INVALID_ARGUMENT, abi.init_name, " ", bytes);
  CHECK(std::string(cuattn_last_error()).find(wanted) != std::string::npos, "wanted ", wanted,
        ", got ", cuattn_last_error());
}

// Zero-initialised and garbage.
const size_t kNoSizes[] = {
    0,       1, 3, 7, 12, 20, 4097, 4104, size_t{1} << 32, size_t{0x7ffd12345678}, SIZE_MAX - 7,
    SIZE_MAX};

template <class Options>
void check_sizes(const Abi<Options>& abi) {
  Options same;
  abi.init(&same, sizeof same);
  CHECK(same.struct_size == sizeof same);
  const Result by_default = run(abi, &same);
  abi.set(same);
  const Result by_known = run(abi, &same);
  CHECK(by_known != by_default, abi.init_name, ": the test sets nothing");
  abi.set_unknown(same);
  CHECK(run(abi, &same) != by_known, abi.init_name, ": the test sets nothing");

  // Smaller: nothing behind is written by init or read by the call, and it counts as the default.
  for (size_t bytes = sizeof(size_t); bytes < sizeof(Options); bytes += 8) {
    Sized<Options> older(bytes);
    abi.init(older.get(), bytes);
    CHECK(older.get()->struct_size == bytes);
    CHECK(run(abi, older.get()) == by_default, abi.init_name, " of ", bytes, " bytes");
  }
  std::vector<char> memory(sizeof(Options), '\x5a');
  Options* old = reinterpret_cast<Options*>(memory.data());
  abi.init(old, abi.old_bytes);
  for (size_t at = abi.old_bytes; at < sizeof(Options); ++at) CHECK(memory[at] == '\x5a', at);
  abi.set(*old);
  CHECK(run(abi, old) == by_known, abi.init_name, " of an older header");

  // Larger: zeros behind are nothing, anything else is refused.
  for (size_t bytes : {sizeof(Options) + 8, sizeof(Options) + 64, kMostBytes}) {
    Sized<Options> newer(bytes);
    abi.init(newer.get(), bytes);
    CHECK(newer.get()->struct_size == bytes);
    abi.set(*newer.get());
    CHECK(run(abi, newer.get()) == by_known, abi.init_name, " of ", bytes, " bytes");
    for (size_t at : {sizeof(Options), bytes - 1}) {
      newer.memory[at] = 1;
      Result result;
      CHECK(abi.call(newer.get(), result) == CUATTN_NOT_IMPLEMENTED, abi.init_name, " ", at);
      std::string wanted = "a field that this library does not have, at byte " + std::to_string(at);
      CHECK(std::string(cuattn_last_error()).find(wanted) != std::string::npos,
            cuattn_last_error());
      newer.memory[at] = 0;
    }
  }

  Options good;
  abi.init(&good, sizeof good);
  for (size_t bytes : kNoSizes) {
    Sized<Options> garbage(sizeof(Options));
    std::memcpy(garbage.memory.get(), &good, sizeof good);
    garbage.set_size(bytes);
    refuses_size(abi, garbage.get(), bytes);
    std::vector<char> untouched(sizeof(Options), '\x5a');
    abi.init(reinterpret_cast<Options*>(untouched.data()), bytes);
    CHECK(untouched == std::vector<char>(sizeof(Options), '\x5a'), abi.init_name, " ", bytes);
    CHECK(std::string(cuattn_last_error()).find(abi.init_name) != std::string::npos,
          cuattn_last_error());
  }
}

Result random_values(size_t count) {
  Random random(3);
  Result values(count);
  for (float& value : values) value = random.normal();
  return values;
}

TEST(attention_options_of_other_sizes) {
  Result q = random_values(2 * 4 * 2 * 8), k = random_values(2 * 5 * 2 * 8);
  TensorView q_view(q.data(), DType::f32, {2, 4, 2, 8}), k_view(k.data(), DType::f32, {2, 5, 2, 8});
  DLTensor dq = q_view.dl(), dk = k_view.dl();
  check_sizes<cuattn_attention_options>(
      {"cuattn_attention_options_init", cuattn_attention_options_init,
       [&](const cuattn_attention_options* options, Result& result) {
         result.assign(q.size(), -1.0f);
         TensorView out(result.data(), DType::f32, {2, 4, 2, 8});
         DLTensor d_out = out.dl();
         cuattn_attention_call call;
         cuattn_status status = cuattn_attention_prepare(&dq, &dk, &dk, options, &call);
         if (status != CUATTN_OK) return status;
         CHECK(call.workspace_bytes == 0);
         return cuattn_attention_run(&call, &d_out, nullptr, nullptr, 0, nullptr);
       },
       offsetof(cuattn_attention_options, window_left),
       [](cuattn_attention_options& o) { o.causal = 1; },
       [](cuattn_attention_options& o) { o.window_left = 0; }});
}

TEST(what_attention_options_reserve_must_be_zero) {
  Result q = random_values(2 * 4 * 2 * 8);
  TensorView view(q.data(), DType::f32, {2, 4, 2, 8});
  DLTensor dq = view.dl();
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  options.reserved = 1;
  cuattn_attention_call call;
  CHECK(cuattn_attention_prepare(&dq, &dq, &dq, &options, &call) == CUATTN_NOT_IMPLEMENTED);
  CHECK(std::string(cuattn_last_error()).find("0 in reserved, got 1") != std::string::npos,
        cuattn_last_error());
}

TEST(paged_options_of_other_sizes) {
  Result q = random_values(2 * 3 * 2 * 8), cache = random_values(4 * 8 * 2 * 8);
  std::vector<int32_t> tables = {0, 1, 2, 3}, lens = {16, 11};
  TensorView q_view(q.data(), DType::f32, {2, 3, 2, 8});
  TensorView cache_view(cache.data(), DType::f32, {4, 8, 2, 8});
  TensorView tables_view(tables.data(), DType::i32, {2, 2});
  TensorView lens_view(lens.data(), DType::i32, {2});
  DLTensor dq = q_view.dl(), dc = cache_view.dl(), dt = tables_view.dl(), dl = lens_view.dl();
  check_sizes<cuattn_paged_options>(
      {"cuattn_paged_options_init", cuattn_paged_options_init,
       [&](const cuattn_paged_options* options, Result& result) {
         result.assign(q.size(), -1.0f);
         TensorView out(result.data(), DType::f32, {2, 3, 2, 8});
         DLTensor d_out = out.dl();
         cuattn_attention_call call;
         cuattn_status status = cuattn_paged_prepare(&dq, &dc, &dc, &dt, &dl, options, &call);
         if (status != CUATTN_OK) return status;
         std::vector<float> workspace(call.workspace_bytes / sizeof(float) + 1);
         return cuattn_paged_run(&call, &d_out, nullptr, workspace.data(), call.workspace_bytes,
                                 nullptr);
       },
       offsetof(cuattn_paged_options, window_left), [](cuattn_paged_options& o) { o.causal = 0; },
       [](cuattn_paged_options& o) { o.window_left = 0; }});
}

TEST(cache_options_of_other_sizes) {
  Result rows = random_values(3 * 8 * 8);
  std::vector<int64_t> slots = {0, 5, 9}, positions = {1, 2, 3};
  TensorView rows_view(rows.data(), DType::f32, {3, 8, 8});
  TensorView slots_view(slots.data(), DType::i64, {3});
  Result angles(4 * 4, 0.5f);
  TensorView angles_view(angles.data(), DType::f32, {4, 4});
  TensorView positions_view(positions.data(), DType::i64, {3});
  DLTensor dr = rows_view.dl(), ds = slots_view.dl(), da = angles_view.dl(),
           dp = positions_view.dl();
  check_sizes<cuattn_cache_options>(
      {"cuattn_cache_options_init", cuattn_cache_options_init,
       [&](const cuattn_cache_options* options, Result& result) {
         result.assign(2 * 2 * 8 * 8 * 8, -1.0f);
         // As many heads as tokens a block: a cache of either layout.
         TensorView k(result.data(), DType::f32, {2, 8, 8, 8});
         TensorView v(result.data() + result.size() / 2, DType::f32, {2, 8, 8, 8});
         DLTensor dk = k.dl(), dv = v.dl();
         return cuattn_reshape_and_cache(&dr, &dr, &dk, &dv, &ds, options, nullptr);
       },
       offsetof(cuattn_cache_options, cos),
       [](cuattn_cache_options& o) { o.kv_layout = CUATTN_KV_HND; },
       [&](cuattn_cache_options& o) {
         o.cos = o.sin = &da;
         o.positions = &dp;
       }});
}

TEST(rope_options_of_other_sizes) {
  Result x = random_values(3 * 2 * 8), angles = random_values(9 * 2);
  TensorView view(x.data(), DType::f32, {3, 2, 8}), tables(angles.data(), DType::f32, {9, 2});
  DLTensor dx = view.dl(), dt = tables.dl();
  check_sizes<cuattn_rope_options>(
      {"cuattn_rope_options_init", cuattn_rope_options_init,
       [&](const cuattn_rope_options* options, Result& result) {
         result.assign(x.size(), -1.0f);
         TensorView out(result.data(), DType::f32, {3, 2, 8});
         DLTensor d_out = out.dl();
         return cuattn_apply_rope(&dx, &dt, &dt, options, &d_out, nullptr);
       },
       offsetof(cuattn_rope_options, seqlen_k), [](cuattn_rope_options& o) { o.interleaved = 1; },
       [](cuattn_rope_options& o) { o.seqlen_k = 8; }});
}

TEST(norm_options_of_other_sizes) {
  Result x = random_values(3 * 8), weight = random_values(8);
  TensorView view(x.data(), DType::f32, {3, 8}), weights(weight.data(), DType::f32, {8});
  DLTensor dx = view.dl(), dw = weights.dl();
  check_sizes<cuattn_norm_options>({"cuattn_norm_options_init", cuattn_norm_options_init,
                                    [&](const cuattn_norm_options* options, Result& result) {
                                      result.assign(x.size(), -1.0f);
                                      TensorView out(result.data(), DType::f32, {3, 8});
                                      DLTensor d_out = out.dl();
                                      return cuattn_layer_norm(&dx, &dw, options, &d_out, nullptr);
                                    },
                                    offsetof(cuattn_norm_options, bias),
                                    [](cuattn_norm_options& o) { o.weight_offset = 1.0; },
                                    [&](cuattn_norm_options& o) { o.bias = &dw; }});
}

TEST(sample_options_of_other_sizes) {
  Result logits = random_values(40 * 8);
  std::vector<int64_t> offset = {77};
  TensorView view(logits.data(), DType::f32, {40, 8}), offsets(offset.data(), DType::i64, {1});
  DLTensor dl = view.dl(), d_offsets = offsets.dl();
  check_sizes<cuattn_sample_options>(
      {"cuattn_sample_options_init", cuattn_sample_options_init,
       [&](const cuattn_sample_options* given, Result& result) {
         // Without a seed, which every call must give, nothing is drawn.
         result.assign(40, -1.0f);
         std::vector<int32_t> tokens(40);
         TensorView out(tokens.data(), DType::i32, {40});
         DLTensor d_out = out.dl();
         cuattn_status status = cuattn_sample(&dl, given, &d_out, nullptr);
         if (status == CUATTN_INVALID_ARGUMENT &&
             std::string(cuattn_last_error()).find("seed must be given") != std::string::npos)
           return CUATTN_OK;
         if (status == CUATTN_OK) result.assign(tokens.begin(), tokens.end());
         return status;
       },
       offsetof(cuattn_sample_options, offsets), [](cuattn_sample_options& o) { o.seed = 5; },
       [&](cuattn_sample_options& o) { o.offsets = &d_offsets; }});
}

TEST(prefix_options_of_other_sizes) {
  std::vector<int64_t> tokens = {7, 8};
  auto pool_with = [&](const cuattn_prefix_options& salted) {
    cuattn_block_pool* pool = nullptr;
    int32_t id;
    CHECK(cuattn_block_pool_create(4, 2, &pool) == CUATTN_OK);
    CHECK(cuattn_block_pool_allocate(pool, 1, &id) == CUATTN_OK);
    CHECK(cuattn_block_pool_commit(pool, &id, 1, tokens.data(), 2, -1, &salted) == CUATTN_OK);
    return pool;
  };
  cuattn_prefix_options salted;
  cuattn_prefix_options_init(&salted, sizeof salted);
  salted.salt = "salt";
  salted.salt_bytes = 4;
  cuattn_block_pool* pool = pool_with(salted);
  auto found = [&](const cuattn_prefix_options* options, int64_t& count) {
    int32_t id;
    return cuattn_block_pool_match_prefix(pool, tokens.data(), 2, options, &id, &count);
  };
  int64_t count = -1;
  CHECK(found(&salted, count) == CUATTN_OK && count == 1, cuattn_last_error());
  // Nothing but the size: no salt.
  for (size_t bytes : {sizeof(size_t), offsetof(cuattn_prefix_options, salt_bytes)}) {
    cuattn_prefix_options older = salted;
    older.struct_size = bytes;
    CHECK(found(&older, count) == CUATTN_OK && count == 0, bytes, " ", cuattn_last_error());
  }
  Sized<cuattn_prefix_options> newer(sizeof salted + 16);
  cuattn_prefix_options_init(newer.get(), newer.bytes);
  CHECK(found(newer.get(), count) == CUATTN_OK && count == 0, cuattn_last_error());
  newer.get()->salt = "salt";
  newer.get()->salt_bytes = 4;
  CHECK(found(newer.get(), count) == CUATTN_OK && count == 1, cuattn_last_error());
  newer.memory[newer.bytes - 1] = 1;
  CHECK(found(newer.get(), count) == CUATTN_NOT_IMPLEMENTED, cuattn_last_error());
  for (size_t bytes : kNoSizes) {
    cuattn_prefix_options garbage = salted;
    garbage.struct_size = bytes;
    CHECK(found(&garbage, count) == CUATTN_INVALID_ARGUMENT, bytes);
    CHECK(std::string(cuattn_last_error()).find("cuattn_prefix_options_init") != std::string::npos,
          cuattn_last_error());
  }
  cuattn_block_pool_destroy(pool);
}

TEST(what_a_made_up_device_reserves_must_be_zero) {
  Result q = random_values(2 * 4 * 2 * 8);
  TensorView view(q.data(), DType::f32, {2, 4, 2, 8});
  DLTensor dq = view.dl();
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  cuattn_device device{};
  cuattn_plan plan;
  std::memset(&plan, 0xff, sizeof plan);
  CHECK(cuattn_attention_explain(&dq, &dq, &dq, &options, &device, &plan) == CUATTN_OK,
        cuattn_last_error());
  for (int64_t value : plan.reserved) CHECK(value == 0);
  device.reserved[40] = 1;
  CHECK(cuattn_attention_explain(&dq, &dq, &dq, &options, &device, &plan) ==
        CUATTN_NOT_IMPLEMENTED);
  CHECK(std::string(cuattn_last_error()).find("device") != std::string::npos, cuattn_last_error());
}

}  // namespace
}  // namespace cuattn::test
