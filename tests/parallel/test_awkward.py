# SPDX-License-Identifier: Apache-2.0
"""Calls that are right but unusual, and calls that go wrong on one rank alone."""

from __future__ import annotations

import pytest

import frameworks

frameworks.require("torch")
import awkward_jobs  # noqa: E402


def test_ranks_that_differ_in_one_option_say_which(pool):
    for name in awkward_jobs.ONE_OPTION:
        found = pool.run(2, awkward_jobs.one_option_differs, name)
        assert len(set(found)) == 1, (name, found)
        kind, text = found[0]
        assert kind == "ValueError", (name, found)
        assert f"{name} is " in text or "refused by other ranks" in text, text


@pytest.mark.parametrize("name", ["q", "alibi_slopes", "sinks", "bias"])
def test_a_gradient_that_one_rank_alone_wants_is_refused_on_all(name, pool):
    for kind, text in pool.run(2, awkward_jobs.learns_alone, name):
        assert kind == "ValueError"
        assert "requires_grad is [" in text, text


@pytest.mark.parametrize("name", ["seqused", "dropout_state", "alibi_slopes", "bias", "q"])
def test_what_is_written_before_the_way_back_is_seen(name, pool):
    for scheme in awkward_jobs.SCHEMES:
        if name == "q" and scheme == "heads":
            continue  # whose exchange has copied it
        for kind, text in pool.run(2, awkward_jobs.written_before_the_way_back, name, scheme):
            assert kind == "RuntimeError", (scheme, kind, text)
            assert "modified by an inplace operation" in text, text


def test_a_gradient_of_a_gradient_is_refused(pool):
    for scheme in awkward_jobs.SCHEMES:
        for kind, text in pool.run(2, awkward_jobs.gradient_of_a_gradient, scheme):
            assert kind == "NotImplementedError", (scheme, kind, text)
            assert "a gradient of a gradient does not go through ranks" in text, text


def test_empty_shards_take_part_both_ways(pool, seed):
    pool.run(4, awkward_jobs.empty_shards, seed)


@pytest.mark.parametrize("size", [2, 3])
def test_a_bias_where_a_rank_has_one_row_or_none(size, pool, seed):
    pool.run(size, awkward_jobs.biases_of_few_rows, seed)


def test_views_are_as_good_as_copies(pool, seed):
    pool.run(2, awkward_jobs.strided, seed)


def test_any_group_and_pairs_with_one_rank(pool, seed):
    found = pool.run(4, awkward_jobs.other_groups, seed)
    for rank in (0, 2):
        assert found[rank][0] == "ValueError"
        assert "group must be a ProcessGroup that holds this rank" in found[rank][1]


def test_explain_says_what_attention_does(pool):
    pool.run(2, awkward_jobs.explained)


def test_decode_that_is_awkward(pool):
    found = list(zip(*pool.run(2, awkward_jobs.decode_awkward), strict=True))
    if pool.backend == "nccl":  # lengths on a device are not compared: nobody waits for them
        assert found.pop(2) == (("", ""), ("", ""))
    for of_ranks in found:
        kinds, texts = zip(*of_ranks, strict=True)
        assert all(kinds), of_ranks
        assert all("parallel.paged_attention: " in text for text in texts) or "grad" in texts[1]


def test_documents_of_no_token(pool):
    pool.run(2, awkward_jobs.documents_of_none)
