# SPDX-License-Identifier: Apache-2.0
"""BlockPool against a model made of dicts and lists: every state and every answer. What it refuses
is in test_block_pool_errors.py.
"""

from __future__ import annotations

import os
import threading
import time

import numpy as np
import pytest

import cuattn


class Model:
    """What a pool must do, said with dicts and lists.

    A key is (the content before, or the salt, and the block's tokens). Contents are numbered at
    their first commit, so that what followed an evicted block is not found again.
    """

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = dict.fromkeys(range(num_blocks), 0)
        self.key, self.content = {}, {}  # of committed blocks
        self.cached = {}  # key -> the block that is found
        self.contents = 0
        self.free_list = list(range(num_blocks))  # handed out from the front
        self.counts = dict.fromkeys(("evictions", "copies", "queried_tokens", "matched_tokens"), 0)

    def forget(self, block):
        if self.is_cached(block):
            del self.cached[self.key[block]]
        self.key.pop(block, None)

    def is_cached(self, block):
        return block in self.key and self.cached.get(self.key[block]) == block

    def take(self):
        block = self.free_list.pop(0)
        self.counts["evictions"] += self.is_cached(block)
        self.forget(block)
        self.references[block] = 1
        return block

    def allocate(self, n):
        if n > len(self.free_list):
            raise cuattn.OutOfBlocksError
        return [self.take() for _ in range(n)]

    def check_held(self, ids):
        left = dict(self.references)
        for block in ids:
            if left.get(block, 0) == 0:
                raise ValueError
            left[block] -= 1

    def free(self, ids):
        self.check_held(ids)
        for block in ids:
            self.references[block] -= 1
        for block in dict.fromkeys(reversed(ids)):
            if self.references[block] == 0:
                if self.is_cached(block):
                    self.free_list.append(block)
                else:
                    self.forget(block)
                    self.free_list.insert(0, block)

    def fork(self, ids):
        if any(self.references.get(block, 0) == 0 for block in ids):
            raise ValueError
        for block in ids:
            self.references[block] += 1

    def make_writable(self, block):
        self.check_held([block])
        if self.references[block] == 1:
            self.forget(block)
            return block, None
        (copy,) = self.allocate(1)
        self.references[block] -= 1
        self.counts["copies"] += 1
        return copy, block

    def match_prefix(self, tokens, salt=None):
        size, ids, parent = self.block_size, [], ("begin", salt)
        while (len(ids) + 1) * size <= len(tokens):
            key = (parent, tuple(tokens[len(ids) * size : (len(ids) + 1) * size]))
            if key not in self.cached:
                break
            block = self.cached[key]
            if self.references[block] == 0:
                self.free_list.remove(block)
            self.references[block] += 1
            ids.append(block)
            parent = self.content[block]
        self.counts["queried_tokens"] += len(tokens)
        self.counts["matched_tokens"] += len(ids) * size
        return ids, len(ids) * size

    def commit(self, ids, tokens, salt=None):
        size, parent = self.block_size, ("begin", salt)
        for i, block in enumerate(ids[: len(tokens) // size]):
            key = (parent, tuple(tokens[i * size : (i + 1) * size]))
            if block not in self.key:
                self.key[block] = key
                if key not in self.cached:
                    self.contents += 1
                    self.cached[key], self.content[block] = block, self.contents
                self.content[block] = self.content[self.cached[key]]
            assert self.key[block] == key
            parent = self.content[block]

    def stats(self):
        cached = set(self.cached.values())
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "free_blocks": len(self.free_list),
            "used_blocks": sum(n > 0 for n in self.references.values()),
            "shared_blocks": sum(n > 1 for n in self.references.values()),
            "cached_blocks": len(cached),
            "evictable_blocks": sum(self.references[block] == 0 for block in cached),
            **self.counts,
        }


# AddressSanitizer looks at memory, which a shorter walk goes through as well, four times as slowly.
STEPS = 20_000 if "ASAN_OPTIONS" in os.environ else 100_000


class Walk:
    """Random sequences on a pool and on its model, as an engine would hold them."""

    def __init__(self, rng, num_blocks, block_size):
        self.rng = rng
        self.pool, self.model = (
            cuattn.BlockPool(num_blocks, block_size),
            Model(num_blocks, block_size),
        )
        self.sequences = []  # (blocks, tokens)

    def both(self, method, *arguments, **options):
        """The answer of both, which must be one; an exception counts as an answer."""
        answers = []
        for side in (self.model, self.pool):
            try:
                answers.append(getattr(side, method)(*arguments, **options))
            except (ValueError, cuattn.OutOfBlocksError) as error:
                answers.append(type(error))
        assert answers[0] == answers[1], (method, arguments, options)
        return answers[1]

    def tokens(self):
        """Few different tokens, so that sequences share prefixes of all lengths."""
        return [int(t) for t in self.rng.integers(0, 2, int(self.rng.integers(0, 13)))]

    def pick(self):
        return self.sequences[int(self.rng.integers(len(self.sequences)))]

    def add(self):
        tokens, salt = self.tokens(), (None, b"a", "a", 7)[int(self.rng.integers(4))]
        ids, matched = self.both("match_prefix", tokens, salt=salt)
        more = -(-(len(tokens) - matched) // self.pool.block_size)
        fresh = self.both("allocate", more)
        if fresh is cuattn.OutOfBlocksError:
            self.both("free", ids)
            return
        self.sequences.append((ids + fresh, tokens))
        self.both("commit", ids + fresh, tokens, salt=salt)

    def drop(self):
        ids, _ = self.sequences.pop(int(self.rng.integers(len(self.sequences))))
        self.both("free", ids)

    def fork(self):
        ids, tokens = self.pick()
        self.both("fork", ids)
        self.sequences.append((list(ids), tokens))

    def write(self):
        """Writes to a block: the tokens from there on are others, and the rest is dropped."""
        ids, tokens = self.pick()
        if not ids:
            return
        at = int(self.rng.integers(len(ids)))
        answer = self.both("make_writable", ids[at])
        if answer is cuattn.OutOfBlocksError:
            return
        self.both("free", ids[at + 1 :])
        ids[at:] = [answer[0]]
        kept = tokens[: at * self.pool.block_size]
        self.sequences = [s for s in self.sequences if s[0] is not ids] + [(ids, kept)]

    def mistake(self):
        block = int(self.rng.integers(-1, self.pool.num_blocks + 1))
        ids = [*(self.pick()[0] if self.sequences else []), block]
        if self.model.references.get(block, 0) == 0:
            assert self.both("free", ids) is ValueError
            assert self.both("fork", ids) is ValueError
            assert self.both("make_writable", block) is ValueError
        assert self.both("allocate", self.pool.num_blocks + 1) is cuattn.OutOfBlocksError

    def step(self):
        choices = [self.add, self.mistake]
        if self.sequences:
            choices += [self.drop, self.write]
            choices += (
                [self.fork] if len(self.sequences) < self.pool.num_blocks / 3 else [self.drop]
            )
        choices[int(self.rng.integers(len(choices)))]()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(6, 1), (12, 2), (40, 3), (9, 4)])
def test_random_walk_agrees_with_the_model(num_blocks, block_size, rng):
    walk = Walk(rng, num_blocks, block_size)
    for step in range(STEPS):
        walk.step()
        if step % 16 == 0:
            assert walk.pool.stats() == walk.model.stats()
            references = [walk.pool.ref_count(block) for block in range(num_blocks)]
            assert references == list(walk.model.references.values())
    seen = walk.pool.stats()
    assert min(seen["evictions"], seen["copies"], seen["matched_tokens"]) > 100  # all paths taken
    for ids, _ in walk.sequences:
        walk.both("free", ids)
    assert walk.pool.stats() == walk.model.stats()
    assert sorted(walk.both("allocate", num_blocks)) == list(range(num_blocks))


def mix(x):
    """The pool's own mixing of 64 bits, from src/cache/pool.cpp; of an array."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def test_prompts_made_to_collide_are_found_as_fast_as_others(rng):
    """Blocks of two tokens with one hash, by solving for the last one, as if there were no seed.

    Without one they would share a bucket, through which each look-up walks. (That what shares a
    hash is told apart is in tests/cpp/test_block_pool.cpp, which chooses the seed.)
    """
    count, begin = 16_000, mix(np.zeros(1, np.uint64))
    first = np.arange(count, dtype=np.uint64)
    last = mix(begin ^ first) ^ np.uint64(12345)
    assert len(set(mix(mix(begin ^ first) ^ last).tolist())) == 1  # else this test shows nothing
    attack = np.stack([first, last], 1).view(np.int64)
    prompts = {"attack": attack, "random": rng.integers(-(2**63), 2**63, (count, 2))}

    def seconds(tokens):
        pool = cuattn.BlockPool(count, 2)
        for block, prompt in zip(pool.allocate(count), tokens, strict=True):
            pool.commit([block], prompt)
        begin = time.perf_counter()
        for prompt in tokens:
            assert pool.match_prefix(prompt)[1] == 2
        return time.perf_counter() - begin

    took = {name: min(seconds(tokens) for _ in range(3)) for name, tokens in prompts.items()}
    assert took["attack"] < 4 * took["random"], took  # 30 times, were it possible


def test_the_same_tokens_after_others_are_another_prefix():
    pool = cuattn.BlockPool(8, 2)
    a, b = pool.allocate(2), pool.allocate(2)
    pool.commit(a, [1, 1, 5, 5])
    pool.commit(b, [2, 2, 5, 5])
    assert pool.match_prefix([1, 1, 5, 5]) == (a, 4)
    assert pool.match_prefix([2, 2, 5, 5, 9]) == (b, 4)
    assert pool.match_prefix([5, 5]) == ([], 0)


def test_a_sequence_is_committed_piece_by_piece():
    pool = cuattn.BlockPool(8, 2)
    ids = pool.allocate(3)
    pool.commit(ids[:1], [1, 2])
    pool.commit(ids[1:], [3, 4, 5, 6], parent=ids[0])
    assert pool.match_prefix([1, 2, 3, 4, 5, 6, 7]) == (ids, 6)
    pool.commit(ids, [1, 2, 3, 4, 5, 6])  # once more is no mistake
    assert pool.stats()["cached_blocks"] == 3


def test_a_second_copy_of_cached_tokens_stays_private_and_its_successors_are_shared():
    pool = cuattn.BlockPool(8, 2)
    a, b = pool.allocate(1), pool.allocate(2)
    pool.commit(a, [1, 2])
    pool.commit(b, [1, 2, 3, 4])
    assert pool.match_prefix([1, 2, 3, 4]) == ([a[0], b[1]], 4)


def test_what_was_unused_the_longest_is_evicted_first():
    pool = cuattn.BlockPool(3, 1)
    ids = pool.allocate(3)
    for block, token in zip(ids, (10, 20, 30), strict=True):
        pool.commit([block], [token])
        pool.free([block])
    pool.free(pool.match_prefix([10])[0])  # used again: 20 is now the oldest
    assert pool.allocate(1) == [ids[1]]
    assert pool.allocate(1) == [ids[2]]
    assert pool.match_prefix([10]) == ([ids[0]], 1)
    with pytest.raises(cuattn.OutOfBlocksError):
        pool.allocate(1)


def test_of_one_sequence_the_end_is_evicted_first():
    pool = cuattn.BlockPool(4, 1)
    ids = pool.allocate(4)
    pool.commit(ids, [1, 2, 3, 4])
    pool.free(ids)
    assert pool.allocate(2) == [ids[3], ids[2]]
    assert pool.match_prefix([1, 2, 3, 4]) == (ids[:2], 2)


@pytest.mark.parametrize("committed", [False, True])
def test_an_id_that_stands_twice_loses_two_references(committed):
    pool = cuattn.BlockPool(3, 1)
    ids = pool.allocate(2)
    if committed:
        pool.commit(ids, [1, 2])
    pool.fork(ids)
    pool.free([ids[1], *ids, ids[0]])
    assert pool.stats()["free_blocks"] == 3
    assert sorted(pool.allocate(3)) == [0, 1, 2]


SALTS = [
    None,
    b"",
    b"1",
    "1",
    "",
    1,
    -1,
    2**70,
    b"tenant" * 9,
    b"tenant" * 9 + b"\0",
    b"i1",
    "\udc80",
]


def test_different_salts_never_share():
    pool = cuattn.BlockPool(2 * len(SALTS), 2)
    held = {}
    for salt in SALTS:
        assert pool.match_prefix([1, 2, 3, 4], salt=salt) == ([], 0)
        held[salt] = pool.allocate(2)
        pool.commit(held[salt][:1], [1, 2], salt=salt)
        pool.commit(held[salt][1:], [3, 4], parent=held[salt][0])  # the salt goes with the parent
    for salt in SALTS:
        assert pool.match_prefix([1, 2, 3, 4], salt=salt) == (held[salt], 4)
    assert pool.match_prefix([1, 2], salt=np.int64(1)) == (held[1][:1], 2)


def test_a_salt_of_its_own_for_each_sequence_leaves_nothing_behind():
    pool = cuattn.BlockPool(2, 1)
    for salt in range(1000):
        ids = pool.allocate(2)
        pool.commit(ids, [1, 2], salt=salt)
        pool.free(ids)
        assert pool.stats()["cached_blocks"] == 2
    assert pool.match_prefix([1, 2], salt=998) == ([], 0)
    assert pool.match_prefix([1, 2], salt=999)[1] == 2


def test_a_written_block_is_no_longer_found():
    pool = cuattn.BlockPool(4, 2)
    ids = pool.allocate(2)
    pool.commit(ids, [1, 2, 3, 4])
    assert pool.make_writable(ids[1]) == (ids[1], None)
    assert pool.match_prefix([1, 2, 3, 4]) == (ids[:1], 2)


def test_tokens_may_be_any_integers():
    pool = cuattn.BlockPool(4, 2)
    ids = pool.allocate(2)
    pool.commit(ids, np.array([5, 6, 7, 8], np.int32))
    for tokens in ([5, 6, 7, 8], (5, 6, 7, 8), np.arange(5, 9, dtype=np.uint8), range(5, 9)):
        assert pool.match_prefix(tokens) == (ids, 4)
    assert pool.match_prefix(np.array([[5, 0], [6, 0], [7, 0]])[:, 0]) == (ids[:1], 2)
    assert pool.match_prefix([]) == ([], 0)
    assert pool.allocate(np.int64(1)) == [2]
    pool.free(np.array(ids))


def test_the_time_of_a_call_does_not_grow_with_the_pool():
    """Steps over a pool of 2^20 blocks with a full cache touch only the blocks they are about."""
    pool = cuattn.BlockPool(2**20, 1)
    ids = pool.allocate(2**20)
    pool.commit(ids, np.arange(2**20))
    pool.free(ids)
    assert pool.stats()["evictable_blocks"] == 2**20
    for token in range(20_000):  # minutes, were any of them linear in the pool
        found, _ = pool.match_prefix([0])
        fresh = pool.allocate(1)
        pool.commit(fresh, [-1 - token])
        pool.free(found + fresh)
    assert pool.stats()["evictions"] == 20_000


def test_threads_share_a_pool():
    pool = cuattn.BlockPool(64, 2)
    held = [0] * 64  # by the thread that allocated the block; two would show
    errors = []

    def work(seed):
        rng, own = np.random.default_rng(seed), []
        try:
            for _ in range(3000):
                if rng.random() < 0.5 or not own:
                    try:
                        ids = pool.allocate(int(rng.integers(1, 6)))
                    except cuattn.OutOfBlocksError:
                        continue
                    for block in ids:
                        assert held[block] == 0
                        held[block] = seed
                    own.append(ids)
                else:
                    ids = own.pop()
                    for block in ids:
                        assert held[block] == seed
                        held[block] = 0
                    pool.fork(ids)
                    pool.free(ids)
                    pool.free(ids)
            for ids in own:
                for block in ids:
                    held[block] = 0
                pool.free(ids)
        except BaseException as error:
            errors.append(error)

    seed = int(os.environ["CUATTN_TEST_SEED"]) + 1
    threads = [threading.Thread(target=work, args=(seed + i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert pool.stats()["free_blocks"] == 64
    assert pool.stats()["used_blocks"] == 0
