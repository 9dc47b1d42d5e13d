// SPDX-License-Identifier: Apache-2.0
// What the C ABI refuses: the status, the argument named in the message, the output left alone, the
// next call right. The messages word for word are tested from Python (tests/calls/test_errors.py).
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "problem.h"
#include "test.h"

namespace cuattn::test {
namespace {

constexpr DLDevice kHost{kDLCPU, 0};

// A small right call; each test spoils one thing of it.
struct Call {
  float q_data[2 * 4 * 2 * 8], k_data[2 * 5 * 2 * 8], v_data[2 * 5 * 2 * 8],
      out_data[2 * 4 * 2 * 8], lse_data[2 * 2 * 4];
  float slopes_data[8], bias_data[64];
  int32_t lengths[8] = {0, 2, 4, 0, 0, 0, 0, 0};
  TensorView q{q_data, DType::f32, {2, 4, 2, 8}}, k{k_data, DType::f32, {2, 5, 2, 8}},
      v{v_data, DType::f32, {2, 5, 2, 8}};
  TensorView out{out_data, DType::f32, {2, 4, 2, 8}}, lse{lse_data, DType::f32, {2, 2, 4}};
  TensorView extra{slopes_data, DType::f32, {2}};
  AttentionOptions options;

  Call() {
    Random random(7);
    for (float* array : {q_data, k_data, v_data}) {
      for (int i = 0; i < 2 * 4 * 2 * 8; ++i) array[i] = random.normal();
    }
    for (int i = 128; i < 160; ++i) k_data[i] = v_data[i] = 0.5f;
    for (float& slope : slopes_data) slope = 0.1f;
    std::memset(out_data, 0xff, sizeof out_data);
    std::memset(lse_data, 0xff, sizeof lse_data);
  }
  void run() {
    options.lse = &lse;
    attention(q, k, v, out, options);
  }
  bool untouched() const {
    for (float value : out_data) {
      if (!std::isnan(value)) return false;
    }
    return true;
  }
};

template <class Error>
void refuses(const char* named, const std::function<void(Call&)>& spoil) {
  Call call;
  spoil(call);
  try {
    call.run();
    CHECK(false, "accepted a call that should be refused for its ", named);
  } catch (const Error& error) {
    CHECK(std::strstr(error.what(), named) != nullptr, "expected '", named, "' in: ", error.what());
    CHECK(std::string(error.what()) == cuattn_last_error());
  }
  CHECK(call.untouched(), "the output was written although the call was refused for its ", named);
  Call good;
  good.run();
  CHECK(!good.untouched(), "the call after a refusal did nothing");
}

using Invalid = std::invalid_argument;

TEST(wrong_shapes_are_refused_by_name) {
  refuses<Invalid>("q must have 4 axes",
                   [](Call& c) { c.q = TensorView(c.q_data, DType::f32, {4, 2, 8}); });
  refuses<Invalid>("k must have 4 axes",
                   [](Call& c) { c.k = TensorView(c.k_data, DType::f32, {80}); });
  refuses<Invalid>("k must have head_dim",
                   [](Call& c) { c.k = TensorView(c.k_data, DType::f32, {2, 5, 1, 16}); });
  refuses<Invalid>("k must have batch", [](Call& c) { c.k.shape[0] = c.v.shape[0] = 1; });
  refuses<Invalid>("v must have seqlen_kv", [](Call& c) { c.v.shape[1] = 4; });
  refuses<Invalid>("v must have num_heads_kv", [](Call& c) { c.v.shape[2] = 1; });
  refuses<Invalid>("multiple of num_heads_kv", [](Call& c) {
    c.q.shape[2] = 1;
    c.out.shape[2] = 1;
  });
  refuses<Invalid>("out must have shape", [](Call& c) { c.out.shape[1] = 3; });
  refuses<Invalid>("lse_out must have shape", [](Call& c) { c.lse.shape[2] = 3; });
  refuses<Invalid>("q must have head_dim", [](Call& c) { c.q.shape[3] = c.k.shape[3] = 4; });
  refuses<Invalid>("q must have head_dim", [](Call& c) {
    c.q = TensorView(c.q_data, DType::f32, {2, 1, 1, 12});
    c.k = c.v = TensorView(c.k_data, DType::f32, {2, 1, 1, 12});
  });
}

TEST(wrong_dtypes_are_refused_by_name) {
  refuses<Invalid>("q must be float32, float16 or bfloat16",
                   [](Call& c) { c.q.dtype = {kDLFloat, 64, 1}; });
  refuses<Invalid>("k must be float32", [](Call& c) { c.k.dtype = dl_dtype(DType::f16); });
  refuses<Invalid>("out must be float32", [](Call& c) { c.out.dtype = dl_dtype(DType::bf16); });
  refuses<Invalid>("lse_out must be float32", [](Call& c) { c.lse.dtype = dl_dtype(DType::f16); });
  refuses<Invalid>("all be float8_e4m3fn", [](Call& c) { c.q.dtype = dl_dtype(DType::e4m3); });
}

TEST(arrays_of_other_devices_are_refused) {
  refuses<Invalid>("k must be on cpu", [](Call& c) { c.k.device = {kDLCUDA, 0}; });
  refuses<Invalid>("out must be on cpu", [](Call& c) { c.out.device = {kDLCUDA, 1}; });
  refuses<std::runtime_error>("q must be on the CPU or a CUDA device", [](Call& c) {
    c.q.device = c.k.device = c.v.device = c.out.device = c.lse.device = {kDLROCM, 0};
  });
}

TEST(strides_that_no_kernel_reads_are_refused) {
  refuses<Invalid>("q must be contiguous in its last axis",
                   [](Call& c) { c.q.strides = {64, 16, 8, 2, 0, 0}; });
  refuses<Invalid>("q must not have negative strides", [](Call& c) { c.q.strides[1] = -16; });
  refuses<Invalid>("no stride may be zero", [](Call& c) { c.out.strides[1] = 0; });
  refuses<Invalid>("k has no memory", [](Call& c) { c.k.data = nullptr; });
}

TEST(impossible_numbers_are_refused) {
  refuses<Invalid>("window", [](Call& c) { c.options.window_left = -2; });
  refuses<Invalid>("softcap", [](Call& c) { c.options.softcap = -1; });
  refuses<Invalid>("softcap", [](Call& c) { c.options.softcap = std::nan(""); });
  refuses<Invalid>("scale", [](Call& c) { c.options.scale = INFINITY; });
  refuses<Invalid>("num_splits", [](Call& c) { c.options.num_splits = -1; });
  refuses<Invalid>("layout", [](Call& c) { c.options.layout = Layout::thd; });
  refuses<Invalid>("kv_layout belongs to paged caches and must be 'nhd', 0 in C, without",
                   [](Call& c) { c.options.kv_layout = KvLayout::hnd; });
  refuses<Invalid>("accumulate must be 'exact' for float32 q",
                   [](Call& c) { c.options.accumulate = Accumulate::fast; });
  refuses<Invalid>("accumulate must be 'exact' or 'fast', 0 or 1 in C, got 2",
                   [](Call& c) { c.options.accumulate = static_cast<Accumulate>(2); });
  refuses<Invalid>("backend must be", [](Call& c) { c.options.backend = "gpu"; });
  refuses<NotImplemented>("sm80", [](Call& c) { c.options.backend = "sm80"; });
  refuses<NotImplemented>("sm90", [](Call& c) { c.options.backend = "sm90"; });
}

TEST(a_scale_of_nan_is_refused_by_the_c_abi) {  // in AttentionOptions NaN means the default
  Call c;
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  options.has_scale = 1;
  options.scale = std::nan("");
  DLTensor q = c.q.dl(), k = c.k.dl(), v = c.v.dl();
  cuattn_attention_call call;
  CHECK(cuattn_attention_prepare(&q, &k, &v, &options, &call) == CUATTN_INVALID_ARGUMENT);
  CHECK(std::strstr(cuattn_last_error(), "scale") != nullptr, cuattn_last_error());
}

TEST(extra_arrays_of_wrong_size_are_refused) {
  refuses<Invalid>("alibi_slopes", [](Call& c) {
    c.extra = TensorView(c.slopes_data, DType::f32, {3});
    c.options.alibi_slopes = &c.extra;
  });
  refuses<Invalid>("sinks", [](Call& c) {
    c.extra = TensorView(c.slopes_data, DType::f32, {2, 2});
    c.options.sinks = &c.extra;
  });
  refuses<Invalid>("bias", [](Call& c) {
    c.extra = TensorView(c.bias_data, DType::f32, {4, 6});
    c.options.bias = &c.extra;
  });
  refuses<Invalid>("seqused_k", [](Call& c) {
    c.extra = TensorView(c.lengths, DType::i32, {3});
    c.options.seqused_k = &c.extra;
  });
  refuses<Invalid>("seqused_q must be int32", [](Call& c) {
    c.extra = TensorView(c.bias_data, DType::f32, {2});
    c.options.seqused_q = &c.extra;
  });
}

TEST(offsets_that_do_not_grow_are_refused_on_the_cpu) {
  Call c;
  TensorView q(c.q_data, DType::f32, {4, 2, 8}), out(c.out_data, DType::f32, {4, 2, 8});
  TensorView cu(c.lengths, DType::i32, {3});
  for (std::vector<int32_t> bad : {std::vector<int32_t>{0, 3, 2}, {0, 2, 9}, {-1, 2, 4}}) {
    std::copy(bad.begin(), bad.end(), c.lengths);
    try {
      attention_varlen(q, q, q, cu, cu, 4, 4, out);
      CHECK(false, "cu_seqlens ", bad[0], " ", bad[1], " ", bad[2], " was accepted");
    } catch (const Invalid& error) {
      CHECK(std::strstr(error.what(), "cu_seqlens") != nullptr, error.what());
    }
    CHECK(c.untouched());
  }
}

TEST(a_missing_workspace_is_refused_with_its_size) {
  Call c;
  c.options.backend = "naive";
  size_t bytes = attention_workspace_bytes(c.q, c.k, c.v, c.options);
  CHECK(bytes == 2 * 2 * 4 * 5 * sizeof(float), bytes);
  DLTensor q = c.q.dl(), k = c.k.dl(), v = c.v.dl(), out = c.out.dl();
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  options.backend = "naive";
  cuattn_attention_call call;
  CHECK(cuattn_attention_prepare(&q, &k, &v, &options, &call) == CUATTN_OK, cuattn_last_error());
  CHECK(cuattn_attention_run(&call, &out, nullptr, nullptr, 0, nullptr) == CUATTN_OUT_OF_MEMORY);
  CHECK(std::strstr(cuattn_last_error(), std::to_string(bytes).c_str()) != nullptr,
        cuattn_last_error());
  CHECK(c.untouched());
}

TEST(null_pointers_and_uninitialised_options_are_refused) {
  Call c;
  DLTensor q = c.q.dl();
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  CHECK(options.struct_size == sizeof options && options.window_left == -1 &&
        options.window_right == -1);
  cuattn_attention_call call;
  CHECK(cuattn_attention_prepare(nullptr, &q, &q, &options, &call) == CUATTN_INVALID_ARGUMENT);
  CHECK(cuattn_attention_prepare(&q, &q, &q, nullptr, &call) == CUATTN_INVALID_ARGUMENT);
  options.struct_size = 3;
  CHECK(cuattn_attention_prepare(&q, &q, &q, &options, &call) == CUATTN_INVALID_ARGUMENT);
  CHECK(cuattn_merge_states(&q, &q, &q, nullptr, &q, nullptr, 0, nullptr) ==
        CUATTN_INVALID_ARGUMENT);
}

TEST(pages_beside_functions_of_a_user_need_packed_queries) {
  Call c;
  DLTensor q = c.q.dl(), k = c.k.dl(), v = c.v.dl();
  cuattn_attention_options options;
  cuattn_flex_options functions;
  cuattn_attention_call call;
  cuattn_attention_options_init(&options, sizeof options);
  cuattn_flex_options_init(&functions, sizeof functions);
  CHECK(cuattn_flex_prepare(&q, &k, &v, &options, &functions, &call) == CUATTN_OK,
        cuattn_last_error());
  options.block_tables = &q;
  CHECK(cuattn_flex_prepare(&q, &k, &v, &options, &functions, &call) == CUATTN_INVALID_ARGUMENT);
  CHECK(std::string(cuattn_last_error()).find("cu_seqlens_q must be given with block_tables") !=
        std::string::npos);
}

TEST(negative_extents_are_refused) {
  refuses<Invalid>("q must have extents >= 0, got -2 on axis 0", [](Call& c) {
    c.q.shape[0] = c.k.shape[0] = c.v.shape[0] = c.out.shape[0] = -2;
  });
}

// The status and text of one call of the C ABI.
void refused(cuattn_status status, const char* text) {
  CHECK(status == CUATTN_INVALID_ARGUMENT, "status ", status, " where this was expected: ", text);
  CHECK(std::strstr(cuattn_last_error(), text) != nullptr, "expected '", text,
        "' in: ", cuattn_last_error());
}

TEST(what_no_array_can_be_is_refused) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  refuses<Invalid>("q must have a shape, got -1 axes", [](Call& c) { c.q.ndim = -1; });
  refuses<Invalid>("k must have a shape, got -2147483648 axes",
                   [](Call& c) { c.k.ndim = INT32_MIN; });
  refuses<Invalid>("v must have at most 6 axes, got 7", [](Call& c) { c.v.ndim = 7; });
  refuses<Invalid>("k must have bytes that 64 bits can count, got extent 5 and stride 46116860184",
                   [](Call& c) { c.k.strides[1] = kHuge; });
  refuses<Invalid>("out must have bytes that 64 bits can count",
                   [](Call& c) { c.out.strides[1] = kHuge; });
  refuses<Invalid>("lse_out must have bytes that 64 bits can count",
                   [](Call& c) { c.lse.strides[1] = -kHuge; });
  refuses<Invalid>("sinks must have bytes that 64 bits can count", [](Call& c) {
    c.extra.strides[0] = kHuge;
    c.options.sinks = &c.extra;
  });
  refuses<Invalid>("bias must have extents >= 0, got -5 on axis 1", [](Call& c) {
    c.extra = TensorView(c.bias_data, DType::f32, {4, 5});
    c.extra.shape[1] = -5;
    c.options.bias = &c.extra;
  });
}

// In C++ an enum without a type of its own could not hold what a producer may write.
static_assert(std::is_same_v<std::underlying_type_t<DLDeviceType>, int32_t>);

TEST(devices_that_nobody_knows_are_refused) {
  for (int32_t kind : {0, 16, 999, INT32_MAX, -1, INT32_MIN}) {
    refuses<std::runtime_error>(
        "q must be on the CPU or a CUDA device, got device type ",
        [&](Call& c) { c.q.device.device_type = static_cast<DLDeviceType>(kind); });
  }
}

TEST(a_view_of_a_tensor_without_a_shape_is_refused) {
  Call c;
  DLTensor q = c.q.dl();
  q.shape = nullptr;
  CHECK(TensorView(q).ndim == -1);
  refuses<Invalid>("q must have a shape", [&](Call& call) { call.q = TensorView(q); });
  q.ndim = INT32_MIN;
  refuses<Invalid>("q must have a shape", [&](Call& call) { call.q = TensorView(q); });
}

TEST(tensors_that_lie_in_the_c_abi_are_refused) {
  Call c;
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  cuattn_attention_call call;
  DLTensor k = c.k.dl(), v = c.v.dl();
  auto prepare = [&](const DLTensor& q) {
    return cuattn_attention_prepare(&q, &k, &v, &options, &call);
  };
  DLTensor q = c.q.dl();
  q.shape = nullptr;
  refused(prepare(q), "attention: q must have a shape, got NULL for 4 axes");
  q = c.q.dl();
  q.byte_offset = UINT64_MAX;
  refused(prepare(q), "attention: q must lie in memory, got byte_offset 18446744073709551615");
  int64_t shape[] = {int64_t{1} << 32, int64_t{1} << 32, 2, 8};
  q = c.q.dl();
  q.shape = shape;
  q.strides = nullptr;
  refused(prepare(q), "attention: q must have bytes that 64 bits can count, got extent 4294967296");
  cuattn_plan plan;
  q.data = nullptr;
  refused(cuattn_attention_explain(&q, &k, &v, &options, nullptr, &plan), "q must have bytes");
  q = c.q.dl();
  CHECK(prepare(q) == CUATTN_OK, cuattn_last_error());
  DLTensor out = c.out.dl();
  out.ndim = -4;
  refused(cuattn_attention_run(&call, &out, nullptr, nullptr, 0, nullptr),
          "attention: out must have a shape, got -4 axes");
  CHECK(c.untouched());
}

TEST(null_is_refused_where_a_pointer_must_be_given) {
  Call c;
  DLTensor q = c.q.dl(), k = c.k.dl(), v = c.v.dl(), out = c.out.dl();
  cuattn_attention_options options;
  cuattn_attention_options_init(&options, sizeof options);
  refused(cuattn_attention_prepare(&q, &k, &v, &options, nullptr), "attention: call must not be");
  refused(cuattn_attention_run(nullptr, &out, nullptr, nullptr, 0, nullptr),
          "attention: call must not be NULL");
  refused(cuattn_attention_explain(&q, &k, &v, &options, nullptr, nullptr),
          "attention: plan must not be NULL");
  refused(cuattn_kernel_at(0, nullptr), "kernel_at: info must not be NULL");

  cuattn_paged_options paged;
  cuattn_paged_options_init(&paged, sizeof paged);
  refused(cuattn_paged_prepare(&q, &k, &v, &q, &q, &paged, nullptr),
          "paged_attention: call must not be NULL");
  refused(cuattn_paged_run(nullptr, &out, nullptr, nullptr, 0, nullptr),
          "paged_attention: call must not be NULL");
  refused(cuattn_paged_check(nullptr, &out, nullptr, nullptr, 0, nullptr),
          "paged_attention: call must not be NULL");
  refused(cuattn_paged_explain(&q, &k, &v, &q, &q, &paged, nullptr, nullptr),
          "paged_attention: plan must not be NULL");
  cuattn_attention_call call;
  refused(cuattn_paged_plan_prepare(&q, &q, nullptr, &paged, &call), "paged_plan: shape must not");
  cuattn_paged_shape shape{};
  refused(cuattn_paged_plan_prepare(&q, &q, &shape, &paged, nullptr), "paged_plan: call must not");
  refused(cuattn_paged_plan_run(nullptr, &out, nullptr), "paged_plan: call must not be NULL");

  refused(cuattn_reshape_and_cache(&q, &q, &q, &q, &q, nullptr, nullptr), "options must be init");
  refused(cuattn_gather_cache_total(&q, nullptr, nullptr), "gather_cache: total must not be NULL");
  void* memory;
  int32_t is_pinned;
  refused(cuattn_host_alloc(16, nullptr, &is_pinned), "pinned_empty: memory must not be NULL");
  refused(cuattn_host_alloc(16, &memory, nullptr), "pinned_empty: is_pinned must not be NULL");
  cuattn_host_free(nullptr, 0);
}

TEST(options_that_are_null_leave_a_message) {
  const std::pair<const char*, std::function<void()>> inits[] = {
      {"attention: options", [] { cuattn_attention_options_init(nullptr, 8); }},
      {"paged_attention: options", [] { cuattn_paged_options_init(nullptr, 8); }},
      {"reshape_and_cache: options", [] { cuattn_cache_options_init(nullptr, 8); }}};
  for (const auto& [named, init] : inits) {
    init();
    CHECK(std::strstr(cuattn_last_error(), named) != nullptr, cuattn_last_error());
  }
}

TEST(lists_of_caches_are_given_or_empty) {
  Call c;
  std::vector<int64_t> mapping = {0, 1};
  TensorView map(mapping.data(), DType::i64, {1, 2});
  DLTensor pairs = map.dl(), cache = c.q.dl();
  const DLTensor *some[] = {&cache, nullptr}, *none[] = {nullptr};
  auto copy = [&](const DLTensor* const* k, int32_t nk, const DLTensor* const* v, int32_t nv) {
    return cuattn_copy_blocks(k, nk, v, nv, &pairs, nullptr);
  };
  refused(copy(nullptr, 1, nullptr, 0), "copy_blocks: k_caches must not be NULL");
  refused(copy(some, 1, nullptr, 1), "copy_blocks: v_caches must not be NULL");
  refused(copy(some, -1, nullptr, 0), "copy_blocks: the number of k_caches must be >= 0, got -1");
  refused(copy(some, 1, some, -2), "copy_blocks: the number of v_caches must be >= 0, got -2");
  refused(copy(none, 1, nullptr, 0), "copy_blocks: k_caches must be an array, got NULL");
  refused(copy(some, 2, nullptr, 0), "copy_blocks: k_caches must be an array, got NULL");
  refused(cuattn_copy_blocks(some, 1, nullptr, 0, nullptr, nullptr), "block_mapping must be");
  refused(cuattn_swap_blocks(nullptr, 1, some, 1, &pairs, nullptr), "swap_blocks: src must not be");
  refused(cuattn_swap_blocks(some, 1, nullptr, 1, &pairs, nullptr), "swap_blocks: dst must not be");
  refused(cuattn_swap_blocks(some, 1, some, -1, &pairs, nullptr), "the number of dst must be >= 0");
  CHECK(copy(nullptr, 0, nullptr, 0) == CUATTN_OK, cuattn_last_error());
}

TEST(a_block_pool_refuses_null_and_negative_counts) {
  cuattn_block_pool* pool = nullptr;
  refused(cuattn_block_pool_create(4, 2, nullptr), "BlockPool: pool must not be NULL");
  CHECK(cuattn_block_pool_create(4, 2, &pool) == CUATTN_OK, cuattn_last_error());
  int32_t ids[4];
  int64_t tokens[4] = {1, 2, 3, 4}, count;
  refused(cuattn_block_pool_allocate(pool, 2, nullptr), "BlockPool.allocate: ids must not be NULL");
  refused(cuattn_block_pool_free(pool, nullptr, 1), "BlockPool.free: ids must not be NULL");
  refused(cuattn_block_pool_fork(pool, nullptr, 1), "BlockPool.fork: ids must not be NULL");
  refused(cuattn_block_pool_ref_count(pool, 0, nullptr), "BlockPool.ref_count: count must not");
  refused(cuattn_block_pool_make_writable(pool, 0, nullptr), "make_writable: writable must not be");
  refused(cuattn_block_pool_match_prefix(pool, nullptr, 4, nullptr, ids, &count),
          "tokens must not be NULL");
  refused(cuattn_block_pool_match_prefix(pool, tokens, 4, nullptr, nullptr, &count),
          "ids must not be NULL");
  refused(cuattn_block_pool_match_prefix(pool, tokens, 4, nullptr, ids, nullptr),
          "num_ids must not be");
  refused(cuattn_block_pool_commit(pool, nullptr, 2, tokens, 4, -1, nullptr),
          "commit: ids must not be");
  refused(cuattn_block_pool_commit(pool, ids, 2, nullptr, 4, -1, nullptr),
          "commit: tokens must not be");
  refused(cuattn_block_pool_get_stats(pool, nullptr), "BlockPool.stats: stats must not be NULL");
  refused(cuattn_block_pool_free(nullptr, ids, 1), "BlockPool: pool must not be NULL");

  CHECK(cuattn_block_pool_allocate(pool, 2, ids) == CUATTN_OK, cuattn_last_error());
  refused(cuattn_block_pool_free(pool, ids, -1), "free: the number of ids must be >= 0, got -1");
  refused(cuattn_block_pool_fork(pool, ids, -3), "fork: the number of ids must be >= 0, got -3");
  refused(cuattn_block_pool_commit(pool, ids, -1, tokens, 0, -1, nullptr),
          "the number of ids must be >= 0");
  cuattn_block_pool_stats stats;
  CHECK(cuattn_block_pool_get_stats(pool, &stats) == CUATTN_OK, cuattn_last_error());
  CHECK(stats.used_blocks == 2 && stats.shared_blocks == 0 && stats.queried_tokens == 0);
  // Nothing is nowhere.
  CHECK(cuattn_block_pool_free(pool, nullptr, 0) == CUATTN_OK, cuattn_last_error());
  CHECK(cuattn_block_pool_allocate(pool, 0, nullptr) == CUATTN_OK, cuattn_last_error());
  CHECK(cuattn_block_pool_match_prefix(pool, tokens, 1, nullptr, nullptr, &count) == CUATTN_OK &&
            count == 0,
        cuattn_last_error());
  cuattn_block_pool_destroy(pool);
  cuattn_block_pool_destroy(nullptr);
}

TEST(blocks_of_no_whole_bytes_are_refused) {
  Call c;
  std::vector<int64_t> mapping = {0, 1};
  TensorView cache(c.q_data, DType::f32, {2, 4, 8}), map(mapping.data(), DType::i64, {1, 2});
  DLTensor pairs = map.dl();
  for (DLDataType dtype : {DLDataType{kDLOpaqueHandle, 0, 1}, {kDLInt, 4, 1}, {kDLFloat, 32, 2}}) {
    cache.dtype = dtype;
    DLTensor one = cache.dl();
    const DLTensor* caches[] = {&one};
    CHECK(cuattn_copy_blocks(caches, 1, nullptr, 0, &pairs, nullptr) == CUATTN_INVALID_ARGUMENT);
    CHECK(std::strstr(cuattn_last_error(), "must hold whole bytes") != nullptr,
          cuattn_last_error());
  }
}

}  // namespace
}  // namespace cuattn::test
