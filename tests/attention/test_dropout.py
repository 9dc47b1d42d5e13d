# SPDX-License-Identifier: Apache-2.0
"""Dropout of the forward pass: against float64 with the bits of the rule, its mean, and that
nothing but seed, offset and place decides; on CUDA sm90, sm80, simt and naive have it, the others
refuse it by name.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest

import cases
import cuattn
import frameworks
import harness
import reference
from cases import Case

DROPOUT = {"dropout_p": 0.3, "dropout_seed": 2**40 + 11, "dropout_offset": 2**32 - 2}
TARGETS = harness.target_params(cuda=("naive", "simt"))
CASES = {
    "plain": Case(),
    "causal": Case(causal=True, seqlen_q=70, seqlen_kv=300, head_dim=128),
    "one_query": Case(seqlen_q=1, seqlen_kv=239, num_heads_q=8),  # rows along the head dimension
    "window": Case(window=(20, 3), layout="bhsd", seqlen_q=147, seqlen_kv=191),
    "ragged": Case(layout="ragged", batch=3, num_heads_q=6, causal=True),
    "options": Case(softcap=5.0, alibi="batch", sinks=True, bias="full", seqused="both"),
    "bool": Case(bias="bool", causal=True, head_dim=40),
}


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(
    ("device", "backend", "name"),
    harness.target_params(tuple(CASES), cuda=("naive", "simt", "sm80")),
)
def test_dropout_against_float64(device, backend, name, dtype, rng):
    case = dataclasses.replace(CASES[name], dtype=dtype)
    places = cases.dropout_places(rng, case.num_heads_q)
    change = lambda problem: problem.options.update(DROPOUT, **places)  # noqa: E731
    harness.assert_case(device, backend, case, rng, change)


SM90 = {  # plain scores alone
    "plain": Case(seqlen_q=200, seqlen_kv=300),
    "causal_128": Case(causal=True, seqlen_q=300, seqlen_kv=700, head_dim=128, sinks=True),
    "few_queries": Case(seqlen_q=5, seqlen_kv=900, num_heads_q=8),  # keys in parts, heads unpacked
    "window": Case(window=(60, 20), layout="bhsd", seqlen_q=333, seqlen_kv=391, head_dim=72),
    "ragged": Case(
        layout="ragged", batch=9, num_heads_q=6, causal=True, seqlen_q=260, seqlen_kv=290
    ),
    "used": Case(seqused="both", seqlen_q=150, seqlen_kv=260, head_dim=96, head_dim_v=40),
    "padded": Case(kv_start=True, seqlen_q=130, seqlen_kv=270, causal=True),
    "dead_rows": Case(causal=True, seqlen_q=300, seqlen_kv=100, storage="packed"),
    "192": Case(causal=True, seqlen_q=260, seqlen_kv=390, head_dim=192, scale=0.2),
    "192_128": Case(seqlen_q=200, seqlen_kv=300, head_dim=192, head_dim_v=128),
    "256": Case(causal=True, seqlen_q=260, seqlen_kv=300, head_dim=256, num_heads_q=2),
    "many_items": Case(causal=True, seqlen_q=520, seqlen_kv=520, batch=12, num_heads_q=8),
}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("device", "backend", "name"),
    harness.target_params(tuple(SM90), cpu=(), cuda=("sm90",)),
)
def test_dropout_of_sm90_against_float64(device, backend, name, dtype, rng):
    case = dataclasses.replace(SM90[name], dtype=dtype)
    given = {"dropout_p": rng.choice([0.1, 0.6])} | cases.dropout_places(rng, case.num_heads_q)
    change = lambda problem: problem.options.update(DROPOUT, **given)  # noqa: E731
    harness.assert_case(device, backend, case, rng, change)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_only_seed_offset_and_place_decide(device, backend, rng):
    """A sequence in a padded batch and packed, keys from q's library or a state array: one mask."""
    attention = functools.partial(harness.numpy_call, device, cuattn.attention)
    q, k, v = (rng.standard_normal((2, n, 2, 16), np.float32) for n in (40, 50, 50))
    options = {**DROPOUT, "backend": backend}
    out = attention(q, k, v, **options)
    state = np.array([DROPOUT["dropout_seed"], DROPOUT["dropout_offset"]])
    again = attention(q, k, v, dropout_p=0.3, dropout_state=state, backend=backend)
    assert np.array_equal(out, again)
    packed = harness.numpy_call(
        device,
        cuattn.attention_varlen,
        *(x.reshape(-1, 2, 16) for x in (q, k, v)),
        np.array([0, 40, 80], np.int32),
        np.array([0, 50, 100], np.int32),
        40,
        50,
        **options,
    )
    assert np.array_equal(packed.reshape(out.shape), out)
    for other in ({"dropout_seed": 5}, {"dropout_offset": 5}):
        assert not np.array_equal(attention(q, k, v, **{**options, **other}), out)


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_the_mean_is_the_result_without_dropout(device, backend, rng):
    attention = functools.partial(harness.numpy_call, device, cuattn.attention)
    q, k, v = (rng.standard_normal((1, n, 1, 8), np.float32) for n in (5, 64, 64))
    draws = [
        attention(q, k, v, dropout_p=0.25, dropout_seed=1, dropout_offset=i, backend=backend)
        for i in range(2000)
    ]
    plain = attention(q, k, v, backend=backend)
    deviation = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - plain) < 5 * deviation).all()


@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_lse_does_not_know_of_dropout(device, backend, rng):
    attention = functools.partial(harness.numpy_call, device, cuattn.attention)
    q, k, v = (rng.standard_normal((1, 33, 2, 16), np.float32) for _ in range(3))
    _, lse = attention(q, k, v, return_lse=True, backend=backend)
    out, dropped = attention(q, k, v, return_lse=True, backend=backend, **DROPOUT)
    assert np.array_equal(lse, dropped)
    few = {"dropout_p": 0.001, "dropout_seed": 1}  # below half a step of 1 / 256: none
    assert np.array_equal(
        attention(q, k, v, backend=backend, **few),
        attention(q, k, v, backend=backend),
    )
    assert out.shape == q.shape


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("device", ["a100", "h100"])
def test_cuda_drops_by_tiles(dtype, device):
    shape, options = (2, 64, 4, 64), {**DROPOUT, "dtype": dtype}
    plan = cuattn.explain("attention", shape, shape, shape, device=device, **options)
    best = "sm90" if device == "h100" else "sm80"
    assert plan.kernel == ("simt" if dtype == "float32" else best)
    assert plan.workspace_bytes == 0
    by_name = cuattn.explain(
        "attention", shape, shape, shape, device=device, backend="naive", **options
    )
    assert by_name.workspace_bytes == 4 * 2 * 4 * 64 * 64


@pytest.mark.parametrize(
    "change",
    [{"softcap": 5.0}, {"scale": -1.0}, {"alibi_slopes": (4,)}, {"bias": (64, 64)}],
    ids=str,
)
def test_sm80_has_the_dropout_that_sm90_refuses(change):
    options = {**DROPOUT, "dtype": "bfloat16", "device": "h100", **change}
    shape = (2, 64, 4, 64)
    assert cuattn.explain("attention", shape, shape, shape, **options).kernel == "sm80"
    with pytest.raises(NotImplementedError) as raised:
        cuattn.explain("attention", shape, shape, shape, backend="sm90", **options)
    assert str(raised.value) == (
        "attention: backend 'sm90' cannot run this call: it has no dropout beside softcap, ALiBi, "
        "a bias or a scale up to 0, which sm80 has; use backend='sm80' or 'auto'"
    )


def test_keys_in_blocks_are_gathered_for_dropout():
    """The warps that would load the blocks draw what is kept."""
    cache, options = (9, 64, 2, 64), {"block_tables": (2, 3), "seqused_k": (2,), "device": "h100"}
    shapes = ((120, 8, 64), cache, cache, (3,), None, 60, 192)
    for more, clause in (({}, "are read in their blocks"), (DROPOUT, "are gathered from their")):
        plan = cuattn.explain("attention_varlen", *shapes, dtype="bfloat16", **options, **more)
        assert plan.kernel == "sm90"
        assert clause in str(plan)


@pytest.mark.parametrize("backend", ["tiled", "cublas"])
def test_other_cuda_kernels_refuse_dropout(backend):
    shape, options = (2, 64, 4, 64), {**DROPOUT, "backend": backend}
    with pytest.raises(NotImplementedError) as raised:
        cuattn.explain("attention", shape, shape, shape, device="h100", **options)
    assert str(raised.value) == (
        f"attention: backend '{backend}' cannot run this call: it has no dropout, which sm90, "
        "sm80, simt and naive have; use backend='sm90' or 'auto'"
    )


def test_the_gradients_draw_the_same_bits(rng):
    """Of the library alone: central differences of its own forward pass at one seed."""
    q, k, v = (rng.standard_normal((1, n, 2, 8), np.float32) for n in (6, 40, 40))
    dout = rng.standard_normal(q.shape, np.float32)

    def run(values):
        return cuattn.attention(q, k, values, return_lse=True, **DROPOUT)

    out, lse = run(v)
    direction = rng.standard_normal(v.shape, np.float32)
    dv = cuattn.attention_backward(dout, q, k, v, out, lse, **DROPOUT).dv
    # out is linear in v, so a whole step is exact.
    want = np.sum(dout.astype(np.float64) * (run(v + direction)[0].astype(np.float64) - out))
    assert np.isclose(np.sum(dv.astype(np.float64) * direction), want, rtol=1e-4, atol=1e-4)
    exact, _ = reference.attention(q, k, v, **DROPOUT)
    assert np.allclose(out, exact, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "backend", "dtype"),
    harness.target_params(("float32", "bfloat16"), cuda=("naive", "auto", "sm80")),
)
def test_a_part_drops_what_the_whole_drops(device, backend, dtype, rng):
    """Some rows, heads and sequences of a call, against all keys and against the last of them."""
    if backend == "sm80" and dtype == "float32":
        pytest.skip("sm80 takes 16 bits")
    attention = functools.partial(harness.numpy_call, device, cuattn.attention)
    shapes = (3, 90, 6, 16), (3, 110, 3, 16), (3, 110, 3, 16)
    q, k, v = (rng.standard_normal(x, np.float32).astype(cases.DTYPES[dtype]) for x in shapes)
    whole = {**DROPOUT, "backend": backend}
    first_key = 37 if str(device) == "cpu" else 32
    hidden = np.zeros((1, 1, 1, 110), np.float32)
    hidden[..., :first_key] = -np.inf
    part = (slice(1, 3), slice(41, 90), slice(2, 4))
    of_keys = part[0], slice(None), slice(1, 2)
    places = {"dropout_row": 41, "dropout_head": 1 * 6 + 2, "dropout_heads": 6}
    for bias, begin in ((None, 0), (hidden, first_key)):
        want = attention(q, k, v, bias=bias, **whole)[part]
        keys = (x[of_keys][:, begin:] for x in (k, v))
        got = attention(q[part], *keys, dropout_key=begin, **places, **whole)
        near = 1e-5 if dtype == "float32" else 2e-2
        assert np.abs(got.astype(np.float32) - want.astype(np.float32)).max() < near


def test_places_out_of_range_are_refused():
    q = np.ones((1, 4, 2, 8), np.float32)
    for given, words in (
        ({"dropout_row": -1}, "dropout_row must lie in [0, 2^31), got -1"),
        ({"dropout_key": 2**31}, "dropout_key must lie in [0, 2^31), got 2147483648"),
        ({"dropout_head": -5}, "dropout_head must lie in [0, 2^31), got -5"),
        ({"dropout_heads": 1}, "dropout_heads must lie in [num_heads_q, 2^31) = [2, 2^31) or be 0"),
        (
            {"dropout_head": 7, "dropout_heads": 4},
            "dropout_head must leave all heads of the call, "
            "2, among the dropout_heads of one sequence, 4, got 7, which is head 3 of its sequence",
        ),
        (
            {"dropout_head": 3},
            "dropout_head must leave all heads of the call, 2, among the "
            "dropout_heads of one sequence, 2, got 3, which is head 1 of its sequence; pass",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(f"attention: {words}")):
            cuattn.attention(q, q, q, dropout_p=0.5, dropout_seed=1, **given)


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_every_face_refuses_heads_that_leave_their_sequence(module):
    library = frameworks.require(module)
    q, lse = library.ones((1, 4, 2, 8)), library.ones((1, 2, 4))
    rows, cu, ragged_lse = q[0], library.asarray([0, 4], dtype=library.int32), lse[0]
    lengths = cu, cu, 4, 4
    if module == "numpy":
        q, lse, rows, ragged_lse = (x.astype(np.float32) for x in (q, lse, rows, ragged_lse))
    options = {"dropout_p": 0.5, "dropout_seed": 1, "dropout_heads": 6}
    for op, given in (
        ("attention", (q, q, q)),
        ("attention_varlen", (rows, rows, rows, *lengths)),
        ("attention_backward", (q, q, q, q, q, lse)),
        ("attention_varlen_backward", (*(rows,) * 5, ragged_lse, *lengths)),
    ):
        call = getattr(cuattn, op)
        with pytest.raises(ValueError, match=f"{op}: dropout_head must leave all heads .* got 11,"):
            call(*given, **options, dropout_head=11)
        call(*given, **options, dropout_head=10)


def test_explain_takes_the_keys_that_the_device_takes():
    """Of shapes and of arrays on the host: the device asked about decides, not theirs."""
    shape = (1, 4, 2, 64)
    options = {"dropout_p": 0.5, "dropout_seed": 1, "dropout_key": 24, "dtype": "float16"}
    arrays = np.ones(shape, np.float16), np.ones((1, 2, 4), np.float32)
    for array, lse in ((shape, ("float32", 1, 2, 4)), arrays):
        calls = {"attention": (array,) * 3, "attention_backward": (*(array,) * 5, lse)}
        for op, given in calls.items():
            words = f"{op}: dropout_key must be a multiple of 16 on CUDA, got 24; begin the part"
            with pytest.raises(NotImplementedError, match=words):
                cuattn.explain(op, *given, device="h100", **options)
            cuattn.explain(op, *given, device="h100", **options | {"dropout_key": 32})
            assert cuattn.explain(op, *given, device="cpu", **options).kernel == "cpu"
