# SPDX-License-Identifier: Apache-2.0
"""flex_attention on CUDA, or the emulator: options and row ranges; the rest is refused."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import flex_cases
import harness
from cuattn import flex
from cuattn.flex import functors
from device_arrays import to_device, to_host

TOLERANCE = {"float32": 5e-5, "float16": 6e-3}


def masks(rng, n):
    ids = np.sort(rng.integers(0, 4, n))
    limit = rng.integers(0, n, 2)
    return {
        "documents": lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q),
        "prefix": lambda b, h, q, k: (k <= q) | (k < limit[b]),
        "chunks": lambda b, h, q, k: q // 50 == k // 50,
        "heads, and rows that see nothing": lambda b, h, q, k: (k <= q - 20 * h) & (q % 3 != 0),
        "causal": flex.masks.causal(),
    }


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("naive", "cublas", "simt", "sm80"))
)
def test_row_ranges_equal_the_dense_formula(rng, device, backend):
    dtype = "float16" if backend == "sm80" else "float32"
    for case, (name, mask) in enumerate(masks(rng, 200).items()):
        dims = ((64, 64), (64, 64) if harness.is_emulated() else (128, 128))[case % 2]
        queries = (2, 150 + 50 * (case % 2), 4, dims[0])
        shapes = (queries, (2, 200, 2, dims[0]), (2, 200, 2, dims[1]))
        q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
        options = {}
        if case % 2:
            options = {"softcap": 4.0, "sinks": rng.standard_normal(4).astype(np.float32)}
        want, lse = flex_cases.attention(
            *(x.transpose(0, 2, 1, 3) for x in (q, k, v)), mask=mask, **options
        )
        given = {
            n: to_device(device, x) if isinstance(x, np.ndarray) else x for n, x in options.items()
        }
        arrays = [to_device(device, x) for x in (q, k, v)]
        out, got = cuattn.flex_attention(
            *arrays, mask_mod=mask, backend=backend, return_lse=True, **given
        )
        out, got = to_host(out).transpose(0, 2, 1, 3), to_host(got)
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance, err_msg=name)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(lse), err_msg=name)
        some = np.isfinite(lse)
        np.testing.assert_allclose(got[some], lse[some], atol=2e-3, err_msg=name)


def test_row_ranges_of_wide_heads_go_where_they_are_read():
    shapes = ((1, 64, 2, 264),) * 3
    ids = np.repeat([0, 1], 32)
    mask = lambda b, h, q, k: ids[q] == ids[k]  # noqa: E731
    plan = cuattn.explain("flex_attention", *shapes, mask_mod=mask, dtype="float16", device="h100")
    assert plan.kernel == "naive"


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_row_ranges_of_wide_heads_and_of_any_numbers(rng, device, backend):
    """head_dim 264; and an empty row whose begin is far behind the last key."""
    for dim in (264, 64):
        n = 130
        begin, end = np.zeros(n, np.int32), np.full(n, n, np.int32)
        begin[::7], end[::7] = np.iinfo(np.int32).max, 0
        mask = lambda b, h, q, k, begin=begin, end=end: (k >= begin[q]) & (k < end[q])  # noqa: E731
        q, k, v = (rng.standard_normal((1, n, 2, dim)).astype(np.float16) for _ in range(3))
        want, _ = flex_cases.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), mask=mask)
        out = cuattn.flex_attention(*(to_device(device, x) for x in (q, k, v)), mask_mod=mask)
        out = to_host(out).transpose(0, 2, 1, 3)
        np.testing.assert_allclose(out, want, atol=6e-3, rtol=6e-3)


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("sm90",)))
def test_row_ranges_of_many_tiles(rng, device, backend):
    """Arbitrary begins and ends of each row, with every option that sm90 takes beside them.

    Those of wide heads are compiled by NVRTC.
    """
    every = ((64, 64), (128, 128), (40, 24), (96, 128), (192, 128), (256, 256), (136, 200))
    for case in range(24):
        dims = every[case % 7 if functors.can_compile() else case % 4]
        batch, heads_kv, group = 2, int(rng.integers(1, 3)), int(rng.choice((1, 4)))
        q_len, kv_len = (int(n) for n in rng.integers(1, 900, 2))
        heads = heads_kv * group
        axes = (heads if case % 3 else batch, q_len)
        limits = np.sort(rng.integers(-30, kv_len + 200, (2, *axes)), axis=0).astype(np.int32)
        if case % 2:  # long runs of rows that see the same
            limits = limits[:, :, np.arange(q_len) // 150 * 150]
        begin, end = limits
        by_head = case % 3 > 0

        def mask(b, h, q, k, begin=begin, end=end, by_head=by_head):
            first = h if by_head else b
            return (k >= begin[first, q]) & (k < end[first, q])

        options = ({}, {"causal": True}, {"window": (200, 150)}, {"num_splits": 3})[case // 4 % 4]
        if case % 5 == 4:
            options |= {"sinks": rng.standard_normal(heads).astype(np.float32)}
        shapes = ((q_len, heads, dims[0]), (kv_len, heads_kv, dims[0]), (kv_len, heads_kv, dims[1]))
        q, k, v = (rng.standard_normal((batch, *s)).astype("float16") for s in shapes)
        want, lse = flex_cases.attention(
            *(x.transpose(0, 2, 1, 3) for x in (q, k, v)),
            mask=lambda b, h, i, j, o=options, n=kv_len - q_len, m=mask: (
                m(b, h, i, j) & within(o, i + n - j)
            ),
            sinks=options.get("sinks"),
        )
        given = {
            n: to_device(device, x) if isinstance(x, np.ndarray) else x for n, x in options.items()
        }
        out, got = cuattn.flex_attention(
            *(to_device(device, x) for x in (q, k, v)),
            **{"mask_mod": mask, "backend": backend, "return_lse": True, **given},
        )
        where = f"case {case}: {dims}, {q_len} x {kv_len}, group {group}, {list(options)}"
        out, got = to_host(out).transpose(0, 2, 1, 3), to_host(got)
        np.testing.assert_allclose(out, want, atol=6e-3, rtol=6e-3, err_msg=where)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(lse), err_msg=where)
        some = np.isfinite(lse)
        np.testing.assert_allclose(got[some], lse[some], atol=2e-3, err_msg=where)


def within(options, distance):
    """What causal and window leave, by how far a key stands before the query."""
    left, right = options.get("window", (-1, 0 if options.get("causal") else -1))
    return ((left < 0) | (distance <= left)) & ((right < 0) | (distance >= -right))


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("naive", "simt", "sm80", "sm90"))
)
def test_gradients_of_row_ranges_equal_those_of_the_cpu(rng, device, backend):
    dtype = "float16" if backend in ("sm80", "sm90") else "float32"
    every = ((64, 64), (128, 128), (192, 128), (256, 256), (80, 40))
    if backend == "sm90":
        every = ((64, 64), (128, 128), (40, 24), (96, 128), (128, 128))
    n = 200 if harness.is_emulated() else 701
    for case, (name, mask) in enumerate(masks(rng, n).items()):
        dims = every[0 if harness.is_emulated() or backend == "naive" else case]
        queries = (2, n - 50 * (1 - case % 2), 4)
        shapes = ((*queries, dims[0]), *((2, n, 2, d) for d in dims), (*queries, dims[1]))
        given = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
        *arrays, dout = (x.astype(np.float32) for x in given)
        out, lse = cuattn.flex_attention(*arrays, mask_mod=mask, return_lse=True)
        dlse = rng.standard_normal(lse.shape).astype(np.float32)
        want = cuattn.flex_attention_backward(dout, *arrays, out, lse, mask_mod=mask, dlse=dlse)
        host = [given[3], *given[:3], out.astype(dtype), lse]
        got = cuattn.flex_attention_backward(
            *(to_device(device, x) for x in host),
            mask_mod=mask,
            dlse=to_device(device, dlse),
            backend=backend,
        )
        tolerance = {"float32": 2e-5, "float16": 8e-3}[dtype]
        for what, x, y in zip(want._fields, got, want, strict=True):
            most = tolerance * np.abs(y).max()
            words = f"{name}, {what}, {dims}"
            np.testing.assert_allclose(to_host(x), y, atol=most, rtol=0, err_msg=words)


@pytest.mark.gpu
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}")
@pytest.mark.skipif(harness.is_emulated(), reason="torch has no arrays of the emulator")
def test_torch_differentiates_row_ranges(rng):
    import torch

    ids = np.sort(rng.integers(0, 4, 300))
    mask = lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q)  # noqa: E731
    x = [torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    leaves = [t.clone().requires_grad_() for t in x]
    dense = [t.float().clone().requires_grad_() for t in x]
    out = cuattn.flex_attention(*leaves, mask_mod=mask)
    seen = torch.from_numpy((ids[:, None] == ids[None]) & np.tri(300, dtype=bool)).cuda()
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in dense), attn_mask=seen
    ).transpose(1, 2)
    dout = torch.randn_like(out)
    out.backward(dout)
    want.backward(dout.float())
    for a, b in zip(leaves, dense, strict=True):
        error = (a.grad.float() - b.grad).norm() / b.grad.norm()
        assert float(error) < 1e-2


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_scale_softcap_and_alibi_compile_nothing(rng, device, backend, monkeypatch):
    monkeypatch.setenv("CUATTN_DISABLE_JIT", "1")
    slopes, ids = rng.random(4).astype(np.float32), np.sort(rng.integers(0, 3, 200))
    scores = (
        flex.scores.softcap(3.0),
        flex.scores.alibi(slopes),
        lambda s, b, h, i, j: 5.0 * np.tanh(s / 5.0) - 0.1 * abs(j - i),
        lambda s, b, h, i, j: s * 1.5,
        lambda s, b, h, i, j: 5.0 * np.tanh(s / 4.0) - 0.1 * abs(j - i),
    )
    every = (None, flex.masks.causal(), lambda b, h, i, j: ids[i] == ids[j])
    for case, score in enumerate(scores):
        for mask in every:
            dtype = ("float16", "float32")[case % 2]
            shapes = ((2, 200, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
            q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
            dense = score if case != 1 else lambda s, b, h, i, j: s - slopes[h] * abs(i - j)
            x = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
            dense_mask = mask if mask is not every[1] else lambda b, h, i, j: j <= i
            dense = dense if case else lambda s, b, h, i, j: 3.0 * np.tanh(s / 3.0)
            want, _ = flex_cases.attention(*x, mask=dense_mask, mod=dense)
            arrays = [to_device(device, x) for x in (q, k, v)]
            for _ in range(2):
                out = cuattn.flex_attention(*arrays, score_mod=score, mask_mod=mask)
                out = to_host(out).transpose(0, 2, 1, 3)
                np.testing.assert_allclose(out, want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            if mask is every[1]:
                check_gradients(device, q, k, v, {"score_mod": score, "mask_mod": mask})


def check_gradients(device, q, k, v, functions):
    """Hold gradients of functions that are options to those of the CPU, by its programs."""
    wide = [x.astype(np.float32) for x in (q, k, v)]
    out, lse = cuattn.flex_attention(*wide, return_lse=True, **functions)
    want = cuattn.flex_attention_backward(out, *wide, out, lse, **functions)
    given = [to_device(device, x.astype(q.dtype)) for x in (out, q, k, v, out)]
    got = cuattn.flex_attention_backward(*given, to_device(device, lse), **functions)
    for x, y in zip(got, want, strict=True):
        most = (8e-3 if q.dtype == np.float16 else 2e-5) * np.abs(y).max()
        np.testing.assert_allclose(to_host(x), y, atol=most, rtol=0)


# Functors


def functions(rng, n):
    """Masks and scores that are no rows, with arrays of 1 and 2 axes, and numbers."""
    ids, table = rng.integers(0, 4, n), rng.standard_normal((4, 2 * n)).astype(np.float32)
    drawn, width = rng.random((n, n)) < 0.3, int(rng.integers(5, n))
    return (
        (lambda b, h, q, k: ids[q] == ids[k], lambda s, b, h, q, k: s + table[h, q - k + n]),
        (lambda b, h, q, k: (k <= q) & ((q - k < width) | (k < 4)), None),
        (
            lambda b, h, q, k: drawn[q, k] & (q % 7 != b),
            lambda s, b, h, q, k: 3.0 * np.tanh(s / 3.0),
        ),
        (
            lambda b, h, q, k: (k <= q + 10) & (k // 7 % 2 == h % 2),
            lambda s, b, h, q, k: s - abs(q - k) / width,
        ),
        (None, lambda s, b, h, q, k: np.where(q % 3 == 0, s, -np.inf)),
    )


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("simt", "sm80", "sm90"))
)
def test_functors_equal_the_dense_formula(rng, device, backend, compiler):
    emulated = harness.is_emulated()
    dtype = "float32" if backend == "simt" else "float16"
    every = ((64, 64), (128, 128), (256, 256), (72, 40), (192, 128))
    if backend == "sm90":
        every = ((64, 64), (256, 256), (96, 96), (72, 40), (192, 128))
    for case, (mask, score) in enumerate(functions(rng, 200)):
        if emulated and case % 2:
            continue
        for dims in every[: 1 if emulated else 5 if case == 0 else 2]:
            check_functor(rng, device, backend, dtype, dims, mask, score, case)


def check_functor(rng, device, backend, dtype, dims, mask, score, case):
    n, (d, dv) = 200, dims
    shapes = ((2, n - 13 * (case % 2), 4, d), (2, n, 2, d), (2, n, 2, dv))
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    options = (
        {"softcap": 4.0, "sinks": rng.standard_normal(4).astype(np.float32)} if case == 1 else {}
    )
    heads_first = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    want, lse = flex_cases.attention(*heads_first, mask=mask, mod=score, **options)
    given = {
        m: to_device(device, x) if isinstance(x, np.ndarray) else x for m, x in options.items()
    }
    arrays = [to_device(device, x) for x in (q, k, v)]
    forms = [{"mask_mod": mask}]
    if mask is not None and case % 2 == 0:  # the same by lists that were made before
        forms.append({"block_mask": cuattn.create_block_mask(mask, 2, 4, q.shape[1], n)})
    for form in forms:
        out, got = cuattn.flex_attention(
            *arrays, score_mod=score, backend=backend, return_lse=True, **form, **given
        )
        out, got = to_host(out).transpose(0, 2, 1, 3), to_host(got)
        where = f"case {case}, {dtype}, {dims}, {list(form)}"
        tolerance = TOLERANCE[dtype]
        np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance, err_msg=where)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(lse), err_msg=where)
        some = np.isfinite(lse)
        np.testing.assert_allclose(got[some], lse[some], atol=2e-3, err_msg=where)


@pytest.mark.parametrize(
    ("device", "backend"), harness.target_params(cpu=(), cuda=("simt", "sm80", "sm90"))
)
def test_sparse_attention_equals_the_dense_formula(rng, device, backend, compiler):
    dtype = "float32" if backend == "simt" else "float16"
    blocks = rng.random((2, 4, 3, 4)) < 0.5
    blocks[:, :, 1] = False  # rows that see nothing
    q, k, v = (
        rng.standard_normal((2, n, m, 64)).astype(dtype) for n, m in ((150, 4), *[(200, 2)] * 2)
    )
    dense = blocks.repeat(64, axis=2).repeat(64, axis=3)[:, :, :150, :200]
    heads_first = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    want, _ = flex_cases.attention(*heads_first, bias=np.where(dense, 0.0, -np.inf))
    arrays = [to_device(device, x) for x in (q, k, v)]
    named = blocks if harness.is_emulated() else to_device(device, blocks)
    out = cuattn.sparse_attention(*arrays, named, block_size=64, backend=backend)
    tolerance = TOLERANCE[dtype]
    got = to_host(out).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_lengths_and_numbers_compile_nothing(rng, device, backend, compiler, monkeypatch):
    compiled = []
    made = functors.machine_code
    monkeypatch.setattr(functors, "machine_code", lambda *x: compiled.append(x) or made(*x))
    for n in (30, 64, 100, 131):
        for number in (2.0, 0.7):
            ids = rng.integers(0, 3, n)
            mask = lambda b, h, q, k, ids=ids: ids[q] != ids[k] + 1  # noqa: E731
            score = lambda s, b, h, q, k, number=number: s * number - np.sqrt(1.0 * abs(q - k))  # noqa: E731
            q = rng.standard_normal((1, n, 2, 64)).astype(np.float32)
            x = to_device(device, q)
            out = to_host(cuattn.flex_attention(x, x, x, mask_mod=mask, score_mod=score))
            heads_first = q.transpose(0, 2, 1, 3)
            want, _ = flex_cases.attention(*[heads_first] * 3, mask=mask, mod=score)
            np.testing.assert_allclose(out.transpose(0, 2, 1, 3), want, atol=5e-5, rtol=5e-5)
    assert len(compiled) == 1


@pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("auto",)))
def test_what_no_kernel_takes_is_refused(rng, device, backend, compiler, monkeypatch):
    q = to_device(device, np.zeros((1, 8, 1, 64), np.float32))
    odd = {"mask_mod": lambda b, h, i, j: (i + j) % 3 == 0}
    with pytest.raises(NotImplementedError, match="backend 'naive' cannot run this call"):
        cuattn.flex_attention(q, q, q, backend="naive", **odd)
    lse = to_device(device, np.zeros((1, 1, 8), np.float32))
    with pytest.raises(NotImplementedError, match="backend 'naive' cannot run this call"):
        cuattn.flex_attention_backward(q, q, q, q, q, lse, backend="naive", **odd)
    monkeypatch.undo()
    monkeypatch.setenv("CUATTN_DISABLE_JIT", "1")
    with pytest.raises(functors.CompileError, match="CUATTN_DISABLE_JIT is set"):
        cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: (i + j) % 5 == 0)
