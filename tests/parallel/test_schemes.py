# SPDX-License-Identifier: Apache-2.0
"""Attention over 2 and 4 ranks is that of one process: to the bit by gather and heads."""

from __future__ import annotations

import pytest

import frameworks

frameworks.require("torch")
import awkward_jobs  # noqa: E402
import jobs  # noqa: E402
import mistakes  # noqa: E402


@pytest.mark.parametrize(
    ("size", "dtype", "heads", "seqlen", "batch"),
    [
        (2, "float32", (8, 2), 512, 2),
        (2, "float32", (4, 2), 512, 1),  # its runs go into one call
        (4, "bfloat16", (4, 4), 1024, 1),
        (4, "bfloat16", (4, 4), 1000, 2),
        (2, "float16", (4, 1), 700, 1),
    ],
)
def test_every_mask_layout_and_scheme(size, dtype, heads, seqlen, batch, pool, seed):
    pool.run(size, jobs.masks_and_layouts, seed, dtype, heads, seqlen, batch)


@pytest.mark.parametrize(
    ("size", "job", "arguments"),
    [
        (2, "masks_and_layouts", ("bfloat16", (8, 2), 512, 1)),
        (4, "masks_and_layouts", ("float16", (4, 4), 1000, 2)),
        (2, "every_option", ()),
        (4, "any_length", ()),
        (2, "documents", ()),
        (4, "gradients", ()),
        (2, "decode", ()),
        (4, "decode", ()),
    ],
)
def test_keys_are_read_from_the_memory_of_other_ranks(size, job, arguments, pool, seed):
    """By copy engines between GPUs of one host; on the CPU by memory that processes share."""
    pool.run(size, jobs.by_buffers, job, seed, *arguments)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("job", "arguments"),
    [("masks_and_layouts", ("bfloat16", (8, 2), 512, 1)), ("decode", ())],
)
def test_keys_move_by_nccl_where_ranks_share_no_host(job, arguments, nccl, seed):
    nccl.run(2, jobs.by_nccl, job, seed, *arguments)


@pytest.mark.parametrize("size", [2, 4])
def test_every_option(size, pool, seed):
    pool.run(size, jobs.every_option, seed)


def test_any_length_goes(pool, seed):
    pool.run(4, jobs.any_length, seed)


def test_documents_lie_on_any_number_of_ranks(pool, seed):
    pool.run(2, jobs.documents, seed)


def test_a_ring_merges_parts_that_are_not_rounded(pool, seed):
    errors = pool.run(4, jobs.errors_of_a_ring, seed)
    wide, narrow, one = (sum(rank[i] for rank in errors) ** 0.5 for i in range(3))
    assert wide <= 1.02 * one
    assert narrow >= 1.15 * one  # what this test would see


def test_layouts_by_name_and_the_choice_of_a_scheme(pool, seed):
    pool.run(2, jobs.by_name, seed)


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_are_those_of_one_process(size, pool, seed):
    pool.run(size, jobs.gradients, seed)


def test_two_levels(pool, seed):
    pool.run(4, jobs.two_levels, seed, [])


@pytest.mark.parametrize("size", [2, 4])
def test_decode_over_a_context_that_is_dealt_to_ranks(size, pool, seed):
    assert len(set(pool.run(size, jobs.decode, seed))) == 1  # reduce="all": the same bits


@pytest.mark.parametrize("case", ["packed", "shared out"])
def test_a_decode_that_fails_on_a_rank_leaves_the_next_alone(case, gloo):
    found = gloo.run(2, awkward_jobs.decode_that_fails, case)
    assert found[0] == [1.0, "nan", 3.0, 4.0]
    assert found[1] == [1.0, "out of memory", 3.0, 4.0]


def test_calibrate_gives_all_ranks_the_same_speeds(pool):
    found = pool.run(2, jobs.calibration)
    assert found[0] == found[1]
    assert all(x > 0 for x in found[0][0].values())


def test_a_call_is_one_op_of_a_graph(pool, seed):
    pool.run(2, jobs.compiled, seed)


@pytest.mark.gpu
def test_a_call_is_captured_as_a_graph(nccl, seed):
    nccl.run(2, jobs.graph, seed)


MUTANTS = tuple(mistakes.mutants())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_seen(name, pool, seed):
    found = pool.run(2, mistakes.mutant, name, seed)
    assert not any(right for right, _ in found)
    assert any(wrong for _, wrong in found)
