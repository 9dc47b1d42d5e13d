# SPDX-License-Identifier: Apache-2.0
"""Cases of mla_decode: random inputs with poison in all that must not matter, and how a call is run
and judged. Next: mla/test_mla_decode.py.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

import cases
import cuattn
import harness
import reference

CUDA_BACKENDS = ("auto", "sm90", "sm80", "simt")
JUNK = (0, -1, 2147480000, 2**31 - 1, -(2**31), -123456)  # in tables past the context
SCALE = 192**-0.5
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def packed(ckv, kpe):
    """Plain numpy: rows of [512 codes | 4 scales | 64 of bfloat16] as bytes."""
    parts = ckv.astype(np.float32).reshape(-1, 4, 128)
    scales = np.fmax.reduce(abs(parts), -1) / np.float32(448)
    scales = np.where(scales >= np.float32(2.0**-126), scales, np.float32(1))
    codes = (parts / scales[..., None]).astype(E4M3)
    rows = np.zeros((len(ckv), 656), np.uint8)
    rows[:, :512] = codes.reshape(-1, 512).view(np.uint8)
    rows[:, 512:528] = scales.view(np.uint8).reshape(-1, 16)
    rows[:, 528:] = kpe.view(np.uint8).reshape(-1, 128)
    return rows


def unpacked(cache):
    """What a packed cache says, as a bfloat16 cache of 576 columns."""
    flat = np.ascontiguousarray(cache).reshape(-1, 656)
    codes = flat[:, :512].copy().view(E4M3).astype(np.float32).reshape(-1, 4, 128)
    scales = flat[:, 512:528].copy().view(np.float32)
    latents = (codes * scales[..., None]).reshape(-1, 512).astype(BF16)
    whole = np.concatenate([latents, flat[:, 528:].copy().view(BF16)], -1)
    return whole.reshape(*cache.shape[:-1], 576)


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """One call; the data comes from a seed."""

    dtype: str = "bfloat16"
    latent: int = 512
    rope: int = 64
    heads: int = 16
    q_len: int | None = None  # None: decode, without an axis of queries
    block_size: int = 64
    lens: tuple = (37, 1, 0, 130)
    joined: bool = True  # one cache [..., latent + rope]
    causal: bool = True
    window: tuple = (-1, -1)
    softcap: float = 0.0
    sinks: bool = False
    scale: float = SCALE
    spread: float = 1.0  # of q
    options: tuple = ()  # more keywords, as pairs

    def __str__(self):
        changed = (
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return ",".join(changed) or "default"


def make(case, rng):
    """Random inputs by name, with NaN in every slot that no sequence owns."""
    dtype, size = cases.DTYPES[case.dtype], case.block_size
    blocks_of = [-(-n // size) for n in case.lens]
    num_blocks = sum(blocks_of) + 3
    ids = rng.permutation(num_blocks).astype(np.int32)
    width = max(blocks_of, default=0) + 2
    tables = rng.choice(np.array(JUNK, np.int64), (len(case.lens), width)).astype(np.int32)
    used = np.zeros((num_blocks, size), bool)
    for b, (count, length) in enumerate(zip(blocks_of, case.lens, strict=True)):
        mine, ids = ids[:count], ids[count:]
        tables[b, :count] = mine
        for i, block in enumerate(mine):
            used[block, : min(size, length - i * size)] = True
    columns = case.latent + case.rope
    cache = rng.standard_normal((num_blocks, size, columns), np.float32)
    cache = np.where(used[:, :, None], cache, np.nan).astype(dtype)
    shape = (len(case.lens), *([] if case.q_len is None else [case.q_len]), case.heads, columns)
    q = (rng.standard_normal(shape, np.float32) * case.spread).astype(dtype)
    arrays = {"q": q, "cache": cache, "block_tables": tables,
              "context_lens": np.array(case.lens, np.int32)}  # fmt: skip
    if case.sinks:
        arrays["sinks"] = rng.standard_normal(case.heads).astype(np.float32)
    return arrays


def expected(case, arrays, rounded_to=None):
    """Out and lse of the oracle, or of the plain formula in a dtype: keys of 576, values of 512."""
    cache = arrays["cache"][:, :, None]
    return reference.paged_attention(
        arrays["q"], cache, cache[..., : case.latent], arrays["block_tables"],
        arrays["context_lens"], causal=case.causal, window=case.window, softcap=case.softcap,
        sinks=arrays.get("sinks"), scale=case.scale, rounded_to=rounded_to,
    )  # fmt: skip


def call(device, backend, case, arrays, give_out=False, **more):
    """Call mla_decode; out and lse as numpy arrays, every buffer checked."""
    arena, latent = harness.Arena(device), case.latent
    placed = {}
    for name, whole in (("q", arrays["q"]), ("cache", arrays["cache"])):
        if case.joined:
            view = arena.put(whole, name=name)
            placed[name] = view[..., :latent], view[..., latent:]
        else:
            placed[name] = (
                arena.put(whole[..., :latent], "padded", name),
                arena.put(whole[..., latent:], "padded", name + " rope"),
            )
    if case.rope == 0:
        placed = {name: (parts[0], None) for name, parts in placed.items()}
    tables, lens = (arena.put(arrays[n], name=n, align=4) for n in ("block_tables", "context_lens"))
    options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    if case.sinks:
        options["sinks"] = arena.put(arrays["sinks"], name="sinks", align=4)
    if give_out:
        shape = (*arrays["q"].shape[:-1], latent)
        lse_shape = (shape[0], shape[-2], *shape[1:-2])
        options["out"] = arena.output(shape, arrays["q"].dtype, "padded", "out")
        options["lse_out"] = arena.output(lse_shape, np.float32, "contiguous", "lse_out", align=4)
    out, lse = cuattn.mla_decode(
        *placed["q"], *placed["cache"], tables, lens, scale=case.scale, return_lse=True,
        backend=backend, **options, **dict(case.options), **more,
    )  # fmt: skip
    device.synchronize()
    assert not give_out or (out is options["out"] and lse is options["lse_out"])
    assert device.is_array(out)
    arena.verify()
    return device.numpy(out), device.numpy(lse)


def serves(backend, case):
    """Whether a rung takes a case; "auto", "simt" and "cpu" take all."""
    if backend == "sm90":
        fits = (case.latent, case.rope) == (512, 64)
        return case.dtype != "float32" and fits
    return backend != "sm80" or (case.dtype != "float32" and case.latent <= 512 and case.rope <= 64)


def assert_case(device, backend, case, rng, give_out=False, reorder=None):
    """The library against the oracle for one case."""

    def attempt():
        arrays = make(case, rng)
        if reorder is not None:
            reorder(arrays)
        out, lse = call(device, backend, case, arrays, give_out)
        want, want_lse = expected(case, arrays)
        plain, plain_lse = expected(case, arrays, cases.DTYPES[case.dtype])
        cases.check_lse(lse, want_lse, plain_lse)
        cases.check(out, want, plain, case.dtype)

    # Few rows: of 16 bits too, chance alone puts a draw a little beyond twice the plain error.
    harness.assert_by_draws(case.dtype, attempt, small=2)
