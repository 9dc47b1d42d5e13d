# SPDX-License-Identifier: Apache-2.0
"""The contract sentence by sentence: arrays, conventions, errors; each with values known on paper.

Most tests read the softmax weights themselves: with an identity for V, a row of out is the weights
of its keys.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

import cuattn
from harness import Arena, bits

KEYS = 24  # of the small examples; a multiple of 8, so that the identity is a valid V
F32 = np.float32


class Scene:
    """Calls on one device with numpy arrays in and out."""

    def __init__(self, device):
        self.device = device
        self.arena = Arena(device)

    def put(self, value):
        return self.arena.put(value, align=4) if isinstance(value, np.ndarray) else value

    def attention(self, *arrays, **options):
        placed = [self.put(x) for x in arrays]
        options = {name: self.put(x) for name, x in options.items()}
        result = cuattn.attention(*placed, **options)
        self.device.synchronize()
        self.arena.verify()
        if isinstance(result, tuple):
            return tuple(self.device.numpy(x) for x in result)
        return self.device.numpy(result)

    def weights(self, scores, heads=1, **options):
        """Softmax weights [heads, rows, keys] and lse of given scores [rows, keys], scale 1."""
        rows, keys = scores.shape
        q = np.zeros((1, rows, heads, KEYS), F32)
        q[0, :, :, :rows] = np.eye(rows, dtype=F32)[:, None]
        k, v = np.zeros((2, 1, keys, heads, KEYS), F32)
        k[0, :, :, :rows] = scores.T[:, None]
        v[0, :, :, :keys] = np.eye(keys, dtype=F32)[:, None]
        out, lse = self.attention(q, k, v, scale=1.0, return_lse=True, **options)
        return out[0].swapaxes(0, 1)[..., :keys], lse[0]


@pytest.fixture
def scene(device):
    return Scene(device)


def seen(scene, rows, keys, **options):
    """Which keys [rows, keys] have weight when all scores are equal."""
    weights, _ = scene.weights(np.zeros((rows, keys)), **options)
    return weights[0] > 0


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def example(rng, *shape):
    return rng.standard_normal(shape, F32)


# Section 1: arrays, devices, streams.


def test_importing_cuattn_imports_no_array_library_but_numpy():
    libraries = ("torch", "jax", "cupy", "ml_dtypes")
    code = f"import sys, cuattn; print([name for name in {libraries} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_without_ml_dtypes_numpy_is_told_what_it_needs():
    code = """
import sys
sys.modules["ml_dtypes"] = None
import numpy as np, cuattn
q = np.zeros((1, 4, 2, 16), np.uint8)
for call in (lambda: cuattn.attention(q, q, q, dtype="float8_e4m3fn"),
             lambda: cuattn.PagedKVCache(1, 2, 16, 2, 16, "bfloat16", like=q)):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stdout
    assert all("bfloat16 need ml_dtypes, which is not inst" in line for line in lines), lines


def test_results_come_back_in_the_library_of_q(device, rng):
    scene = Scene(device)
    q = scene.put(example(rng, 1, 3, 2, 8))
    out, lse = cuattn.attention(q, q, q, return_lse=True)
    assert type(out) is type(q)
    assert type(lse) is type(q)


def test_out_is_written_in_place_and_returned(scene, rng):
    q = scene.put(example(rng, 1, 3, 2, 8))
    out = scene.arena.output((1, 3, 2, 8), F32)
    assert cuattn.attention(q, q, q, out=out) is out
    scene.device.synchronize()
    scene.arena.verify()
    assert np.isfinite(scene.device.numpy(out)).all()


def test_lse_out_implies_return_lse(scene, rng):
    q = scene.put(example(rng, 1, 3, 2, 8))
    lse_out = scene.arena.output((1, 2, 3), F32)
    out, lse = cuattn.attention(q, q, q, lse_out=lse_out)
    scene.device.synchronize()
    assert lse is lse_out
    assert np.isfinite(scene.device.numpy(lse)).all()
    assert scene.device.is_array(out)


def test_out_and_lse_may_have_strides_of_their_own(scene, rng):
    q = example(rng, 1, 5, 2, 8)
    out = scene.arena.output((1, 5, 2, 8), F32, "packed")
    lse = scene.arena.output((1, 2, 5), F32, "transposed", align=4)
    placed = scene.put(q)
    cuattn.attention(placed, placed, placed, out=out, lse_out=lse)
    expected, expected_lse = scene.attention(q, q, q, return_lse=True)
    np.testing.assert_array_equal(scene.device.numpy(out), expected)
    np.testing.assert_array_equal(scene.device.numpy(lse), expected_lse)


def test_read_only_numpy_arrays_are_valid_inputs(rng):
    q = example(rng, 1, 3, 2, 8)
    q.flags.writeable = False
    assert np.isfinite(cuattn.attention(q, q, q)).all()


def test_results_do_not_share_memory_with_inputs_or_earlier_results(rng):
    q = example(rng, 1, 3, 2, 8)
    first = cuattn.attention(q, q, q)
    kept = first.copy()
    q[:] = 7
    second = cuattn.attention(q, q, q)
    second[:] = 0
    np.testing.assert_array_equal(first, kept)


def test_no_reference_to_an_argument_is_kept(rng):
    class Traced(np.ndarray):
        pass

    q = example(rng, 1, 3, 2, 8).view(Traced)
    watch = weakref.ref(q)
    for options in ({}, {"backend": "naive"}, {"window": (-3, 0)}):
        try:
            cuattn.attention(q, q, q, **options)
        except ValueError:
            continue
    before = sys.getrefcount(q)
    cuattn.attention(q, q, q)
    assert sys.getrefcount(q) == before
    del q
    gc.collect()
    assert watch() is None


def test_a_thousand_calls_do_not_grow_the_process(rng):
    q = example(rng, 2, 64, 4, 32)

    def resident():
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for backend in ("cpu", "naive"):
        for _ in range(50):
            cuattn.attention(q, q, q, backend=backend, return_lse=True)
        before = resident()
        for _ in range(500):
            cuattn.attention(q, q, q, backend=backend, return_lse=True)
        assert resident() - before < 16 << 20


def test_strides_beyond_two_to_the_31_elements():
    """Two batch entries 2^31 elements apart; untouched pages of the gap cost nothing."""
    gap = 2**31 + 64
    try:
        memory = np.empty(gap + 4096, np.float16)
    except MemoryError:
        pytest.skip("needs 4 GiB of address space")
    shape, strides = (2, 9, 2, 16), (gap * 2, 64, 32, 2)
    q, k, v, out = (
        np.ndarray(shape, np.float16, memory, offset, strides) for offset in range(0, 4096, 1024)
    )
    rng = np.random.default_rng(3)
    for x in (q, k, v):
        x[:] = rng.standard_normal(shape)
    cuattn.attention(q, k, v, out=out)
    expected = cuattn.attention(*(np.ascontiguousarray(x) for x in (q, k, v)))
    assert np.array_equal(bits(out), bits(expected))


def test_sums_are_kept_in_float32(scene):
    """In float16 the score 40,000 * 4 would be infinite, and 4,096 ones would sum to 2,048."""
    q = np.full((1, 1, 1, 8), 200, np.float16)
    k = np.full((1, 4096, 1, 8), 100, np.float16)
    v = np.ones((1, 4096, 1, 8), np.float16)
    out, lse = scene.attention(q, k, v, scale=1.0, return_lse=True)
    assert (out == 1).all()
    assert lse.item() == pytest.approx(160_000 + math.log(4096), rel=1e-6)


def test_several_threads_may_call_at_once(rng):
    inputs = [example(rng, 2, 40, 4, 32) for _ in range(4)]
    expected = [cuattn.attention(q, q, q, causal=True) for q in inputs]
    failures = []

    def work(index):
        for _ in range(20):
            if not np.array_equal(
                cuattn.attention(*[inputs[index]] * 3, causal=True), expected[index]
            ):
                failures.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Section 2: conventions.


def test_layout_bshd_and_bhsd_name_the_same_call(scene, rng):
    q, k, v = example(rng, 2, 5, 4, 8), example(rng, 2, 6, 2, 8), example(rng, 2, 6, 2, 16)
    out, lse = scene.attention(q, k, v, return_lse=True)
    assert out.shape == (2, 5, 4, 16)  # out like q, with head_dim_v
    other, other_lse = scene.attention(
        *(np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v)), layout="bhsd", return_lse=True
    )
    assert other.shape == (2, 4, 5, 16)
    np.testing.assert_array_equal(other.swapaxes(1, 2), out)
    np.testing.assert_array_equal(other_lse, lse)
    assert lse.shape == (2, 4, 5)


def test_query_head_h_reads_kv_head_h_over_group(scene):
    q, k = np.zeros((1, 2, 6, 8), F32), np.zeros((1, 3, 2, 8), F32)
    v = np.broadcast_to(np.arange(2, dtype=F32)[:, None], (1, 3, 2, 8))
    out = scene.attention(q, k, v)
    np.testing.assert_array_equal(out[0, 0, :, 0], [0, 0, 0, 1, 1, 1])


def test_scale_is_one_over_the_root_of_head_dim_by_default(scene):
    q = np.full((1, 1, 1, 16), 1, F32)
    k = np.full((1, 1, 1, 16), 3, F32)
    _, lse = scene.attention(q, k, k, return_lse=True)
    assert lse.item() == pytest.approx(3 * 16 / 4, rel=1e-6)
    _, lse = scene.attention(q, k, k, scale=0.5, return_lse=True)
    assert lse.item() == pytest.approx(24, rel=1e-6)


@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1)])
def test_causal_is_aligned_bottom_right(scene, rows, keys):
    i, j = np.ogrid[:rows, :keys]
    np.testing.assert_array_equal(seen(scene, rows, keys, causal=True), j <= i + keys - rows)


@pytest.mark.parametrize("window", [(0, 0), (2, 1), (-1, 1), (2, -1), (-1, -1), (9, 9), (0, -1)])
@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 7), (7, 3)])
def test_window_is_inclusive_and_minus_one_is_unlimited(scene, rows, keys, window):
    i, j = np.ogrid[:rows, :keys]
    left, right = (rows + keys if side < 0 else side for side in window)
    at = i + keys - rows
    expected = (j >= at - left) & (j <= at + right)
    np.testing.assert_array_equal(seen(scene, rows, keys, window=window), expected)


def test_window_composes_with_causal(scene):
    i, j = np.ogrid[:6, :6]
    expected = (j >= i - 2) & (j <= i)
    np.testing.assert_array_equal(seen(scene, 6, 6, causal=True, window=(2, 3)), expected)


def test_softcap_comes_after_scale_and_before_bias(scene, rng):
    scores, bias = example(rng, 3, KEYS) * 5, example(rng, 3, KEYS)
    weights, _ = scene.weights(scores, softcap=2.0, bias=bias)
    np.testing.assert_allclose(weights[0], softmax(2 * np.tanh(scores / 2) + bias), atol=2e-6)


def test_softcap_zero_is_off(scene, rng):
    scores = example(rng, 3, KEYS) * 5
    np.testing.assert_allclose(scene.weights(scores, softcap=0.0)[0][0], softmax(scores), atol=2e-6)


@pytest.mark.parametrize(("rows", "keys"), [(4, 4), (3, 8), (8, 3)])
def test_alibi_subtracts_slope_times_the_distance_to_the_diagonal(scene, rows, keys):
    slopes = np.array([0.5, 0.25], F32)
    i, j = np.ogrid[:rows, :keys]
    distance = np.abs(i + keys - rows - j)
    weights, _ = scene.weights(np.zeros((rows, keys)), heads=2, alibi_slopes=slopes)
    for head, slope in enumerate(slopes):
        np.testing.assert_allclose(weights[head], softmax(-slope * distance), atol=2e-6)
    again, _ = scene.weights(np.zeros((rows, keys)), heads=2, alibi_slopes=slopes[None])
    np.testing.assert_array_equal(again, weights)  # [batch, num_heads_q] says the same


def test_a_sink_takes_weight_but_has_no_value(scene):
    weights, lse = scene.weights(np.zeros((1, 3)), heads=2, sinks=np.log(np.array([1, 5], F32)))
    np.testing.assert_allclose(weights[:, 0], [[1 / 4] * 3, [1 / 8] * 3], rtol=1e-6)
    np.testing.assert_allclose(lse[:, 0], np.log([4, 8]), rtol=1e-6)  # lse includes it


def test_bias_is_added_and_broadcast_from_the_right(scene, rng):
    scores = example(rng, 3, KEYS)
    for shape in (
        (KEYS,),
        (1,),
        (3, 1),
        (3, KEYS),
        (1, 1, KEYS),
        (2, 1, 1),
        (1, 2, 3, KEYS),
        (1, 1, 1, 1),
    ):
        bias = example(rng, *shape)
        weights, _ = scene.weights(scores, heads=2, bias=bias)
        np.testing.assert_allclose(
            weights[None], softmax(scores + bias + np.zeros((1, 2, 1, 1))), atol=2e-6
        )


def test_bias_has_no_alignment_rule_and_any_non_negative_stride(scene, rng):
    """A bias sliced out of a larger array at an odd place, its keys two elements apart."""
    scores = example(rng, 3, KEYS)
    wide = example(rng, 5, 2 * KEYS + 3)
    bias = wide[1:4, 1 : 2 * KEYS + 1 : 2]
    q = np.zeros((1, 3, 1, KEYS), F32)
    q[0, :, 0, :3] = np.eye(3)
    k, v = np.zeros((2, 1, KEYS, 1, KEYS), F32)
    k[0, :, 0, :3], v[0, :, 0] = scores.T, np.eye(KEYS)
    placed = scene.put(wide)[1:4, 1 : 2 * KEYS + 1 : 2]
    out = cuattn.attention(*(scene.put(x) for x in (q, k, v)), scale=1.0, bias=placed)
    scene.device.synchronize()
    np.testing.assert_allclose(scene.device.numpy(out)[0, :, 0], softmax(scores + bias), atol=2e-6)


def test_boolean_bias_keeps_what_is_true(scene, rng):
    keep = rng.random((4, KEYS)) < 0.5
    np.testing.assert_array_equal(seen(scene, 4, KEYS, bias=keep), keep)


def test_lse_is_the_natural_logarithm_of_the_scaled_masked_scores(scene, rng):
    scores = example(rng, 4, KEYS)
    _, lse = scene.weights(scores)
    np.testing.assert_allclose(lse[0], np.log(np.exp(scores.astype(float)).sum(axis=1)), rtol=1e-5)


def test_a_query_without_keys_gives_zero_and_minus_infinity(scene):
    weights, lse = scene.weights(np.zeros((5, 3)), causal=True)
    assert not weights[0, :2].any()
    assert (lse[0, :2] == -np.inf).all()
    weights, lse = scene.weights(np.zeros((2, 3)), bias=np.zeros((2, 3), bool))
    assert not weights.any()
    assert (lse == -np.inf).all()


def test_a_query_with_nothing_but_a_sink_gives_zero_and_the_sink(scene):
    weights, lse = scene.weights(np.zeros((5, 3)), causal=True, sinks=np.array([1.5], F32))
    assert not weights[0, :2].any()
    assert (lse[0, :2] == 1.5).all()


def test_context_of_length_zero(scene):
    q, k = np.ones((2, 3, 4, 8), F32), np.ones((2, 0, 2, 8), F32)
    out, lse = scene.attention(q, k, k, return_lse=True)
    assert out.shape == (2, 3, 4, 8)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_seqused_rows_beyond_are_zero_and_keys_beyond_unseen(scene):
    q = np.zeros((2, 4, 1, 8), F32)
    v = np.arange(5, dtype=F32)[None, :, None, None] * np.ones((2, 5, 1, 8), F32)
    used_q, used_k = np.array([2, 4], np.int32), np.array([3, 0], np.int32)
    k = np.zeros_like(v)
    out, lse = scene.attention(q, k, v, seqused_q=used_q, seqused_k=used_k, return_lse=True)
    np.testing.assert_allclose(out[:, :, 0, 0], [[1, 1, 0, 0], [0] * 4], rtol=1e-6)
    expected = [[math.log(3)] * 2 + [-math.inf] * 2, [-math.inf] * 4]
    np.testing.assert_allclose(lse[:, 0], expected, rtol=1e-6)


def test_causal_counts_from_the_lengths_in_use(scene):
    """Three queries against five keys in use: the last one sees all five, the first one three."""
    q, k = np.zeros((1, 4, 1, 8), F32), np.zeros((1, 8, 1, 8), F32)
    used = {"seqused_q": np.array([3], np.int32), "seqused_k": np.array([5], np.int32)}
    _, lse = scene.attention(q, k, k, causal=True, return_lse=True, **used)
    np.testing.assert_allclose(np.exp(lse[0, 0]), [3, 4, 5, 0], rtol=1e-6)


def test_packed_sequences_do_not_see_each_other(scene):
    lengths_q, lengths_k = np.array([0, 2, 2, 5], np.int32), np.array([0, 3, 4, 4], np.int32)
    q, k = np.zeros((5, 2, 8), F32), np.zeros((4, 1, 8), F32)
    v = np.array([1, 2, 3, 50], F32)[:, None, None] * np.ones((4, 1, 8), F32)
    arrays = [scene.put(x) for x in (q, k, v, lengths_q, lengths_k)]
    out, lse = cuattn.attention_varlen(*arrays, 3, 3, return_lse=True)
    scene.device.synchronize()
    out, lse = scene.device.numpy(out), scene.device.numpy(lse)
    assert out.shape == (5, 2, 8)
    assert lse.shape == (2, 5)
    np.testing.assert_allclose(out[:, 0, 0], [2, 2, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(lse[0], [math.log(3)] * 2 + [-math.inf] * 3, rtol=1e-6)


def test_max_seqlen_may_be_generous_and_the_bias_follows_it(scene):
    """max_seqlen above the number of rows is an upper bound like any other."""
    q, k = np.zeros((2, 1, 8), F32), np.zeros((3, 1, 8), F32)
    bias = np.log(np.arange(1, 65, dtype=F32)).reshape(1, 1, 1, 64) * np.ones((1, 1, 32, 1), F32)
    ends = [scene.put(np.array([0, n], np.int32)) for n in (2, 3)]
    _, lse = cuattn.attention_varlen(
        *(scene.put(x) for x in (q, k, k)), *ends, 32, 64, bias=scene.put(bias), return_lse=True
    )
    scene.device.synchronize()
    np.testing.assert_allclose(scene.device.numpy(lse), math.log(6), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_head_dims_are_any_multiple_of_8_up_to_256(scene, dtype):
    for head_dim in range(8, 257, 8):
        q = np.ones((1, 1, 1, head_dim), dtype)
        assert scene.attention(q, q, q).shape == (1, 1, 1, head_dim)


# Section 5: errors. Each message has its test in test_errors.py; no argument may crash the process.

POOL = [
    *(None, True, False, 0, 1, -1, 2**63, -(2**63), 1.5, float("nan"), float("inf"), 1j),
    *("", "auto", "naive", b"x", [], (), (1, 2), (-1, -1), (2**40, 0), {}, object(), range(3)),
    *(np.float32(1), np.zeros(0, F32), np.zeros(4, F32), np.zeros(2, np.int32)),
    *(np.zeros((2, 5, 4, 16), dtype) for dtype in (F32, np.float16, "M8[s]", bool)),
    *(np.zeros((1,) * 9, F32), np.zeros((5, 5), bool), np.array("text"), np.array(None)),
    np.zeros((2, 5, 4, 16), F32)[::-1, ::2],
]
ARGUMENTS = (
    *("q", "k", "v", "layout", "causal", "window", "scale", "softcap", "alibi_slopes", "sinks"),
    *("bias", "seqused_q", "seqused_k", "num_splits", "batch_invariant", "return_lse", "out"),
    *("lse_out", "workspace", "backend", "stream"),
)


def test_no_argument_of_any_kind_crashes(rng):
    """Every argument takes every odd value, and random pairs do: a result or a plain exception."""
    good = {name: np.zeros((2, 5, 4, 16), F32) for name in "qkv"}
    mistakes = [{name: value} for name in ARGUMENTS for value in POOL]
    for _ in range(1000):
        names = rng.choice(len(ARGUMENTS), size=2, replace=False)
        mistakes.append({ARGUMENTS[n]: POOL[int(rng.integers(len(POOL)))] for n in names})
    messages = set()
    for changes in mistakes:
        try:
            cuattn.attention(**{**good, **changes})
        except (ValueError, TypeError, NotImplementedError, MemoryError) as error:
            messages.add(str(error))
    assert all(message.startswith("attention: ") for message in messages), messages
    np.testing.assert_array_equal(cuattn.attention(**good), np.zeros((2, 5, 4, 16)))


def test_a_refused_call_leaves_no_trace_in_the_next(scene, rng):
    q = example(rng, 1, 5, 2, 8)
    expected = scene.attention(q, q, q)
    for options in ({"window": (-2, 0)}, {"scale": math.nan}, {"sinks": np.zeros(3, F32)}):
        with pytest.raises(ValueError, match="attention: "):
            scene.attention(q, q, q, **options)
        np.testing.assert_array_equal(scene.attention(q, q, q), expected)
