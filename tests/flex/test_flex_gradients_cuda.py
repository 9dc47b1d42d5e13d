# SPDX-License-Identifier: Apache-2.0
"""Gradients of functors on CUDA, or the emulator, and of the arrays that they capture: held against
those of the CPU, which test_flex_backward.py holds against float64.
"""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import harness
from cuattn import flex
from test_flex_cuda import compiler, to_device, to_host  # noqa: F401 - a fixture

SM80 = pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("sm80",))
)
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}"),
    pytest.mark.skipif(harness.is_emulated(), reason="torch has no arrays of the emulator"),
)
TOLERANCE = 1e-2  # of the largest number: float16 rounds q to v, dout, out, P and ds


def functions(rng, batch, heads, n):
    """Masks and scores that are compiled, and the arrays of the scores that get gradients."""
    ids = rng.integers(0, 4, n)
    drawn, width = rng.random((n, n)) < 0.3, int(rng.integers(5, n))
    table = rng.standard_normal((heads, 2 * n + 1)).astype(np.float32)[:, ::2].copy()
    gain, of_rows = rng.random(heads).astype(np.float32), rng.standard_normal(n).astype(np.float32)
    one = np.array(rng.random(), np.float32)
    return (
        (
            lambda b, h, q, k: ids[q] == ids[k],
            lambda s, b, h, q, k: s + table[h, (q - k + n) // 2],
            [table],
        ),
        (lambda b, h, q, k: (k <= q) & ((q - k < width) | (k < 4)), None, []),  # plain, lists
        (
            lambda b, h, q, k: drawn[q, k] & (q % 7 != b),  # rows that see nothing
            lambda s, b, h, q, k: gain[h] * np.tanh(s + of_rows[q] * of_rows[k]) * one,
            [one, gain, of_rows],
        ),
        (
            lambda b, h, q, k: (k <= q) & ((q + k) % 3 != h % 2),  # row ranges, and more
            lambda s, b, h, q, k: np.where(k % 5 == 0, -np.inf, s * abs(s) / 3),
            [],
        ),
        (flex.masks.causal(), lambda s, b, h, q, k: s * gain[h] + of_rows[b], [of_rows, gain]),
    )


def options_of(rng, case, heads, q_len, kv_len):
    """Options that stand beside functions, and the gradients to ask for."""
    options, need = {}, ("dq", "dk", "dv")
    if case == 2:
        options = {"softcap": 4.0, "sinks": rng.standard_normal(heads).astype(np.float32)}
        need = ("dk", "dsinks", "dq")
    if case == 3:
        bias = rng.standard_normal((heads, q_len, kv_len)).astype(np.float16)
        options, need = {"bias": bias}, ("dv", "dbias", "dq")
    if case == 4:
        options, need = {"alibi_slopes": rng.random(heads).astype(np.float32)}, ("dslopes", "dv")
    return options, need


def check(device, arrays, dout, functions, options, need, wanted, words):
    """Hold the gradients of a call against those of the CPU, in float32 of the same numbers."""
    wide = {n: x.astype(np.float32) if n == "bias" else x for n, x in options.items()}
    of_cpu = {**functions, **wide}
    out, lse = cuattn.flex_attention(
        *(x.astype(np.float32) for x in arrays), return_lse=True, **of_cpu
    )
    dlse = np.random.default_rng(1).standard_normal(lse.shape).astype(np.float32)
    given = [dout, *arrays, out.astype(np.float16), lse]
    want = cuattn.flex_attention_backward(
        *(x.astype(np.float32) for x in given[:4]),
        *(out, lse),
        **{"dlse": dlse, "need": need, "arrays": wanted, **of_cpu},
    )
    there = {
        n: to_device(device, x) if isinstance(x, np.ndarray) else x for n, x in options.items()
    }
    got = cuattn.flex_attention_backward(
        *(to_device(device, x) for x in given),
        **{"dlse": to_device(device, dlse), "need": need, "arrays": wanted, "backend": "sm80"},
        **functions,
        **there,
    )
    pairs = list(zip(want._fields, got, want, strict=True))
    if wanted:
        assert pairs.pop()[0] == "darrays"
        each = zip(got.darrays, want.darrays, strict=True)
        pairs += [(f"array {i}", x, y) for i, (x, y) in enumerate(each)]
    for what, x, y in pairs:
        x = x if isinstance(x, np.ndarray) else to_host(x)
        assert x.shape == y.shape, f"{words}, {what}"
        most = TOLERANCE * max(float(np.abs(y).max(initial=0)), 1e-3)
        np.testing.assert_allclose(x, y, atol=most, rtol=0, err_msg=f"{words}, {what}")


@SM80
def test_gradients_of_functors_equal_those_of_the_cpu(rng, device, backend, compiler):  # noqa: F811
    every = ((64, 64), (128, 128), (72, 40), (192, 128), (256, 256))
    for case in (0, 2, 3) if harness.is_emulated() else range(15):
        kind, dims = case % 5, every[0 if harness.is_emulated() else case % 5 ^ case // 5 % 2]
        batch, heads_kv = 2, int(rng.integers(1, 3))
        heads = heads_kv * int(rng.choice((1, 2, 3)))
        most = 100 if harness.is_emulated() else 420
        q_len, kv_len = (int(n) for n in rng.integers(30, most, 2))
        n = max(q_len, kv_len)
        mask, score, wanted = functions(rng, batch, heads, n)[kind]
        shapes = ((q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1]))
        arrays = [rng.standard_normal((batch, *s)).astype(np.float16) for s in shapes]
        dout = rng.standard_normal((batch, q_len, heads, dims[1])).astype(np.float16)
        options, need = options_of(rng, kind, heads, q_len, kv_len)
        words = f"case {case}: {dims}, {q_len} x {kv_len}, heads {heads} of {heads_kv}"
        given = {"mask_mod": mask, "score_mod": score}
        check(device, arrays, dout, given, options, need, wanted, words)
        if kind < 2:  # the same by lists that were made before
            made = cuattn.create_block_mask(mask, batch, heads, q_len, kv_len, block_size=64)
            given = {"block_mask": made, "score_mod": score}
            check(device, arrays, dout, given, options, need, wanted[:1], f"{words}, lists")
