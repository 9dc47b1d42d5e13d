# SPDX-License-Identifier: Apache-2.0
# THE table of compiled kernels: one function per combination of a row. A new head size is one word:
# the planner chooses among what stands here, and knows no other list.
#   op          whose parameters it takes: Op in instances.h
#   name        KERNEL_RUNG: the header has launch_NAME, whose template takes the axes in this order
#   header      in cuda/
#   kind        portable (all of CUATTN_CUDA_ARCHS, below 10.0 from one PTX), each (compiled for each of them: its
#               code asks which one it is, as for conversions of e4m3) or sm90 (90a only)
#   dtypes      of q, k and v; paged_attention: of the caches
#   head dims   of q and k; `192x128`: v has 128. A call takes the smallest that hold its own
#   masks, scores   `-`: decided at run time, no axis of the template. A mask that is missing is served
#               by the next wider one: none by causal, causal by window
# forward_sm90 has a second tile at head_dim 64 and 128, and so two rows.

cuattn_kernel(attention forward_sm90 attention/sm90/launch.cuh sm90
              "f16;bf16" "64;128" "none;causal;window;rows" "identity")
cuattn_kernel(attention forward_sm90 attention/sm90/launch.cuh sm90
              "f16;bf16" "96;192;256;192x128" "none;causal;window" "identity")
cuattn_kernel(attention forward_sm90 attention/sm90/launch.cuh sm90
              "f16;bf16" "64;96;128;192;256;192x128" "causal;window" "scored")
# Dropout beside a softcap, ALiBi or a bias is of the scored ones of forward_sm80.
cuattn_kernel(attention forward_sm90 attention/sm90/launch.cuh sm90
              "f16;bf16" "64;96;128;192;256;192x128" "window" "dropped")
cuattn_kernel(attention forward_sm90 attention/sm90/float8.cuh sm90
              "e4m3" "64;128;256" "none;causal;window" "identity;fast")
# With a scale for each 128 rows of q and k. At 64 numbers of 16 bits are as fast.
cuattn_kernel(attention forward_sm90 attention/sm90/float8.cuh sm90
              "e4m3;i8" "128;256" "none;causal;window" "parts")
cuattn_kernel(attention forward_sm80 attention/sm80/forward.cuh portable
              "f16;bf16" "32;64;96;128;192;256;192x128" "none;causal;window" "identity")
# That of 512 serves every call but those with row ranges.
cuattn_kernel(attention forward_sm80 attention/sm80/forward.cuh portable
              "f16;bf16" "32;64;96;128;192;256;192x128;512" "window" "scored")
# Without scores 128 would spill on sm_80: 192x128 serves it.
cuattn_kernel(attention forward_sm80 attention/sm80/forward.cuh portable
              "f16;bf16" "32;64;96;192;256;192x128" "rows" "identity")
cuattn_kernel(attention forward_sm80 attention/sm80/forward.cuh portable
              "f16;bf16" "32;64;96;128;192;256;192x128" "rows" "scored")
cuattn_kernel(attention forward_simt attention/simt.cuh portable
              "f32" "64;128;256" "causal;window" "identity")
cuattn_kernel(attention forward_simt attention/simt.cuh portable
              "f32" "64;128;256" "rows" "identity")
cuattn_kernel(attention forward_simt attention/simt.cuh portable
              "f32" "64;128;256" "rows" "scored")
cuattn_kernel(attention forward_simt attention/simt.cuh portable
              "f32" "64;128;256;512" "window" "scored")
cuattn_kernel(attention forward_tiled attention/tiled.cuh portable
              "f32;f16;bf16" "64;128" "causal;window" "identity")

# Two kernels each, one a pass; a third where scored, for dbias. The scored ones have dropout, too
# (sm90: three more kernels of it, and up to four of a bias at 64 and 128); of simt they serve all
# calls. Row ranges at 64 would spill on sm90: 128 serves it.
cuattn_kernel(attention_backward backward_sm90 backward/sm90/backward.cuh sm90
              "f16;bf16" "128" "none;causal;window;rows" "identity")
cuattn_kernel(attention_backward backward_sm90 backward/sm90/backward.cuh sm90
              "f16;bf16" "64;96;192;256;192x128" "none;causal;window" "identity")
cuattn_kernel(attention_backward backward_sm90 backward/sm90/backward.cuh sm90
              "f16;bf16" "64;96;128;192;256;192x128" "window" "scored")
cuattn_kernel(attention_backward backward_sm80 backward/sm80/backward.cuh portable
              "f16;bf16" "32;96;192" "window" "identity")
cuattn_kernel(attention_backward backward_sm80 backward/sm80/backward.cuh portable
              "f16;bf16" "64;128;256;192x128" "window;rows" "identity")
cuattn_kernel(attention_backward backward_sm80 backward/sm80/backward.cuh portable
              "f16;bf16" "32;64;96;128;192;256;192x128" "window" "scored")
cuattn_kernel(attention_backward backward_simt backward/simt/backward.cuh portable
              "f32" "64;128;256" "window" "scored")

cuattn_kernel(paged_attention paged_sm80 paged/sm80/decode.cuh each
              "f16;bf16;e4m3" "64;128;256" - -)
cuattn_kernel(paged_attention paged_simt paged/simt.cuh each
              "f32" "128;256" - -)
cuattn_kernel(paged_attention paged_sm90 paged/sm90/decode.cuh sm90
              "f16;bf16" "64;128;256" - -)

# The latent is key and value; its rope columns are no axis.
cuattn_kernel(mla_decode mla_sm80 mla/sm80/decode.cuh each
              "f16;bf16" "512" - -)
cuattn_kernel(mla_decode mla_sm90 mla/sm90/decode.cuh sm90
              "f16;bf16" "512" - -)
cuattn_kernel(mla_decode mla_simt mla/simt.cuh each
              "f32;f16;bf16" "512;1024" - -)
