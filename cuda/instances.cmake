# SPDX-License-Identifier: Apache-2.0
# THE table of compiled kernels: one function per combination of a row; a new head size is one word.
#   header     of the kernel, in cuda/
#   kind       portable (all of CUATTN_CUDA_ARCHS) or sm90 (90a only)
#   head dims  of q and k; `192x128`: v has 128
# At most 6 kernels share a source, so that none takes minutes to compile; forward_sm90 has a second
# tile at head_dim 128.

cuattn_kernel(forward_sm90 attention/sm90/forward.cuh sm90 "f16;bf16" "64;96;128;192;256;192x128"
              "none;causal;window" "identity")
cuattn_kernel(forward_sm90 attention/sm90/forward.cuh sm90 "f16;bf16" "64;96;128;192;256;192x128"
              "none;causal;window" "scored")
cuattn_kernel(forward_sm80 attention/sm80/forward.cuh portable "f16;bf16" "32;64;96;128;192;256;192x128"
              "none;causal;window" "identity;scored")
cuattn_kernel(forward_simt attention/simt.cuh portable "f32" "64;128;256"
              "none;causal;window" "identity;scored")
cuattn_kernel(forward_tiled attention/tiled.cuh portable "f32;f16;bf16" "64;128"
              "none;causal;window" "identity")

# Paged attention: cache dtypes, head dims.
cuattn_paged_kernel(paged_sm80 paged/sm80/decode.cuh portable "f16;bf16;e4m3" "64;128;256")
cuattn_paged_kernel(paged_simt paged/simt.cuh portable "f32" "128;256")
cuattn_paged_kernel(paged_sm90 paged/sm90/decode.cuh sm90 "f16;bf16" "64;128;256")
