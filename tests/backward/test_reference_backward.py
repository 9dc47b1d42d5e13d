# SPDX-License-Identifier: Apache-2.0
"""The oracle of the gradients, held against central differences of the oracle of attention, every
option alone and in pairs; and Philox against the vectors of its authors.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import reference
import reference_backward

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM, DIM_V = 2, 4, 2, 5, 7, 8, 8
BIASES = ["bhij", "hij", "1hij", "b1ij", "11ij", "bh1j", "bhi1", "1h11", "1111", "ij", "1j", "b11j"]


def bias_of(axes):
    extents = {"b": BATCH, "h": HEADS, "i": ROWS, "j": KEYS, "1": 1}
    return lambda rng: {"bias": rng.standard_normal([extents[a] for a in axes])}


def masking_bias(rng):
    bias = rng.standard_normal((BATCH, 1, ROWS, KEYS))
    bias[rng.random(bias.shape) < 0.3] = -np.inf
    bias[0, 0, 1] = -np.inf  # a row without keys
    return {"bias": bias}


OPTIONS = {
    "plain": lambda rng: {},
    "causal": lambda rng: {"causal": True},
    "window": lambda rng: {"window": (2, 1)},
    "bhsd": lambda rng: {"layout": "bhsd"},
    "scale": lambda rng: {"scale": 0.7},
    "scale_negative": lambda rng: {"scale": -0.3},
    "scale_zero": lambda rng: {"scale": 0.0},
    "softcap": lambda rng: {"softcap": 1.3},
    "alibi": lambda rng: {"alibi_slopes": rng.uniform(0, 0.5, HEADS)},
    "alibi_batch": lambda rng: {"alibi_slopes": rng.uniform(0, 0.5, (BATCH, HEADS))},
    "sinks": lambda rng: {"sinks": rng.standard_normal(HEADS)},
    "bias_bool": lambda rng: {"bias": rng.random((BATCH, 1, ROWS, KEYS)) < 0.7},
    "bias_masking": masking_bias,
    **{f"bias_{axes}": bias_of(axes) for axes in BIASES},
    "seqused_q": lambda rng: {"seqused_q": np.array([3, 0])},
    "seqused_k": lambda rng: {"seqused_k": np.array([0, 4])},
    "ragged": lambda rng: {"ragged": True},
    "dlse": lambda rng: {"dlse": True},
    "dropout": lambda rng: {"dropout_p": 0.4, "dropout_seed": 2**40 + 7, "dropout_offset": 3},
}


def exclusive(a, b):
    """Whether two options cannot be given at once."""
    kind = a.split("_")[0]
    return (kind == b.split("_")[0] and kind in ("scale", "bias", "alibi")) or (
        {a, b} == {"bhsd", "ragged"}
    )


PAIRS = [pair for pair in itertools.combinations(OPTIONS, 2) if not exclusive(*pair)]


def problem_of(names, rng):
    """Arrays (with dout, and dlse), options, and the functions of a call with these options."""
    options = {}
    for name in names:
        options |= OPTIONS[name](rng)
    ragged, with_dlse = (options.pop(name, False) for name in ("ragged", "dlse"))
    shapes = {
        "q": (BATCH, ROWS, HEADS, DIM),
        "k": (BATCH, KEYS, KV_HEADS, DIM),
        "v": (BATCH, KEYS, KV_HEADS, DIM_V),
    }
    lse_shape = (BATCH, HEADS, ROWS)
    if ragged:
        cu_seqlens = (np.array([0, 2, 2 + ROWS]), np.array([0, KEYS, KEYS + 3]))
        totals = {"q": 3 + ROWS, "k": 5 + KEYS, "v": 5 + KEYS}  # rows behind the last sequence
        shapes = {name: (totals[name], *shape[2:]) for name, shape in shapes.items()}
        lse_shape = (HEADS, totals["q"])
    elif options.get("layout") == "bhsd":
        shapes = {name: (b, h, s, d) for name, (b, s, h, d) in shapes.items()}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    for name in ("alibi_slopes", "sinks", "bias"):
        if name in options:
            arrays[name] = options.pop(name)
    dout = rng.standard_normal((*shapes["q"][:-1], DIM_V))
    dlse = rng.standard_normal(lse_shape) if with_dlse else None

    def forward(arrays):
        rest = {name: x for name, x in arrays.items() if name not in "qkv"}
        qkv = [arrays[name] for name in "qkv"]
        if ragged:
            return reference.attention_varlen(*qkv, *cu_seqlens, ROWS, KEYS, **rest, **options)
        return reference.attention(*qkv, **rest, **options)

    def loss(arrays):
        out, lse = forward(arrays)
        total = np.sum(np.where(np.isnan(out), 0, dout * out))  # rows of no sequence are NaN
        if dlse is not None:
            total += np.sum(np.where(np.isfinite(lse), dlse * np.where(lse == -np.inf, 0, lse), 0))
        return total

    def backward():
        out, lse = forward(arrays)
        rest = {name: x for name, x in arrays.items() if name not in "qkv"} | options
        given = [dout, *(arrays[name] for name in "qkv"), out, lse]
        if ragged:
            return reference_backward.attention_varlen_backward(
                *given, *cu_seqlens, ROWS, KEYS, dlse=dlse, **rest
            )
        return reference_backward.attention_backward(*given, dlse=dlse, **rest)

    return arrays, loss, backward


def assert_gradients(names, rng):
    arrays, loss, backward = problem_of(names, rng)
    found = backward()
    gradients = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks", "alibi_slopes": "dslopes"}
    if "bias" in arrays and arrays["bias"].dtype != np.bool_:
        gradients["bias"] = "dbias"
    assert set(found) == {gradients[name] for name in arrays if name in gradients}
    for name, x in arrays.items():
        if name not in gradients:
            continue
        gradient = found[gradients[name]]
        assert gradient.shape == x.shape
        # Along random directions, and one element by itself.
        directions = [rng.standard_normal(x.shape) for _ in range(3)]
        one = np.zeros(x.shape)
        one.reshape(-1)[rng.integers(x.size)] = 1
        for direction in (*directions, one):
            step = 1e-5 * direction
            difference = loss({**arrays, name: x + step}) - loss({**arrays, name: x - step})
            want = np.sum(gradient * direction)
            assert abs(difference / 2e-5 - want) <= 1e-7 * (1 + np.abs(gradient).sum()), name


@pytest.mark.parametrize("name", OPTIONS)
def test_the_gradients_are_central_differences(name, rng):
    assert_gradients([name], rng)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_gradients_of_two_options_are_central_differences(pair, rng):
    assert_gradients(pair, rng)


def test_the_gradients_of_all_options_are_central_differences(rng):
    names = "causal window scale softcap alibi_batch sinks bias_1hij seqused_q seqused_k dlse"
    assert_gradients([*names.split(), "dropout"], rng)


# kat_vectors of Random123: counter, key, words.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS)
def test_philox_gives_the_words_of_its_authors(counter, key, words):
    assert tuple(int(w) for w in reference.philox(counter, key)) == words


def test_dropout_keeps_what_the_rule_says():
    kept = reference.dropout(0.25, 5 + (6 << 32), 7, (2, 3), (4, 40))
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 3, 39), (0, 1, 2, 17)):
        words = reference.philox((j // 16, i, b * 3 + h, 7), (5, 6))
        byte = int(words[j % 16 // 4]) >> 8 * (j % 4) & 255
        assert kept[b, h, i, j] == (256 / 192 if byte < 192 else 0)
    assert reference.dropout(0.0, 0, 0, (1, 1), (1, 1)) is None
    assert abs(reference.dropout(0.5, 1, 0, (4, 4), (64, 64)).mean() - 1) < 0.02
    assert (reference.dropout(0.9999, 1, 0, (1, 1), (64, 64)) > 0).any()  # one byte in 256 stays
