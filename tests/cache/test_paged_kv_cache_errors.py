# SPDX-License-Identifier: Apache-2.0
"""What PagedKVCache refuses: the message in full, and that nothing changed."""

from __future__ import annotations

import copy
import pickle

import pytest

import cuattn
from paged_engine import make

CHOICES = "float32, float16, bfloat16, float8_e4m3fn"
COPIED = (
    "must not be copied or pickled, because a copy would hand out the same blocks; share the "
    "object, or make a new"
)
REFUSALS = {
    "num_layers_0": (lambda c, s: make(num_layers=0), ValueError,
        "PagedKVCache: num_layers must be >= 1, got 0; give the real number"),
    "max_seqs_0": (lambda c, s: make(max_seqs=0), ValueError,
        "PagedKVCache: max_seqs must be >= 1, got 0; give the real number"),
    "num_heads_kv_float": (lambda c, s: make(num_heads_kv=2.0), TypeError,
        "PagedKVCache: num_heads_kv must be an integer, got 2.0; pass an int"),
    "num_blocks_0": (lambda c, s: make(num_blocks=0), ValueError,
        "PagedKVCache: num_blocks must be >= 1, got 0; give the real number"),
    "block_size_0": (lambda c, s: make(block_size=0), ValueError,
        "PagedKVCache: block_size must be >= 1, got 0; give the real number"),
    "head_dim_12": (lambda c, s: make(head_dim=12), ValueError,
        "PagedKVCache: head_dim must be a multiple of 8 for float32, got 12; pad the heads with "
        "zeros"),
    "head_dim_8_fp8": (lambda c, s: make(dtype="float8_e4m3fn"), ValueError,
        "PagedKVCache: head_dim must be a multiple of 16 for float8_e4m3fn, got 8; pad the heads "
        "with zeros"),
    "dtype": (lambda c, s: make(dtype="float64"), ValueError,
        f"PagedKVCache: dtype must be one of {CHOICES}, got float64; choose one of these"),
    "kv_layout": (lambda c, s: make(kv_layout="bshd"), ValueError,
        "PagedKVCache: kv_layout must be 'nhd', 'hnd' or 'vllm', got 'bshd'; choose one of these"),
    "block_size_257": (lambda c, s: make(block_size=257), ValueError,
        "PagedKVCache: block_size must be at most 256, got 257; that is what the kernels take"),
    "block_size_vllm": (lambda c, s: make(kv_layout="vllm"), ValueError,
        "PagedKVCache: block_size must be 8, 16 or 32 for kv_layout 'vllm', got 4; or use 'nhd'"),
    "like": (lambda c, s: make(like=[1.0]), TypeError,
        "PagedKVCache: like must be an array of numpy, torch or CuPy, which can be written in "
        "place, got list; pass one on the device where the cache is to be"),
    "unknown": (lambda c, s: c.append(77, 1), ValueError,
        "PagedKVCache.append: seq must be a sequence of this cache, got 77, which was freed or "
        "never added; pass what add or fork gave"),
    "freed_twice": (lambda c, s: c.free(s["freed"]), ValueError,
        "PagedKVCache.free: seq must be a sequence of this cache, got 2, which was freed or never "
        "added; pass what add or fork gave"),
    "swapped": (lambda c, s: c.append(s["swapped"], 1), ValueError,
        "PagedKVCache.append: sequence 1 must be in the cache, but it is swapped out; call swap_in "
        "first"),
    "swapped_in_a_table": (lambda c, s: c.block_tables([s["here"], s["swapped"]]), ValueError,
        "PagedKVCache.block_tables: sequence 1 must be in the cache, but it is swapped out; call "
        "swap_in first"),
    "not_swapped": (lambda c, s: c.swap_in(s["here"]), ValueError,
        "PagedKVCache.swap_in: sequence 0 must be swapped out, but it is in the cache; leave it "
        "there"),
    "out_of_blocks": (lambda c, s: c.append(s["here"], 30), cuattn.OutOfBlocksError,
        "PagedKVCache.append: sequence 0 needs 7 more blocks, got 6 free of 8; free or swap out a "
        "sequence, or make a larger cache"),
    "out_of_columns": (lambda c, s: c.append(s["here"], 28), ValueError,
        "PagedKVCache.append: n must lie within [0, 27] for sequence 0 of 5 tokens, got 28; make "
        "the cache with a larger max_blocks_per_seq"),
    "negative_n": (lambda c, s: c.append(s["here"], -1), ValueError,
        "PagedKVCache.append: n must lie within [0, 27] for sequence 0 of 5 tokens, got -1; make "
        "the cache with a larger max_blocks_per_seq"),
    "n_float": (lambda c, s: c.append(s["here"], 1.0), TypeError,
        "PagedKVCache.append: n must be an integer, got 1.0; pass an int"),
    "tokens_not_n": (lambda c, s: c.append(s["here"], 2, tokens=[1]), ValueError,
        "PagedKVCache.append: tokens must be n = 2 ids, got 1; give each new token its id"),
    "tokens_after_unknown": (lambda c, s: c.append(s["here"], 1, tokens=[1]), ValueError,
        "PagedKVCache.append: tokens must follow known ones, got 5 tokens in the cache and 0 ids; "
        "give all ids by add or append, or leave tokens out"),
    "truncate_longer": (lambda c, s: c.truncate(s["here"], 6), ValueError,
        "PagedKVCache.truncate: n must lie within [0, 5], the tokens of sequence 0, got 6; append "
        "makes it longer"),
    "layer": (lambda c, s: c.k_cache(1), ValueError,
        "PagedKVCache.k_cache: layer must lie within [0, 1), got 1; layers count from 0"),
    "too_many_rows": (lambda c, s: c.context_lens([None] * 5), ValueError,
        "PagedKVCache.context_lens: seqs must be at most max_seqs = 4, got 5; make the cache with "
        "a larger max_seqs"),
    "commit_swapped": (lambda c, s: c.commit(s["swapped"]), ValueError,
        "PagedKVCache.commit: sequence 1 must be in the cache, but it is swapped out; call swap_in "
        "first"),
    "salt_list": (lambda c, s: c.add([1], salt=[1]), TypeError,
        "PagedKVCache.add: salt must be bytes, str, int or None, got [1]; pass the name or the "
        "digest of the adapter, the image or the tenant"),
    "num_layers_true": (lambda c, s: make(num_layers=True), TypeError,
        "PagedKVCache: num_layers must be an integer, got True; pass an int"),
    "seq_list": (lambda c, s: c.append([1], 1), TypeError,
        "PagedKVCache.append: seq must be an integer, got [1]; pass what add or fork gave"),
    "seq_true": (lambda c, s: c.append(True, 1), TypeError,
        "PagedKVCache.append: seq must be an integer, got True; pass what add or fork gave"),
    "seq_list_in_a_table": (lambda c, s: c.block_tables([[1]]), TypeError,
        "PagedKVCache.block_tables: seq must be an integer, got [1]; pass what add or fork gave"),
    "layer_float": (lambda c, s: c.k_cache(0.0), TypeError,
        "PagedKVCache.k_cache: layer must be an integer, got 0.0; pass an int"),
    "layer_text": (lambda c, s: c.v_cache("0"), TypeError,
        "PagedKVCache.v_cache: layer must be an integer, got '0'; pass an int"),
    "seqs_number": (lambda c, s: c.block_tables(5), TypeError,
        "PagedKVCache.block_tables: seqs must be a list of sequences, got 5; pass [5] for one"),
    "tier_none": (lambda c, s: c.swap_out(s["here"], None), TypeError,
        "PagedKVCache.swap_out: tier must be 'host' or a path, got None; leave it out for host "
        "memory"),
    "copy": (lambda c, s: copy.copy(c), TypeError, f"PagedKVCache: {COPIED} PagedKVCache"),
    "deepcopy": (lambda c, s: copy.deepcopy(c), TypeError, f"PagedKVCache: {COPIED} PagedKVCache"),
    "pickle": (lambda c, s: pickle.dumps(c), TypeError, f"PagedKVCache: {COPIED} PagedKVCache"),
    "tokens_float": (lambda c, s: c.add([1.5]), TypeError,
        "PagedKVCache.add: tokens must be integers on one axis, got float64 with shape (1,); pass "
        "a list of token ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_way_out_and_changes_nothing(name):
    call, exception, message = REFUSALS[name]
    wide = name == "out_of_blocks"
    cache = make(max_seqs=4, max_blocks_per_seq=8 if not wide else 16)
    seqs = {name: cache.add() for name in ("here", "swapped", "freed")}
    slots = cache.append(seqs["here"], 5).tolist()
    cache.append(seqs["swapped"], 3)
    cache.swap_out(seqs["swapped"])
    cache.free(seqs["freed"])
    before = cache.stats()
    with pytest.raises(exception) as caught:
        call(cache, seqs)
    assert str(caught.value) == message
    assert type(caught.value) is exception
    assert cache.stats() == before
    assert cache.slot_mapping([seqs["here"]]).tolist() == slots
    cache.swap_in(seqs["swapped"])
    assert cache.context_lens([seqs["here"], seqs["swapped"]]).tolist() == [5, 3]
