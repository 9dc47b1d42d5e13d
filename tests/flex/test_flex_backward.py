# SPDX-License-Identifier: Apache-2.0
"""flex_attention_backward against float64 (flex_gradients.py)."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import flex_cases
from cuattn import _core, flex
from cuattn.flex.program import CODE
from flex_gradients import check, close, dense_array_gradient, dense_gradients

DIMS = ((16, 16), (40, 24), (64, 64))


def arrays(rng, batch, heads, heads_kv, q_len, kv_len, dims, dtype=np.float32):
    shapes = ((q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1]))
    return [rng.standard_normal((batch, *shape)).astype(dtype) for shape in shapes]


def smooth_score(make):
    """A score function that has no corner, which differences could meet."""
    while True:
        mod = make.score()
        if "maximum" not in mod.__code__.co_names and "high" not in mod.__code__.co_freevars:
            return mod
        if "table" in mod.__code__.co_freevars:
            return mod


def differentiate(q, k, v, dout, **options):
    forward = {n: x for n, x in options.items() if n not in ("need", "arrays", "dlse")}
    out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **forward)
    into = {"dq": np.full_like(q, np.nan), "dk": np.full_like(k, np.nan)}
    into["dv"] = np.full_like(v, np.nan)
    return cuattn.flex_attention_backward(dout, q, k, v, out, lse, **into, **options)


@pytest.mark.parametrize("part", range(2))
def test_random_functions_equal_the_dense_formula(rng, part):
    for case in range(30):
        heads_kv, group = int(rng.integers(1, 3)), int(rng.choice((1, 2, 3)))
        batch, heads = int(rng.integers(1, 3)), heads_kv * group
        q_len, kv_len = (int(n) for n in rng.integers(1, (330 if case % 6 == 0 else 90), 2))
        make = flex_cases.Generator(rng, batch, heads, q_len, kv_len)
        mask = None if case % 5 == 4 else make.mask(case % 4)
        mod = smooth_score(make) if case % 3 else None
        q, k, v = arrays(rng, batch, heads, heads_kv, q_len, kv_len, DIMS[case % 3])
        dout = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(np.float32)
        options = {}
        if case % 7 == 1:
            options["softcap"] = 3.0
        if case % 7 == 2:
            options["bias"] = rng.standard_normal((heads, 1, kv_len)).astype(np.float32)
        want = dense_gradients(q, k, v, dout, mask=mask, mod=mod, **options)
        text = f"case {case}: {mask and flex.trace(mask)}, {mod and flex.trace(mod, True)}"
        backend = "naive" if case % 10 == 9 else "auto"
        got = differentiate(q, k, v, dout, mask_mod=mask, score_mod=mod, backend=backend, **options)
        check(got, want, text)


MODS = {
    "key": lambda a: lambda s, b, h, i, j: s + a[j % 7],
    "row": lambda a: lambda s, b, h, i, j: s * a[i % 7],
    "head": lambda a: lambda s, b, h, i, j: s - a[h] * abs(i - j),
    "none": lambda a: lambda s, b, h, i, j: a[()] * np.tanh(s / 2.0),
    "distance": lambda a: lambda s, b, h, i, j: s + a[h, abs(i - j) % 5] * a[b, 2],
    "product": lambda a: lambda s, b, h, i, j: np.exp(a[(i + j) % 7] * s * 0.1) * a[j % 3],
}
SHAPES = {"none": (), "distance": (2, 5)}


@pytest.mark.parametrize("backend", ["auto", "naive"])
@pytest.mark.parametrize("name", MODS)
def test_captured_arrays_get_their_gradients(rng, name, backend):
    array = rng.standard_normal(SHAPES.get(name, (7,)))
    given = array.astype(np.float32)
    array = given.astype(np.float64)
    mod, dense_mod = MODS[name](given), MODS[name](array)
    mask = lambda b, h, i, j: (j <= i + 5) & ((i + j) % 3 != 0)  # noqa: E731
    q, k, v = arrays(rng, 2, 2, 1, 45, 50, (16, 16))
    dout = rng.standard_normal(q.shape).astype(np.float32)
    want = dense_gradients(q, k, v, dout, mask=mask, mod=dense_mod)
    got = differentiate(
        q, k, v, dout, mask_mod=mask, score_mod=mod, arrays=[given], backend=backend
    )
    check(got, want, name)
    close(got.darrays[0], *dense_array_gradient(dense_mod, array, want), name)
    assert got.darrays[0].dtype == np.float32


def test_every_operation_has_its_derivative(rng):
    """Corners included, of scores that are whole numbers and so never lie at one."""
    q = rng.integers(-2, 3, (1, 40, 2, 16)).astype(np.float32)
    k, v = (rng.integers(-2, 3, (1, 60, 2, 16)).astype(np.float32) for _ in range(2))
    dout = rng.standard_normal(q.shape).astype(np.float32)
    mods = {
        "abs": lambda s, b, h, i, j: abs(s + 0.125),
        "min": lambda s, b, h, i, j: np.minimum(s, 0.125),
        "max": lambda s, b, h, i, j: np.maximum(-s, 0.625) - 0.25 * s,
        "div": lambda s, b, h, i, j: (s + 1.0) / (8.0 + s * s),
        "log": lambda s, b, h, i, j: np.log(2.0 + s * s),
        "sqrt": lambda s, b, h, i, j: -np.sqrt(1.0 + s * s),
        "where": lambda s, b, h, i, j: np.where(s > 0.125, 0.5 * s, s * s * 0.125),
        "hidden": lambda s, b, h, i, j: np.where(s > 1.125, -np.inf, s + s),
        "neg": lambda s, b, h, i, j: -(s - i) * 0.5,
        "nested": lambda s, b, h, i, j: np.tanh(np.exp(-abs(s + 0.125)) * 3.0) - s**3 / 100.0,
    }
    for name, mod in mods.items():
        want = dense_gradients(q, k, v, dout, mod=mod)
        got = differentiate(q, k, v, dout, score_mod=mod)
        check(got, want, name)


def test_lists_of_blocks_rows_and_options_hide_what_they_hide(rng):
    q, k, v = arrays(rng, 2, 4, 2, 300, 420, (32, 32))
    dout = rng.standard_normal(q.shape).astype(np.float32)
    mod = lambda s, b, h, i, j: s - 0.02 * abs(i - j)  # noqa: E731
    ids = np.sort(rng.integers(0, 5, 420))
    masks = {
        "lists": flex.masks.streaming(50, 4),
        "rows": flex.masks.document(ids),
        "rows and program": flex.masks.and_masks(
            flex.masks.document(ids), lambda b, h, i, j: (i + j + h) % 3 != 0
        ),
        "option": flex.masks.sliding_window(60, 10),
        "batch and head": lambda b, h, i, j: (i // 64 + j // 64 + b + h) % 3 == 0,
    }
    for name, mask in masks.items():
        want = dense_gradients(q, k, v, dout, mask=mask, mod=mod)
        made = cuattn.create_block_mask(mask, 2, 4, 300, 420, block_size=(64, 128))
        for given in ({"mask_mod": mask}, {"block_mask": made}):
            got = differentiate(q, k, v, dout, score_mod=mod, **given)
            check(got, want, f"{name}, {list(given)}")


def test_padded_and_packed_sequences(rng):
    lengths = np.array([33, 0, 70, 5], np.int32)
    q, k, v = arrays(rng, 4, 4, 2, 80, 80, (32, 24))
    dout = rng.standard_normal((*q.shape[:3], 24)).astype(np.float32)
    table = rng.standard_normal((4, 9)).astype(np.float32)
    mod = lambda s, b, h, i, j: s + table[h, (i - j) % 9]  # noqa: E731
    mask = lambda b, h, i, j, q_len, kv_len: (j % 3 != b % 3) & (j <= i + kv_len - q_len)  # noqa: E731
    used = {"seqused_q": lengths, "seqused_k": lengths}
    call = {"mask_mod": mask, "score_mod": mod, "arrays": [table]}
    padded = differentiate(q, k, v, dout, **call, **used)
    begins = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    packed = [np.concatenate([x[b, :n] for b, n in enumerate(lengths)]) for x in (q, k, v, dout)]
    ragged = {
        **{"cu_seqlens_q": begins, "cu_seqlens_k": begins},
        **{"max_seqlen_q": 70, "max_seqlen_k": 70},
    }
    together = differentiate(*packed, **call, **ragged)
    sums, sizes = np.zeros(table.shape), np.zeros(table.shape)
    for b, n in enumerate(lengths):
        one = [x[b : b + 1, :n] for x in (q, k, v, dout)]
        here = lambda s, _, h, i, j, b=b: mod(s, b, h, i, j)  # noqa: E731
        seen = lambda _, h, i, j, q_len, kv_len, b=b: mask(b, h, i, j, q_len, kv_len)  # noqa: E731
        want = dense_gradients(*one, mask=seen, mod=here)
        check([x[b : b + 1, :n] for x in padded[:3]], want, "padded")
        check([x[None, begins[b] : begins[b] + n] for x in together[:3]], want, "packed")
        assert all(np.all(x[b, n:] == 0) for x in padded[:3])
        for h in range(4):
            i, j = np.indices((n, n))
            np.add.at(sums, (h, (i - j) % 9), want.ds[0, h])
            np.add.at(sizes, (h, (i - j) % 9), want.ds_sizes[0, h])
    close(padded.darrays[0], sums, sizes, "table")
    close(together.darrays[0], sums, sizes, "table, packed")


def test_bits_do_not_depend_on_the_threads(rng, monkeypatch):
    q, k, v = arrays(rng, 2, 4, 2, 260, 1300, (16, 16))
    dout = rng.standard_normal(q.shape).astype(np.float32)
    table = rng.standard_normal((4, 41)).astype(np.float32)
    mod = flex.scores.relative_bias(table)
    results = []
    for threads in ("1", "3"):
        monkeypatch.setenv("CUATTN_NUM_THREADS", threads)
        got = differentiate(q, k, v, dout, score_mod=mod, arrays=[table])
        results.append([*got[:3], *got.darrays])
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(x, y)


def test_lse_has_its_gradient_and_dtypes_theirs(rng):
    import ml_dtypes

    kinds = {np.float16: 2e-4, np.dtype(ml_dtypes.bfloat16): 2e-3}
    for kind, tolerance in kinds.items():
        q, k, v = arrays(rng, 1, 2, 2, 60, 70, (32, 32), kind)
        dout = rng.standard_normal(q.shape).astype(kind)
        dlse = rng.standard_normal((1, 2, 60)).astype(np.float32)
        slopes = rng.random(2).astype(np.float16)
        mod = flex.scores.alibi(slopes)
        want = dense_gradients(q, k, v, dout, mod=mod, dlse=dlse)
        got = differentiate(q, k, v, dout, score_mod=mod, dlse=dlse, arrays=[slopes])
        assert all(x.dtype == kind for x in got[:3])
        check(got[:3], want, kind, tolerance)
        assert got.darrays[0].dtype == np.float16


def test_nothing_to_differentiate(rng):
    table = np.ones((2, 5), np.float32)
    mod = flex.scores.relative_bias(table)
    for batch, q_len, kv_len in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = arrays(rng, batch, 2, 1, q_len, kv_len, (16, 16))
        got = differentiate(
            q,
            k,
            v,
            np.ones_like(q),
            score_mod=mod,
            mask_mod=flex.masks.streaming(3),
            arrays=[table],
        )
        assert all(np.all(x == 0) for x in (*got[:3], *got.darrays))


def test_bad_input(rng):
    q, k, v = arrays(rng, 1, 1, 1, 8, 8, (16, 16))
    table, ids = np.ones(3, np.float32), np.zeros(3, np.int32)
    mod = lambda s, b, h, i, j: s + table[ids[i]]  # noqa: E731
    out, lse = cuattn.flex_attention(q, k, v, score_mod=mod, return_lse=True)

    def call(**given):
        return cuattn.flex_attention_backward(out, q, k, v, out, lse, score_mod=mod, **given)

    for given, error, words in (
        ({"arrays": [np.ones(3, np.float32)]}, ValueError, "must be captured by score_mod"),
        ({"arrays": [ids]}, ValueError, "must hold floats"),
        ({"return_lse": True}, TypeError, "there is no argument return_lse; "),
        ({"need": ("dbias",)}, ValueError, "need must not name dbias"),
        ({"kv_start": np.zeros(1, np.int32)}, NotImplementedError, "kv_start must be None"),
        ({"dq": q}, ValueError, "dq must not share memory with q"),
        ({"causal": 1}, TypeError, "^flex_attention_backward: causal must be True or False"),
    ):
        with pytest.raises(error, match=words):
            call(**given)
    with pytest.raises(ValueError, match="captured by score_mod"):
        cuattn.flex_attention_backward(out, q, k, v, out, lse, arrays=[table])


def test_keys_in_parts_give_what_the_plain_loops_give(rng):
    q, k, v = arrays(rng, 1, 4, 2, 70, 1300, (16, 16))
    dout = rng.standard_normal(q.shape).astype(np.float32)
    table, wide = (rng.standard_normal(s).astype(np.float32) for s in ((4, 61), (70, 1300)))
    mod = lambda s, b, h, i, j: s + table[h, (i + j) % 61] + 0.1 * wide[i, j]  # noqa: E731
    ids = np.sort(rng.integers(0, 4, 1300))
    for mask in (None, flex.masks.streaming(200, 3), flex.masks.document(ids)):
        results = [
            differentiate(
                q, k, v, dout, mask_mod=mask, score_mod=mod, arrays=[table, wide], backend=backend
            )
            for backend in ("auto", "naive")
        ]
        for x, y in zip(*([*r[:3], *r.darrays] for r in results), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4, rtol=0)


def test_the_compiled_module_takes_no_program_that_could_leave_its_arrays():
    q, table = np.ones((1, 3, 1, 8), np.float32), np.ones(4, np.float32)
    lse = np.zeros((1, 1, 3), np.float32)
    given = {"q": q, "k": q, "v": q, "dout": q, "out": q, "lse": lse, "need": ("dq",)}
    score = np.array([[CODE["score"], 0, 0, 0, 0, 0]], np.int32)
    slope = np.array([[CODE["number"], 0, 0, 0, 0, 0], [CODE["give"], 1, 0, 0, 0, -1]], np.int32)
    index = [CODE["k"], 2, 0, 0, 0, 0]
    into = np.zeros(4, np.float32)
    good = {"score_program": score, "score_gradient": slope, "arrays": [table]}
    _core.flex_attention_backward(given, good)

    def giving(*row):
        return np.array([*slope.tolist(), index, [CODE["give"], *row]], np.int32)

    _core.flex_attention_backward(
        given, {**good, "score_gradient": giving(3, 1, 2, 0, 0), "array_gradients": [into]}
    )
    for wrong, words in (
        ({"score_gradient": None}, "score_gradient must be given where"),
        ({"score_gradient": giving(3, 1, 2, 0, 0)}, "score_gradient holds no operation at row 3"),
        ({"score_gradient": giving(3, 1, 2, 0, 1), "array_gradients": [into]}, "at row 3"),
        ({"score_gradient": giving(3, 1, 9, 0, 0), "array_gradients": [into]}, "at row 3"),
        ({"score_gradient": giving(24, 1, 2, 0, 0), "array_gradients": [into]}, "at row 3"),
        ({"score_gradient": giving(3, 1, 2, 0, -2), "array_gradients": [into]}, "at row 3"),
        ({"score_program": slope}, "score_program holds no operation at row 1"),
        ({"mask_program": slope}, "mask_program holds no operation at row 1"),
        ({"array_gradients": [into[:3]]}, "gradient of a captured array must have shape"),
        ({"array_gradients": [table]}, "must not share memory"),
    ):
        with pytest.raises(ValueError, match=words):
            _core.flex_attention_backward(given, {**good, **wrong})
