# SPDX-License-Identifier: Apache-2.0
"""Options that count places of the sequence, forward and backward, over 2 and 4 ranks."""

from __future__ import annotations

import pytest

import frameworks

frameworks.require("torch")
import option_jobs  # noqa: E402


@pytest.mark.parametrize("size", [2, 4])
def test_slopes_are_learned_over_ranks(size, pool, seed):
    pool.run(size, option_jobs.slopes, seed)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_drop_what_one_process_drops(size, pool, seed):
    pool.run(size, option_jobs.dropout, seed)


@pytest.mark.parametrize("size", [2, 4])
def test_padded_batches_lie_on_ranks(size, pool, seed):
    pool.run(size, option_jobs.lengths_in_use, seed)


@pytest.mark.parametrize("size", [2, 4])
def test_documents_are_gathered_in_one_call(size, pool, seed):
    pool.run(size, option_jobs.documents_in_one_call, seed)
