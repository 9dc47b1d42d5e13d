// SPDX-License-Identifier: Apache-2.0
#include "src/check/options.h"

#include <cmath>

namespace cuattn {

namespace {

// What helps against a head_dim that no kernel takes. Values may be cut: each part of their axis is
// a call of its own. Scores are sums over the whole head_dim.
const char* way_out(const char* argument, int64_t head_dim, int32_t most) {
  if (head_dim <= most) return "; pad it with zeros and pass scale= of the true head_dim";
  if (argument[0] == 'v') return "; cut v along head_dim_v, call for each part and join the outs";
  return "; no kernel holds such rows: call the attention of your own library, such as torch's "
         "scaled_dot_product_attention or jax.nn.dot_product_attention";
}

}  // namespace

void require_head_dim(const char* function, const char* argument, const char* axis,
                      int64_t head_dim, DType kv_dtype, int32_t most) {
  bool has_codes = is_code(kv_dtype);
  int32_t step = has_codes ? 16 : 8;
  if (has_codes) most = kMostHeadDim;
  CUATTN_REQUIRE(head_dim >= step && head_dim <= most && head_dim % step == 0, function, ": ",
                 argument, " must have ", axis, " a multiple of ", step, " up to ", most,
                 kv_dtype == DType::i8 ? " for int8"
                 : has_codes           ? " for float8"
                                       : "",
                 ", got ", head_dim, way_out(argument, head_dim, most));
}

void require_heads(const char* function, int64_t num_heads_q, int64_t num_heads_kv) {
  CUATTN_REQUIRE(num_heads_q == 0 || (num_heads_kv > 0 && num_heads_q % num_heads_kv == 0),
                 function, ": q must have num_heads_q a multiple of num_heads_kv, got ",
                 num_heads_q, " and ", num_heads_kv, "; repeat or drop heads");
}

float read_scale(const char* function, bool is_given, double scale, int32_t head_dim) {
  float factor =
      static_cast<float>(is_given ? scale : 1.0 / std::sqrt(static_cast<double>(head_dim)));
  CUATTN_REQUIRE(std::isfinite(factor), function, ": scale must be a finite number, got ", scale,
                 "; pass None for 1 / sqrt(head_dim)");
  return factor;
}

float read_softcap(const char* function, double softcap) {
  float cap = static_cast<float>(softcap);
  CUATTN_REQUIRE(std::isfinite(cap) && (cap > 0.0f || softcap == 0.0), function,
                 ": softcap must be >= 0 and finite in float32, got ", softcap,
                 "; pass 0 to switch it off");
  return cap;
}

namespace {

int32_t window_side(int64_t side, int64_t longest) {
  return side < 0 || side >= longest - 1 ? static_cast<int32_t>(kUnlimited)
                                         : static_cast<int32_t>(side);
}

}  // namespace

MaskParams read_mask(const char* function, bool causal, int64_t window_left, int64_t window_right,
                     int32_t longest_q, int32_t longest_kv) {
  CUATTN_REQUIRE(window_left >= -1 && window_right >= -1, function,
                 ": window must hold two integers >= -1 (-1 = unlimited), got (", window_left, ", ",
                 window_right, "); pass (left, right)");
  return {window_side(window_left, longest_kv), window_side(causal ? 0 : window_right, longest_q)};
}

HeadVector read_heads(const char* function, const char* argument, const DLTensor* tensor,
                      const char* axis, int64_t heads, const char* batch_axis, int64_t batch,
                      DLDevice device, bool check_data, bool may_be_one) {
  if (tensor == nullptr) return {};
  TensorView view = view_of(function, argument, tensor);
  require_dtype(function, argument, view, DType::f32);
  require_device(function, argument, view, device);
  bool is_one = may_be_one && view.ndim <= 1 && view.size() == 1;
  bool is_vector = view.ndim == 1 && view.shape[0] == heads;
  bool is_matrix =
      batch_axis != nullptr && view.ndim == 2 && view.shape[0] == batch && view.shape[1] == heads;
  CUATTN_REQUIRE(is_vector || is_matrix || is_one, function, ": ", argument, " must have ",
                 may_be_one ? "one element or shape (" : "shape (", axis, ",) = (", heads, ",)",
                 batch_axis == nullptr
                     ? std::string()
                     : concat(" or (", batch_axis, ", ", axis, ") = (", batch, ", ", heads, ")"),
                 ", got ", shape_text(view), "; give one number per head");
  require_strided(function, argument, view, false, check_data);
  const auto* data = static_cast<const float*>(view.data);
  if (is_one) return {data, 0, 0};
  return {data, is_matrix ? stride_of(view, 0) : 0, stride_of(view, is_matrix ? 1 : 0)};
}

}  // namespace cuattn
