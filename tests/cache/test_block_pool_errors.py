# SPDX-License-Identifier: Apache-2.0
"""What BlockPool refuses: the message in full, and that nothing changed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import cuattn

WAY_OUT = "free or swap out a sequence, or make a larger pool"
TOKENS = "tokens must be integers on one axis"
SALT = "salt must be bytes, str, int or None"
SALT_WAY_OUT = "pass the name or the digest of the adapter, the image or the tenant"
COPIED = (
    "must not be copied or pickled, because a copy would hand out the same blocks; share the "
    "object, or make a new"
)
REFUSALS = {
    "no_blocks": (lambda p: cuattn.BlockPool(0, 4), ValueError,
        "BlockPool: num_blocks must lie within [1, 2147483647], got 0; ids are int32"),
    "too_many_blocks": (lambda p: cuattn.BlockPool(2**31, 4), ValueError,
        "BlockPool: num_blocks must lie within [1, 2147483647], got 2147483648; ids are int32"),
    "block_size_0": (lambda p: cuattn.BlockPool(4, 0), ValueError,
        "BlockPool: block_size must lie within [1, 2147483647], got 0; it counts tokens"),
    "num_blocks_float": (lambda p: cuattn.BlockPool(4.0, 4), TypeError,
        "BlockPool: num_blocks must be an integer, got 4.0; pass an int"),
    "allocate_too_many": (lambda p: p.allocate(7), cuattn.OutOfBlocksError,
        f"BlockPool.allocate: 7 blocks must be free, got 6 of 8; {WAY_OUT}"),
    "allocate_negative": (lambda p: p.allocate(-1), ValueError,
        "BlockPool.allocate: n must be >= 0, got -1; it counts blocks"),
    "allocate_true": (lambda p: p.allocate(True), TypeError,
        "BlockPool.allocate: n must be an integer, got True; pass an int"),
    "double_free": (lambda p: p.free([0, 1, 1]), ValueError,
        "BlockPool.free: each block must be held by a reference, got block 1, which is free; "
        "drop each reference once"),
    "free_of_a_number": (lambda p: p.free(3), TypeError,
        "BlockPool.free: ids must be a sequence of integers, got 3; pass a list of blocks"),
    "free_of_text": (lambda p: p.free("0"), TypeError,
        "BlockPool.free: ids must be an integer, got '0'; pass an int"),
    "foreign_id": (lambda p: p.fork([0, 8]), ValueError,
        "BlockPool.fork: ids must lie within [0, 8), got 8; pass what allocate, fork or "
        "match_prefix gave"),
    "huge_id": (lambda p: p.free([2**40]), ValueError,
        "BlockPool.free: ids must fit 32 bits, got 1099511627776; pass a smaller one"),
    "fork_of_a_free_block": (lambda p: p.fork([5]), ValueError,
        "BlockPool.fork: each block must be held by a reference, got block 5, which is free; "
        "drop each reference once"),
    "ref_count_of_a_foreign_id": (lambda p: p.ref_count(-1), ValueError,
        "BlockPool.ref_count: id must lie within [0, 8), got -1; pass a block of this pool"),
    "write_to_a_free_block": (lambda p: p.make_writable(2), ValueError,
        "BlockPool.make_writable: each block must be held by a reference, got block 2, which is "
        "free; drop each reference once"),
    "other_tokens": (lambda p: p.commit([1, 0], [5, 6, 7, 9]), ValueError,
        "BlockPool.commit: a committed block must keep its tokens, got others for block 0; call "
        "make_writable before it is written anew"),
    "other_tokens_before": (lambda p: p.commit([1, 0], [5, 6, 1, 2]), ValueError,
        "BlockPool.commit: a committed block must keep its tokens, got others for block 0; call "
        "make_writable before it is written anew"),
    "too_many_tokens": (lambda p: p.commit([1], [1, 2, 3, 4]), ValueError,
        "BlockPool.commit: tokens must fit ids, got 4 tokens for 1 blocks of 2; pass all blocks "
        "that hold them"),
    "parent_not_committed": (lambda p: p.commit([0], [1, 2], parent=1), ValueError,
        "BlockPool.commit: parent must be committed, got block 1; commit a sequence from its "
        "begin"),
    "parent_negative": (lambda p: p.commit([0], [1, 2], parent=-1), ValueError,
        "BlockPool.commit: parent must be None or a block, got -1; pass the block before the "
        "first of ids"),
    "salt_with_parent": (lambda p: p.commit([1], [3, 4], parent=0, salt=b"a"), ValueError,
        "BlockPool.commit: salt must not stand beside a parent, got block 0; the sequence of the "
        "parent has its own"),
    "other_salt": (lambda p: p.commit([0], [1, 2], salt="a"), ValueError,
        "BlockPool.commit: a committed block must keep its tokens, got others for block 0; call "
        "make_writable before it is written anew"),
    "salt_float": (lambda p: p.match_prefix([1, 2], salt=1.0), TypeError,
        f"BlockPool.match_prefix: {SALT}, got 1.0; {SALT_WAY_OUT}"),
    "salt_true": (lambda p: p.commit([1], [1, 2], salt=True), TypeError,
        f"BlockPool.commit: {SALT}, got True; {SALT_WAY_OUT}"),
    "copy": (lambda p: copy.copy(p), TypeError, f"BlockPool: {COPIED} BlockPool"),
    "deepcopy": (lambda p: copy.deepcopy(p), TypeError, f"BlockPool: {COPIED} BlockPool"),
    "pickle": (lambda p: pickle.dumps(p), TypeError, f"BlockPool: {COPIED} BlockPool"),
    "float_tokens": (lambda p: p.match_prefix([1.0]), TypeError,
        f"BlockPool.match_prefix: {TOKENS}, got float64 with shape (1,); pass a list of token ids"),
    "tokens_of_2_axes": (lambda p: p.commit([1], [[1, 2]]), TypeError,
        f"BlockPool.commit: {TOKENS}, got int64 with shape (1, 2); pass a list of token ids"),
    "tokens_beyond_int64": (lambda p: p.match_prefix(np.array([5, 2**63], np.uint64)), ValueError,
        "BlockPool.match_prefix: tokens must be at most 2^63 - 1, got 9223372036854775808; hash "
        "ids to int64 yourself"),
    "committed_tokens_beyond_int64": (lambda p: p.commit([1], [2**63, 2**64 - 1]), ValueError,
        "BlockPool.commit: tokens must be at most 2^63 - 1, got 18446744073709551615; hash ids to "
        "int64 yourself"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_way_out_and_changes_nothing(name):
    call, exception, message = REFUSALS[name]
    pool = cuattn.BlockPool(8, 2)
    assert pool.allocate(2) == [0, 1]
    pool.commit([0], [1, 2])
    before = pool.stats()
    with pytest.raises(exception) as caught:
        call(pool)
    assert str(caught.value) == message
    assert type(caught.value) is exception
    assert pool.stats() == before
    assert [pool.ref_count(block) for block in range(3)] == [1, 1, 0]
    assert pool.match_prefix([5, 6]) == ([], 0)


def test_unsigned_tokens_within_int64_are_those_of_signed_ones():
    pool = cuattn.BlockPool(8, 2)
    ids = pool.allocate(1)
    pool.commit(ids, np.array([7, 2**63 - 1], np.uint64))
    assert pool.match_prefix([7, 2**63 - 1]) == (ids, 2)


def test_out_of_blocks_is_a_memory_error():
    assert issubclass(cuattn.OutOfBlocksError, MemoryError)
