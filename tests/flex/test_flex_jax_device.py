# SPDX-License-Identifier: Apache-2.0
"""flex_attention of JAX arrays by XLA's FFI, as on a GPU: eagerly, under jit, grad and vmap.

The handlers run on the CPU of XLA, by programs; on the emulator those of CUDA, by compiled
functions, in frames that no XLA made; on a GPU as they are.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import cuattn
import flex_cases
import frameworks
import harness
import xla_frames
from cuattn import flex

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402

import cuattn.jax.flex  # noqa: E402

CALLED = {"forward": "cuattn_flex", "backward": "cuattn_flex_backward"}


def take_every_array(monkeypatch):
    """Treat arrays of JAX on the CPU as those of CUDA device 0."""
    monkeypatch.setattr(cuattn.jax.flex, "device_of", lambda *_: 0)
    for name in ("attention", "backward"):
        path = f"cuattn.flex.{name}.runs_in_xla"
        monkeypatch.setattr(path, lambda x: isinstance(x, jax.Array))


@pytest.fixture
def on_cpu(monkeypatch):
    """Go by the FFI on the CPU, too; list the handlers that are called."""
    called = []
    real, real_call = cuattn.jax.flex.DeviceCall, jax.ffi.ffi_call

    def ffi_call(target, *rest, **more):
        called.append(target)
        return real_call(target, *rest, **more)

    take_every_array(monkeypatch)
    monkeypatch.setattr(cuattn.jax.flex, "DeviceCall", lambda *x: real(*x[:-1], -1))
    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    jax.clear_caches()
    with jax.default_device(jax.devices("cpu")[0]):
        yield called
    jax.clear_caches()


def loss_of(call, weights):
    """Return a loss of q, k, v, a table that the score reads and ids that the mask reads."""

    def loss(q, k, v, table, ids):
        n = table.shape[1]
        out, lse = call(
            (q, k, v),
            lambda b, h, i, j: (j <= i + 10) & ((ids[i] == ids[j]) | (j < 4)),
            lambda s, b, h, i, j: 0.5 * s + table[h, (i - j) % n],
        )
        return (out * weights[0]).sum() + (lse * weights[1]).sum()

    return loss


def ours(arrays, mask, score, **options):
    out, lse = cuattn.flex_attention(
        *arrays, mask_mod=mask, score_mod=score, return_lse=True, **options
    )
    return out.astype(jnp.float32), lse


def dense(arrays, mask, score):
    """The formula, in float32 of JAX's own."""
    q, k, v = (x.astype(jnp.float32) for x in arrays)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") / np.sqrt(q.shape[3])
    b, h, i, j = np.ix_(*map(np.arange, s.shape))
    s = jnp.where(mask(b, h, i, j), score(s, b, h, i, j), -jnp.inf)
    out = jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(s), v, precision="highest")
    return out, jax.nn.logsumexp(s, axis=3)


def drawn(rng, dtype, q_len=70, kv_len=90, dims=(64, 64)):
    """q, k, v, table, ids; and the weights of a loss."""
    shapes = (2, q_len, 4, dims[0]), (2, kv_len, 2, dims[0]), (2, kv_len, 2, dims[1])
    arrays = [jnp.asarray(rng.standard_normal(s).astype(dtype)) for s in shapes]
    table = jnp.asarray(rng.standard_normal((4, 21)).astype(np.float32))
    ids = jnp.asarray(rng.integers(0, 3, max(q_len, kv_len)).astype(np.int32))
    weights = rng.standard_normal((2, q_len, 4, dims[1])), rng.standard_normal((2, 4, q_len))
    return [*arrays, table, ids], [x.astype(np.float32) for x in weights]


def check_gradients(rng, dtype, tolerance, transforms, **shapes):
    """Hold a loss and its gradients, the table's too, against those of the formula."""
    arrays, weights = drawn(rng, dtype, **shapes)
    want = jax.jit(jax.value_and_grad(loss_of(dense, weights), (0, 1, 2, 3)))(*arrays)
    for transform in transforms:
        got = transform(jax.value_and_grad(loss_of(ours, weights), (0, 1, 2, 3)))(*arrays)
        apart = abs(float(got[0]) - float(want[0]))  # of a sum whose terms cancel
        assert apart <= tolerance * np.sqrt(weights[0].size)
        for x, y in zip(got[1], want[1], strict=True):
            assert x.dtype == y.dtype
            x, y = (np.asarray(z, np.float64) for z in (x, y))
            np.testing.assert_allclose(x, y, atol=tolerance * np.abs(y).max(), rtol=0)


def check_values(rng, dtype, tolerance):
    """Hold masks that are windows, rows, lists and given blocks against float64."""
    n, ids = 150, np.sort(rng.integers(0, 4, 150))
    odd = lambda b, h, i, j: (i + j) % 3 != 0  # noqa: E731
    slopes = rng.random(4).astype(np.float32)
    calls = [
        {"mask_mod": flex.masks.causal()},
        {"mask_mod": lambda b, h, i, j: ids[i] == ids[j]},
        {"mask_mod": odd, "score_mod": lambda s, b, h, i, j: s - slopes[h] * abs(i - j)},
        {"block_mask": cuattn.create_block_mask(odd, 1, 1, n, n), "causal": True},
    ]
    masks = [lambda b, h, i, j: j <= i, calls[1]["mask_mod"], odd]
    masks += [lambda b, h, i, j: odd(b, h, i, j) & (j <= i)]
    q, k, v = (rng.standard_normal((1, n, heads, 64)).astype(dtype) for heads in (4, 2, 2))
    x = [jnp.asarray(a) for a in (q, k, v)]
    for call, mask in zip(calls, masks, strict=True):
        want, _ = flex_cases.attention(
            *map(flex_cases.heads_first, (q, k, v)), mask=mask, mod=call.get("score_mod")
        )
        for transform in (lambda f: f, jax.jit):
            out = transform(lambda *x, call=call: cuattn.flex_attention(*x, **call))(*x)
            assert isinstance(out, jax.Array)
            assert out.dtype == dtype
            out = flex_cases.heads_first(np.asarray(out, np.float64))
            np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)
    blocks = rng.random((1, 4, 3, 3)) < 0.5
    seen = blocks.repeat(64, axis=2).repeat(64, axis=3)[:, :, :n, :n]
    heads_first = map(flex_cases.heads_first, (q, k, v))
    want, _ = flex_cases.attention(*heads_first, bias=np.where(seen, 0.0, -np.inf))
    out = cuattn.sparse_attention(*x, jnp.asarray(blocks), block_size=64)
    out = flex_cases.heads_first(np.asarray(out, np.float64))
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)


def check_lengths(rng, dtype, tolerance):
    """Hold packed and padded sequences, with lengths that JAX traces, and pages against numpy."""
    ids, ends = rng.integers(0, 3, 60), np.array([0, 25, 25, 60], np.int32)
    used = np.array([20, 0, 35], np.int32)

    def mask(b, h, i, j):
        return (ids[i] != ids[j]) & (j <= i)

    q, k, v = (rng.standard_normal((60, heads, 64)).astype(dtype) for heads in (4, 2, 2))
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "seqused_k": used}
    sizes = {"max_seqlen_q": 35, "max_seqlen_k": 35}
    pages = rng.permutation(9).astype(np.int32).reshape(3, 3)
    cache = [rng.standard_normal((9, 16, 2, 64)).astype(dtype) for _ in range(2)]
    paged = {"cu_seqlens_q": ends, "block_tables": pages, "seqused_k": used}
    padded = {"seqused_k": np.array([60, 33], np.int32)}
    calls = (
        ((q, k, v), packed, sizes),
        ((q, *cache), paged, {**sizes, "max_seqlen_k": 48}),
        (tuple(np.stack([x, x[::-1]]) for x in (q, k, v)), padded, {}),
    )
    for arrays, lengths, options in calls:
        wide = [x.astype(np.float32) for x in arrays]
        want = cuattn.flex_attention(*wide, mask_mod=mask, **lengths, **options)

        def call(arrays, lengths, options=options):
            return cuattn.flex_attention(*arrays, mask_mod=mask, **lengths, **options)

        x, given = jax.tree.map(jnp.asarray, (arrays, lengths))
        for transform in (lambda f: f, jax.jit):
            out = np.asarray(transform(call)(x, given), np.float32)
            np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)


def check_vmap(rng, dtype, tolerance):
    """Map over queries and what the score reads; q, k and v are of one sequence each."""
    q, k, v = (rng.standard_normal((3, 40, heads, 64)).astype(dtype) for heads in (4, 2, 2))
    gain = rng.random((3, 4)).astype(np.float32) + 0.5

    def call(q, gain):
        score = lambda s, b, h, i, j: s * gain[h] - 0.1 * j  # noqa: E731
        return cuattn.flex_attention(q[None], k[:1], v[:1], score_mod=score)[0]

    out = jax.vmap(call)(jnp.asarray(q), jnp.asarray(gain))
    for i in range(3):
        heads_first = map(flex_cases.heads_first, (q[i : i + 1], k[:1], v[:1]))
        mod = lambda s, b, h, q, k, i=i: s * gain[i][h] - 0.1 * k  # noqa: E731
        want, _ = flex_cases.attention(*heads_first, mod=mod)
        got = flex_cases.heads_first(np.asarray(out[i : i + 1], np.float64))
        np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def check_backward(rng, dtype, tolerance):
    """Hold flex_attention_backward, with the gradient of what a score reads, against numpy's."""
    gain = rng.random(4).astype(np.float32)
    q, k, v = (rng.standard_normal((2, 60, heads, 64)).astype(dtype) for heads in (4, 2, 2))
    wide = [x.astype(np.float32) for x in (q, k, v)]
    scores = {
        "array": lambda gain: lambda s, b, h, i, j: s * gain[h],
        "softcap": lambda _: flex.scores.softcap(2.0),  # an option, on a Hopper a program ahead
        "alibi": lambda gain: flex.scores.alibi(gain),  # an option with an array
    }
    for name, score in scores.items():
        call = {"mask_mod": lambda b, h, i, j: (i * j) % 3 != 1, "score_mod": score(gain)}
        out, lse = cuattn.flex_attention(*wide, return_lse=True, **call)
        dlse = rng.standard_normal(lse.shape).astype(np.float32)
        options = {"need": ("dv", "dq", "dk"), "dlse": dlse}
        options["arrays"] = [gain] if name == "array" else []
        want = cuattn.flex_attention_backward(out, *wide, out, lse, **options, **call)
        x, there = [jnp.asarray(a) for a in (q, k, v)], jnp.asarray(gain)
        call["score_mod"] = score(there)
        out, lse = cuattn.flex_attention(*x, return_lse=True, **call)
        options |= {"dlse": jnp.asarray(dlse), "arrays": [there][: len(options["arrays"])]}
        got = cuattn.flex_attention_backward(out, *x, out, lse, **options, **call)
        assert got._fields == want._fields
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert isinstance(x, jax.Array)
            y = np.asarray(y)
            most = tolerance * np.abs(y).max()
            np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=most, rtol=0)


class TestOnTheCpu:
    """The handlers, with programs."""

    def test_gradients(self, rng, on_cpu):
        check_gradients(rng, np.float32, 2e-5, (lambda f: f, jax.jit), dims=(32, 24))
        assert set(on_cpu) == set(CALLED.values())

    def test_values(self, rng, on_cpu):
        check_values(rng, np.dtype(np.float32), 2e-5)
        assert set(on_cpu) == {CALLED["forward"]}

    def test_backward(self, rng, on_cpu):
        check_backward(rng, np.float32, 2e-5)
        assert set(on_cpu) == set(CALLED.values())

    def test_lengths(self, rng, on_cpu):
        check_lengths(rng, np.float32, 2e-5)
        assert set(on_cpu) == {CALLED["forward"]}

    def test_vmap(self, rng, on_cpu):
        check_vmap(rng, np.float32, 2e-5)
        assert set(on_cpu) == {CALLED["forward"]}

    def test_captured_arrays_are_read_in_each_call(self, rng, on_cpu):
        x, ids = jnp.asarray(rng.standard_normal((1, 150, 2, 32), np.float32)), np.arange(150)
        mask = lambda b, h, i, j: (ids[i] % 2 == ids[j] % 2) & (j <= i)  # noqa: E731
        for _ in range(3):
            ids[:] = rng.permutation(150)
            want = cuattn.flex_attention(*[np.asarray(x)] * 3, mask_mod=mask)
            got = cuattn.flex_attention(x, x, x, mask_mod=mask)
            np.testing.assert_allclose(got, want, atol=2e-5)

    @pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="an older JAX")
    def test_shard_map_adds_up_the_gradient_of_what_is_shared(self, rng, on_cpu):
        x = jnp.asarray(rng.standard_normal((2, 40, 2, 32), np.float32))
        gain = jnp.asarray(rng.random(2, np.float32))
        spec = jax.sharding.PartitionSpec

        def total(x, gain):
            score = lambda s, b, h, i, j: s * gain[h]  # noqa: E731
            return cuattn.flex_attention(x, x, x, score_mod=score).sum()

        def spread(x, gain):
            return jax.lax.psum(total(x, gain), "x")

        mesh, specs = jax.sharding.Mesh(jax.devices("cpu")[:1], ("x",)), (spec("x"), spec())
        mapped = jax.shard_map(spread, mesh=mesh, in_specs=specs, out_specs=spec())
        got, want = (jax.jit(jax.grad(f, (0, 1)))(x, gain) for f in (mapped, total))
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)

    @pytest.mark.skipif(not hasattr(jax, "shard_map"), reason="an older JAX")
    def test_plans_are_kept_without_tracers_and_meshes(self, rng):
        """The first call is made inside a shard_map that runs eagerly, where arrays are tracers."""
        x, ends, found = jnp.zeros((1, 40, 1, 32)), rng.integers(0, 40, 40), []
        mask = lambda b, h, i, j: j < ends[i]  # noqa: E731

        def planned(x):
            arguments = dict.fromkeys("qkv", x)
            call = cuattn.jax.flex_ops.DeviceCall(arguments, None, mask, None, 0)
            found.append(call.plan()[1]["row_end"])
            return x

        mesh, spec = jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec()
        jax.shard_map(planned, mesh=mesh, in_specs=spec, out_specs=spec)(x)
        planned(x)
        assert found[0] is found[1]
        assert isinstance(found[1], np.ndarray)
        np.testing.assert_array_equal(found[1].ravel(), ends)

    def test_functions_that_live_on_keep_no_tracers(self, on_cpu):
        """What a traced mask became is kept with the mask, not with the score beside it."""
        x, ids, score, met = jnp.zeros((1, 40, 1, 32)), jnp.arange(40), flex.scores.softcap(2.0), []

        def call(q, ids):
            met.append(weakref.ref(ids))
            mask = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
            return cuattn.flex_attention(q, q, q, score_mod=score, mask_mod=mask)

        jax.jit(call)(x, ids)
        jax.clear_caches()
        gc.collect()
        assert [trace() for trace in met] == [None]

    def test_explain_says_what_traced_arrays_leave(self):
        x, reasons = jnp.zeros((1, 300, 1, 32)), []

        def explained(ids):
            mask = lambda b, h, i, j: (j <= i) & (ids[i] == ids[j])  # noqa: E731
            plan = cuattn.explain("flex_attention", x, x, x, mask_mod=mask, device="h100")
            reasons.append(plan.reason)
            return ids

        explained(jnp.arange(300) // 7)
        jax.jit(explained)(jnp.arange(300) // 7)
        assert "row ranges" in reasons[0]
        for part in (
            "options, as the mask lies in the window (-1, 0)",
            "which reads arrays that JAX traces",
            "lists of 9 blocks: 3 are skipped, in 6 the program is run",
        ):
            assert part in reasons[1]

    def test_what_is_refused(self, on_cpu):
        x = jnp.zeros((1, 64, 1, 32))
        odd = lambda b, h, i, j: (i + j) % 3 != 0  # noqa: E731

        def call(**options):
            return cuattn.flex_attention(x, x, x, mask_mod=odd, **options)

        with pytest.raises(ValueError, match="traced by JAX, and the host reads its numbers"):
            jax.jit(lambda b: cuattn.sparse_attention(x, x, x, b))(np.ones((1, 1), bool))
        with pytest.raises(ValueError, match="out must not be given with JAX arrays; XLA owns it"):
            call(out=x)
        with pytest.raises(ValueError, match=r"lengths must .* got seqused_k \[65\]; correct"):
            call(seqused_k=np.array([65], np.int32))
        with pytest.raises(ValueError, match="k must have head_dim 32 like q, got 16"):
            cuattn.flex_attention(x, x[..., :16], x, mask_mod=odd)
        with pytest.raises(ValueError, match=r"seqused_k must have shape \(batch,\) = \(1,\), got"):
            jax.jit(lambda n: call(seqused_k=n))(3)
        for function in (call_of_ids, explained_on_h100):
            with jax.enable_x64(), pytest.raises(ValueError, match=r"x.astype\(jax.numpy.int32\)"):
                jax.jit(function)(x, jnp.arange(64))
        with pytest.raises(NotImplementedError, match="no gradient of a gradient goes"):
            jax.grad(lambda q: jax.grad(lambda q: call_of_ids(q, None).sum())(q).sum())(x)

    def test_programs_of_other_processes_and_platforms(self, on_cpu, monkeypatch):
        x, given = np.zeros((1, 8, 1, 32), np.float32), {}
        real = jax.ffi.ffi_call

        def ffi_call(target, results, **more):
            def function(*arrays, **attributes):
                given.update(attributes)
                return real(target, results, **more)(*arrays, **attributes)

            return function

        monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
        call_of_ids(jnp.asarray(x), None)
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, 1, 8), x.dtype)]
        given |= {"flex_present": np.int64(0), "mask_program": ""}
        for changed, what in (
            ({}, None),
            ({"functor": "of another"}, "traced in another process"),
            ({"on_cuda": np.int64(1)}, "traced for another platform than it runs on"),
            ({"numbers": "1,two"}, "attribute numbers of the XLA call holds no whole numbers"),
        ):
            run = lambda more=changed: xla_frames.call(  # noqa: E731
                "cuattn_flex", shapes, [x] * 3, given | more, "cpu"
            )
            if what is None:
                assert (run()[0] == 0).all()
                continue
            with pytest.raises(RuntimeError, match=what):
                run()


def call_of_ids(q, ids):
    """A call whose mask reads ids, which JAX may trace; without any, is of lists."""
    mask = lambda b, h, i, j: (i + j) % 3 != 0 if ids is None else ids[i] == ids[j]  # noqa: E731
    return cuattn.flex_attention(q, q, q, mask_mod=mask)


def explained_on_h100(q, ids):
    mask = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
    cuattn.explain("flex_attention", q, q, q, mask_mod=mask, device="h100")


class OfHandlers:
    """What holds on whatever device the fixture `on_device` puts the handlers of CUDA."""

    def test_values(self, rng, on_device):
        check_values(rng, np.dtype(np.float16), 6e-3)

    def test_backward(self, rng, on_device):
        check_backward(rng, np.float16, 1e-2)

    def test_lengths(self, rng, on_device):
        check_lengths(rng, np.float16, 6e-3)

    def test_vmap(self, rng, on_device):
        check_vmap(rng, np.float16, 6e-3)


@pytest.mark.skipif(not harness.is_emulated(), reason="not a build of the emulator")
class TestOnTheEmulator(OfHandlers):
    """The handlers, with compiled functions."""

    @pytest.fixture
    def on_device(self, monkeypatch, compiler):
        """Go by the handlers of CUDA, whose device is the emulator."""
        take_every_array(monkeypatch)
        monkeypatch.setattr(jax.ffi, "ffi_call", xla_frames.ffi_call)
        jax.clear_caches()
        yield
        jax.clear_caches()

    def test_gradients(self, rng, on_device):
        check_gradients(rng, np.float16, 1e-2, (jax.jit,))
        check_gradients(rng, jnp.bfloat16, 5e-2, (jax.jit,))
        check_gradients(rng, np.float32, 5e-5, (jax.jit,))


@pytest.mark.gpu
@pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}")
@pytest.mark.skipif(harness.is_emulated(), reason="JAX has no arrays of the emulator")
class TestOnAGpu(OfHandlers):
    """XLA itself."""

    @pytest.fixture
    def on_device(self, compiler):
        """Skip, or fail, where JAX has no GPU of its own."""
        frameworks.require_gpu_of_jax()

    def test_gradients(self, rng, on_device):
        check_gradients(rng, np.float16, 1e-2, (lambda f: f, jax.jit), q_len=300, kv_len=333)
        check_gradients(rng, jnp.bfloat16, 5e-2, (jax.jit,), dims=(128, 128))

    def test_float32(self, rng, on_device):
        check_values(rng, np.dtype(np.float32), 5e-5)
        check_gradients(rng, np.float32, 5e-5, (jax.jit,), q_len=300, kv_len=333)
        check_gradients(rng, np.float32, 5e-5, (jax.jit,), dims=(128, 128))
