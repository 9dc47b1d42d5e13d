# SPDX-License-Identifier: Apache-2.0
"""mla_decode against float64: rows, lengths, blocks, caches, options, on every backend."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cuattn
import mla_cases
from harness import bits, target_params
from mla_cases import CUDA_BACKENDS, MlaCase

TARGETS = {"cpu": ("cpu",), "cuda": CUDA_BACKENDS}
EDGES = (0, 1, 31, 33, 64, 127, 129, 300)
CASES = [
    *(MlaCase(dtype=d, heads=h, lens=(45, 0, 66)) for d, h in (
        ("float32", 1), ("float16", 7), ("bfloat16", 17), ("float16", 33), ("bfloat16", 128))),
    *(MlaCase(q_len=q, heads=h, lens=(q - 1, 70, q + 30), dtype=d) for q, h, d in (
        (1, 16, "float16"), (2, 9, "bfloat16"), (3, 16, "float32"), (5, 3, "float16"),
        (37, 2, "bfloat16"))),
    *(MlaCase(block_size=b, joined=b % 2 == 0, lens=(70, 3, 131), heads=5, dtype=d)
      for b, d in zip((1, 3, 8, 16, 24, 128, 256),
                      itertools.cycle(("float16", "float32", "bfloat16")))),
    MlaCase(lens=EDGES, heads=8, dtype="float16"),
    MlaCase(lens=EDGES, heads=20, dtype="bfloat16", joined=False),
    MlaCase(lens=(700, 1500), heads=4, options=(("num_splits", 7),)),
    MlaCase(lens=(700, 90), heads=24, options=(("num_splits", 3),), dtype="float16"),
    MlaCase(lens=(700, 90), heads=24, options=(("batch_invariant", True),)),
    MlaCase(lens=(1000, 63, 1, 0, 32), heads=128),
    MlaCase(lens=(513, 96), q_len=2, heads=64, block_size=16, options=(("num_splits", 3),),
            dtype="float16"),
    MlaCase(lens=(300, 129), q_len=2, heads=96, block_size=32, window=(70, -1), sinks=True,
            joined=False),
    MlaCase(lens=(300, 129), q_len=2, heads=96, block_size=24, window=(70, -1), sinks=True,
            joined=False),
    MlaCase(lens=(700, 1500), heads=20, block_size=1, options=(("num_splits", 7),)),
    MlaCase(lens=(90, 200, 0), causal=False, q_len=3, heads=64, block_size=40, dtype="float16"),
    MlaCase(lens=(90, 40), window=(13, -1), q_len=3, heads=6),
    MlaCase(lens=(90, 40), window=(5, 2), causal=False, q_len=4, heads=6, dtype="float16"),
    MlaCase(lens=(90, 2, 0), causal=False, q_len=3, heads=6, dtype="float32"),
    MlaCase(lens=(90, 40), softcap=5.0, heads=16, dtype="float16"),
    MlaCase(lens=(90, 0, 40), sinks=True, heads=16),
    MlaCase(lens=(90, 40), scale=-0.07, heads=16, dtype="float16"),
    MlaCase(lens=(90, 40), scale=0.0, heads=16, dtype="float32"),
    MlaCase(lens=(90, 40), spread=40.0, heads=16, dtype="float16"),
    *(MlaCase(latent=n, rope=r, lens=(90, 40), heads=5, dtype=d) for n, r, d in (
        (16, 8, "float32"), (80, 0, "float16"), (256, 64, "bfloat16"), (336, 128, "float16"),
        (1024, 64, "bfloat16"), (640, 16, "float32"))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "backend", "case"), target_params(CASES, **TARGETS, ids=[str(c) for c in CASES])
)
def test_against_float64(device, backend, case, rng):
    if not mla_cases.serves(backend, case):
        with pytest.raises(NotImplementedError, match=f"backend '{backend}' cannot run this"):
            mla_cases.call(device, backend, case, mla_cases.make(case, rng))
        return
    mla_cases.assert_case(device, backend, case, rng, give_out=case.heads % 2 == 0)


# Each block raises the maximum, or none but the first does; all are equal; the last key is alone.
ORDERS = {
    "climbing": lambda n: np.linspace(0.0, 3.0, n),
    "falling": lambda n: np.linspace(3.0, 0.0, n),
    "equal": np.zeros,
    "last": lambda n: np.where(np.arange(n) == n - 1, 6.0, 0.0),
}


@pytest.mark.parametrize(
    ("device", "backend", "order"), target_params(list(ORDERS), **TARGETS, ids=list(ORDERS))
)
def test_maxima_that_move(device, backend, order, rng):
    length, size = 150, 16 if backend == "sm90" else 8
    case = MlaCase(dtype="float16", lens=(length,), block_size=size, heads=16)

    def reorder(arrays):
        cache, tables = arrays["cache"], arrays["block_tables"]
        for key, value in enumerate(ORDERS[order](length)):
            cache[tables[0, key // size], key % size] = np.float16(value / 8)
        arrays["q"][...] = np.abs(arrays["q"])

    mla_cases.assert_case(device, backend, case, rng, reorder=reorder)


@pytest.mark.parametrize(("device", "backend"), target_params(**TARGETS))
def test_batch_invariance_and_repeats(device, backend, rng):
    case = MlaCase(
        dtype="float16", lens=(600, 37, 1100), heads=8, options=(("batch_invariant", True),)
    )
    arrays = mla_cases.make(case, rng)
    out, lse = mla_cases.call(device, backend, case, arrays)
    again = mla_cases.call(device, backend, case, arrays)
    assert all((bits(a) == bits(b)).all() for a, b in zip((out, lse), again, strict=True))
    order = [2, 0]
    few = {n: a if n == "cache" else a[order] for n, a in arrays.items()}
    fewer = mla_cases.call(device, backend, case, few)
    for whole, part in zip((out, lse), fewer, strict=True):
        assert (bits(whole[order]) == bits(part)).all()


@pytest.mark.parametrize(("device", "backend"), target_params(cpu=("cpu",), cuda=("auto", "sm80")))
def test_listed_tokens(device, backend, rng):
    """Blocks of one token: the table lists tokens, in any order, one of them twice."""
    case = MlaCase(dtype="float16", heads=40, block_size=1, lens=(70, 0, 9, 33))
    arrays = mla_cases.make(case, rng)
    pages = rng.standard_normal((6, 32, 576), np.float32).astype(np.float16)
    arrays["cache"] = pages.reshape(192, 1, 576)
    tables = arrays["block_tables"]
    for b, count in enumerate(case.lens):
        tables[b, :count] = rng.permutation(192)[:count]
    tables[0, 5] = tables[0, 60]
    out, lse = mla_cases.call(device, backend, case, arrays)
    tokens = pages.reshape(192, 576).astype(np.float64)
    for b, count in enumerate(case.lens):
        keys = tokens[tables[b, :count]]
        weights = np.exp(arrays["q"][b].astype(np.float64) @ keys.T * case.scale)
        sums = weights.sum(-1, keepdims=True)
        want = np.divide(weights @ keys[:, :512], sums, out=np.zeros((40, 512)), where=sums > 0)
        assert abs(out[b] - want).max() < 4e-3 * max(1, abs(want).max())
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[b], np.log(sums[:, 0]), rtol=0, atol=2e-3)


def test_bits_do_not_depend_on_threads(rng, tmp_path):
    """The sums of a row have one order, whoever computes them."""
    import os
    import subprocess
    import sys

    case = MlaCase(dtype="bfloat16", lens=(3000, 37, 0), heads=16, q_len=2)
    arrays = mla_cases.make(case, rng)
    np.savez(tmp_path / "in.npz", **{n: a.view(np.uint8) for n, a in arrays.items()})
    program = (
        "import sys, numpy as np, ml_dtypes, cuattn\n"
        "a = dict(np.load('in.npz'))\n"
        "q, cache = (a[n].view(ml_dtypes.bfloat16) for n in ('q', 'cache'))\n"
        "t, n = (a[k].view(np.int32) for k in ('block_tables', 'context_lens'))\n"
        "out = cuattn.mla_decode(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], "
        "t, n, scale=0.07)\n"
        "sys.stdout.buffer.write(out.tobytes())\n"
    )
    outs = [
        subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, check=True,
            env={**os.environ, "CUATTN_NUM_THREADS": str(threads)},
        ).stdout
        for threads in (1, 3)
    ]  # fmt: skip
    assert len(outs[0]) == 3 * 2 * 16 * 512 * 2
    assert outs[0] == outs[1]


@pytest.mark.parametrize(("device", "backend"), target_params(**TARGETS))
def test_nothing_to_do(device, backend):
    for lens, heads in (((), 16), ((5, 9), 0)):
        case = MlaCase(dtype="float16", lens=lens, heads=heads)
        out, lse = mla_cases.call(
            device, backend, case, mla_cases.make(case, np.random.default_rng(0))
        )
        assert out.shape == (len(lens), heads, 512)
        assert lse.shape == (len(lens), heads)


def test_kernels_are_listed():
    listed = {(k["op"], k["kernel"]) for k in cuattn.kernels()}
    assert ("mla_decode", "cpu") in listed
    plan = cuattn.explain(
        "mla_decode", (128, 16, 512), (128, 16, 64), (8192, 64, 512), (8192, 64, 64), (128, 64),
        (128,), scale=mla_cases.SCALE, device="a100", dtype="bfloat16",
    )  # fmt: skip
    assert (plan.kernel, plan.tile_m, plan.head_dim) == ("sm80", 16, 512)
    assert plan.num_splits == 0
    assert plan.workspace_bytes > 0


@pytest.mark.parametrize(
    ("kernel", "change", "said"),
    [
        ("sm90", {}, "* sm90: runs: wgmma, 64 rows, half of the columns of O a warpgroup"),
        ("sm90", {"heads": 17, "dtype": "float16"}, "sm80: can: tensor cores"),
        ("sm90", {"heads": 1}, "sm80: can: tensor cores"),
        ("sm90", {"block_size": 24}, "sm80: can: tensor cores"),
        ("sm90", {"block_size": 1, "heads": 4}, "sm80: can: tensor cores"),
        ("sm80", {"latent": 256}, "sm90: cannot: it takes latents of 512 columns and 64 rope"),
        ("sm80", {"device": "a100"}, "sm90: cannot: it runs on compute capability 9.0 alone"),
        ("simt", {"dtype": "float32"}, "sm90: cannot: it takes float16 and bfloat16, not float32"),
    ],
)
def test_what_explain_says_of_sm90(kernel, change, said):
    x = {"heads": 128, "block_size": 64, "latent": 512, "device": "h100", "dtype": "bfloat16"}
    x |= change
    plan = cuattn.explain(
        "mla_decode", (8, x["heads"], x["latent"]), (8, x["heads"], 64),
        (100, x["block_size"], x["latent"]), (100, x["block_size"], 64), (8, 9), (8,), scale=1.0,
        device=x["device"], dtype=x["dtype"],
    )  # fmt: skip
    assert plan.kernel == kernel
    assert said in plan.ladder
