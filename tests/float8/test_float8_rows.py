# SPDX-License-Identifier: Apache-2.0
"""Values of float8 by rows, which sm90 turns into columns as they come: the same bits each time,
and with batch_invariant whoever else is there; codes behind the last key may be NaN.
"""

import pytest

import cuattn
import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(not harness.has_hopper(), reason="needs a GPU of compute capability 9.0"),
]

MASKS = {"none": {}, "causal": {"causal": True}, "window": {"window": (90, 20)}}
DIMS = [64, 128, 256]
SUMS = ["exact", "fast"]


def drawn(torch, rng, *shape):
    """Codes of N(0, 1), uint8."""
    generator = torch.Generator("cuda").manual_seed(int(rng.integers(2**31)))
    x = torch.randn(*shape, generator=generator, device="cuda")
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def bits(torch, out, lse):
    return out.view(torch.int16).clone(), lse.view(torch.int32).clone()


REPEATED = {
    "drawn": dict(batch=20, options={"causal": True}),
    "fixed": dict(batch=10),
    "window": dict(batch=10, options={"window": (90, 20)}),
    "ragged": dict(batch=50, ragged=True, options={"causal": True}),
    "packed heads": dict(batch=60, rows=9),
    "split": dict(batch=1, keys=3000, options={"num_splits": 3}),
}


@pytest.mark.parametrize("accumulate", SUMS)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("name", REPEATED)
def test_a_thousand_launches_give_the_same_bits(torch, name, head_dim, accumulate, rng):
    given = {"rows": 290, "keys": 333, "options": {}, "ragged": False, **REPEATED[name]}
    batch, rows, keys = given["batch"], given["rows"], given["keys"]
    q = drawn(torch, rng, batch, rows, 8, head_dim)
    k, v = (drawn(torch, rng, batch, keys, 2, head_dim) for _ in "kv")
    function, more = cuattn.attention, ()
    if given["ragged"]:
        function = cuattn.attention_varlen
        ends = [torch.arange(batch + 1, device="cuda", dtype=torch.int32) * n for n in (rows, keys)]
        more = (*ends, rows, keys)
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    options = {"dtype": "float8_e4m3fn", "accumulate": accumulate, "backend": "sm90"}
    options |= {"return_lse": True, **given["options"]}
    out, lse = function(q, k, v, *more, **options)
    options |= {"out": torch.empty_like(out), "lse_out": torch.empty_like(lse)}
    first = bits(torch, out, lse)
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        result = function(q, k, v, *more, **options)
        for a, b, dtype in zip(result, first, (torch.int16, torch.int32), strict=True):
            changed += (a.view(dtype) != b).sum()
    assert changed.item() == 0


@pytest.mark.parametrize("accumulate", SUMS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", DIMS)
def test_batch_invariant_rows_are_the_same_alone_in_a_batch_and_packed(
    torch, head_dim, mask, accumulate, rng
):
    rows, keys = 20, 700
    options = {"dtype": "float8_e4m3fn", "accumulate": accumulate, "backend": "sm90"}
    options |= {"return_lse": True, "batch_invariant": True, **MASKS[mask]}
    q = drawn(torch, rng, 130, rows, 8, head_dim)
    k, v = (drawn(torch, rng, 130, keys, 2, head_dim) for _ in "kv")
    results = []
    for batch in (1, 3, 130):
        out, lse = cuattn.attention(q[:batch], k[:batch], v[:batch], **options)
        results.append(bits(torch, out[0], lse[0]))
    # Behind a sequence whose queries fill tiles, and whose keys are no multiple of anything.
    for before in (7, 90):
        mate = [drawn(torch, rng, n, h, head_dim) for n, h in ((512, 8), (before, 2), (before, 2))]
        joined = [torch.cat([a, b[0]]) for a, b in zip(mate, (q, k, v), strict=True)]
        starts = [
            torch.tensor([0, n, n + more], device="cuda", dtype=torch.int32)
            for n, more in ((512, rows), (before, keys))
        ]
        out, lse = cuattn.attention_varlen(*joined, *starts, 512, keys, **options)
        results.append(bits(torch, out[512:], lse[:, 512:]))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("accumulate", SUMS)
@pytest.mark.parametrize("head_dim", DIMS)
@pytest.mark.parametrize("keys", [1, 31, 32, 95, 96, 129, 300])
def test_codes_behind_the_last_key_may_be_nan(torch, keys, head_dim, accumulate, rng):
    q = drawn(torch, rng, 2, 70, 4, head_dim)
    k, v = (drawn(torch, rng, 2, 400, 2, head_dim) for _ in "kv")
    used = torch.full((2,), keys, device="cuda", dtype=torch.int32)
    options = {"dtype": "float8_e4m3fn", "accumulate": accumulate, "backend": "sm90"}
    options |= {"seqused_k": used, "num_splits": 1}
    want = cuattn.attention(q, k, v, **options)
    k[:, keys:] = v[:, keys:] = 0x7F
    assert torch.equal(
        cuattn.attention(q, k, v, **options).view(torch.int16), want.view(torch.int16)
    )
    assert torch.isfinite(want).all()


@pytest.mark.parametrize("accumulate", SUMS)
@pytest.mark.parametrize("head_dim", DIMS)
def test_batch_invariant_rows_of_split_keys_are_the_same_in_a_batch(
    torch, head_dim, accumulate, rng
):
    options = {"dtype": "float8_e4m3fn", "accumulate": accumulate, "backend": "sm90"}
    options |= {"return_lse": True, "batch_invariant": True}
    q = drawn(torch, rng, 40, 20, 8, head_dim)
    k, v = (drawn(torch, rng, 40, 3000, 2, head_dim) for _ in "kv")
    results = []
    for batch in (1, 3, 40):
        out, lse = cuattn.attention(q[:batch], k[:batch], v[:batch], **options)
        results.append(bits(torch, out[0], lse[0]))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
