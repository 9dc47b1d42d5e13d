# SPDX-License-Identifier: Apache-2.0
"""reshape_and_cache of the newest tokens of sequences: what slots computed by numpy would give."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cuattn
import frameworks
import harness
from cache_cases import E4M3, F32, I32, I64, LAYOUTS, PAIRS, cache_shape, tables
from cases import DTYPES, normals
from harness import Arena, Cpu, bits

HEADS, DIM, BLOCK = 3, 32, 16


def make(rng, layout, dtype, cache_dtype, lens, q_len):
    """The arrays of a call by name, and the slots and places of its rows."""
    lens = np.asarray(lens, I32)
    columns = -(-max(int(lens.max(initial=0)), 1) // BLOCK) + 1
    blocks = len(lens) * columns
    wide = rng.permutation(blocks).astype(I32).reshape(len(lens), columns)
    used = -(-lens // BLOCK)[:, None] > np.arange(columns)
    garbage = rng.choice(np.array([-7, -1, blocks, 2**30, -(2**31)], I32), wide.shape)
    places = lens[:, None].astype(I64) + np.arange(-q_len, 0)
    held = places.clip(0)
    slots = np.take_along_axis(wide, held // BLOCK, 1) * BLOCK + held % BLOCK
    slots = np.where(places < 0, -1, slots).astype(I64)
    stored = E4M3 if cache_dtype == "float8_e4m3fn" else DTYPES[dtype]
    shapes = [
        cache_shape(layout, blocks, BLOCK, HEADS, DIM, stored, is_k) for is_k in (True, False)
    ]
    caches = [np.empty(s, stored) for s in shapes]
    k, v = (normals(rng, (slots.size, HEADS, DIM)).astype(DTYPES[dtype]) for _ in range(2))
    arrays = {"k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1]}
    newest = {"block_tables": np.where(used, wide, garbage), "context_lens": lens}
    return arrays, newest, slots.ravel(), places.ravel()


def write(device, arrays, **options):
    """The bytes of both caches, which begin as 0xFF, after the call."""
    arena = Arena(device)
    placed = {name: arena.put(x, name=name) for name, x in arrays.items() if "cache" not in name}
    for name in ("k_cache", "v_cache"):
        placed[name] = arena.output(arrays[name].shape, arrays[name].dtype, name=name)
    for name, x in options.items():
        storage = "padded" if name == "block_tables" else "contiguous"
        placed[name] = arena.put(x, storage, name) if isinstance(x, np.ndarray) else x
    cuattn.reshape_and_cache(**placed)
    device.synchronize()
    arena.verify()
    return [bits(device.numpy(placed[name])) for name in ("k_cache", "v_cache")]


def assert_alike(device, arrays, newest, others):
    for got, want in zip(
        write(device, arrays, **newest), write(device, arrays, **others), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize("dtype_pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_newest_tokens_go_where_their_slots_say(device, layout, dtype_pair, q_len, rng):
    lens = [*rng.integers(0, 90, 6), 0, 1, 3, BLOCK, BLOCK + 1]
    arrays, newest, slots, _ = make(rng, layout, *dtype_pair, lens, q_len)
    options = {"kv_layout": layout}
    assert_alike(device, arrays, {**newest, **options}, {"slot_mapping": slots, **options})


@pytest.mark.parametrize("seqs", [70, 400])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_newest_tokens_of_a_large_call(device, layout, seqs, rng):
    lens = rng.integers(0, 60, seqs)
    arrays, newest, slots, places = make(rng, layout, "float16", None, lens, 29)
    options = {"kv_layout": layout, **tables(rng, DIM // 2, rows=64)}
    others = {"slot_mapping": slots, "positions": places.clip(0), **options}
    assert_alike(device, arrays, {**newest, **options}, others)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype_pair", PAIRS, ids="-".join)
def test_newest_keys_are_rotated_by_their_places(device, dtype_pair, interleaved, rng):
    arrays, newest, slots, places = make(rng, "nhd", *dtype_pair, rng.integers(0, 90, 9), 4)
    options = {**tables(rng, DIM // 4, rows=95), "rope_interleaved": interleaved}
    others = {"slot_mapping": slots, "positions": places.clip(0), **options}
    assert_alike(device, arrays, {**newest, **options}, others)
    given = {**options, "positions": rng.integers(0, 95, slots.size)}
    assert_alike(device, arrays, {**newest, **given}, {"slot_mapping": slots, **given})


@pytest.mark.parametrize("kind", ["ropes", "latents", "packed"])
def test_newest_latents_go_where_their_slots_say(device, kind, rng):
    dtype = "bfloat16" if kind == "packed" else "float16"
    lens, latent, columns = rng.integers(0, 90, 7), 512, 64
    _, newest, slots, places = make(rng, "nhd", dtype, None, lens, 3)
    blocks = newest["block_tables"].size
    rows = [normals(rng, (slots.size, n)).astype(DTYPES[dtype]) for n in (latent, columns)]
    shapes = [(blocks, BLOCK, n) for n in (latent, columns)]
    options, others = {}, {}
    if kind == "ropes":
        options = {**tables(rng, columns // 2, rows=95), "rope_interleaved": False}
        others = {"positions": places.clip(0)}

    def write_latents(**given):
        arena = Arena(device)
        caches = [arena.output(shape, DTYPES[dtype]) for shape in shapes]
        placed = [arena.put(x) for x in rows]
        if kind == "packed":
            caches = [arena.output((blocks, BLOCK, 656), np.uint8), None]
        if kind == "latents":
            placed[1] = caches[1] = None
        named = {n: arena.put(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}
        cuattn.mla_write(placed[0], placed[1], caches[0], caches[1], **named)
        device.synchronize()
        arena.verify()
        return [bits(device.numpy(x)) for x in caches if x is not None]

    found = write_latents(**newest, **options)
    for got, want in zip(
        found, write_latents(slot_mapping=slots, **options, **others), strict=True
    ):
        np.testing.assert_array_equal(got, want)


def test_nothing_is_new(device, rng):
    arrays, newest, _, _ = make(rng, "nhd", "float32", None, [0, 3], 1)
    empty = {**arrays, "k": arrays["k"][:0], "v": arrays["v"][:0]}
    nobody = {name: x[:0] for name, x in newest.items()}
    for found in (write(device, empty, **newest), write(device, empty, **nobody)):
        assert all((x.view(np.uint8) == 0xFF).all() for x in found)


TABLES = np.array([[0, 1], [2, 3]], I32)
# Changes to a call with 2 tokens of each of 2 sequences, and the message. Of contents only the CPU
# is asked.
REFUSED = {
    "both": ({"slot_mapping": np.zeros(4, I64)},
             "slot_mapping must be given, or block_tables and context_lens without it, got "
             "slot_mapping and 2 of these; pass one of the two"),
    "neither": ({"block_tables": None, "context_lens": None},
                "slot_mapping must be given, or block_tables and context_lens without it, got no "
                "slot_mapping and 0 of these; pass one of the two"),
    "one": ({"context_lens": None},
            "slot_mapping must be given, or block_tables and context_lens without it, got no "
            "slot_mapping and 1 of these; pass one of the two"),
    "rows": ({"block_tables": np.zeros((3, 2), I32), "context_lens": np.ones(3, I32)},
             "k must have as many rows of each of the 3 sequences of block_tables, got 4; give "
             "each its q_len newest tokens, or pass slot_mapping"),
    "lens_shape": ({"context_lens": np.ones(3, I32)}, "context_lens must have shape"),
    "lens_dtype": ({"context_lens": np.ones(2, I64)}, "context_lens must be int32"),
    "tables_dtype": ({"block_tables": TABLES.astype(I64)}, "block_tables must be int32"),
    "cos": ({"cos": np.ones((19, 4), F32)},
            "cos and sin must be given together, got one of them; pass both to rotate k by the "
            "places of its tokens, or none"),
}  # fmt: skip
CONTENTS = {
    "lens": ({"context_lens": np.array([2, 33], I32)},
             "context_lens must be from 0 to 32, the tokens of block_tables, got 33 for sequence "
             "1; give the sequence more blocks"),
    "negative": ({"context_lens": np.array([-1, 3], I32)}, "context_lens must be from 0 to 32"),
    "block": ({"block_tables": np.array([[0, 1], [2, 9]], I32)},
              "block_tables must hold block ids within [0, 4), got 9 at (1, 1); new tokens go "
              "there"),
    "places": ({"cos": np.ones((19, 4), F32), "sin": np.ones((19, 4), F32)},
               "cos must have a row for each place, got 19 for place 19 of sequence 1; make it "
               "longer, or give positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(device, name):
    assert_refused(device, *REFUSED[name])


@pytest.mark.parametrize("name", CONTENTS)
def test_bad_contents_are_refused_on_the_cpu(name):
    assert_refused(Cpu(), *CONTENTS[name])


def assert_refused(device, changes, message):
    caches = [np.zeros((4, 16, 2, 16), F32) for _ in range(2)]
    rows = [np.ones((4, 2, 16), F32) for _ in range(2)]
    arrays = {"k": rows[0], "v": rows[1], "k_cache": caches[0], "v_cache": caches[1]}
    good = {"block_tables": TABLES, "context_lens": np.array([2, 20], I32)}
    with pytest.raises(ValueError, match=re.escape(f"reshape_and_cache: {message}")):
        write(device, arrays, **{**good, **changes})
    found = write(device, arrays, **good)
    assert all((x.view(np.uint8) != 0xFF).any() for x in found)


def test_jax_arrays_are_refused(rng):
    jax = frameworks.require("jax")
    arrays, newest, _, _ = make(rng, "nhd", "float32", None, [3], 1)
    placed = {name: jax.numpy.asarray(x) for name, x in {**arrays, **newest}.items()}
    message = "block_tables and context_lens must be None for JAX arrays"
    with pytest.raises(NotImplementedError, match=f"reshape_and_cache: {message}"):
        cuattn.reshape_and_cache(**placed)
    slots = {"slot_mapping": jax.numpy.zeros(1, int)}
    with pytest.raises(NotImplementedError, match=f"reshape_and_cache: {message}"):
        cuattn.reshape_and_cache(**placed, **slots)
    row, cache = jax.numpy.zeros((1, 16)), jax.numpy.zeros((2, 4, 16))
    with pytest.raises(NotImplementedError, match=f"mla_write: {message}"):
        cuattn.mla_write(row, row, cache, cache, block_tables=placed["block_tables"])


@pytest.mark.parametrize("device", harness.devices()[1:], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_without_a_place_are_skipped_on_cuda(device, layout, rng):
    """Lengths beyond the table, and blocks that are none: what the host does not look at."""
    arrays, newest, slots, _ = make(rng, layout, "float16", None, [40, 20, 33, 17, 5], 2)
    blocks, lens = newest["block_tables"], newest["context_lens"]
    blocks[0, 2], blocks[1, 1], lens[2], lens[3] = -1, 2**30, 10**6, -5
    slots[:8] = -1
    options = {"kv_layout": layout}
    assert_alike(device, arrays, {**newest, **options}, {"slot_mapping": slots, **options})
