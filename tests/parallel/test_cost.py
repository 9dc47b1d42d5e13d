# SPDX-License-Identifier: Apache-2.0
"""The model that scheme="auto" chooses by: near what two GPUs took, and monotone."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import frameworks

frameworks.require("torch")

from cuattn.parallel import Layout  # noqa: E402
from cuattn.parallel.cost import (  # noqa: E402
    ENGINES,
    SCHEMES,
    Shape,
    Speeds,
    choose,
    groups_of_sums,
    model,
    shape_of_documents,
)

PLENTY = 1 << 40
# Two H100s, causal, head_dim 128, bfloat16, zigzag: milliseconds of one GPU and of a call alone by
# gather, ring and heads (docs/notes/20261125-two-gpus.md).
MEASURED = {
    (16, 16, 8192): (0.42, 0.59, 0.62, 1.08),
    (32, 8, 8192): (0.77, 0.87, 0.86, 1.33),
    (16, 16, 32768): (5.9, 4.13, 3.78, 4.65),
    (32, 8, 32768): (12.1, 6.91, 7.42, 8.18),
    (16, 16, 131072): (96.5, 52.2, 51.1, 54.2),
}
# The faster of gather and ring where calls follow one another, of which the host shows less.
BETTER_IN_A_ROW = {
    (16, 16, 8192): "gather",
    (32, 8, 8192): "gather",
    (32, 8, 32768): "gather",
    (16, 16, 131072): "ring",
}


def shape_of(heads_q=16, heads_kv=16, causal=True, **more):
    return Shape(1, heads_q, heads_kv, 256, 2, causal, **more)


def choice_of(shape, seqlen, size=2, refused=(), memory=PLENTY, speeds=None, wanted="auto"):
    limits = dict.fromkeys(refused, "a reason"), memory, speeds
    return choose("parallel.attention", wanted, shape, seqlen, size, limits)


@pytest.mark.parametrize("row", MEASURED)
def test_the_model_says_what_two_gpus_took(row):
    *heads, seqlen = row
    one, gather, ring, heads_took = MEASURED[row]
    found = choice_of(shape_of(*heads), seqlen)
    took = {"gather": gather, "ring": ring, "heads": heads_took}
    assert found.alone * 1e3 == pytest.approx(one, rel=0.12)
    for scheme, seconds in found.seconds.items():
        assert seconds * 1e3 == pytest.approx(took[scheme], rel=0.25), scheme
    assert took[found.scheme] <= 1.03 * min(took.values())
    assert found.scheme == BETTER_IN_A_ROW.get(row, found.scheme)


# Two H200s, the same shapes: a step with gradients (docs/notes/20261129-copy-engines.md).
TRAINING = {32768: (24.5, 18.5, 15.5, 14.5), 131072: (387.0, 216.0, 213.0, 207.0)}


@pytest.mark.parametrize("seqlen", TRAINING)
def test_the_model_says_what_training_took(seqlen):
    one, gather, ring, heads = TRAINING[seqlen]
    found = choice_of(shape_of(trains=True), seqlen, speeds=ENGINES)
    took = {"gather": gather, "ring": ring, "heads": heads}
    assert found.alone * 1e3 == pytest.approx(one, rel=0.12)
    for scheme, seconds in found.seconds.items():
        assert seconds * 1e3 == pytest.approx(took[scheme], rel=0.12), scheme
    assert found.scheme == "heads"


def by_turns(seqlen, size):
    """Chunks of 1024 tokens, dealt by turns."""
    ends = [min(end, seqlen) for end in range(1024, seqlen + 1024, 1024)]
    return Layout._of("by turns", size, [i % size for i in range(len(ends))], ends)


def test_whole_documents_hide_what_comes_for_the_others():
    """Their attention waits for no keys; heads exchanges rows of all."""
    lengths = np.array([30000, 30000, 5072], np.int64)
    cut = np.array([0, 0, 0, 5072], np.int64)
    layout = by_turns(5072, 2)
    shape = shape_of_documents(shape_of(), np.concatenate([[0], np.cumsum(lengths)]), layout)
    part = shape_of_documents(shape_of(), cut, layout, np.array([30000, 30000, 0]))
    assert part.beside + part.pairs == shape.pairs
    limits = {}, 1 << 40, ENGINES
    alike = choose("f", "auto", shape, 65072, 2, limits)
    apart = choose("f", "auto", shape, 65072, 2, limits, (part, 5072))
    assert apart.seconds["heads"] == alike.seconds["heads"]
    assert apart.seconds["gather"] < alike.seconds["gather"] - 0.5e-3
    assert apart.buffer_bytes < alike.buffer_bytes / 10
    assert apart.scheme == "gather"


def test_sums_of_a_short_sequence_go_home_at_once():
    """Each group is calls and an exchange; of a long one they would fill the memory."""
    bytes_of = 4 * 256  # of a token of a head
    found = [groups_of_sums(16, tokens * bytes_of) for tokens in (1, 2442, 8192, 131072)]
    assert found == [1, 1, 2, 8]
    assert groups_of_sums(2, 131072 * bytes_of) == 2


def test_documents_that_many_chunks_cut_go_by_no_ring():
    """What made a call three times as long as one GPU: 277 calls of 1024 rows each."""
    lengths = np.array([21521, 2442, 1178, 9363, 21206, 19067, 30000, 26295], np.int64)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    shape = shape_of_documents(shape_of(), begins, by_turns(int(begins[-1]), 2))
    assert shape.pairs == pytest.approx(float((lengths**2).sum()) / 2)
    found = choice_of(shape, int(begins[-1]))
    assert found.scheme != "ring"
    assert found.seconds["ring"] > 2 * found.seconds[found.scheme]


@pytest.mark.parametrize("seqlen", [8192, 32768, 131072])
@pytest.mark.parametrize("heads", [(16, 16), (32, 8)])
def test_copy_engines_bring_all_heads_at_once(heads, seqlen):
    """Two calls of attention and packing by groups cost more than what they would hide."""
    for masks in ({"causal": True}, {"causal": False, "in_order": True}):
        found = choice_of(shape_of(*heads, **masks), seqlen, speeds=ENGINES)
        assert found.groups == (heads[1],)
        if seqlen > 8192 and heads == (16, 16):
            assert found.scheme == "ring"
    assert "by the model of two H200s and their copy engines" in str(found)


def test_engines_count_for_the_keys_of_gather_and_ring_alone():
    """NCCL moves what heads exchanges, and the sums of gradients."""
    for shape in (shape_of(), shape_of(trains=True)):
        nccl, engines = (model(shape, 32768, 2, x, (16,)) for x in (Speeds(), ENGINES))
        assert engines["heads"] == nccl["heads"]
        assert engines["gather"] < nccl["gather"]
        assert engines["ring"] < nccl["ring"]


def test_gradients_of_documents_count_their_calls():
    begins = np.arange(0, 131073, 4096)
    shape = shape_of(trains=True)
    cut = shape_of_documents(shape, begins, by_turns(131072, 2))
    whole = dataclasses.replace(cut, pieces=(0.0, 0.0))
    forth = [dataclasses.replace(x, trains=False) for x in (cut, whole)]
    for scheme in ("gather", "ring"):
        both, way = (
            [model(x, 131072, 2, ENGINES, (16,))[scheme] for x in pair]
            for pair in ((cut, whole), forth)
        )
        assert both[0] - both[1] >= 2 * (way[0] - way[1]) > 0


def test_a_short_sequence_is_gathered_at_once():
    for heads in ((16, 16), (32, 8)):
        found = choice_of(shape_of(*heads), 8192)
        assert found.scheme == "gather"
        assert len(found.groups) == 1


def test_slower_transport_never_makes_a_scheme_faster():
    for heads, seqlen, size in itertools.product(
        ((16, 16), (32, 8), (64, 8)), (1024, 8192, 131072), (2, 4, 8)
    ):
        shape = shape_of(*heads)
        slower = (
            Speeds(bytes=45e9),
            Speeds(latency=1e-3),
            Speeds(flops=300e12),
        )
        fast = model(shape, seqlen, size, Speeds(), (heads[1],))
        for speeds in slower:
            slow = model(shape, seqlen, size, speeds, (heads[1],))
            assert all(slow[name] >= seconds for name, seconds in fast.items())
        assert all(seconds > 0 for seconds in fast.values())


def test_keys_in_order_are_not_put_in_order():
    dealt = choice_of(shape_of(), 32768).seconds["gather"]
    in_order = choice_of(shape_of(in_order=True), 32768).seconds["gather"]
    assert dealt - in_order == pytest.approx(2 * 32768 * 16 * 256 * 2 / 2.5e12, rel=0.6)


def test_a_step_that_hides_its_exchange_costs_attention_alone():
    """Without host, latency, merges and copies it is n >= e (F / W) / G: docs/parallel.md."""
    speeds = Speeds(latency=0.0)
    for share in (1, 4, 8):
        shape = shape_of(16, 16 // share)
        rows = 2 * speeds.flops / speeds.bytes / share
        for times, is_hidden in ((0.8, False), (1.1, True)):
            seqlen = int(4 * rows * times)
            ring = model(shape, seqlen, 4, speeds, (1,))["ring"]
            free = model(shape, seqlen, 4, speeds._replace(bytes=1e30), (1,))["ring"]
            assert (ring == free) == is_hidden, (share, times)


def test_the_choice_is_among_what_can_run():
    shape = shape_of()
    names = set(SCHEMES) & {"gather", "heads", "ring"}
    for count in range(3):
        for refused in itertools.combinations(sorted(names), count):
            found = choice_of(shape, 32768, refused=refused)
            assert found.scheme in names - set(refused)
            assert found.seconds.keys() == names - set(refused)
            assert found.seconds[found.scheme] == min(found.seconds.values())
    with pytest.raises(NotImplementedError, match="no scheme can run this call"):
        choice_of(shape, 32768, refused=names)
    tight = choice_of(shape, 32768, memory=1 << 20)
    assert "gather" in tight.refused
    assert choice_of(shape, 32768, size=1).scheme == "local"


def test_the_words_tell_what_one_rank_would_take():
    found = choice_of(shape_of(), 8192)
    assert f"one rank that held all: {found.alone * 1e3:.3f} ms" in str(found)
    assert "gather: the least time by the model of two H100s (parallel.calibrate" in str(found)
    assert str(choice_of(shape_of(), 8192, size=1)) == "local: the group has one rank"
    asked = choice_of(shape_of(), 8192, wanted="ring")
    assert asked.scheme == "ring"
    assert dataclasses.replace(asked, scheme="gather").seconds == found.seconds
