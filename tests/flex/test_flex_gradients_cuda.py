# SPDX-License-Identifier: Apache-2.0
"""Gradients of functors on CUDA, or the emulator, and of the arrays that they capture: held against
those of the CPU, which test_flex_backward.py holds against float64. Those of float32 are in
test_flex_gradients_float32.py.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

import cuattn
import harness
from cuattn import flex
from device_arrays import to_device, to_host

SM80 = pytest.mark.parametrize(("device", "backend"), harness.target_params(cpu=(), cuda=("sm80",)))
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}"),
    pytest.mark.skipif(harness.is_emulated(), reason="torch has no arrays of the emulator"),
]
TOLERANCE = 1e-2  # of the largest number: float16 rounds P and ds
SUMS = ("dslopes", "dsinks", "array")  # of ds in float32, whose terms may cancel: no less than of 1


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
    out = out.astype(np.float16).astype(np.float32)  # both read the same
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
        least = 1.0 if what.startswith(SUMS) else 1e-3
        most = TOLERANCE * max(float(np.abs(y).max(initial=0)), least)
        np.testing.assert_allclose(x, y, atol=most, rtol=0, err_msg=f"{words}, {what}")


@SM80
def test_gradients_of_functors_equal_those_of_the_cpu(rng, device, backend, compiler):
    every = ((64, 64), (128, 128), (72, 40), (192, 128), (256, 256))
    for case in (0, 2, 3) if harness.is_emulated() else range(7):
        kind, dims = case % 5, every[0 if harness.is_emulated() else case % 5 ^ case // 5]
        batch, heads_kv = 2, int(rng.integers(1, 3))
        heads = heads_kv * int(rng.choice((1, 2, 3)))
        most = 100 if harness.is_emulated() else 420
        q_len, kv_len = (int(n) for n in rng.integers(30, most, 2))
        kv_len += 130 * (case == 0)  # more than one block of keys
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


@SM80
def test_gradients_of_row_ranges_beside_options(rng, device, backend, compiler):
    """No kernel of the library's own but naive has them together: the ranges are compiled."""
    batch, heads, q_len, kv_len, dims = 2, 4, 70, 90, (64, 40)
    ids = np.sort(rng.integers(0, 4, kv_len))
    ids[:9] = 9  # rows that see nothing
    mask = lambda b, h, q, k: (ids[q] == ids[k]) & (k >= b)  # noqa: E731
    slopes = rng.random(heads).astype(np.float32)
    bias = rng.standard_normal((heads, q_len, kv_len)).astype(np.float16)
    three = ("dq", "dk", "dv")
    cases = {
        "softcap": (None, {"softcap": 2.0}, three),
        "a score that is one": (flex.scores.softcap(1.5), {}, three),
        "ALiBi": (None, {"alibi_slopes": slopes, "softcap": 3.0}, (*three, "dslopes")),
        "bias": (None, {"bias": bias}, ("dbias", "dk", "dq")),
        "dropout": (None, {"dropout_p": 0.3, "dropout_seed": 5}, three),
        "scale": (None, {"scale": -0.2, "causal": True}, three),
    }
    some = ("softcap", "bias", "dropout") if harness.is_emulated() else cases
    shapes = ((q_len, heads, dims[0]), (kv_len, 2, dims[0]), (kv_len, 2, dims[1]))
    for name in some:
        score, options, need = cases[name]
        arrays = [rng.standard_normal((batch, *s)).astype(np.float16) for s in shapes]
        dout = rng.standard_normal((batch, q_len, heads, dims[1])).astype(np.float16)
        given = {"mask_mod": mask, "score_mod": score}
        check(device, arrays, dout, given, options, need, (), name)


@SM80
def test_what_has_no_gradient_on_cuda_is_refused(rng, device, backend, compiler):
    gain = np.ones(2, np.float32)
    score = lambda s, b, h, q, k: s * gain[h]  # noqa: E731

    def call(dtype, dim, **options):
        x = to_device(device, np.zeros((1, 8, 2, dim), dtype))
        lse = to_device(device, np.zeros((1, 2, 8), np.float32))
        return cuattn.flex_attention_backward(*[x] * 5, lse, score_mod=score, **options)

    with pytest.raises(NotImplementedError, match=r"head_dim_v up to 256, got 264 and 264"):
        call(np.float16, 264)
    with pytest.raises(NotImplementedError, match=r"summed in any order, got one of shape \(2,\)"):
        call(np.float16, 64, arrays=[gain], deterministic=True)
    with pytest.raises(NotImplementedError, match="batch_invariant must not be True on CUDA where"):
        call(np.float16, 64, arrays=[gain], batch_invariant=True)
    with pytest.raises(NotImplementedError, match="masks and scores of the user run in sm80 alone"):
        call(np.float16, 64, backend="naive")
    with pytest.raises(NotImplementedError, match="user run in simt alone, in float32"):
        call(np.float32, 64, backend="sm80")
    found = call(np.float16, 64, deterministic=True)
    assert [to_host(x).any() for x in found] == [False] * 3


@pytest.mark.skipif(harness.is_emulated(), reason="the emulator has no kernels of sm90")
def test_explain_says_what_differentiates(monkeypatch):
    monkeypatch.setattr("cuattn.flex.device.can_compile", lambda: True)
    table = np.zeros((4, 9), np.float32)
    causal, score = flex.masks.causal(), lambda s, b, h, q, k: s + table[h, q - k]

    def explain(d=64, device="h100", **call):
        rows, lse = (2, 300, 4, d), (2, 4, 300)
        shapes = (*[rows] * 5, lse)
        return cuattn.explain("flex_attention_backward", *shapes, device=device, **call)

    for d, given, words, kernel in (
        (64, {"mask_mod": causal}, "the window (-1, 0)", "sm90"),
        (64, {"mask_mod": flex.masks.chunked(50)}, "row ranges", "sm90"),
        (256, {"mask_mod": flex.masks.chunked(50)}, "row ranges", "sm80"),
        (64, {"mask_mod": flex.masks.chunked(50), "softcap": 2.0}, "compiled by NVRTC", "sm80"),
        (
            64,
            {"mask_mod": flex.masks.chunked(50), "dropout_p": 0.1, "dropout_seed": 1},
            "row ranges",
            "sm80",
        ),
        (64, {"mask_mod": flex.masks.streaming(9)}, "compiled by NVRTC", "sm80"),
        (128, {"score_mod": score, "arrays": [table]}, "arrays by atomics", "sm80"),
    ):
        plan = explain(d, **given)
        assert (plan.kernel, words in plan.reason) == (kernel, True), plan.reason
    made = cuattn.create_block_mask(flex.masks.streaming(40), None, None, 300, 300, block_size=64)
    for device, count in (("h100", 9), ("a100", 15)):  # as the forward kernel joins blocks
        shapes = ((2, 300, 4, 64),) * 3
        forward = cuattn.explain("flex_attention", *shapes, device=device, block_mask=made)
        for plan in (forward, explain(device=device, block_mask=made)):
            assert f"lists of {count} blocks" in plan.reason
    used, slopes = np.array([300, 9], np.int32), np.ones(4, np.float32)
    plan = explain(mask_mod=causal, seqused_k=used, alibi_slopes=slopes)  # of the host, with shapes
    assert plan.kernel == "sm90"
    plan = explain(device="cpu", score_mod=score, arrays=[table], dtype="float32")
    assert plan.kernel == "cpu"
    plan = explain(score_mod=score, arrays=[table], dtype="float32")
    assert (plan.kernel, "arrays by atomics" in plan.reason) == ("simt", True)
    with pytest.raises(NotImplementedError, match="got 320 and 320; wider heads have no"):
        explain(320, score_mod=score, dtype="float32")
    for name in ("deterministic", "batch_invariant"):
        with pytest.raises(NotImplementedError, match=f"{name} must not be True on CUDA where"):
            explain(score_mod=score, arrays=[table], **{name: True})
        assert explain(device="cpu", score_mod=score, arrays=[table], **{name: True})
    with pytest.raises(ValueError, match="arrays must be captured by score_mod, got one of shape"):
        explain(score_mod=score, arrays=[table.copy()])
    for backend in ("sm90", "naive"):
        with pytest.raises(NotImplementedError, match=f"backend '{backend}' .* in sm80 alone"):
            explain(score_mod=score, backend=backend)
        with pytest.raises(NotImplementedError, match=f"backend '{backend}' .* in simt alone"):
            explain(score_mod=score, backend=backend, dtype="float32")
    monkeypatch.setattr("cuattn.flex.device.can_compile", lambda: False)
    plan = explain(mask_mod=flex.masks.chunked(50), softcap=2.0)
    assert (plan.kernel, "NVRTC" in plan.reason) == ("naive", False)
    with pytest.raises(TypeError, match="takes dout, q, k, v, out, lse, got 0 arguments"):
        cuattn.explain("flex_attention_backward")


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize(("name", "most"), [("bfloat16", 2e-2), ("float32", 2e-5)])
    def test_torch_differentiates_functors(self, rng, name, most):
        """Against torch's autograd of the dense formula, learned arrays on the device included."""
        import torch

        n, heads, dtype = 301, 4, getattr(torch, name)
        ids = torch.from_numpy(rng.integers(0, 3, n)).cuda()
        table = torch.randn(heads, 2 * n, device="cuda", requires_grad=True)
        gain = torch.rand(heads, device="cuda").to(dtype).requires_grad_()
        mask = lambda b, h, q, k: (ids[q] == ids[k]) | (k == 0)  # noqa: E731
        score = lambda s, b, h, q, k: torch.tanh(s * gain[h]) + table[h, q - k + n]  # noqa: E731
        shapes = ((n, heads), (n, 2), (n, 2))
        leaves = [torch.randn(2, *s, 64, device="cuda").to(dtype).requires_grad_() for s in shapes]
        place = torch.arange(n, device="cuda")
        q, k = place[:, None], place[None, :]
        dense = [x.detach().double().requires_grad_() for x in (*leaves, table, gain)]
        x, y, z = (t.transpose(1, 2) for t in dense[:3])
        y, z = (t.repeat_interleave(2, dim=1) for t in (y, z))
        s = torch.tanh(x @ y.transpose(2, 3) / 8 * dense[4][:, None, None])
        s = s + dense[3][:, q - k + n]
        s = s.masked_fill(~((ids[q] == ids[k]) | (k == 0)), -torch.inf)
        want = (s.softmax(3) @ z).transpose(1, 2)
        out = cuattn.flex_attention(*leaves, mask_mod=mask, score_mod=score)
        dout = torch.randn(2, n, heads, 64, device="cuda").to(dtype)
        out.backward(dout)
        want.backward(dout.double())
        for i, (a, b) in enumerate(zip((*leaves, table, gain), dense, strict=True)):
            assert a.grad.dtype == a.dtype
            error = (a.grad.double() - b.grad).norm() / b.grad.norm()
            assert float(error) < most, f"{i}: {float(error)}"

    def test_a_call_is_captured_after_a_first_one(self, rng):
        import torch

        gain = torch.rand(2, device="cuda")
        score = lambda s, b, h, q, k: s * gain[h] + gain[0]  # noqa: E731
        q, k, v = (torch.randn(1, 200, 2, 64, device="cuda").half() for _ in range(3))
        out, lse = cuattn.flex_attention(q, k, v, score_mod=score, return_lse=True)

        def call():
            return cuattn.flex_attention_backward(
                out, q, k, v, out, lse, score_mod=score, arrays=[gain]
            )

        want = call()
        graph = torch.cuda.CUDAGraph()
        with harness.capturing(graph):
            got = call()
        for _ in range(2):  # what the first one has summed is cleared
            graph.replay()
            torch.cuda.synchronize()
            for a, b in zip(got[:3], want[:3], strict=True):
                assert torch.equal(a, b)
            torch.testing.assert_close(got.darrays[0], want.darrays[0], rtol=1e-3, atol=1e-3)


@SM80
def test_gradients_take_the_plan_of_the_forward_call(rng, device, backend, compiler, monkeypatch):
    """Row ranges, lists and programs are found once for both."""
    module = sys.modules["cuattn.flex.attention"]
    plans, plan = [], module.plan
    monkeypatch.setattr(module, "plan", lambda *x: plans.append(1) or plan(*x))
    ids = rng.integers(0, 4, 150)
    call = {"mask_mod": lambda b, h, q, k: ids[q] == ids[k], "backend": backend}
    q, k, v = (
        to_device(device, rng.standard_normal((1, 150, 2, 64)).astype(np.float16)) for _ in "qkv"
    )
    for _ in range(2):
        out, lse = cuattn.flex_attention(q, k, v, return_lse=True, **call)
        cuattn.flex_attention_backward(out, q, k, v, out, lse, **call)
    assert len(plans) == 1
