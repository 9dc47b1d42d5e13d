# SPDX-License-Identifier: Apache-2.0
"""parallel_attention in a shard_map over four CPU devices, or GPUs, gives what one device gives."""

from __future__ import annotations

import numpy as np
import pytest

import frameworks

jax = frameworks.require("jax")
from cuattn.jax import parallel_attention, token_order  # noqa: E402  after what it needs

SENT = {"gather": "all-gather", "heads": "all-to-all", "ring": "collective-permute"}
WORDS = {  # of each refusal
    "axis": "axis must be an axis of a jax.shard_map",
    "axes": "axis must be the name of one axis",
    "scheme": "scheme must be 'auto', 'gather', 'heads' or 'ring', got 'rings'",
    "layout": "layout must be 'contiguous' or 'zigzag', got 'bshd'",
    "heads": "for each of 4 devices, got 6 and 3; choose another scheme",
    "gather": "'gather' needs causal windows or none, got window (2, 2)",
    "slopes": "'gather' needs causal for alibi_slopes, got a full mask",
    "ring": "'ring' needs alibi_slopes None",
    "zigzag": "'ring' needs layout 'contiguous' for windows, got 'zigzag'",
    "none": "'heads' needs heads of q",
    "groups": "head_groups must divide k's 4 heads, got 3",
    "odd": "q must have an even number of rows for zigzag, got 7",
    "unequal": "q and k must have the same number of rows",
}


MOST = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 0.03}  # apart from one device


def run(*words):
    if jax.__version_info__ < (0, 10):
        pytest.skip("shard_map of an older JAX checks otherwise what varies")
    return frameworks.run_of_jax("parallel_jax_calls.py", *words)


@pytest.fixture(scope="module")
def lines():
    return run("cpu")


def test_values_and_gradients_of_one_device(lines):
    found = [line for line in lines if line[0] != "refused"]
    assert len(found) == 16
    for name, apart, _, dtype in found:
        assert apart <= MOST[dtype], (name, apart)


@pytest.mark.gpu
def test_gpus_give_what_one_gives(rng):
    frameworks.require_gpus_of_jax(4)
    found = run("gpu", str(rng.integers(2**31)))
    assert len(found) == 28
    for name, apart, sent, dtype in found:
        assert apart <= MOST[dtype], (name, dtype, apart)
        scheme = SENT.get(name.split()[0])
        assert name == "ring narrow" or scheme in (None, *sent), (name, sent)


def test_each_scheme_sends_what_it_is_named_for(lines):
    for name, _, collectives, *_ in lines:
        scheme = name.split()[0]
        if scheme in SENT and name != "ring narrow":
            assert SENT[scheme] in collectives, (name, collectives)
            others = {sent for one, sent in SENT.items() if one != scheme}
            assert not others & set(collectives), (name, collectives)
    narrow = next(line for line in lines if line[0] == "ring narrow")
    assert narrow[2] == []  # what nobody sees is not sent


def test_refusals(lines):
    refused = {line[1]: line[2] for line in lines if line[0] == "refused"}
    assert refused.keys() == WORDS.keys()
    for name, text in refused.items():
        assert "Error: parallel_attention: " in text, (name, text)
        assert WORDS[name] in text, (name, text)


def test_every_token_lies_on_one_device(rng):
    for size in (1, 2, 3, 8):
        for layout in ("contiguous", "zigzag"):
            seqlen = 2 * size * int(rng.integers(0, 9))
            order = token_order(seqlen, size, layout)
            np.testing.assert_array_equal(np.sort(order), np.arange(seqlen))
            assert (np.diff(order.reshape(size, -1)) > 0).all()  # in order within a device
    np.testing.assert_array_equal(token_order(8, 2), [0, 1, 6, 7, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="seqlen must be a multiple of 4 for zigzag over 2 dev"):
        token_order(6, 2)
    with pytest.raises(ValueError, match="token_order: layout must be"):
        token_order(8, 2, "striped")


def test_outside_of_shard_map_the_axis_is_named():
    x = np.zeros((1, 4, 2, 16), np.float32)
    with pytest.raises(ValueError, match=r"axis must be an axis of a jax\.shard_map around"):
        parallel_attention(x, x, x, axis="x")
