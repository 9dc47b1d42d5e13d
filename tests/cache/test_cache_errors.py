# SPDX-License-Identifier: Apache-2.0
"""Refusals of the cache operations, word for word; afterwards nothing was written."""

from __future__ import annotations

import re

import numpy as np
import pytest

import cuattn
import dlpack
from cache_cases import E4M3, cache_shape
from harness import Arena, Cpu
from refusals import COPY, F32, I32

I64 = np.int64
ARRAY = "must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__)"


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


def writing(layout="nhd", cache_dtype=F32):
    """Arguments of a good call of reshape_and_cache: 5 tokens, 2 heads of 16, 3 blocks of 8."""
    k_shape, v_shape = (cache_shape(layout, 3, 8, 2, 16, cache_dtype, x) for x in (True, False))
    return {
        "k": ones(5, 2, 16),
        "v": ones(5, 2, 16),
        "k_cache": np.zeros(k_shape, cache_dtype),
        "v_cache": np.zeros(v_shape, cache_dtype),
        "slot_mapping": np.arange(5, dtype=I64),
        "kv_layout": layout,
    }


def rope(half=8, rows=9):
    return {
        "cos": ones(rows, half),
        "sin": ones(rows, half),
        "positions": np.zeros(5, I64),
    }


def gathering():
    """Sequences of 3 and 9 tokens, 2 heads of 16, 3 blocks of 8."""
    return {
        "k_cache": ones(3, 8, 2, 16),
        "v_cache": ones(3, 8, 2, 16),
        "block_tables": np.zeros((2, 2), I32),
        "cu_seqlens": np.array([0, 3, 12], I32),
        "k_out": np.zeros((12, 2, 16), F32),
        "v_out": np.zeros((12, 2, 16), F32),
    }


def copying():
    return {
        "k_caches": [ones(6, 4, 2, 8), ones(6, 4, 2, 8)],
        "v_caches": [ones(6, 4, 2, 8), ones(6, 4, 2, 8)],
        "block_mapping": np.array([[0, 3], [0, 4], [1, 5]], I64),
    }


def swapping():
    return {
        "src": [ones(6, 4, 2, 8), ones(6, 4, 2, 8)],
        "dst": [np.zeros((4, 4, 2, 8), F32), np.zeros((4, 4, 2, 8), F32)],
        "block_mapping": np.array([[5, 0], [4, 1]], I64),
    }


HOST = ("block_mapping", "src_host")  # stay numpy arrays on every device


def place(arena, name, value):
    if name in HOST:
        return value
    if isinstance(value, list):
        return [place(arena, name, x) for x in value]
    return arena.put(value, name=name) if isinstance(value, np.ndarray) else value


def check(device, function, arguments, changes, exception, message, keep=()):
    """The call raises exactly this and changes nothing (Arena.verify holds every array)."""
    arena = Arena(device)
    placed = {name: place(arena, name, value) for name, value in arguments.items()}
    for name, value in changes.items():
        placed[name] = value if name in keep else place(arena, name, value)
    with pytest.raises(exception) as caught:
        getattr(cuattn, function)(**placed)
    assert str(caught.value) == f"{function}: {message}"
    assert type(caught.value) is exception
    device.synchronize()
    arena.verify()
    good = Arena(device)
    placed = {}
    for name, value in arguments.items():
        placed[name] = place(good, name, value)
    getattr(cuattn, function)(**placed)
    device.synchronize()


# fmt: off
# Changes to the good call, exception, message.
WRITE = {
    "k_rank": ({"k": ones(5, 32)}, ValueError,
        "k must have 3 axes [num_tokens, num_heads_kv, head_dim], got 2 with shape (5, 32); "
        "reshape it"),
    "k_dtype": ({"k": ones(5, 2, 16, dtype=np.float64)}, ValueError,
        "k must be float32, float16 or bfloat16, got float64; cast it first"),
    "v_dtype": ({"v": ones(5, 2, 16, dtype=np.float16)}, ValueError,
        "v must be float32 like k, got float16; cast it"),
    "cache_dtype": ({"k_cache": ones(3, 8, 2, 16, dtype=np.float16)}, ValueError,
        "k_cache must be float32 like k, or float8_e4m3fn, got float16; cast k and v to it first"),
    "cache_of_integers": ({"k_cache": ones(3, 8, 2, 16, dtype=I32)}, ValueError,
        "k_cache must be float32, float16, bfloat16 or float8_e4m3fn (or uint8, as its bytes), "
        "got int32; view it as one of these"),
    "v_cache_dtype": ({"v_cache": ones(3, 8, 2, 16, dtype=np.float16)}, ValueError,
        "v_cache must be float32 like k_cache, got float16; cast it"),
    "tokens": ({"v": ones(4, 2, 16)}, ValueError,
        "v must have num_tokens 5 like k, got 4; make them equal"),
    "heads_of_k_cache": ({"k_cache": ones(3, 8, 4, 16)}, ValueError,
        "v_cache must have num_heads_kv 4 like k_cache, got 2; make them equal"),
    "heads_of_k": ({"k": ones(5, 4, 16)}, ValueError,
        "k_cache must have num_heads_kv 4 like k, got 2; make them equal"),
    "heads_of_v": ({"v": ones(5, 4, 16)}, ValueError,
        "v must have num_heads_kv 2 like k, got 4; make them equal"),
    "head_dim": ({"k": ones(5, 2, 32)}, ValueError,
        "k_cache must have head_dim 32 like k, got 16; make them equal"),
    "head_dim_step": ({"k": ones(5, 2, 12), "k_cache": ones(3, 8, 2, 12)}, ValueError,
        "k_cache must have head_dim a multiple of 8 up to 1024, got 12; pad it with zeros"),
    "head_dim_of_v": ({"v_cache": ones(3, 8, 2, 32)}, ValueError,
        "v_cache must have head_dim 16 like v, got 32; make them equal"),
    "blocks": ({"v_cache": ones(4, 8, 2, 16)}, ValueError,
        "v_cache must have num_blocks 3 like k_cache, got 4; make them equal"),
    "block_size": ({"v_cache": ones(3, 4, 2, 16)}, ValueError,
        "v_cache must have block_size 8 like k_cache, got 4; make them equal"),
    "block_size_limit": ({"k_cache": ones(1, 257, 2, 16)}, ValueError,
        "k_cache must have block_size from 1 to 256, got 257; cut the cache into blocks of such a "
        "size"),
    "cache_rank": ({"k_cache": ones(3, 8, 32)}, ValueError,
        "k_cache must have 4 axes [num_blocks, block_size, num_heads_kv, head_dim], got 3 with "
        "shape (3, 8, 32); reshape it"),
    "slots_shape": ({"slot_mapping": np.arange(4, dtype=I64)}, ValueError,
        "slot_mapping must have shape (num_tokens,) = (5,), got (4,); give one entry for each"),
    "slots_int32": ({"slot_mapping": np.arange(5, dtype=I32)}, ValueError,
        "slot_mapping must be int64, got int32; cast it"),
    "kv_layout": ({"kv_layout": "bshd"}, ValueError,
        "kv_layout must be 'nhd', 'hnd' or 'vllm', got 'bshd'; choose one of these"),
    "kv_layout_type": ({"kv_layout": 1}, TypeError,
        "kv_layout must be a string, got 1; pass a str"),
    "scale_without_e4m3": ({"k_scale": 2.0}, ValueError,
        "k_scale belongs to a float8_e4m3fn cache, got one of float32; leave it out"),
    "half_a_rope": ({"cos": ones(9, 8), "sin": ones(9, 8)}, ValueError,
        "cos, sin and positions must be given together, got 2 of them; pass all three to rotate "
        "k, or none"),
    "interleaved_without_rope": ({"rope_interleaved": True}, ValueError,
        "rope_interleaved must be False without cos and sin, got True; pass them too"),
    "rope_too_wide": (rope(half=9), ValueError,
        "cos must have rotary_dim / 2 from 1 to head_dim / 2 = 8, got 9; only the first "
        "rotary_dim elements are rotated"),
    "rope_rows": ({**rope(), "sin": ones(8, 8)}, ValueError,
        "sin must have max_position 9 like cos, got 8; make them equal"),
    "rope_empty": (rope(rows=0), ValueError,
        "cos must have at least one row, got 0; give one for each position"),
    "rope_dtype": ({**rope(), "cos": ones(9, 8, dtype=np.float16)}, ValueError,
        "cos must be float32, got float16; cast it"),
    "positions_int32": ({**rope(), "positions": np.zeros(5, I32)}, ValueError,
        "positions must be int64, got int32; cast it"),
    "positions_shape": ({**rope(), "positions": np.zeros(6, I64)}, ValueError,
        "positions must have shape (num_tokens,) = (5,), got (6,); give one entry for each"),
    "not_an_array": ({"slot_mapping": [0, 1, 2, 3, 4]}, TypeError,
        f"slot_mapping {ARRAY}, got list; convert it first"),
}
WRITE_E4M3 = {
    "scale_zero": ({"k_scale": 0.0}, ValueError,
        "k_scale must be positive and finite in float32, as 1 / k_scale, got 0; value = stored * "
        "scale"),
    "scale_without_inverse": ({"k_scale": 1e-40}, ValueError,
        "k_scale must be positive and finite in float32, as 1 / k_scale, got 1e-40; value = stored "
        "* scale"),
    "scales_zero": ({"v_scale": np.array([1, 0], np.float32)}, ValueError,
        "v_scale must be positive and finite in float32, as 1 / v_scale, got 0; value = stored * "
        "scale"),
    "scales_nan": ({"k_scale": np.array([np.nan, 1], np.float32)}, ValueError,
        "k_scale must be positive and finite in float32, as 1 / k_scale, got nan; value = stored * "
        "scale"),
    "scale_nan": ({"v_scale": float("nan")}, ValueError,
        "v_scale must be positive and finite in float32, as 1 / v_scale, got nan; value = stored * "
        "scale"),
    "scale_shape": ({"v_scale": ones(3)}, ValueError,
        "v_scale must have shape (num_heads_kv,) = (2,) or one element, got (3,); give one scale "
        "for each head"),
    "scale_dtype": ({"v_scale": ones(2, dtype=np.float64)}, ValueError,
        "v_scale must be float32, got float64; cast it"),
    "head_dim_step": (
        {"k": ones(5, 2, 24), "k_cache": ones(3, 8, 2, 24, dtype=E4M3)}, ValueError,
        "k_cache must have head_dim a multiple of 16 up to 1024 (float8_e4m3fn), got 24; pad it "
        "with zeros"),
}
WRITE_VLLM = {
    "x": ({"k_cache": ones(3, 2, 2, 8, 8)}, ValueError,
        "k_cache must have x = 4 (16 bytes) as its last axis in kv_layout 'vllm', got 8; view it "
        "as [num_blocks, num_heads_kv, head_dim / x, block_size, x]"),
    "block_size": ({"k_cache": ones(3, 2, 4, 12, 4)}, ValueError,
        "k_cache must have block_size 8, 16 or 32 in kv_layout 'vllm', got 12; use 'nhd' or 'hnd' "
        "for others"),
    "v_rank": ({"v_cache": ones(3, 2, 4, 8, 4)}, ValueError,
        "v_cache must have 4 axes [num_blocks, num_heads_kv, head_dim, block_size], got 5 with "
        "shape (3, 2, 4, 8, 4); reshape it"),
}
# Rules about values, which on CUDA only the device sees.
WRITE_CPU = {
    "slot_out_of_range": ({"slot_mapping": np.array([0, 24, 2, 3, 4])}, ValueError,
        "slot_mapping must lie within [-1, 24), got 24 at index 1; a slot is block * block_size + "
        "token, -1 skips"),
    "slot_below": ({"slot_mapping": np.array([0, 1, 2, 3, -2])}, ValueError,
        "slot_mapping must lie within [-1, 24), got -2 at index 4; a slot is block * block_size + "
        "token, -1 skips"),
    "position_out_of_range": ({**rope(), "positions": np.array([0, 1, 9, 3, 4])}, ValueError,
        "positions must lie within [0, 9), got 9 at index 2; cos and sin have that many rows"),
    "position_below": ({**rope(), "positions": np.array([-1, 1, 8, 3, 4])}, ValueError,
        "positions must lie within [0, 9), got -1 at index 0; cos and sin have that many rows"),
    "misaligned_k": (
        {"k": np.ndarray((5, 2, 16), F32, bytearray(2000), offset=1)}, ValueError,
        f"k must be aligned to its elements of 4 bytes; {COPY}"),
    "negative_strides": ({"k": ones(5, 2, 16)[::-1]}, ValueError,
        f"k must not have negative strides, got (-32, 16, 1); {COPY}"),
    "stream": ({"stream": 1}, ValueError,
        "stream must be None for arrays on the CPU, which run at once; leave it out"),
}
GATHER = {
    "rank": ({"k_cache": ones(3, 8, 32)}, ValueError,
        "k_cache must have 4 axes in kv_layout 'nhd', got 3; reshape it"),
    "out_dtype": ({"k_out": ones(12, 2, 16, dtype=np.float16)}, ValueError,
        "k_out must be float32 like k_cache, got float16; cast it"),
    "out_heads": ({"v_out": ones(12, 1, 16)}, ValueError,
        "v_out must have num_heads_kv 2 like v_cache, got 1; make them equal"),
    "out_rows": ({"v_out": ones(11, 2, 16)}, ValueError,
        "v_out must have num_tokens 12 like k_out, got 11; make them equal"),
    "out_head_dim": ({"k_out": ones(12, 2, 24)}, ValueError,
        "k_out must have head_dim 16 like k_cache, got 24; make them equal"),
    "tables_dtype": ({"block_tables": np.zeros((2, 2), I64)}, ValueError,
        "block_tables must be int32, got int64; cast it, "
        "by x.astype('int32') or torch's x.int()"),
    "tables_rank": ({"block_tables": np.zeros(2, I32)}, ValueError,
        "block_tables must have 2 axes [num_seqs, max_blocks_per_seq], got 1 with shape (2,); "
        "reshape it"),
    "lengths_shape": ({"cu_seqlens": np.zeros(2, I32)}, ValueError,
        "cu_seqlens must have shape (num_seqs + 1,) = (3,), got (2,); give one entry for each"),
    "lengths_dtype": ({"cu_seqlens": np.zeros(3, I64)}, ValueError,
        "cu_seqlens must be int32, got int64; cast it, "
        "by x.astype('int32') or torch's x.int()"),
    "no_blocks": ({"k_cache": ones(0, 8, 2, 16), "v_cache": ones(0, 8, 2, 16),
                   "cu_seqlens": np.zeros(3, I32)}, ValueError,
        "k_cache and block_tables must hold a block, got 0 and 2 columns; nothing can be gathered "
        "from none"),
}
GATHER_CPU = {
    "block_out_of_range": ({"block_tables": np.array([[0, 9], [1, 3]], I32)}, ValueError,
        "block_tables must name blocks in [0, 3), got 3 at (1, 1); entries past the sequence may "
        "hold anything"),
    "block_negative": ({"block_tables": np.array([[-1, 9], [1, 2]], I32)}, ValueError,
        "block_tables must name blocks in [0, 3), got -1 at (0, 0); entries past the sequence may "
        "hold anything"),
    "narrow_table": ({"block_tables": np.array([[0], [1]], I32)}, ValueError,
        "block_tables must have room for every sequence, got a length of 9 for sequence 1 with 1 "
        "blocks of 8; widen the table"),
    "lengths_start": ({"cu_seqlens": np.array([1, 3, 12], I32)}, ValueError,
        "cu_seqlens must start at 0, got 1; element i is where sequence i begins"),
    "lengths_decrease": ({"cu_seqlens": np.array([0, 3, 2], I32)}, ValueError,
        "cu_seqlens must not decrease, got 2 after 3 at index 2; pass the running sum of the "
        "sequence lengths"),
    "rows_missing": ({"cu_seqlens": np.array([0, 3, 13], I32)}, ValueError,
        "cu_seqlens must end within the rows of k_out, got 13 with 12 rows; allocate "
        "[cu_seqlens[-1], num_heads_kv, head_dim]"),
}
MAPPINGS = {
    "source": ([[6, 1]], "block_mapping must name source blocks in [0, 6), got 6 in pair 0; a row "
        "is (source, destination)"),
    "source_below": ([[1, 2], [-1, 3]], "block_mapping must name source blocks in [0, 6), got -1 "
        "in pair 1; a row is (source, destination)"),
    "destination": ([[0, 17]], "block_mapping must name destination blocks in [0, {blocks}), got "
        "17 in pair 0; a row is (source, destination)"),
    "twice": ([[0, 3], [1, 2], [4, 3]], "block_mapping must name each destination once, got 3 in "
        "pairs 0 and 2; all pairs are copied at once"),
}
# fmt: on


@pytest.mark.parametrize("name", WRITE)
def test_writing_is_refused(device, name):
    check(device, "reshape_and_cache", writing(), *WRITE[name])


@pytest.mark.parametrize("name", WRITE_E4M3)
def test_quantising_is_refused(device, name):
    if name in ("scales_zero", "scales_nan") and device.name != "cpu":
        return pytest.skip("arrays of CUDA are read under CUATTN_CHECK=1: test_cache_cuda.py")
    check(device, "reshape_and_cache", writing(cache_dtype=E4M3), *WRITE_E4M3[name])


@pytest.mark.parametrize("name", WRITE_VLLM)
def test_writing_the_vllm_layout_is_refused(device, name):
    check(device, "reshape_and_cache", writing("vllm"), *WRITE_VLLM[name])


@pytest.mark.parametrize("name", WRITE_CPU)
def test_bad_values_are_refused_on_the_cpu(name):
    changes, exception, message = WRITE_CPU[name]
    check(Cpu(), "reshape_and_cache", writing(), changes, exception, message, keep=changes)


@pytest.mark.parametrize("name", GATHER)
def test_gathering_is_refused(device, name):
    check(device, "gather_cache", gathering(), *GATHER[name])


@pytest.mark.parametrize("name", GATHER_CPU)
def test_bad_tables_are_refused_on_the_cpu(name):
    check(Cpu(), "gather_cache", gathering(), *GATHER_CPU[name])


@pytest.mark.parametrize("function", ["copy_blocks", "swap_blocks"])
@pytest.mark.parametrize("name", MAPPINGS)
def test_bad_mappings_are_refused(device, name, function):
    """A mapping on the host is checked on every device."""
    pairs, message = MAPPINGS[name]
    arguments = copying() if function == "copy_blocks" else swapping()
    message = message.format(blocks=6 if function == "copy_blocks" else 4)
    changes = {"block_mapping": np.array(pairs, I64)}
    check(device, function, arguments, changes, ValueError, message)


def test_copying_from_a_destination_is_refused(device):
    """All pairs are copied at once, so what the second would read is not said."""
    changes = {"block_mapping": np.array([[0, 3], [3, 4]], I64)}
    message = (
        "block_mapping must not copy from a destination, got 3 as source of pair 1 and destination "
        "of pair 0; all pairs are copied at once: make two calls"
    )
    check(device, "copy_blocks", copying(), changes, ValueError, message)
    # Between two arrays the same rows are fine.
    arena = Arena(device)
    target = arena.output((5, 4, 2, 8), F32)
    cuattn.swap_blocks(arena.put(ones(6, 4, 2, 8)), target, changes["block_mapping"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_mapping": np.zeros((3, 3), I64)},
            "block_mapping must have shape (n, 2), got (3, 3); a row is (source, destination)",
        ),
        (
            {"block_mapping": np.zeros((3, 2), I32)},
            "block_mapping must be int64, got int32; cast it",
        ),
        (
            {"block_mapping": np.zeros((2, 3), I64).T},
            f"block_mapping must be contiguous, got strides (1, 3); {COPY}",
        ),
        (
            {"v_caches": [ones(6, 4, 2, 8)]},
            "v_caches must have one cache for each of k_caches (2), or none, got 1; pass the "
            "layers of both",
        ),
        (
            {"v_caches": [ones(5, 4, 2, 8), ones(5, 4, 2, 8)]},
            "v_caches[0] must have num_blocks 6 like k_caches[0], got 5; make them equal",
        ),
        (
            {"k_caches": [ones(6, 4, 2, 8), ones(6, 4, 2, 16)]},
            "k_caches[1] must have shape, strides and dtype of k_caches[0] (6, 4, 2, 8) float32, "
            "got (6, 4, 2, 16) float32; copy other caches by another call",
        ),
        (
            {"k_caches": [ones(6), ones(6)]},
            "k_caches[0] must have blocks on the first of 2 to 6 axes, got shape (6,); "
            "pass a cache",
        ),
    ],
)
def test_copying_is_refused(device, changes, message):
    check(device, "copy_blocks", copying(), changes, ValueError, message)


def test_blocks_must_be_contiguous(device):
    arena = Arena(device)
    cache = arena.put(ones(6, 4, 2, 8))
    views = [cache[:, :, :, ::2], cache[:, ::2]]
    for view in views:
        with pytest.raises(ValueError, match=r"^copy_blocks: k_caches\[0\] must have contiguous "):
            cuattn.copy_blocks(view, None, np.array([[0, 1]], I64))
    arena.verify()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dst": [np.zeros((4, 4, 2, 8), F32)]},
            "dst must have one cache for each of src (2), got 1; pass the same layers",
        ),
        (
            {"dst": [np.zeros((4, 4, 2, 8), np.float16)] * 2},
            "dst[0] must have blocks like those of src[0] (6, 4, 2, 8) float32, got (4, 4, 2, 8) "
            "float16; only the number of blocks may differ",
        ),
        (
            {"dst": [np.zeros((4, 4, 1, 8), F32)] * 2},
            "dst[0] must have blocks like those of src[0] (6, 4, 2, 8) float32, got (4, 4, 1, 8) "
            "float32; only the number of blocks may differ",
        ),
    ],
)
def test_swapping_is_refused(device, changes, message):
    check(device, "swap_blocks", swapping(), changes, ValueError, message)


def test_swapping_within_one_array_is_refused(device):
    arena = Arena(device)
    cache = arena.put(ones(6, 4, 2, 8))
    message = (
        r"^swap_blocks: dst\[0\] must not share memory with src\[0\], got overlapping arrays; use "
        r"copy_blocks within one cache$"
    )
    for dst in (cache, cache[2:]):
        with pytest.raises(ValueError, match=message):
            cuattn.swap_blocks(cache, dst, np.array([[0, 1]], I64))
    arena.verify()


def test_read_only_caches_are_refused():
    cache = np.zeros((3, 8, 2, 16), F32)
    cache.flags.writeable = False
    for function, arguments, name in (
        ("reshape_and_cache", {**writing(), "v_cache": cache}, "v_cache"),
        ("copy_blocks", {**copying(), "k_caches": [cache]}, "k_caches[0]"),
        ("swap_blocks", {**swapping(), "dst": cache}, "dst[0]"),
    ):
        message = re.escape(f"{function}: {name} is read-only; pass a writable array")
        with pytest.raises(ValueError, match=f"^{message}$"):
            getattr(cuattn, function)(**arguments)


def test_bytes_stand_for_e4m3(device):
    """uint8 caches, for libraries without float8: the same bytes."""
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal((20, 2, 32), F32) for _ in range(2)]
    slots = rng.permutation(24)[:20].astype(I64)
    held = []
    for dtype in (E4M3, np.dtype(np.uint8)):
        arena = Arena(device)
        caches = [arena.output((3, 8, 2, 32), dtype) for _ in range(2)]
        placed = [arena.put(x) for x in rows]
        cuattn.reshape_and_cache(*placed, *caches, arena.put(slots, align=8), k_scale=0.1)
        table = arena.put(np.array([[2, 0]], I32), align=4)
        out = cuattn.gather_cache(*caches, table, arena.put(np.array([0, 11], I32), align=4))
        device.synchronize()
        arrays = [device.numpy(x) for x in (*caches, *out)]
        assert all(x.dtype == dtype for x in arrays)
        held.append([x.view(np.uint8) for x in arrays])
    for a, b in zip(*held, strict=True):
        assert np.array_equal(a, b)


def on_cuda(values):
    """An array that says it lies on a GPU, for calls that are refused before one is asked."""
    return dlpack.Array(values, device=(2, 0))


@pytest.mark.parametrize(
    ("first", "stride", "rule"),
    [
        (4, 128, "must start on 16 bytes, got an address with remainder 8"),
        (0, 132, "must have {} that start on 16 bytes, got strides (132, 32, 16, 1) in elements"),
    ],
)
def test_blocks_on_cuda_start_on_16_bytes(first, stride, rule):
    memory = np.zeros(4 * stride + 16, np.float16)[first:]
    strides = [2 * n for n in (stride, 32, 16, 1)]
    cache = on_cuda(np.lib.stride_tricks.as_strided(memory, (4, 4, 2, 16), strides))
    k, slots = on_cuda(ones(1, 2, 16, dtype=np.float16)), on_cuda(np.zeros(1, I64))
    table, lens = on_cuda(np.zeros((1, 1), I32)), on_cuda(np.ones(1, I32))
    starts = re.escape(rule.format("blocks, heads and tokens"))
    with pytest.raises(ValueError, match=f"^reshape_and_cache: k_cache {starts}"):
        cuattn.reshape_and_cache(k, k, cache, cache, slots, stream=1)
    with pytest.raises(ValueError, match=f"^paged_attention: k_cache {starts}"):
        cuattn.paged_attention(k, cache, cache, table, lens, stream=1)
