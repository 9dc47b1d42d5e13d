# SPDX-License-Identifier: Apache-2.0
"""The ranks that the tests of this folder share: processes over gloo, GPUs over NCCL."""

import pytest
from pool import Pool, count_gpus, why_no_nccl


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """One worker begins with the tests over NCCL, so that few make ranks, which import torch."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "nccl" not in item.nodeid)


@pytest.fixture(scope="session")
def gloo():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nccl():
    reason = why_no_nccl()
    if reason is not None:
        pytest.skip(reason)
    pool = Pool(min(count_gpus(), 4), backend="nccl")
    yield pool
    pool.close()


@pytest.fixture(params=["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def pool(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def seed(rng):
    return int(rng.integers(2**31))
