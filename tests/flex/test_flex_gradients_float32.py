# SPDX-License-Identifier: Apache-2.0
"""Gradients of functors in float32 on CUDA, or the emulator, against the dense formula in float64
(flex_gradients.py); what that has not, against the CPU. And mistakes, which the comparison notices.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

import cuattn
import harness
from cuattn.flex import functors
from device_arrays import to_device, to_host
from emulated_functor import machine_code
from flex_gradients import check, close, dense_array_gradient, dense_gradients

SIMT = pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("simt",)))
TOLERANCE = 2e-6  # of the sizes of all that is added up
FORWARD_ALONE = ("need", "arrays", "dlse")


def drawn(rng, heads, heads_kv, q_len, kv_len, dims):
    """q, k, v and dout of two batches."""
    shapes = ((q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1]))
    arrays = [rng.standard_normal((2, *s)).astype(np.float32) for s in shapes]
    return [*arrays, rng.standard_normal((2, q_len, heads, dims[1])).astype(np.float32)]


def on_device(device, x):
    return to_device(device, x) if isinstance(x, np.ndarray) else x


def on_host(x):
    return x if isinstance(x, np.ndarray) else to_host(x)


def differentiate(device, q, k, v, dout, **call):
    """The gradients by name, and of arrays as `arrays`: of one forward and one backward call."""
    call = {name: on_device(device, x) for name, x in call.items()}
    q, k, v, dout = (to_device(device, x) for x in (q, k, v, dout))
    forward = {n: x for n, x in call.items() if n not in FORWARD_ALONE}
    out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **forward)
    found = cuattn.flex_attention_backward(dout, q, k, v, out, lse, backend="simt", **call)
    named = {n: x for n, x in found._asdict().items() if n != "darrays"}
    named = {n: on_host(x) for n, x in named.items()}
    return named | {"arrays": [on_host(x) for x in getattr(found, "darrays", ())]}


def hold(device, arrays, words, *, mask, mod, dense=None, captured=(), **call):
    """Hold dq, dk, dv and the gradients of captured arrays against float64; return both."""
    wide = [x.astype(np.float64) for x in captured]  # which `mod` makes its function of
    given = {"score_mod": mod and mod(*captured), "arrays": captured, **call}
    mod = mod and mod(*wide)
    want = dense_gradients(*arrays, mask=mask, mod=mod, **(dense or {}))
    got = differentiate(device, *arrays, **given)
    check([got[n] for n in ("dq", "dk", "dv")], want, words, TOLERANCE)
    for i, (x, y) in enumerate(zip(got["arrays"], wide, strict=True)):
        close(x, *dense_array_gradient(mod, y, want), f"{words}, array {i}", TOLERANCE)
    return got, want


def table_of(rng):
    return rng.standard_normal((4, 5)).astype(np.float32)


def tanh_and_table(table):
    return lambda s, b, h, q, k: np.tanh(s) + table[h, (q + 2 * k) % 5]


def blocks_of(kinds):
    """Return a mask whose blocks of 64 x 64 are hidden, asked or seen; a row of them hides all."""
    kinds[1] = 0

    def mask(b, h, q, k):
        kind = kinds[q // 64, k // 64]
        return (kind == 2) | ((kind == 1) & ((q + k) % 3 != h))

    return mask


@SIMT
def test_scores_and_lists_equal_the_dense_formula(rng, device, backend, compiler):
    """Each head_dim that is compiled; masks of three kinds of blocks; an array of two axes."""
    sizes = ((64, 64, 131, 197), (72, 120, 200, 150), (256, 168, 150, 140))
    for dims, q_len, kv_len in ((s[:2], *s[2:]) for s in sizes):
        arrays = drawn(rng, 4, 2, q_len, kv_len, dims)
        call = {"mod": tanh_and_table, "captured": [table_of(rng)]}
        ids = rng.integers(0, 3, max(q_len, kv_len))
        mask = lambda b, h, q, k, ids=ids: ids[q] == ids[k]  # noqa: E731
        hold(device, arrays, f"head_dim {dims}", mask=mask, mask_mod=mask, **call)
        mask = blocks_of(rng.integers(0, 3, (4, 4)))
        made = cuattn.create_block_mask(mask, 2, 4, q_len, kv_len, block_size=64, exact=True)
        hold(device, arrays, f"head_dim {dims}, lists", mask=mask, block_mask=made, **call)


@SIMT
def test_options_beside_functions_equal_the_dense_formula(rng, device, backend, compiler):
    """Row ranges, a softcap, a bias, ALiBi, a window, and their gradients; three arrays."""
    q_len, kv_len, heads = 101, 90, 3
    arrays = drawn(rng, heads, 1, q_len, kv_len, (40, 64))
    lse, ids = (2, heads, q_len), np.sort(rng.integers(0, 4, q_len))
    gain, of_rows = rng.random(heads).astype(np.float32), rng.random(q_len).astype(np.float32)
    one = np.array(rng.random(), np.float32)
    dlse = rng.standard_normal(lse).astype(np.float32)
    hold(
        *(device, arrays, "softcap"),
        mask=(mask := lambda b, h, q, k: (ids[q] == ids[k]) & ((k * k + q) % 7 > b + 1)),
        mod=lambda x, y, z: lambda s, b, h, q, k: y[h] * np.tanh(s + z[q] * z[k]) * x,
        captured=[one, gain, of_rows],
        dense={"softcap": 2.0, "dlse": dlse},
        **{"mask_mod": mask, "softcap": 2.0, "dlse": dlse},
    )
    bias = rng.standard_normal((heads, 1, kv_len)).astype(np.float32)
    got, want = hold(
        *(device, arrays, "bias"),
        mask=(mask := lambda b, h, q, k: ids[q] == ids[k]),  # row ranges alone
        mod=lambda: lambda s, b, h, q, k: np.where(k % 5 == 0, -np.inf, s * abs(s) / 3),
        dense={"bias": bias},
        **{"mask_mod": mask, "bias": bias, "need": ("dv", "dbias", "dq", "dk")},
    )
    close(got["dbias"], *(x.sum((0, 2))[:, None] for x in want[2:4]), "dbias", TOLERANCE)
    slopes = rng.random(heads).astype(np.float32)
    distance = abs(np.arange(q_len)[:, None] + (kv_len - q_len) - np.arange(kv_len))
    inner = lambda b, h, q, k: (q + k) % 4 != 1  # noqa: E731
    got, want = hold(
        *(device, arrays, "ALiBi"),
        mask=lambda b, h, q, k: inner(b, h, q, k) & (abs(q + kv_len - q_len - k) <= 30),
        mod=lambda x: lambda s, b, h, q, k: s * x[h] + x[b],
        captured=[gain],
        dense={"bias": -slopes[:, None, None] * distance},
        **{"mask_mod": inner, "alibi_slopes": slopes, "window": (30, 30)},
        need=("dslopes", "dq", "dv", "dk"),
    )
    terms = ((-want.ds * distance).sum((0, 2, 3)), (want.ds_sizes * distance).sum((0, 2, 3)))
    close(got["dslopes"], *terms, "dslopes", TOLERANCE)


@SIMT
def test_what_the_formula_has_not_equals_the_cpu(rng, device, backend, compiler):
    """Packed and padded sequences, dropout, sinks; each gradient alone."""
    heads, gain = 4, rng.random(4).astype(np.float32)
    mask, score = lambda b, h, q, k: (q + k) % 4 != b, lambda s, b, h, q, k: np.tanh(s) * gain[h]
    begins = np.array([0, 70, 70, 133], np.int32)
    packed = {"cu_seqlens_q": begins, "cu_seqlens_k": begins}
    packed |= {"max_seqlen_q": 70, "max_seqlen_k": 70}
    used = np.array([90, 133], np.int32)
    drops = {"dropout_p": 0.3, "dropout_seed": 5}
    sinks = rng.standard_normal(heads).astype(np.float32)
    calls = (
        {**packed, "need": ("dq", "dk")},
        {"seqused_q": used[::-1].copy(), "seqused_k": used, "need": ("dv", "dk", "dq")},
        {**drops, "need": ("dq", "dk", "dv")},
        {"sinks": sinks, "need": ("dsinks", "dk")},
        {"need": ("dv",)},
    )
    for call in calls:
        arrays = drawn(rng, heads, 2, 133, 133, (64, 64))
        if "cu_seqlens_q" in call:
            arrays = [x[0] for x in arrays]
        call |= {"mask_mod": mask, "score_mod": score, "arrays": [gain]}
        want, got = (differentiate_on(where, arrays, call) for where in (None, device))
        assert list(got) == [*call["need"], "arrays"]
        for name, x, y in zip(got, [*got.values()][:-1], [*want.values()][:-1], strict=False):
            close(x, y, 10 * np.abs(y).max(), f"{name}, {sorted(call)}", TOLERANCE)
        x, y = got["arrays"][0], want["arrays"][0]
        close(x, y, 100 * np.abs(y).max(), f"array, {sorted(call)}", TOLERANCE)


def differentiate_on(device, arrays, call):
    """The same on the CPU, without a device."""
    if device is not None:
        return differentiate(device, *arrays, **call)
    q, k, v, dout = arrays
    forward = {n: x for n, x in call.items() if n not in FORWARD_ALONE}
    out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **forward)
    found = cuattn.flex_attention_backward(dout, q, k, v, out, lse, **call)._asdict()
    return {n: x for n, x in found.items() if n != "darrays"} | {"arrays": [*found["darrays"]]}


PASSES, POLICY = "cuda/backward/simt/passes.cuh", "include/cuattn/device/functor_gradient.cuh"
MISTAKES = {  # in a header, or the source that is written: what is replaced, by what
    "none": ("", "", ""),
    "a mask is not asked": (PASSES, "(!asks || policy.sees(row, key))", "true"),
    "lists are not read": (PASSES, "return policy.lists(at.row0, row_end, at.key0, asks);", ""),
    "only the first block of a tile": (POLICY, "bool some = false", "row_end = row + 1; bool some"),
    "hidden blocks of a tile": (POLICY, "masked |= !all;", ""),
    "a slope of 1": (POLICY, "dx *= Functor::derivative(", "dx += 0.0f * Functor::derivative("),
    "what an array is given": ("", "0.0f : ds *", "0.0f : 2.0f *"),
    "keys that give": (PASSES, "template <bool kGives = false>", "template <bool kGives = true>"),
}


@pytest.mark.skipif(not harness.is_emulated(), reason="plants mistakes in the emulator's sources")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(monkeypatch, tmp_path, name):
    """In what gradients are compiled of, for one mask whose blocks are smaller than a tile."""
    header, old, new = MISTAKES[name]
    build = Path(cuattn.__file__).parents[1]
    if header:
        text = (build / "emulated" / header).read_text()
        assert old in text, f"{header} has no {old!r} any more"
        path = tmp_path / header.removeprefix("include/")
        path.parent.mkdir(parents=True)
        path.write_text(text.replace(old, new))

    def compiled(source, arch):
        if "functor_gradient" not in source:
            return machine_code(source, build, tmp_path)
        if not header and old not in source:
            raise LookupError(f"a source has no {old!r} any more")
        text = source if header else source.replace(old, new)
        return machine_code(text, build, tmp_path, tmp_path)

    monkeypatch.setattr(functors, "_known", {})
    monkeypatch.setattr(functors, "machine_code", compiled)
    rng = np.random.default_rng(3)
    mask = blocks_of(np.array([[1, 2, 0], [0, 0, 0], [0, 1, 2], [2, 2, 0]]))
    made = cuattn.create_block_mask(mask, 2, 4, 200, 150, block_size=64, exact=True)
    device = next(one for one, backend in harness.targets((), ("simt",)))
    given = {"mask": mask, "mod": tanh_and_table, "captured": [table_of(rng)], "block_mask": made}
    arrays = drawn(rng, 4, 2, 200, 150, (72, 120))
    with contextlib.nullcontext() if name == "none" else pytest.raises(AssertionError):
        hold(device, arrays, name, **given)
