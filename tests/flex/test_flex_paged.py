# SPDX-License-Identifier: Apache-2.0
"""Masks and scores of a user over caches in blocks: decoding, appending, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cuattn
import flex_cases
import frameworks
import harness
from cuattn import flex
from device_arrays import to_device, to_host

TARGETS = harness.target_params(cpu=("cpu", "naive"), cuda=("simt", "sm80", "sm90"))
STEPS = {
    "decode": ((1, 1, 1), (70, 3, 33)),
    "append": ((5, 40, 1), (50, 40, 90)),
    "mixed, one empty": ((0, 33, 1), (20, 64, 0)),
}


def functions(rng, n):
    """Masks and scores by name; q_idx is that of the new queries, so lengths say where they are."""
    ids, table = np.sort(rng.integers(0, 5, n)).astype(np.int32), rng.standard_normal(2 * n)
    table = table.astype(np.float32)

    def documents(b, h, q, k, q_len, kv_len):
        return (ids[q + kv_len - q_len] == ids[k]) & (k <= q + kv_len - q_len)

    def scattered(b, h, q, k, q_len, kv_len):
        return ((q + 2 * k + b + h) % 3 != 0) & (k <= q + kv_len - q_len)

    def relative(s, b, h, q, k, q_len, kv_len):
        return s + table[q + kv_len - q_len - k + n]

    return {
        "documents": (documents, None),
        "scattered": (scattered, None),
        "relative": (None, relative),
        "both": (scattered, relative),
        "causal": (flex.masks.causal(), None),
        "nothing": (None, None),
    }


def paged(rng, rows, block_size, layout):
    """Caches that hold rows of each sequence, the rest of them NaN, and the tables of blocks."""
    counts = [-(-len(x) // block_size) for x, _ in rows]
    ids = rng.permutation(sum(counts) + 3).astype(np.int32)
    tables = np.full((len(rows), max(*counts, 1) + 1), 2**30, np.int32)
    caches = []
    for side in range(2):
        cache = np.full((len(ids), block_size, *rows[0][side].shape[1:]), np.nan, np.float32)
        used = 0
        for b, count in enumerate(counts):
            tables[b, :count] = ids[used : used + count]
            for i in range(count):
                part = rows[b][side][i * block_size : (i + 1) * block_size]
                cache[tables[b, i], : len(part)] = part
            used += count
        caches.append(cache)
    order = {"nhd": (0, 1, 2, 3), "hnd": (0, 2, 1, 3)}[layout]
    return [np.ascontiguousarray(x.transpose(order)) for x in caches], tables


def put(device, x):
    return x if device.name == "cpu" else to_device(device, x)


def got(x):
    return np.asarray(x, np.float64) if isinstance(x, np.ndarray) else to_host(x)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("device", "backend"), TARGETS)
def test_keys_in_blocks_equal_the_dense_formula(rng, device, backend, step, compiler):
    dtype = "float32" if backend in ("cpu", "naive", "simt") else "float16"
    most = {"float32": 5e-5, "float16": 6e-3}[dtype]
    for case, (name, (mask, mod)) in enumerate(functions(rng, 128).items()):
        queries, keys = STEPS[step]
        layout, block_size = ("nhd", "hnd")[case % 2], (16, 4)[case // 2 % 2]
        dim = 192 if backend == "sm90" and case % 3 == 0 else 64
        q = rng.standard_normal((sum(queries), 4, dim)).astype(dtype)
        rows = [[rng.standard_normal((n, 2, dim)).astype(dtype) for _ in "kv"] for n in keys]
        caches, tables = paged(rng, rows, block_size, layout)
        begins = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
        lens = np.array(keys, np.int32)
        arrays = [put(device, x) for x in (q, *(x.astype(dtype) for x in caches))]
        given = {"block_tables": tables, "cu_seqlens_q": begins, "seqused_k": lens}
        out, lse = cuattn.flex_attention(
            *arrays,
            mask_mod=mask,
            score_mod=mod,
            kv_layout=layout,
            max_seqlen_q=max(queries),
            max_seqlen_k=max(keys),
            backend=backend if name != "nothing" else "auto",
            return_lse=True,
            **{n: put(device, x) for n, x in given.items()},
        )
        out, lse = got(out), got(lse)
        for b, at in enumerate(itertools.pairwise(begins)):
            here = slice(*at)
            lengths = (queries[b], keys[b])
            of_b = {
                "mask": of_sequence(mask, b, 0, *lengths),
                "mod": of_sequence(mod, b, 1, *lengths),
            }
            want, want_lse = flex_cases.attention(
                *(flex_cases.heads_first(x[None]) for x in (q[here], *rows[b])), **of_b
            )
            where = f"{name}, sequence {b}"
            np.testing.assert_allclose(
                out[here].transpose(1, 0, 2)[None], want, atol=most, rtol=most, err_msg=where
            )
            found = lse[None, :, here]
            np.testing.assert_array_equal(np.isinf(found), np.isinf(want_lse), err_msg=where)
            some = np.isfinite(want_lse)
            np.testing.assert_allclose(found[some], want_lse[some], atol=2e-3, err_msg=where)


def of_sequence(function, b, place, q_len, kv_len):
    """A function as that of sequence b alone, whose number is its argument `place`."""
    if function is None:
        return None
    asked = flex_cases.lengths_asked(function, q_len, kv_len)
    return lambda *at: function(*at[:place], b, *at[place + 1 :], **asked)


def test_explain_says_how_keys_are_read(rng):
    mask, _ = functions(rng, 128)["scattered"]
    begins, lens = np.array([0, 1, 2], np.int32), np.array([20, 31], np.int32)
    cache, tables = np.zeros((9, 16, 2, 64), np.float16), np.zeros((2, 2), np.int32)
    q = np.zeros((2, 4, 64), np.float16)
    lengths = {"cu_seqlens_q": begins, "seqused_k": lens, "max_seqlen_q": 1, "max_seqlen_k": 31}
    plan = cuattn.explain(
        "flex_attention", q, cache, cache, mask_mod=mask, block_tables=tables, **lengths
    )
    assert plan.kernel == "cpu"
    assert "keys are gathered from their blocks first" in plan.reason
    call = {"mask_mod": mask, "block_tables": tables, **lengths}
    unread = {n: ("int32", *x.shape) for n, x in call.items() if isinstance(x, np.ndarray)}
    for given in (call, {**call, "block_tables": unread["block_tables"]}, {**call, **unread}):
        shapes = (q.shape, cache.shape, cache.shape)
        plan = cuattn.explain("flex_attention", *shapes, device="h100", dtype="float16", **given)
        assert plan.kernel == "sm90"
        assert "a functor" in plan.reason
        assert "keys are read in their blocks" in plan.reason
        assert plan.packed_heads == 2
    few, more = (9, 4, 2, 64), {**unread, "block_tables": ("int32", 2, 8)}
    call = {"device": "h100", "dtype": "float16", **call, **more}
    plan = cuattn.explain("flex_attention", q.shape, few, few, **call)
    assert "keys are gathered from their blocks first" in plan.reason


def test_keys_in_blocks_have_no_gradients(rng):
    torch = frameworks.require("torch")
    q = torch.zeros(2, 4, 64, requires_grad=True)
    cache, tables = torch.zeros(9, 16, 2, 64), torch.zeros(2, 2, dtype=torch.int32)
    call = {
        "block_tables": tables,
        "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32),
        "seqused_k": torch.tensor([20, 31], dtype=torch.int32),
        **{"max_seqlen_q": 1, "max_seqlen_k": 31},
    }
    with pytest.raises(NotImplementedError, match="block_tables must not be given where a grad"):
        cuattn.flex_attention(q, cache, cache, mask_mod=lambda b, h, q, k: k != 3, **call)


@pytest.mark.parametrize(("wrong", "what"), [
    ({"seqused_k": np.array([20, 33], np.int32)}, "got a length of 33 for sequence 1"),
    ({"seqused_k": None}, "cu_seqlens_k"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q"),
    ({"kv_layout": "sideways"}, "kv_layout"),
    ({"block_tables": np.full((2, 2), 9, np.int32)}, "block_tables"),
])  # fmt: skip
def test_what_is_wrong_with_pages_is_said(wrong, what):
    q, cache = np.zeros((2, 4, 64), np.float32), np.zeros((9, 16, 2, 64), np.float32)
    call = {"block_tables": np.zeros((2, 2), np.int32), "seqused_k": np.array([20, 31], np.int32)}
    call |= {"cu_seqlens_q": np.array([0, 1, 2], np.int32), "max_seqlen_q": 1, "max_seqlen_k": 32}
    mask = lambda b, h, q, k: k != 3  # noqa: E731
    cuattn.flex_attention(q, cache, cache, mask_mod=mask, **call)
    with pytest.raises(ValueError, match=what):
        cuattn.flex_attention(q, cache, cache, mask_mod=mask, **{**call, **wrong})


def test_head_dims_of_caches():
    """The last axis of a vllm cache of v is the block's tokens."""
    from cuattn.flex import device

    q, k = np.zeros((2, 4, 64)), np.zeros((9, 2, 8, 16, 8))
    paged = {"q": q, "k": k, "block_tables": np.zeros((1, 2), np.int32)}
    assert device.head_dims_of({**paged, "v": np.zeros((9, 2, 128, 16)), "kv_layout": "vllm"}) == (
        64,
        128,
    )
    assert device.head_dims_of({**paged, "v": np.zeros((9, 16, 2, 128))}) == (64, 128)
    assert device.head_dims_of({"q": q, "v": np.zeros((5, 2, 32))}) == (64, 32)


def test_torch_compiles_over_pages_without_a_break():
    torch = frameworks.require("torch")
    q, k, v = (torch.randn(shape) for shape in ((4, 4, 16), (9, 16, 2, 16), (9, 16, 2, 16)))
    given = {
        "block_tables": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 2, 4], dtype=torch.int32),
        "seqused_k": torch.tensor([20, 31], dtype=torch.int32),
        "max_seqlen_q": 2,
        "max_seqlen_k": 32,
    }

    def attend(q):
        return cuattn.flex_attention(q, k, v, mask_mod=thirds, **given)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), attend(q))


def thirds(b, h, q_idx, kv_idx):
    return (kv_idx % 3 != 0) | (q_idx < 1)
