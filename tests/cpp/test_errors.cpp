// SPDX-License-Identifier: Apache-2.0
// What the C ABI refuses: the status, the argument named in the message, the output left alone, the
// next call right. The messages word for word are tested from Python (tests/test_errors.py).
#include <cmath>
#include <cstring>
#include <functional>

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
  refuses<NotImplemented>("float8_e4m3fn", [](Call& c) { c.q.dtype = dl_dtype(DType::e4m3); });
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
  refuses<Invalid>("backend must be", [](Call& c) { c.options.backend = "gpu"; });
  refuses<NotImplemented>("sm80", [](Call& c) { c.options.backend = "sm80"; });
  refuses<NotImplemented>("sm90", [](Call& c) { c.options.backend = "sm90"; });
  refuses<NotImplemented>("num_splits = 2", [](Call& c) { c.options.num_splits = 2; });
}

TEST(a_scale_of_nan_is_refused_by_the_c_abi) {  // in AttentionOptions NaN means the default
  Call c;
  cuattn_attention_options options;
  cuattn_attention_options_init(&options);
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
  cuattn_attention_options_init(&options);
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
  cuattn_attention_options_init(&options);
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

TEST(negative_extents_are_refused) {
  refuses<Invalid>("q must have batch from 0 to", [](Call& c) {
    c.q.shape[0] = c.k.shape[0] = c.v.shape[0] = c.out.shape[0] = -2;
  });
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
