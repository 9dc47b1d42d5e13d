# SPDX-License-Identifier: Apache-2.0
"""No tracer of JAX is kept by flex_attention: JAX's own check finds none, by each way of a call."""

from __future__ import annotations

import gc

import pytest

import cuattn
import frameworks

jax = frameworks.require("jax")

import cuattn.jax.flex  # noqa: E402

BLOCKS = cuattn.create_block_mask(lambda b, h, i, j: j <= i, None, None, 64, 64, block_size=64)
TABLES: list = []


def biased(s, b, h, i, j, tables=TABLES):
    return s + tables[0][h]


def by_a_function_that_lives_on(q, table):
    TABLES.append(table)
    try:
        return cuattn.flex_attention(q, q, q, score_mod=biased)
    finally:
        TABLES.clear()


LEAKS = {
    "a mask": lambda q, table: cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: j <= i),
    "a captured array": lambda q, table: cuattn.flex_attention(
        q, q, q, score_mod=lambda s, b, h, i, j: s + table[h]
    ),
    "a function that lives on": by_a_function_that_lives_on,
    "a block mask that lives on": lambda q, table: cuattn.flex_attention(
        q, q, q, block_mask=BLOCKS, mask_mod=lambda b, h, i, j: table[h] > 0
    ),
}


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_left_alone():
    """JAX collects garbage after each trace: what other tests left would be walked each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("what", LEAKS)
@pytest.mark.parametrize("transform", ["jit", "grad of jit", "jit of grad"])
@pytest.mark.parametrize("by", ["callback", "ffi"])
def test_no_tracer_outlives_its_trace(what, transform, by, monkeypatch):
    """JAX keeps what it differentiates by, functions what they were traced to."""
    if by == "ffi":  # as on a GPU
        monkeypatch.setattr(cuattn.jax.flex, "device_of", lambda *_: 0)
        real = cuattn.jax.flex.DeviceCall
        monkeypatch.setattr(cuattn.jax.flex, "DeviceCall", lambda *x: real(*x[:-1], -1))
    call, q, table = LEAKS[what], jax.numpy.ones((1, 64, 2, 16)), jax.numpy.ones(2)
    loss = lambda q, table: call(q, table).sum()  # noqa: E731
    transforms = {
        "jit": lambda: jax.jit(call),
        "grad of jit": lambda: jax.grad(jax.jit(loss), (0, 1)),
        "jit of grad": lambda: jax.jit(jax.grad(loss, (0, 1))),
    }
    with jax.checking_leaks(), jax.default_device(jax.devices("cpu")[0]):
        transforms[transform]()(q, table)
