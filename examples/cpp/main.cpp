// SPDX-License-Identifier: Apache-2.0
// cuattn from C++, without Python: causal attention over host arrays, held against the formula in
// plain loops. For device memory pass {kDLCUDA, device} as the views' device and a cudaStream_t as
// attention()'s last argument.
#include <cuattn/attention.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() {
  const int64_t batch = 2, seqlen = 100, heads_q = 4, heads_kv = 2, dim = 64;
  std::vector<float> q(batch * seqlen * heads_q * dim), k(batch * seqlen * heads_kv * dim);
  std::vector<float> v(k.size()), out(q.size());
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  for (std::vector<float>* array : {&q, &k, &v}) {
    for (float& x : *array) x = normal(generator);
  }

  cuattn::AttentionOptions options;
  options.causal = true;
  cuattn::TensorView q_view(q.data(), cuattn::DType::f32, {batch, seqlen, heads_q, dim});
  cuattn::TensorView k_view(k.data(), cuattn::DType::f32, {batch, seqlen, heads_kv, dim});
  cuattn::TensorView v_view(v.data(), cuattn::DType::f32, {batch, seqlen, heads_kv, dim});
  cuattn::TensorView out_view(out.data(), cuattn::DType::f32, {batch, seqlen, heads_q, dim});
  try {
    cuattn::attention(q_view, k_view, v_view, out_view, options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }

  double worst = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads_q; ++h)
      for (int64_t i = 0; i < seqlen; ++i) {
        const float* query = &q[((b * seqlen + i) * heads_q + h) * dim];
        int64_t kv = h / (heads_q / heads_kv);
        std::vector<double> want(dim, 0.0);
        double sum = 0;
        for (int64_t j = 0; j <= i; ++j) {
          int64_t row = ((b * seqlen + j) * heads_kv + kv) * dim;
          double score = 0;
          for (int64_t d = 0; d < dim; ++d) score += double(query[d]) * k[row + d];
          double weight = std::exp(score / std::sqrt(double(dim)));
          sum += weight;
          for (int64_t d = 0; d < dim; ++d) want[d] += weight * v[row + d];
        }
        const float* got = &out[((b * seqlen + i) * heads_q + h) * dim];
        for (int64_t d = 0; d < dim; ++d) worst = std::max(worst, std::abs(got[d] - want[d] / sum));
      }
  std::printf("cuattn %s: causal attention of %lld x %lld queries, largest error %.1e\n",
              cuattn_version(), static_cast<long long>(batch), static_cast<long long>(seqlen),
              worst);
  return worst < 1e-5 ? 0 : 1;
}
