# SPDX-License-Identifier: Apache-2.0
"""What must hold for any attention, whatever the reference says: hypothesis draws the shapes and
options.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import CUDA_BACKENDS, DTYPES, EPS, Case, make_problem
from cuattn import merge_states
from harness import Arena, bits, run, serves, target_params

EXAMPLES = 25

CASES = st.builds(
    Case,
    dtype=st.sampled_from(sorted(DTYPES)),
    batch=st.integers(1, 4),
    num_heads_q=st.just(6),
    num_heads_kv=st.sampled_from([1, 2, 3, 6]),
    seqlen_q=st.integers(1, 140),
    seqlen_kv=st.integers(1, 140),
    head_dim=st.integers(1, 16).map(lambda n: 8 * n),
    causal=st.booleans(),
    window=st.tuples(st.integers(-1, 80), st.integers(-1, 80)),
    give_out=st.booleans(),
)
SCORED = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([0.0, 20.0]),
        "alibi": st.sampled_from(["none", "head", "batch"]),
        "sinks": st.booleans(),
    }
)
on_every_backend = pytest.mark.parametrize(("device", "backend"), target_params())
# cuBLAS chooses its kernel by shape and strides, so the same row may get other bits there.
on_own_kernels = pytest.mark.parametrize(
    ("device", "backend"),
    target_params(cuda=tuple(name for name in CUDA_BACKENDS if name != "cublas")),
)
examples = settings(max_examples=EXAMPLES)


def fit(backend, device, case):
    """The nearest case that the rung serves."""
    if not serves(backend, device, case):
        case = dataclasses.replace(case, dtype="float32" if backend == "simt" else "float16")
    if not serves(backend, device, case):
        case = dataclasses.replace(
            case, softcap=0.0, alibi="none", bias="none", sinks=False, layout="bshd", seqused="none"
        )
    return case


def close(a, b, case, factor=1.0):
    """Two results of the library for the same mathematics: a few roundings of the dtype apart."""
    factor *= 16 if case.dtype == "float32" else 4  # float32 has no coarser rounding to hide in
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    size = max(np.abs(b[np.isfinite(b)]).max(initial=0.0), 1.0)
    np.testing.assert_allclose(a, b, rtol=0, atol=factor * EPS[case.dtype] * size)


def same_bits(a, b, case):
    assert np.array_equal(bits(a), bits(b)), case


def close_lse(a, b):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@on_every_backend
@examples
@given(case=CASES, options=SCORED, seed=st.integers(0, 2**31))
def test_permuting_batch_and_heads_permutes_the_result(device, backend, case, options, seed):
    case = fit(backend, device, dataclasses.replace(case, **options))
    rng = np.random.default_rng(seed)
    problem = make_problem(case, rng)
    out, lse = run(device, backend, problem)
    batch, groups = rng.permutation(case.batch), rng.permutation(case.num_heads_kv)
    heads = np.concatenate(
        [g * (6 // case.num_heads_kv) + rng.permutation(6 // case.num_heads_kv) for g in groups]
    )
    arrays = problem.arrays
    arrays["q"] = arrays["q"][batch][:, :, heads]
    arrays["k"], arrays["v"] = (arrays[name][batch][:, :, groups] for name in "kv")
    if "alibi_slopes" in arrays:
        slopes = arrays["alibi_slopes"]
        arrays["alibi_slopes"] = slopes[heads] if slopes.ndim == 1 else slopes[batch][:, heads]
    if "sinks" in arrays:
        arrays["sinks"] = arrays["sinks"][heads]
    permuted, permuted_lse = run(device, backend, problem)
    assert np.array_equal(bits(out[batch][:, :, heads]), bits(permuted))
    assert np.array_equal(bits(lse[batch][:, heads]), bits(permuted_lse))


@on_every_backend
@examples
@given(case=CASES, seed=st.integers(0, 2**31), cut=st.floats(0, 1))
def test_splitting_the_keys_and_merging_gives_the_whole(device, backend, case, seed, cut):
    case = fit(backend, device, dataclasses.replace(case, causal=False, window=(-1, -1)))
    problem = make_problem(case, np.random.default_rng(seed))
    out, lse = run(device, backend, problem)
    cut = round(cut * case.seqlen_kv)
    parts, arrays = [], problem.arrays
    for keys in (slice(None, cut), slice(cut, None)):
        half = dataclasses.replace(
            problem, arrays={**arrays, "k": arrays["k"][:, keys], "v": arrays["v"][:, keys]}
        )
        arena = Arena(device)
        parts += [arena.put(x) for x in run(device, backend, half)]
    merged, merged_lse = merge_states(*parts)
    device.synchronize()
    close(device.numpy(merged), out, case, 2)
    close_lse(device.numpy(merged_lse), lse)


@on_every_backend
@examples
@given(case=CASES, seed=st.integers(0, 2**31), constant=st.floats(-60, 60))
def test_a_constant_added_to_all_scores_moves_lse_only(device, backend, case, seed, constant):
    if backend == "tiled":
        pytest.skip("tiled has no bias")
    case = fit(backend, device, case)
    problem = make_problem(case, np.random.default_rng(seed))
    out, lse = run(device, backend, problem)
    problem.arrays["bias"] = np.full((1, 1, 1, 1), constant, np.float32)
    moved, moved_lse = run(device, backend, problem)
    # Scores of size 60 are rounded to 4e-6.
    close(moved, out, case, 8 if case.dtype == "float32" else 1)
    np.testing.assert_allclose(moved_lse, lse + constant, rtol=2e-5, atol=2e-5)


@on_every_backend
@examples
@given(case=CASES, options=SCORED, seed=st.integers(0, 2**31))
def test_grouped_heads_are_repeated_heads(device, backend, case, options, seed):
    case = fit(backend, device, dataclasses.replace(case, **options))
    problem = make_problem(case, np.random.default_rng(seed))
    out, lse = run(device, backend, problem)
    for name in "kv":
        problem.arrays[name] = np.repeat(problem.arrays[name], 6 // case.num_heads_kv, axis=2)
    repeated, repeated_lse = run(device, backend, problem)
    close(repeated, out, case)
    close_lse(repeated_lse, lse)


@on_every_backend
@examples
@given(case=CASES, options=SCORED, seed=st.integers(0, 2**31), prefix=st.floats(0, 1))
def test_a_causal_prefix_does_not_know_the_rest(device, backend, case, options, seed, prefix):
    case = dataclasses.replace(case, **options, causal=True, seqlen_kv=case.seqlen_q)
    case = fit(backend, device, dataclasses.replace(case, window=(case.window[0], -1)))
    problem = make_problem(case, np.random.default_rng(seed))
    out, lse = run(device, backend, problem)
    rows = round(prefix * case.seqlen_q)
    problem.arrays.update({name: problem.arrays[name][:, :rows] for name in "qkv"})
    short = dataclasses.replace(case, seqlen_q=rows, seqlen_kv=rows)
    part, part_lse = run(device, backend, dataclasses.replace(problem, case=short))
    close(part, out[:, :rows], case)
    close_lse(part_lse, lse[:, :, :rows])


@on_own_kernels
@examples
@given(case=CASES, options=SCORED, seed=st.integers(0, 2**31), ragged=st.booleans())
def test_a_sequence_has_the_same_bits_whoever_shares_its_batch(
    device, backend, case, options, seed, ragged
):
    case = dataclasses.replace(
        case, **options, batch=4, layout="ragged" if ragged else "bshd", give_out=False
    )
    if case.alibi == "batch":
        case = dataclasses.replace(case, alibi="head")
    case = fit(backend, device, case)
    rng = np.random.default_rng(seed)
    problem = make_problem(case, rng)
    problem.options["batch_invariant"] = True
    out, lse = run(device, backend, problem)
    chosen, arrays = int(rng.integers(4)), dict(problem.arrays)
    if case.layout == "ragged":  # alone, with bounds of its own; then with mates of other lengths
        starts_q, starts_k = arrays["cu_seqlens_q"], arrays["cu_seqlens_k"]
        rows, keys = (slice(s[chosen], s[chosen + 1]) for s in (starts_q, starts_k))
        arrays.update(q=arrays["q"][rows], k=arrays["k"][keys], v=arrays["v"][keys])
        lengths = (rows.stop - rows.start, keys.stop - keys.start)
        arrays["cu_seqlens_q"], arrays["cu_seqlens_k"] = (
            np.array([0, n], np.int32) for n in lengths
        )
        single = dataclasses.replace(problem, arrays=arrays, lengths=tuple(int(n) for n in lengths))
        expected, expected_lse = out[rows], lse[:, rows]
    else:
        arrays.update({name: arrays[name][chosen : chosen + 1] for name in "qkv"})
        single = dataclasses.replace(
            problem, arrays=arrays, case=dataclasses.replace(case, batch=1)
        )
        expected, expected_lse = out[chosen : chosen + 1], lse[chosen : chosen + 1]
    alone, alone_lse = run(device, backend, single)
    assert np.array_equal(bits(alone), bits(expected))
    assert np.array_equal(bits(alone_lse), bits(expected_lse))


@on_own_kernels
@examples
@given(case=CASES, seed=st.integers(0, 2**31))
def test_layouts_and_packing_agree_bit_for_bit(device, backend, case, seed):
    case = fit(backend, device, dataclasses.replace(case, give_out=False))
    problem = make_problem(case, np.random.default_rng(seed))
    out, lse = run(device, backend, problem)
    swapped = {name: np.ascontiguousarray(problem.arrays[name].swapaxes(1, 2)) for name in "qkv"}
    heads_first = dataclasses.replace(
        problem,
        arrays=swapped,
        options={**problem.options, "layout": "bhsd"},
        case=dataclasses.replace(case, layout="bhsd"),
    )
    other, other_lse = run(device, backend, heads_first)
    same_bits(other.swapaxes(1, 2), out, case)
    same_bits(other_lse, lse, case)
    ragged = dataclasses.replace(case, layout="ragged")
    if not serves(backend, device, ragged):
        return
    packed = {
        name: problem.arrays[name].reshape(-1, *problem.arrays[name].shape[2:]) for name in "qkv"
    }
    for name, n in (("cu_seqlens_q", case.seqlen_q), ("cu_seqlens_k", case.seqlen_kv)):
        packed[name] = np.arange(case.batch + 1, dtype=np.int32) * n
    options = {name: value for name, value in problem.options.items() if name != "layout"}
    lengths = (case.seqlen_q, case.seqlen_kv)
    other, other_lse = run(
        device,
        backend,
        dataclasses.replace(problem, case=ragged, arrays=packed, options=options, lengths=lengths),
    )
    same_bits(other.reshape(out.shape), out, case)
    same_bits(other_lse.reshape(6, case.batch, -1).swapaxes(0, 1), lse, case)
