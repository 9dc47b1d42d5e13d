# SPDX-License-Identifier: Apache-2.0
"""JAX arrays over caches: what the tests of attention, of writes and of refusals share."""

from __future__ import annotations

import numpy as np

import cache_cases
import cases
import frameworks
import paged_cases
from cache_cases import CACHE_DTYPES, cache_shape
from harness import bits

jax = frameworks.require("jax")
import jax.numpy as jnp  # noqa: E402


def device_of(device):
    """JAX's device for that of a test; without one the test is skipped, or fails."""
    if device.name == "cuda":
        frameworks.require_gpu_of_jax()
    return jax.devices()[0] if device.name == "cuda" else jax.devices("cpu")[0]


def to_jax(values):
    """The numpy arrays of a dict, tuple or list as JAX arrays; anything else as it is."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, values)


def assert_same_bits(got, want):
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, jax.Array)
        a = np.asarray(a)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b))


def eager_and_jitted(function):
    return function, jax.jit(function)


def writing(rng, layout="nhd", dtype="float32", cache_dtype=None, tokens=37):
    """Arguments of a good call; the caches hold random bytes, a few slots are -1."""
    rows = [rng.standard_normal((tokens, 3, 64), np.float32).astype(cases.DTYPES[dtype])] * 2
    cache_dtype = np.dtype(CACHE_DTYPES[cache_dtype or dtype])
    caches = [
        rng.integers(
            0, 256, (*cache_shape(layout, 7, 16, 3, 64, cache_dtype, is_k), cache_dtype.itemsize)
        )
        .astype(np.uint8)
        .view(cache_dtype)[..., 0]
        for is_k in (True, False)
    ]
    slots = cache_cases.Write(tokens=tokens).draw_slots(rng)
    return [rows[0], rows[1][::-1].copy(), *caches, slots]


def gathering(rng, layout="nhd", dtype="float32"):
    """Caches of random bytes, and sequences of 20, 0 and 33 tokens; junk past them."""
    dtype = np.dtype(CACHE_DTYPES[dtype])
    caches = writing(rng, layout, "float32", dtype.name)[2:4]
    tables = rng.choice(np.array(paged_cases.JUNK, np.int64), (3, 4)).astype(np.int32)
    tables[0, :2], tables[2, :3] = (6, 1), (0, 1, 5)
    return [*caches, tables, np.array([0, 20, 20, 53], np.int32)]
