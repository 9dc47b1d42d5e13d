# SPDX-License-Identifier: Apache-2.0
"""The words of every refusal: what test_errors.py asks for and which message must come.

Name: (function, changed arguments, exception, message behind "function: ").
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32, I32 = np.float32, np.int32
ARRAY = "must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__)"
COPY = "make a contiguous copy"
GROW = "pad it with zeros and pass scale= of the true head_dim"
TOO_WIDE = (
    "no kernel holds such rows: call the attention of your own library, such as torch's "
    "scaled_dot_product_attention or jax.nn.dot_product_attention"
)
CUT = "cut v along head_dim_v, call for each part and join the outs"


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


# fmt: off
REFUSALS = {
    # Shapes
    "q_of_3_axes": ("attention", {"q": ones(5, 4, 16)}, ValueError,
        "q must have 4 axes [batch, seqlen, num_heads, head_dim], got 3 with shape (5, 4, 16); "
        "reshape it"),
    "k_of_5_axes": ("attention", {"k": ones(1, 2, 7, 2, 16)}, ValueError,
        "k must have 4 axes [batch, seqlen, num_heads, head_dim], got 5 with shape (1, 2, 7, 2, "
        "16); reshape it"),
    "v_of_2_axes_bhsd": ("attention", {"v": ones(2, 8), "layout": "bhsd"}, ValueError,
        "v must have 4 axes [batch, num_heads, seqlen, head_dim], got 2 with shape (2, 8); "
        "reshape it"),
    "q_of_0_axes": ("attention", {"q": np.array(1, F32)}, ValueError,
        "q must have 4 axes [batch, seqlen, num_heads, head_dim], got 0 with shape (); reshape it"),
    "head_dim_12": ("attention", {"q": ones(2, 5, 4, 12), "k": ones(2, 7, 2, 12)}, ValueError,
        f"q must have head_dim a multiple of 8 up to 512, got 12; {GROW}"),
    "head_dim_520": ("attention", {"q": ones(2, 5, 4, 520), "k": ones(2, 7, 2, 520)}, ValueError,
        f"q must have head_dim a multiple of 8 up to 512, got 520; {TOO_WIDE}"),
    "head_dim_0": ("attention", {"q": ones(2, 5, 4, 0), "k": ones(2, 7, 2, 0)}, ValueError,
        f"q must have head_dim a multiple of 8 up to 512, got 0; {GROW}"),
    "head_dim_v_12": ("attention", {"v": ones(2, 7, 2, 12)}, ValueError,
        f"v must have head_dim_v a multiple of 8 up to 512, got 12; {GROW}"),
    "head_dim_v_520": ("attention", {"v": ones(2, 7, 2, 520)}, ValueError,
        f"v must have head_dim_v a multiple of 8 up to 512, got 520; {CUT}"),
    "head_dim_of_k": ("attention", {"k": ones(2, 7, 2, 24)}, ValueError,
        "k must have head_dim 16 like q, got 24; make them equal"),
    "heads_of_v": ("attention", {"v": ones(2, 7, 1, 8)}, ValueError,
        "v must have num_heads_kv 2 like k, got 1; make them equal"),
    "seqlen_of_v": ("attention", {"v": ones(2, 6, 2, 8)}, ValueError,
        "v must have seqlen_kv 7 like k, got 6; make them equal"),
    "batch_of_k": ("attention", {"k": ones(3, 7, 2, 16)}, ValueError,
        "k must have batch 2 like q, got 3; make them equal"),
    "batch_of_v": ("attention", {"v": ones(3, 7, 2, 8)}, ValueError,
        "v must have batch 2 like q, got 3; make them equal"),
    "heads_do_not_divide": (
        "attention", {"k": ones(2, 7, 3, 16), "v": ones(2, 7, 3, 8)}, ValueError,
        "q must have num_heads_q a multiple of num_heads_kv, got 4 and 3; repeat or drop heads"),
    "no_heads_of_k": ("attention", {"k": ones(2, 7, 0, 16), "v": ones(2, 7, 0, 8)}, ValueError,
        "q must have num_heads_q a multiple of num_heads_kv, got 4 and 0; repeat or drop heads"),
    # Dtypes
    "float64": ("attention", {"q": ones(2, 5, 4, 16, dtype=np.float64)}, ValueError,
        "q must be float32, float16 or bfloat16, got float64; cast it first"),
    "int32": ("attention", {"q": ones(2, 5, 4, 16, dtype=I32)}, ValueError,
        "q must be float32, float16 or bfloat16, got int32; cast it first"),
    "dtype_of_k": ("attention", {"k": ones(2, 7, 2, 16, dtype=np.float16)}, ValueError,
        "k must be float32 like q, got float16; cast it"),
    "dtype_of_v": ("attention", {"v": ones(2, 7, 2, 8, dtype=ml_dtypes.bfloat16)}, ValueError,
        "v must be float32 like q, got bfloat16; cast it"),
    # Not arrays
    "q_is_a_list": ("attention", {"q": [1.0]}, TypeError, f"q {ARRAY}, got list; convert it first"),
    "k_is_none": ("attention", {"k": None}, TypeError,
        f"k {ARRAY}, got NoneType; convert it first"),
    "v_is_text": ("attention", {"v": "v"}, TypeError, f"v {ARRAY}, got str; convert it first"),
    "bias_is_a_number": ("attention", {"bias": 3.0}, TypeError,
        f"bias {ARRAY}, got float; convert it first"),
    "out_is_a_list": ("attention", {"out": []}, TypeError,
        f"out {ARRAY}, got list; convert it first"),
    "workspace_is_a_list": (
        "attention", {"workspace": []}, TypeError,
        f"workspace {ARRAY}, got list; convert it first"),
    # Options
    "layout_unknown": ("attention", {"layout": "sbhd"}, ValueError,
        "layout must be 'bshd' or 'bhsd', got 'sbhd'; choose one of these"),
    "layout_number": ("attention", {"layout": 3}, TypeError,
        "layout must be a string, got 3; pass a str"),
    "accumulate_unknown": ("attention", {"accumulate": "slow"}, ValueError,
        "accumulate must be 'exact' or 'fast', got 'slow'; choose one of these"),
    "accumulate_none": ("attention_varlen", {"accumulate": None}, TypeError,
        "accumulate must be a string, got None; pass a str"),
    "accumulate_of_float32": ("attention", {"accumulate": "fast"}, ValueError,
        "accumulate must be 'exact' for float32 q, got 'fast'; leave it out, or quantise q, k and "
        "v with cuattn.quantize"),
    "accumulate_of_packed_float32": ("attention_varlen", {"accumulate": "fast"}, ValueError,
        "accumulate must be 'exact' for float32 q, got 'fast'; leave it out, or quantise q, k and "
        "v with cuattn.quantize"),
    "causal_number": ("attention", {"causal": 1}, TypeError,
        "causal must be True or False, got 1; pass a bool"),
    "return_lse_text": ("attention", {"return_lse": "no"}, TypeError,
        "return_lse must be True or False, got 'no'; pass a bool"),
    "batch_invariant_none": ("attention", {"batch_invariant": None}, TypeError,
        "batch_invariant must be True or False, got None; pass a bool"),
    "window_number": ("attention", {"window": 3}, TypeError,
        "window must be a pair (left, right), -1 for no limit, got 3; pass two integers"),
    "window_single": ("attention", {"window": (1,)}, TypeError,
        "window must be a pair (left, right), -1 for no limit, got (1,); pass two integers"),
    "window_float": ("attention", {"window": (1.5, 2)}, TypeError,
        "window must be an integer, got 1.5; pass an int"),
    "window_left_below_minus_one": ("attention", {"window": (-2, 3)}, ValueError,
        "window must hold two integers >= -1 (-1 = unlimited), got (-2, 3); pass (left, right)"),
    "window_right_below_minus_one": ("attention", {"window": (0, -5)}, ValueError,
        "window must hold two integers >= -1 (-1 = unlimited), got (0, -5); pass (left, right)"),
    "window_beyond_64_bits": ("attention", {"window": (2**70, 0)}, ValueError,
        "window must fit 64 bits, got 1180591620717411303424; pass a smaller one"),
    "scale_nan": ("attention", {"scale": float("nan")}, ValueError,
        "scale must be a finite number, got nan; pass None for 1 / sqrt(head_dim)"),
    "scale_infinite": ("attention", {"scale": float("-inf")}, ValueError,
        "scale must be a finite number, got -inf; pass None for 1 / sqrt(head_dim)"),
    "scale_beyond_float32": ("attention", {"scale": 1e300}, ValueError,
        "scale must be a finite number, got 1e+300; pass None for 1 / sqrt(head_dim)"),
    "scale_text": ("attention", {"scale": "x"}, TypeError,
        "scale must be a number, got 'x'; pass a float"),
    "softcap_negative": ("attention", {"softcap": -1.0}, ValueError,
        "softcap must be >= 0 and finite in float32, got -1; pass 0 to switch it off"),
    "softcap_nan": ("attention", {"softcap": float("nan")}, ValueError,
        "softcap must be >= 0 and finite in float32, got nan; pass 0 to switch it off"),
    "softcap_beyond_float32": ("attention", {"softcap": 1e300}, ValueError,
        "softcap must be >= 0 and finite in float32, got 1e+300; pass 0 to switch it off"),
    "softcap_zero_in_float32": ("attention", {"softcap": 1e-60}, ValueError,
        "softcap must be >= 0 and finite in float32, got 1e-60; pass 0 to switch it off"),
    "layout_of_merge_states": ("attention", {"layout": "nhd"}, ValueError,
        "layout must be 'bshd' or 'bhsd', got 'nhd'; choose one of these"),
    "softcap_none": (
        "attention", {"softcap": None}, TypeError,
        "softcap must be a number, got None; pass a float"),
    "alibi_of_3": ("attention", {"alibi_slopes": ones(3)}, ValueError,
        "alibi_slopes must have shape (num_heads_q,) = (4,) or (batch, num_heads_q) = (2, 4), "
        "got (3,); "
        "give one number per head"),
    "alibi_of_one_batch": ("attention", {"alibi_slopes": ones(1, 4)}, ValueError,
        "alibi_slopes must have shape (num_heads_q,) = (4,) or (batch, num_heads_q) = (2, 4), "
        "got (1, 4); "
        "give one number per head"),
    "alibi_float64": ("attention", {"alibi_slopes": ones(4, dtype=np.float64)}, ValueError,
        "alibi_slopes must be float32, got float64; cast it"),
    "sinks_of_2": ("attention", {"sinks": ones(2)}, ValueError,
        "sinks must have shape (num_heads_q,) = (4,), got (2,); give one number per head"),
    "sinks_float16": ("attention", {"sinks": ones(4, dtype=np.float16)}, ValueError,
        "sinks must be float32, got float16; cast it"),
    "bias_too_short": ("attention", {"bias": ones(2, 4, 5, 6)}, ValueError,
        "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv] = (2, 4, 5, 7), got "
        "(2, 4, 5, 6); "
        "add axes of extent 1 where it is shared"),
    "bias_of_5_axes": ("attention", {"bias": ones(1, 2, 4, 5, 7)}, ValueError,
        "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv] = (2, 4, 5, 7), "
        "got (1, 2, 4, 5, 7); add axes of extent 1 where it is shared"),
    "bias_float64": ("attention", {"bias": ones(5, 7, dtype=np.float64)}, ValueError,
        "bias must be float32, bool or the dtype of q (float32), got float64; cast it"),
    "seqused_q_int64": ("attention", {"seqused_q": np.array([1, 2])}, ValueError,
        "seqused_q must be int32, got int64; cast it, "
        "by x.astype('int32') or torch's x.int()"),
    "seqused_q_of_1": ("attention", {"seqused_q": np.array([1], I32)}, ValueError,
        "seqused_q must have shape (batch,) = (2,), got (1,); give one entry for each"),
    "seqused_k_of_2_axes": ("attention", {"seqused_k": ones(2, 1, dtype=I32)}, ValueError,
        "seqused_k must have shape (batch,) = (2,), got (2, 1); give one entry for each"),
    "num_splits_negative": ("attention", {"num_splits": -1}, ValueError,
        "num_splits must be >= 0, got -1; pass 0 to let cuattn choose"),
    "num_splits_float": ("attention", {"num_splits": 1.0}, TypeError,
        "num_splits must be an integer, got 1.0; pass an int"),
    "num_splits_huge": ("attention", {"num_splits": 2**40}, ValueError,
        "num_splits must fit 32 bits, got 1099511627776; pass a smaller one"),
    "backend_unknown": ("attention", {"backend": "fast"}, ValueError,
        "backend must be 'auto', 'naive', 'cublas', 'tiled', 'simt', 'sm80', 'sm90' or 'cpu', got "
        "'fast'; use 'auto' for the fastest that serves the call"),
    "backend_none": (
        "attention", {"backend": None}, TypeError,
        "backend must be a string, got None; pass a str"),
    "scales_of_fp8": ("attention", {"k_scale": 2.0}, ValueError,
        "k_scale belongs to float8_e4m3fn arrays, these are float32; leave it out, or make float8 "
        "arrays with cuattn.quantize"),
    "stream_text": ("attention", {"stream": "x"}, TypeError,
        "stream must be None, an integer or an object with cuda_stream, ptr or __cuda_stream__, "
        "got str; pass the stream of your library"),
    "stream_negative": ("attention", {"stream": -1}, ValueError,
        "stream must be a stream handle, not a negative or too large number, got -1; "
        "pass it as its library gives it"),
    # Outputs and workspace
    "out_shape": ("attention", {"out": ones(2, 5, 4, 16)}, ValueError,
        "out must have shape (2, 5, 4, 8), got (2, 5, 4, 16); allocate it with that shape"),
    "out_axes": ("attention", {"out": ones(2, 5, 4)}, ValueError,
        "out must have shape (2, 5, 4, 8), got (2, 5, 4); allocate it with that shape"),
    "out_dtype": ("attention", {"out": ones(2, 5, 4, 8, dtype=np.float16)}, ValueError,
        "out must be float32, got float16; cast it"),
    "lse_out_shape": ("attention", {"lse_out": ones(2, 5, 4)}, ValueError,
        "lse_out must have shape (2, 4, 5), got (2, 5, 4); allocate it with that shape"),
    "lse_out_dtype": ("attention", {"lse_out": ones(2, 4, 5, dtype=np.float16)}, ValueError,
        "lse_out must be float32, got float16; cast it"),
    "workspace_small": (
        "attention", {"backend": "naive", "workspace": ones(10, dtype=np.uint8)}, MemoryError,
        "workspace must hold 1120 bytes for backend 'naive', got 10; allocate as explain() says, "
        "or use backend='auto'"),
    # Ragged
    "no_cu_seqlens_q": ("attention_varlen", {"cu_seqlens_q": None}, TypeError,
        "cu_seqlens_q must be an int32 array [batch + 1], got None"),
    "no_cu_seqlens_k": ("attention_varlen", {"cu_seqlens_k": None}, TypeError,
        "cu_seqlens_k must be an int32 array [batch + 1], got None"),
    "cu_seqlens_int64": ("attention_varlen", {"cu_seqlens_q": np.array([0, 2, 5])}, ValueError,
        "cu_seqlens_q must be int32, got int64; cast it, "
        "by x.astype('int32') or torch's x.int()"),
    "cu_seqlens_k_of_2": ("attention_varlen", {"cu_seqlens_k": np.array([0, 7], I32)}, ValueError,
        "cu_seqlens_k must have shape (batch + 1,) = (3,), got (2,); give one entry for each"),
    "cu_seqlens_of_2_axes": (
        "attention_varlen", {"cu_seqlens_q": np.array([[0, 2, 5]], I32)}, ValueError,
        "cu_seqlens_q must have shape (batch + 1,), got (1, 3); start it with 0"),
    "cu_seqlens_empty": ("attention_varlen", {"cu_seqlens_q": np.array([], I32)}, ValueError,
        "cu_seqlens_q must have shape (batch + 1,), got (0,); start it with 0"),
    "max_seqlen_q_negative": ("attention_varlen", {"max_seqlen_q": -1}, ValueError,
        "max_seqlen_q must be >= 0, got -1; pass an upper bound of the query lengths"),
    "max_seqlen_k_negative": ("attention_varlen", {"max_seqlen_k": -1}, ValueError,
        "max_seqlen_k must be >= 0, got -1; pass an upper bound of the key lengths"),
    "max_seqlen_none": ("attention_varlen", {"max_seqlen_k": None}, TypeError,
        "max_seqlen_k must be an integer, got None; pass an int"),
    "max_seqlen_float": ("attention_varlen", {"max_seqlen_q": 3.0}, TypeError,
        "max_seqlen_q must be an integer, got 3.0; pass an int"),
    "ragged_q_of_4_axes": ("attention_varlen", {"q": ones(1, 5, 4, 16)}, ValueError,
        "q must have 3 axes [total, num_heads, head_dim], got 4 with shape (1, 5, 4, 16); "
        "reshape it"),
    "ragged_total_of_v": ("attention_varlen", {"v": ones(6, 2, 8)}, ValueError,
        "v must have total 7 like k, got 6; make them equal"),
    "ragged_bias": ("attention_varlen", {"bias": ones(2, 4, 5, 7)}, ValueError,
        "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv] = (2, 4, 3, 4), got "
        "(2, 4, 5, 7); "
        "add axes of extent 1 where it is shared"),
    "ragged_out": ("attention_varlen", {"out": ones(5, 4, 16)}, ValueError,
        "out must have shape (5, 4, 8), got (5, 4, 16); allocate it with that shape"),
    "ragged_lse_out": ("attention_varlen", {"lse_out": ones(5, 4)}, ValueError,
        "lse_out must have shape (4, 5), got (5, 4); allocate it with that shape"),
    # merge_states
    "merge_shape_of_b": ("merge_states", {"out_b": ones(1, 5, 3, 8)}, ValueError,
        "out_b must have the shape of out_a (2, 5, 3, 8), got (1, 5, 3, 8); make them equal"),
    "merge_dtype_of_b": ("merge_states", {"out_b": ones(2, 5, 3, 8, dtype=np.float16)}, ValueError,
        "out_b must be float32, got float16; cast it"),
    "merge_dtype_of_a": ("merge_states", {"out_a": ones(2, 5, 3, 8, dtype=I32)}, ValueError,
        "out_a must be float32, float16 or bfloat16, got int32; cast it first"),
    "merge_lse_float16": ("merge_states", {"lse_a": ones(2, 3, 5, dtype=np.float16)}, ValueError,
        "lse_a must be float32, got float16; cast it"),
    "merge_lse_swapped": ("merge_states", {"lse_a": ones(2, 5, 3)}, ValueError,
        "lse_a must have num_heads 3 like out_a, got 5; make them equal"),
    "merge_lse_batch": ("merge_states", {"lse_b": ones(1, 3, 5)}, ValueError,
        "lse_b must have batch 2 like out_b, got 1; make them equal"),
    "merge_lse_axes": ("merge_states", {"lse_a": ones(1, 2, 3, 5)}, ValueError,
        "lse_a must have one axis less than out_a (3), got 4; reshape it"),
    "merge_layout_unknown": ("merge_states", {"layout": "x"}, ValueError,
        "layout must be 'bshd', 'bhsd', 'nhd' or 'thd', got 'x'; choose one of these"),
    "merge_layout_of_3_axes": ("merge_states", {"layout": "nhd"}, ValueError,
        "out_a must have 3 axes [n, num_heads, head_dim], got 4 with shape (2, 5, 3, 8); "
        "reshape it"),
    "merge_out": ("merge_states", {"out": ones(1, 5, 3, 8)}, ValueError,
        "out must have the shape of out_a (2, 5, 3, 8), got (1, 5, 3, 8); make them equal"),
    "merge_lse_out": ("merge_states", {"lse_out": ones(1, 3, 5)}, ValueError,
        "lse_out must have batch 2 like out, got 1; make them equal"),
    "merge_half_a_part": ("merge_states", {"lse_b": None}, TypeError,
        "lse_b must be given with out_b; leave out both for stacked parts"),
    "merge_other_half": ("merge_states", {"out_b": None}, TypeError,
        "out_b must be given with lse_b; leave out both for stacked parts"),
    "merge_not_an_array": ("merge_states", {"lse_a": 1.0}, TypeError,
        f"lse_a {ARRAY}, got float; convert it first"),
}

# Arrays that only numpy makes, and rules that only hold on the CPU.
CPU_REFUSALS = {
    "q_of_7_axes": ("attention", {"q": ones(1, 1, 1, 1, 1, 1, 1)}, ValueError,
        "q must have at most 6 axes, got 7; reshape it"),
    "complex64": ("attention", {"q": ones(2, 5, 4, 16, dtype=np.complex64)}, ValueError,
        "q must be float32, float16 or bfloat16, got complex64; cast it first"),
    "objects": ("attention", {"q": ones(2, 5, 4, 16, dtype=object)}, ValueError,
        "q must hold numbers, got dtype object; cast it"),
    "float8_e5m2": (
        "attention", {"q": ones(2, 5, 4, 16, dtype=ml_dtypes.float8_e5m2)}, ValueError,
        "q must be float32, float16 or bfloat16, got float8_e5m2; cast it first"),
    "float8_e4m3fn": (
        "attention", {"q": ones(2, 5, 4, 16, dtype=ml_dtypes.float8_e4m3fn)}, ValueError,
        "q, k and v must all be float8_e4m3fn or none of them, got float8_e4m3fn, float32 and "
        "float32; make all three with cuattn.quantize, or take paged_attention, which has 16-bit q "
        "over float8 caches"),
    "int4": ("attention", {"q": ones(2, 5, 4, 16, dtype=ml_dtypes.int4)}, ValueError,
        "q must be float32, float16 or bfloat16 (ml_dtypes), got dtype int4; cast it"),
    "big_endian": ("attention", {"q": ones(2, 5, 4, 16, dtype=">f4")}, ValueError,
        "q must be in native byte order; call q.astype(q.dtype.newbyteorder('='))"),
    "masked_array": ("attention", {"q": np.ma.array(ones(2, 5, 4, 16))}, TypeError,
        "q must be a plain array, got a numpy MaskedArray, whose mask would be ignored; pass "
        "bias= instead"),
    "numpy_scalar": ("attention", {"q": F32(1)}, TypeError,
        f"q {ARRAY}, got float32; convert it first"),
    "strides_between_elements": (
        "attention",
        {"k": np.ndarray((2, 7, 2, 16), F32, bytearray(4000), strides=(1000, 130, 64, 4))},
        ValueError,
        "k must have strides that are multiples of its item size 4, got 130 bytes on axis 1; "
        "pass numpy.ascontiguousarray(k)"),
    "misaligned": (
        "attention", {"q": np.ndarray((2, 5, 4, 16), F32, bytearray(3000), offset=1)}, ValueError,
        f"q must be aligned to its elements of 4 bytes; {COPY}"),
    "negative_strides_of_k": ("attention", {"k": ones(2, 7, 2, 16)[:, ::-1]}, ValueError,
        f"k must not have negative strides, got (224, -32, 16, 1); {COPY}"),
    "negative_strides_of_bias": ("attention", {"bias": ones(5, 7)[::-1]}, ValueError,
        f"bias must not have negative strides, got (-7, 1); {COPY}"),
    "negative_strides_of_alibi": ("attention", {"alibi_slopes": ones(4)[::-1]}, ValueError,
        f"alibi_slopes must not have negative strides, got (-1,); {COPY}"),
    "negative_strides_of_out": ("attention", {"out": ones(2, 5, 4, 8)[::-1]}, ValueError,
        f"out must not have negative strides, got (-160, 32, 8, 1); {COPY}"),
    "seqused_k_negative": ("attention", {"seqused_k": np.array([1, -1], I32)}, ValueError,
        "seqused_k must lie within [0, 7], got -1 at index 1; it counts the rows in use of each "
        "sequence"),
    "seqused_k_too_long": ("attention", {"seqused_k": np.array([8, 1], I32)}, ValueError,
        "seqused_k must lie within [0, 7], got 8 at index 0; it counts the rows in use of each "
        "sequence"),
    "seqused_q_too_long": ("attention", {"seqused_q": np.array([0, 6], I32)}, ValueError,
        "seqused_q must lie within [0, 5], got 6 at index 1; it counts the rows in use of each "
        "sequence"),
    "ragged_seqused_too_long": (
        "attention_varlen", {"seqused_k": np.array([0, 5], I32)}, ValueError,
        "seqused_k must lie within [0, 4], got 5 at index 1; it counts the rows in use of each "
        "sequence"),
    "cu_seqlens_decrease": (
        "attention_varlen", {"cu_seqlens_q": np.array([0, 3, 2], I32)}, ValueError,
        "cu_seqlens_q must not decrease, got 2 after 3 at index 2; pass the running sum of the "
        "sequence lengths"),
    "cu_seqlens_negative": (
        "attention_varlen", {"cu_seqlens_q": np.array([0, -1, 5], I32)}, ValueError,
        "cu_seqlens_q must not decrease, got -1 after 0 at index 1; pass the running sum of the "
        "sequence lengths"),
    "cu_seqlens_start": ("attention_varlen", {"cu_seqlens_k": np.array([1, 3, 7], I32)}, ValueError,
        "cu_seqlens_k must start at 0, got 1; element i is where sequence i begins"),
    "cu_seqlens_end": ("attention_varlen",
        {"cu_seqlens_k": np.array([0, 3, 8], I32), "max_seqlen_k": 5}, ValueError,
        "cu_seqlens_k must end within the rows of k, got 8 with 7 rows; "
        "the last element is the total length"),
    "longest_query": ("attention_varlen", {"max_seqlen_q": 2}, ValueError,
        "max_seqlen_q must be at least the longest sequence, got 2 with a length of 3 in "
        "cu_seqlens_q at index 1; "
        "pass the largest difference"),
    "longest_key": ("attention_varlen", {"max_seqlen_k": 3}, ValueError,
        "max_seqlen_k must be at least the longest sequence, got 3 with a length of 4 in "
        "cu_seqlens_k at index 1; "
        "pass the largest difference"),
    "backend_of_cuda": ("attention", {"backend": "sm80"}, NotImplementedError,
        "backend 'sm80' cannot run this call: it runs on CUDA arrays, these are on the CPU; "
        "use backend='cpu' or 'auto'"),
    "stream_on_the_cpu": ("attention", {"stream": 1}, ValueError,
        "stream must be None for arrays on the CPU, which run at once; leave it out"),
    "workspace_misaligned": (
        "attention",
        {"backend": "naive", "workspace": np.ndarray(4000, np.uint8, bytearray(4096), 1)},
        ValueError,
        "workspace must start on 16 bytes; take it from an allocator, not from the middle of an "
        "array"),
    "workspace_strided": (
        "attention",
        {"backend": "naive", "workspace": ones(100, 100, dtype=np.uint8)[:, ::2]},
        ValueError,
        "workspace must be contiguous; pass a one-dimensional uint8 array"),
}

# fmt: on
