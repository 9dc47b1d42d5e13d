# SPDX-License-Identifier: Apache-2.0
"""What JAX arrays over the paged KV cache cannot do: each refusal, while tracing or by the data."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import cuattn
import frameworks

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax  # noqa: E402
from jax_cases import assert_same_bits, gathering, to_jax, writing  # noqa: E402

WHAT_XLA_OWNS = r"must be None for JAX arrays, whose memory and stream belong to XLA; leave it out"


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def attending():
    return {
        "q": jnp.ones((2, 4, 64)),
        "k_cache": jnp.ones((5, 8, 2, 64)),
        "v_cache": jnp.ones((5, 8, 2, 64)),
        "block_tables": jnp.zeros((2, 2), jnp.int32),
        "context_lens": jnp.array([3, 9], jnp.int32),
    }


def prefilling():
    q, k_cache, v_cache, tables, lens = attending().values()
    ends = jnp.arange(3, dtype=jnp.int32)
    return {
        "q": q,
        "k": k_cache,
        "v": v_cache,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": None,
        "max_seqlen_q": 1,
        "max_seqlen_k": 9,
        "block_tables": tables,
        "seqused_k": lens,
    }


def storing():
    return dict(
        zip(
            ("k", "v", "k_cache", "v_cache", "slot_mapping"),
            to_jax(writing(np.random.default_rng(0))),
            strict=True,
        )
    )


def reading():
    return dict(
        zip(
            ("k_cache", "v_cache", "block_tables", "cu_seqlens"),
            to_jax(gathering(np.random.default_rng(0))),
            strict=True,
        )
    )


CALLS = {
    "paged_attention": attending,
    "attention_varlen": prefilling,
    "reshape_and_cache": storing,
    "gather_cache": reading,
}
OWNED = [("paged_attention", n) for n in ("out", "lse_out", "workspace", "stream")]
OWNED += [("attention_varlen", n) for n in ("out", "lse_out", "workspace", "stream")]
OWNED += [("reshape_and_cache", "stream")]
OWNED += [("gather_cache", n) for n in ("k_out", "v_out", "stream")]


@pytest.mark.parametrize(("op", "name"), OWNED)
def test_what_xla_owns_is_refused(op, name):
    given = CALLS[op]()
    with pytest.raises(NotImplementedError, match=f"^{op}: {name} {WHAT_XLA_OWNS}$"):
        getattr(cuattn, op)(**given, **{name: jnp.zeros(3)})


def test_a_plan_is_refused():
    message = "^paged_attention: plan must be None for JAX arrays, .* leave it out$"
    with pytest.raises(NotImplementedError, match=message):
        cuattn.paged_attention(**attending(), plan=jnp.zeros(9, jnp.int32))


f16, i32 = jnp.float16, jnp.int32
REFUSALS = {
    "q_rank": ("paged_attention", {"q": lambda x: x[0]}, ValueError, "q must have"),
    "q_dtype": ("paged_attention", {"q": lambda x: x.astype(i32)}, ValueError, "q must be float32"),
    "complex": ("paged_attention", {"q": lambda x: x + 1j}, ValueError,
        "q must be float32, float16 or bfloat16, got complex64; cast it"),
    "cache_dtype": ("paged_attention", {"v_cache": lambda x: x.astype(f16)}, ValueError,
        "v_cache must be float32 like k_cache, got float16"),
    "tables": ("paged_attention", {"block_tables": lambda x: x.astype(f16)}, ValueError,
        "block_tables must be int32, got float16"),
    "unsigned": ("paged_attention", {"block_tables": lambda x: x.astype(jnp.uint32)}, ValueError,
        "block_tables must be int32, got uint32"),
    "lens": ("paged_attention", {"context_lens": lambda x: x[:1]}, ValueError,
        "context_lens must have"),
    "layout": ("paged_attention", {"kv_layout": "bshd"}, ValueError,
        "kv_layout must be 'nhd', 'hnd' or 'vllm', got 'bshd'"),
    "other_layout": ("paged_attention", {"kv_layout": "vllm"}, ValueError,
        "k_cache must have 5 axes"),
    "kv_dtype": ("paged_attention", {"kv_dtype": "float16"}, ValueError,
        "kv_dtype must be None or 'float8_e4m3fn', got 'float16'"),
    "list": ("paged_attention", {"k_cache": [1.0]}, TypeError,
        "k_cache must be a JAX array like q, got list"),
    "scale_number": ("paged_attention", {"k_scale": 2.0}, ValueError,
        "k_scale belongs to float8_e4m3fn caches, these are float32; leave it out"),
    "scale_array": ("paged_attention", {"v_scale": jnp.ones(2)}, ValueError,
        "v_scale belongs to float8_e4m3fn caches"),
    "scale_list": ("paged_attention", {"k_scale": [2.0]}, TypeError,
        "k_scale must be a Python value, which is static under jax.jit, got list"),
    "softcap": ("paged_attention", {"softcap": jnp.ones(())}, TypeError,
        "softcap must be a Python value, which is static under jax.jit"),
    "window": ("paged_attention", {"window": 3}, TypeError, "window must be a pair"),
    "backend": ("paged_attention", {"backend": "sm90"}, NotImplementedError,
        "backend 'sm90' cannot run this call"),
    "slopes": ("paged_attention", {"alibi_slopes": jnp.ones(3)}, ValueError,
        "alibi_slopes must have shape"),
    "splits": ("paged_attention", {"num_splits": -1}, ValueError,
        "num_splits must be >= 0, got -1"),
    "varlen_layout": ("attention_varlen", {"block_tables": None, "kv_layout": "hnd"}, ValueError,
        "kv_layout belongs to paged caches and must be 'nhd' without block_tables"),
    "varlen_ends": ("attention_varlen", {"cu_seqlens_q": None}, TypeError,
        r"cu_seqlens_q must be an int32 array \[batch \+ 1\], got None"),
    "varlen_tables": ("attention_varlen", {"block_tables": lambda x: x[:1]}, ValueError,
        "block_tables must have num_seqs"),
    "varlen_lengths": ("attention_varlen", {"seqused_k": None}, ValueError,
        "cu_seqlens_q and cu_seqlens_k must both be given, got one"),
    "slots_dtype": ("reshape_and_cache", {"slot_mapping": lambda x: x.astype(f16)}, ValueError,
        "slot_mapping must be int64, got float16; cast it"),
    "slots_shape": ("reshape_and_cache", {"slot_mapping": lambda x: x[:, None]}, ValueError,
        r"slot_mapping must have shape \(num_tokens,\) = \(37,\), got \(37, 1\)"),
    "slots_wide": ("reshape_and_cache", {"slot_mapping": np.full(37, 2**31)}, ValueError,
        "slot_mapping must fit 32 bits while jax_enable_x64 is off, got 2147483648; turn it on"),
    "v": ("reshape_and_cache", {"v": lambda x: x[:3]}, ValueError, "v must have num_tokens"),
    "cache": ("reshape_and_cache", {"k_cache": lambda x: x.astype(f16)}, ValueError,
        "k_cache must be float32 like k, or float8_e4m3fn, got float16"),
    "cos": ("reshape_and_cache", {"cos": jnp.ones((9, 4))}, ValueError,
        "cos, sin and positions must be given together, got 1 of them"),
    "write_scale": ("reshape_and_cache", {"k_scale": 2.0}, ValueError,
        "k_scale belongs to a float8_e4m3fn cache"),
    "interleaved": ("reshape_and_cache", {"rope_interleaved": True}, ValueError,
        "rope_interleaved must be False without cos and sin"),
    "none": ("reshape_and_cache", {"v_cache": None}, TypeError,
        "v_cache must be a JAX array like k, got NoneType"),
    "gather_rank": ("gather_cache", {"k_cache": lambda x: x[0]}, ValueError,
        "k_cache must have 4 axes"),
    "gather_dtype": ("gather_cache", {"v_cache": lambda x: x.astype(f16)}, ValueError,
        "v_cache must be float32 like k_cache, got float16"),
    "gather_tables": ("gather_cache", {"block_tables": lambda x: x[:1]}, ValueError,
        "cu_seqlens must have shape"),
    "gather_ends": ("gather_cache", {"cu_seqlens": lambda x: x[:, None]}, ValueError,
        "cu_seqlens must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_come_while_tracing(name):
    op, changes, error, message = REFUSALS[name]
    given = CALLS[op]()
    for key, change in changes.items():
        given[key] = change(given[key]) if callable(change) else change
    with pytest.raises(error, match=f"^{op}: {message}"):
        getattr(cuattn, op)(**given)
    first = next(iter(given))
    with pytest.raises(error, match=f"^{op}: {message}"):
        jax.eval_shape(lambda x: getattr(cuattn, op)(**{**given, first: x}), given[first])


BAD_DATA = {
    "slots": ("reshape_and_cache", {"slot_mapping": jnp.full(37, -2, i32)},
        r"slot_mapping must lie within \[-1, 112\), got -2 at index 0"),
    "tables": ("paged_attention", {"block_tables": jnp.array([[0, 1], [7, 0]], i32)},
        r"block_tables must hold block ids within \[0, 4\], got 7 at \(1, 0\)"),
    "lens": ("paged_attention", {"context_lens": jnp.array([3, 17], i32)},
        "context_lens must lie within"),
    "gather": ("gather_cache", {"cu_seqlens": jnp.array([1, 2, 3, 4], i32)},
        "cu_seqlens must start at 0, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_DATA)
def test_what_only_the_data_tells_is_an_error_of_the_run(name):
    op, changes, message = BAD_DATA[name]
    given = {**CALLS[op](), **changes}
    with pytest.raises(Exception, match=f"{op}: {message}"):
        jax.block_until_ready(getattr(cuattn, op)(**given))


@pytest.mark.parametrize("op", ["paged_attention", "attention_varlen", "reshape_and_cache"])
def test_gradients_are_refused(op):
    given = CALLS[op]()
    first = next(iter(given))

    def loss(x):
        return jax.tree.leaves(getattr(cuattn, op)(**{**given, first: x}))[0].sum()

    refusal = f"{op}: (no gradient goes through|block_tables must be None for a gradient)"
    with pytest.raises(NotImplementedError, match=refusal):
        jax.grad(loss)(given[first])


def test_functions_that_write_in_place_name_the_way_out():
    q, k_cache, v_cache, tables, lens = attending().values()
    sizes = {"num_heads_q": 4, "num_heads_kv": 2, "head_dim": 64, "block_size": 8}
    taken = "is a JAX array, which this function does not take; use paged_attention"
    for version in (cuattn.paged_attention_v1, cuattn.paged_attention_v2):
        with pytest.raises(NotImplementedError, match=f"^{version.__name__}: q {taken}, which"):
            version(q, q, k_cache, v_cache, tables, lens, 1.0)
    with pytest.raises(
        NotImplementedError, match=f"^paged_plan: context_lens {taken} without plan"
    ):
        cuattn.paged_plan(tables, lens, **sizes)
    with pytest.raises(NotImplementedError, match=r"use cache.at\[destinations\].set"):
        cuattn.copy_blocks([k_cache], None, np.zeros((0, 2), np.int64))
    with pytest.raises(NotImplementedError, match=r"use cache.at\[destinations\].set"):
        cuattn.swap_blocks(k_cache, v_cache, np.zeros((0, 2), np.int64))
    moved = k_cache.at[jnp.array([1])].set(2 * k_cache[jnp.array([3])])  # the way out
    assert np.asarray(moved[1] == 2).all()


def test_numpy_arrays_become_jax_arrays_and_others_are_refused(rng):
    torch = frameworks.require("torch")
    given = {name: np.asarray(x) for name, x in attending().items()}
    want = cuattn.paged_attention(**given)
    got = cuattn.paged_attention(**{**given, "q": jnp.asarray(given["q"])})
    assert_same_bits([got], [want])
    with pytest.raises(ValueError, match="paged_attention: k_cache is a JAX array but the first"):
        cuattn.paged_attention(**{**given, "k_cache": jnp.asarray(given["k_cache"])})
    with pytest.raises(
        TypeError, match="paged_attention: v_cache must be a JAX array like q, got T"
    ):
        cuattn.paged_attention(**{**attending(), "v_cache": torch.ones(5, 8, 2, 64)})


TWO_DEVICES = """
import jax, jax.numpy as jnp, numpy as np, cuattn
first, second = jax.devices("cpu")
ones = jnp.ones((5, 2, 16), "f4")
k, far = jax.device_put(ones, first), jax.device_put(ones, second)
cache = jnp.zeros((4, 8, 2, 16), "f4")
slots = jnp.arange(5)
assert slots.dtype == jnp.int64
near = cuattn.reshape_and_cache(k, k, cache, cache, slots)  # `cache` was put nowhere
assert near[0].devices() == {first} and float(near[0].sum()) == 160
moved = cuattn.reshape_and_cache(far, far, cache, cache, slots)
assert moved[0].devices() == {second} and float(moved[0].sum()) == 160
for call in (
    lambda: cuattn.reshape_and_cache(k, far, cache, cache, slots),
    lambda: cuattn.gather_cache(near[0], moved[0], jnp.zeros((1, 1), "i4"), np.array([0, 1], "i4")),
    lambda: cuattn.attention(k[None], far[None], far[None]),
):
    try:
        call()
    except ValueError as error:
        print(error)
"""


def test_arrays_of_two_devices_are_refused_and_int64_is_taken():
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_ENABLE_X64": "1",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{op}: {name} must be on cpu:0 like {like}, got cpu:1; move it with jax.device_put"
        for op, name, like in (
            ("reshape_and_cache", "v", "k"),
            ("gather_cache", "v_cache", "k_cache"),
            ("attention", "k", "q"),
        )
    ]
