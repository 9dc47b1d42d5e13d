# SPDX-License-Identifier: Apache-2.0
"""PagedKVCache: what is read through its tables is what was written, whatever happened between.

What it refuses is in test_paged_kv_cache_errors.py; what happens when a step of it fails is in
test_paged_kv_cache_failures.py.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import cuattn
import frameworks
import harness
from frameworks import Torch
from harness import why_no_cuda
from paged_engine import LIBRARIES, Engine, make

LAYOUTS = ("nhd", "hnd", "vllm")


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]()


@pytest.mark.parametrize("kv_layout", LAYOUTS)
def test_random_walk_reads_what_was_written(library, kv_layout, rng, tmp_path):
    engine = Engine(library, rng, tmp_path, kv_layout, block_size=8 if kv_layout == "vllm" else 4)
    for _ in range(350):
        for _ in range(int(rng.integers(1, 4))):  # between two looks at the tables
            engine.step()
        engine.verify()
    seen = {"shared", "copied", "out of blocks", "swapped out", "swapped in", "failed"}
    assert engine.seen == seen
    for seq in list(engine.tokens):
        engine.cache.free(seq)
    stats = engine.cache.stats()
    assert stats["free_blocks"] == 12
    assert stats["sequences"] == stats["tokens"] == stats["used_blocks"] == 0
    assert not list(tmp_path.iterdir())


SHAPES = {
    ("nhd", "float16"): ((6, 16, 2, 64), (6, 16, 2, 64)),
    ("hnd", "bfloat16"): ((6, 2, 16, 64), (6, 2, 16, 64)),
    ("vllm", "float32"): ((6, 2, 16, 16, 4), (6, 2, 64, 16)),
    ("vllm", "bfloat16"): ((6, 2, 8, 16, 8), (6, 2, 64, 16)),
    ("vllm", "float8_e4m3fn"): ((6, 2, 4, 16, 16), (6, 2, 64, 16)),
}


@pytest.mark.parametrize(("layout", "dtype"), SHAPES)
@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_caches_have_the_shape_of_their_layout(name, layout, dtype):
    library = LIBRARIES[name]()
    cache = make(
        library, num_layers=3, num_blocks=6, block_size=16, num_heads_kv=2, head_dim=64,
        dtype=dtype, kv_layout=layout,
    )  # fmt: skip
    for layer in range(3):
        for array, shape in zip(
            (cache.k_cache(layer), cache.v_cache(layer)), SHAPES[layout, dtype], strict=True
        ):
            assert tuple(array.shape) == shape
            assert str(array.dtype).removeprefix("torch.") == dtype
            assert library.owns(array)
    assert cache.stats()["cache_bytes"] == 3 * sum(
        int(np.prod(array.shape)) * {"float32": 4, "float8_e4m3fn": 1}.get(dtype, 2)
        for array in (cache.k_cache(0), cache.v_cache(0))
    )


def test_dtype_may_be_the_object_of_a_library():
    torch = frameworks.require("torch")
    for dtype in (np.float16, np.dtype("float16"), "float16", torch.float16):
        assert make(dtype=dtype).k_cache(0).dtype == np.float16


def test_only_new_entries_of_the_tables_are_written(library):
    cache = make(library)
    a, b = cache.add(), cache.add()
    cache.append(a, 8)
    cache.append(b, 4)
    tables = cache.block_tables([a, b])
    tables[:, :2] = -7  # what is there already must not be written again
    cache.append(a, 4)
    cache.append(b, 4)
    after = library.get(cache.block_tables([a, b]))
    assert after[0, :2].tolist() == [-7, -7]
    assert after[1, 0] == -7
    assert 0 <= after[0, 2] < 8
    assert 0 <= after[1, 1] < 8
    assert after[0, 2] != after[1, 1]
    swapped = library.get(cache.block_tables([b, a]))  # other rows: all of it
    assert (swapped[0, :2] >= 0).all()
    assert (swapped[1, :3] >= 0).all()


def test_refused_tables_leave_no_row_behind(library):
    cache = make(library)
    a, freed = cache.add(), cache.add()
    slots = cache.append(a, 8)
    cache._tables[:] = -7
    cache.free(freed)
    with pytest.raises(ValueError, match="freed or never added"):
        cache.block_tables([a, freed])
    row = library.get(cache.block_tables([a]))[0, :2]
    assert row.tolist() == (slots[::4] // 4).tolist()


def test_a_row_follows_what_happened_since_the_last_look(library):
    cache = make(library)
    a, b = cache.add(), cache.add()

    def row():
        return library.get(cache.block_tables([a]))[0, :2].tolist()

    cache.append(a, 8)
    first = row()
    cache.truncate(a, 4)
    cache.append(b, 4)  # takes the block that a gave back
    blocks = [first[0], int(cache.append(a, 4)[0]) // 4]
    assert blocks != first
    assert row() == blocks
    cache.swap_out(a)
    cache.append(b, 8)
    cache.swap_in(a)
    cache.truncate(a, 7)
    last = int(cache.append(a, 1)[0]) // 4
    assert row()[1] == last
    assert row()[0] != blocks[0]


def test_buffers_stay_where_they_are(library):
    cache = make(library, max_seqs=4)
    seq = cache.add()

    def addresses():
        arrays = cache.block_tables([seq]), cache.context_lens([seq]), cache.slot_mapping([seq])
        if hasattr(arrays[0], "data_ptr"):
            return [array.data_ptr() for array in arrays]
        return [
            array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data for array in arrays
        ]

    cache.append(seq, 1)
    first = addresses()
    for _ in range(20):
        cache.append(seq, 1)
        assert addresses() == first
    cache.append(seq, 9)  # more slots than max_seqs
    assert library.get(cache.slot_mapping([seq])).shape == (9,)


def test_a_shared_block_is_copied_only_when_it_is_written():
    cache = make()
    a = cache.add()
    cache.append(a, 6)
    b = cache.fork(a)
    assert cache.stats()["used_blocks"] == 2
    cache.append(b, 1)
    assert cache.stats()["used_blocks"] == 3
    assert cache.stats()["copies"] == 1
    cache.append(a, 1)  # now its own
    assert cache.stats()["copies"] == 1
    c = cache.fork(a)
    cache.append(a, 1)
    cache.append(c, 1)
    full = cache.fork(a)  # 8 tokens: both blocks are full and stay shared
    cache.append(full, 1)
    assert cache.stats()["copies"] == 2


def test_prompts_share_their_begin_and_leave_the_last_token():
    cache = make()
    prompt = list(range(12))
    a = cache.add(prompt)
    assert cache.context_len(a) == 0
    cache.append(a, 12)
    early = cache.add(prompt)  # nobody has said that a's keys are written
    assert cache.context_len(early) == 0
    cache.commit(a)
    cache.append(a, 1, tokens=[12])
    b, c = cache.add(prompt), cache.add([*prompt[:5], 99, 98, 97, 96])
    assert cache.context_len(b) == 8
    assert cache.context_len(c) == 4
    cache.free(a)
    assert cache.context_len(cache.add([*prompt, 5])) == 12
    assert cache.stats()["matched_tokens"] == 8 + 4 + 12


AFTER_A_FAILED_STEP = {
    "free": lambda c, seq: None,
    "append": lambda c, seq: c.append(seq, 1, tokens=[13]),
    "fork": lambda c, seq: c.free(c.fork(seq)),
    "truncate": lambda c, seq: c.truncate(seq, 9),
    "truncate nothing": lambda c, seq: c.truncate(seq, 12),
    "swap": lambda c, seq: (c.swap_out(seq), c.swap_in(seq)),
    "swap to a file": lambda c, seq: (c.swap_out(seq, c.folder / "kv"), c.swap_in(seq)),
    "swapped": lambda c, seq: c.swap_out(seq),
}


@pytest.mark.parametrize("what", AFTER_A_FAILED_STEP)
@pytest.mark.parametrize("ids", ["of add", "of append"])
def test_what_nobody_committed_is_not_offered(what, ids, tmp_path):
    """An engine appends, its step fails, it does this or that, and frees the sequence."""
    cache = make(num_blocks=16)
    cache.folder = tmp_path
    prompt = list(range(13))
    seq = cache.add(prompt if ids == "of add" else None)
    first, second = (
        ({}, {}) if ids == "of add" else ({"tokens": range(5)}, {"tokens": range(5, 12)})
    )
    cache.append(seq, 5, **first)
    cache.commit(seq)
    cache.append(seq, 7, **second)
    if not (what == "append" and ids == "of add"):
        AFTER_A_FAILED_STEP[what](cache, seq)
    else:
        cache.append(seq, 1)
    assert cache.stats()["cached_blocks"] == 1
    cache.free(seq)
    assert cache.context_len(cache.add(prompt)) == 4  # what was committed before
    assert cache.stats()["cached_blocks"] == 1


def test_a_committed_sequence_keeps_what_it_committed(tmp_path):
    """Through swaps that evict it, and by forks."""
    cache = make()
    prompt = list(range(10))
    a = cache.add(prompt, salt=3)
    cache.append(a, 9)
    cache.commit(a)
    for tier in ("host", tmp_path / "kv"):
        cache.swap_out(a, tier)
        other = cache.add()
        cache.append(other, 32)  # all blocks
        assert cache.stats()["cached_blocks"] == 0
        cache.free(other)
        cache.swap_in(a)
        assert cache.stats()["cached_blocks"] == 2
        assert cache.context_len(cache.add(prompt, salt=3)) == 8
        cache.free(max(cache._sequences))
    b = cache.fork(a)
    cache.free(a)
    cache.append(b, 1)
    cache.append(b, 3, tokens=[10, 11, 12])
    cache.commit(b)
    assert cache.context_len(cache.add([*prompt, 10, 11, 12], salt=3)) == 12
    assert cache.context_len(cache.add([*prompt, 10, 11, 12])) == 0


def test_sequences_of_different_salts_share_nothing(tmp_path):
    cache = make(num_blocks=64)
    prompt = list(range(9))
    salts = [None, b"1", "1", 1]
    seqs = [cache.add(prompt, salt=salt) for salt in salts]
    for seq in seqs:
        assert cache.context_len(seq) == 0
        cache.append(seq, 9)
        cache.commit(seq)
    assert cache.stats()["cached_blocks"] == 8
    for seq, salt in zip(seqs, salts, strict=True):
        again = cache.add(prompt, salt=salt)
        assert cache.context_len(again) == 8
        tables = cache.block_tables([seq, again])
        assert tables[0, :2].tolist() == tables[1, :2].tolist()
        cache.swap_out(seq)
        cache.swap_in(seq)  # finds its own
        assert cache.block_tables([again, seq])[1, :2].tolist() == tables[1, :2].tolist()
    assert cache.stats()["shared_blocks"] == 8


def test_truncating_nothing_keeps_the_rest_of_the_prompt():
    """A prompt in two chunks, with a rollback of no tokens between them."""
    cache = make()
    prompt = list(range(17))
    seq = cache.add(prompt)
    cache.append(seq, 8)
    cache.truncate(seq, 8)
    cache.append(seq, 9)
    cache.commit(seq)
    assert cache.context_len(cache.add(prompt)) == 16
    cache.truncate(seq, 12)  # now tokens were removed, and others may follow
    with pytest.raises(ValueError, match="tokens must be n = 1 ids"):
        cache.append(seq, 1, tokens=[])
    cache.append(seq, 1, tokens=[99])


def test_no_more_is_found_than_a_row_of_the_tables_holds():
    cache = make(max_blocks_per_seq=2, max_seqs=2)
    prompt = list(range(20))
    ids = cache.pool.allocate(5)
    cache.pool.commit(ids, prompt)
    a, b = cache.add(prompt), cache.add([7])
    cache.append(b, 1)
    assert cache.context_len(a) == 8
    cache.block_tables([None, b])
    tables = cache.block_tables([a, b])
    assert tables[0].tolist() == ids[:2]
    assert tables[1, 0] == cache.slot_mapping([b])[0] // 4
    with pytest.raises(ValueError, match=r"n must lie within \[0, 0\]"):
        cache.append(a, 1)


def test_swapped_sequences_share_again_what_is_known():
    cache = make()
    prompt = list(range(9))
    a = cache.add(prompt)
    cache.append(a, 9)
    cache.commit(a)
    b = cache.fork(a)
    cache.swap_out(a)
    cache.swap_in(a)
    assert cache.stats()["used_blocks"] == 4  # two shared, and each its last
    cache.free(b)
    cache.swap_out(a)
    assert cache.stats()["free_blocks"] == 8
    assert cache.stats()["swapped_sequences"] == 1
    cache.free(a)
    assert cache.stats()["sequences"] == 0


def test_swapping_to_a_file_that_exists_changes_nothing(tmp_path):
    cache = make()
    seq = cache.add()
    cache.append(seq, 5)
    path = tmp_path / "there"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        cache.swap_out(seq, path)
    assert path.read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        cache.swap_out(seq, tmp_path / "no folder" / "file")
    assert cache.stats()["swapped_sequences"] == 0
    cache.append(seq, 1)
    cache.swap_out(seq, str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    cache.swap_in(seq)
    assert cache.slot_mapping([seq]).tolist() == []  # those it had are another's now
    assert cache.append(seq, 2)[1] % 4 == 3


def test_empty_sequences_and_empty_batches(library):
    cache = make(library)
    seq = cache.add([])
    assert cache.append(seq, 0).shape == (0,)
    assert library.get(cache.context_lens([seq, None])).tolist() == [0, 0]
    assert library.get(cache.slot_mapping([seq])).shape == (0,)
    assert tuple(cache.block_tables([]).shape) == (0, 8)
    assert tuple(cache.context_lens([]).shape) == (0,)
    cache.swap_out(seq)
    cache.swap_in(seq)
    cache.truncate(seq, 0)
    cache.free(cache.fork(seq))
    assert cache.stats()["free_blocks"] == 8


def test_threads_use_one_cache():
    cache = make(num_blocks=64)
    errors = []

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(200):
                seq = cache.add([seed % 3] * 9)
                try:
                    slots = cache.append(seq, 9 - cache.context_len(seq))
                    assert len(set(slots)) == len(slots)
                    child = cache.fork(seq)
                    cache.append(child, int(rng.integers(0, 3)))
                    cache.free(child)
                except cuattn.OutOfBlocksError:
                    errors.append("64 blocks are enough for all")
                cache.commit(seq)
                cache.free(seq)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert cache.stats()["sequences"] == 0
    assert cache.stats()["free_blocks"] == 64


on_cuda = pytest.mark.skipif(why_no_cuda() is not None, reason=f"CUDA: {why_no_cuda()}")


@pytest.mark.gpu
@on_cuda
def test_a_captured_graph_sees_later_steps():
    """The graph copies the three arrays; replays give what the calls since have put there."""
    import torch

    cache = make(Torch("cuda"), max_seqs=3)
    a, b = cache.add(), cache.add()

    def arrays(*seqs):
        return cache.block_tables(seqs), cache.context_lens(seqs), cache.slot_mapping(seqs)

    cache.append(a, 1)
    cache.append(b, 1)
    graph, given = torch.cuda.CUDAGraph(), arrays(a, b, None)
    torch.cuda.synchronize()
    with harness.capturing(graph):
        copies = [array.clone() for array in given]
    for rows in ((a, b, None), (a, None, b), (None, None, b), (b, a, None)):
        slots = [cache.append(seq, 1)[0] if seq is not None else -1 for seq in rows]
        arrays(*rows)
        graph.replay()
        torch.cuda.synchronize()
        tables, lengths, mapping = (copy.cpu().numpy() for copy in copies)
        assert mapping.tolist() == slots
        for row, seq in enumerate(rows):
            assert lengths[row] == (0 if seq is None else cache.context_len(seq))
            if seq is not None:
                assert tables[row, (lengths[row] - 1) // 4] == slots[row] // 4


@pytest.mark.gpu
@on_cuda
def test_calls_do_not_wait_for_the_device():
    """Tables, lengths, slots, copies and swaps to pinned memory are queued behind a long kernel."""
    import torch

    cache = make(Torch("cuda"), num_blocks=64)
    seq = cache.add()
    cache.append(seq, 6)
    cache.swap_out(seq)  # pinned memory is made once
    cache.swap_in(seq)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    done = torch.cuda.Event()
    child = cache.fork(seq)
    cache.append(child, 1)
    cache.block_tables([seq, child]), cache.context_lens([seq]), cache.slot_mapping([child])
    cache.swap_out(seq)
    cache.swap_in(seq)
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
