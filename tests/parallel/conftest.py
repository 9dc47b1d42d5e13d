# SPDX-License-Identifier: Apache-2.0
"""The ranks that the tests of this folder share."""

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture
def seed(rng):
    return int(rng.integers(2**31))
