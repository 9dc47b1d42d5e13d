# SPDX-License-Identifier: Apache-2.0
"""rope_table and apply_rope: the formula, the bits of cache writes, the tables of models."""

from __future__ import annotations

import math

import numpy as np
import pytest

import cuattn
import frameworks
import fused_cases
from cases import DTYPES
from fused_cases import ROUNDING, turned
from harness import bits, numpy_call


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_are_turned_and_the_rest_is_copied(device, dtype, interleaved, rng):
    fused_cases.assert_turned(device, dtype, interleaved, rng)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_a_cache_write(device, dtype, interleaved, rng):
    for head_dim, rotary_dim in ((64, 64), (128, 32), (24, 12)):
        k = rng.standard_normal((33, 3, head_dim)).astype(DTYPES[dtype])
        cos, sin = cuattn.rope_table(1000, rotary_dim)
        positions = rng.integers(0, 1000, 33)
        caches = np.zeros((2, 33, 1, 3, head_dim), DTYPES[dtype])
        written, _ = numpy_call(
            device, cuattn.reshape_and_cache, k, k, *caches, np.arange(33), cos=cos, sin=sin,
            positions=positions, rope_interleaved=interleaved,
        )  # fmt: skip
        found = numpy_call(
            device, cuattn.apply_rope, k, cos, sin, positions, interleaved=interleaved
        )
        assert np.array_equal(bits(found), bits(written[:, 0]))
        back = numpy_call(
            device, cuattn.apply_rope, found, cos, sin, positions,
            interleaved=interleaved, inverse=True,
        )  # fmt: skip
        error = np.abs(back.astype(np.float64) - k.astype(np.float64))
        assert error.max() <= 8 * ROUNDING[dtype] * np.abs(k.astype(np.float64)).max()


def test_zero_sizes_and_positions_far_out(device, rng):
    cos, sin = cuattn.rope_table(2**20, 8)
    for shape in ((0, 2, 8), (2, 0, 2, 8), (3, 0, 8)):
        found = numpy_call(device, cuattn.apply_rope, np.zeros(shape, np.float32), cos, sin)
        assert found.shape == shape
    x = rng.standard_normal((2, 1, 8)).astype(np.float32)
    rows = np.array([2**20 - 1, 2**19])
    found = numpy_call(device, cuattn.apply_rope, x, cos, sin, rows)
    angles = rows[:, None].astype(np.float32) * (10000.0 ** (-np.arange(4) / 4)).astype(np.float32)
    expected, size = turned(x, np.cos(angles.astype(float)), np.sin(angles.astype(float)), 0, False)
    # The frequencies of the table are rounded by power(), here by 2^20 positions enlarged.
    assert (np.abs(found - expected) <= 0.2 * size).all()
    assert (np.abs(found - expected)[..., ::4] <= 1e-6 * size[..., ::4]).all()  # frequency 1


X = np.zeros((2, 4, 2, 16), np.float32)
COS, SIN = np.zeros((2, 5, 4), np.float32)
REFUSED = [
    (dict(x=X[0, 0]), "x must have from 3 to 6 axes"),
    (dict(x=X[None]), r"x must have axes \[n, num_heads, head_dim\]"),
    (dict(x=X.astype(np.int32)), "x must be float32, float16 or bfloat16, got int32"),
    (dict(cos=COS[0]), "cos must have 2 axes"),
    (dict(sin=SIN[:4]), "sin must have max_position 5 like cos, got 4"),
    (dict(cos=COS.astype(np.float64)), "cos must be float32, got float64"),
    (
        dict(cos=np.zeros((5, 9), np.float32), sin=np.zeros((5, 9), np.float32)),
        "cos must have rotary_dim / 2 from 1 to head_dim",
    ),
    (dict(cos=COS[:3], sin=SIN[:3]), "cos must have a row for each of the 4 tokens"),
    (dict(offset=9), "offset must be from 0 to head_dim - rotary_dim = 8, got 9"),
    (dict(offset=-1), "offset must be from 0"),
    (dict(offset=2**63 - 1), "offset must be from 0"),  # the end of the row is beyond int64
    (dict(positions=np.zeros((2, 4), np.int32)), "positions must be int64, got int32"),
    (dict(positions=np.zeros(4, np.int64)), r"positions must have shape \(2, 4\)"),
    (dict(positions=np.full((2, 4), 5)), r"positions must lie within \[0, 5\), got 5 at token 0"),
    (dict(positions=np.full((2, 4), -1)), r"positions must lie within \[0, 5\), got -1"),
    (dict(out=X[:1]), "out must have shape"),
    (dict(interleaved=1), "interleaved must be True or False"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_apply_rope_refuses(change, message):
    arguments = dict(x=X, cos=COS, sin=SIN, positions=None, **{}) | change
    places = [arguments.pop(name) for name in ("x", "cos", "sin", "positions")]
    with pytest.raises((ValueError, TypeError), match=f"apply_rope: {message}"):
        cuattn.apply_rope(*places, **arguments)


def test_out_that_overlaps_x_otherwise_is_refused():
    memory = np.zeros(100, np.float32)
    x, out = memory[:96].reshape(3, 2, 16), memory[4:100].reshape(3, 2, 16)
    with pytest.raises(ValueError, match="apply_rope: out must not share memory with x"):
        cuattn.apply_rope(x, COS, SIN, out=out)


# ---- tables

RULES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0},
    "yarn with mscale": {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0 + i / 50 for i in range(32)], "long_factor": [
        1.0 + i / 3 for i in range(32)], "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_tables_are_those_of_transformers(name):
    torch = frameworks.require("torch")
    frameworks.require_transformers()
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {"rope_type": name.split()[0], "original_max_position_embeddings": 1024, **RULES[name]}
    length = 4096 if name in ("dynamic", "longrope") else 1024
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=8,
        max_position_embeddings=1024,
        rope_parameters={**rule, "rope_theta": 50000.0},
    )  # fmt: skip
    inverse, factor = ROPE_INIT_FUNCTIONS[rule["rope_type"]](config, "cpu", seq_len=length)
    angles = torch.arange(length)[:, None].float() * inverse[None].float()
    cos, sin = cuattn.rope_table(length, 64, 50000.0, scaling=rule)
    # Frequencies differ by a few roundings, which the position multiplies.
    noise = 4e-7 * np.abs(angles.numpy()) + 1e-6
    assert (np.abs(cos - (angles.double().cos() * factor).numpy()) <= noise).all()
    assert (np.abs(sin - (angles.double().sin() * factor).numpy()) <= noise).all()


@pytest.mark.parametrize("length", [4096, 4097])
@pytest.mark.parametrize("longest", [131072, 4096])
def test_longrope_of_phi3(length, longest):
    """Its dict has neither factor: transformers computes it from what the model has beside."""
    torch = frameworks.require("torch")
    frameworks.require_transformers()
    from transformers import Phi3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Phi3Config(
        hidden_size=256, num_attention_heads=8, num_key_value_heads=8,
        max_position_embeddings=longest, original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    )  # fmt: skip
    inverse, factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
    rule = dict(config.rope_parameters)
    with pytest.raises(ValueError, match="put the model's max_position_embeddings into the dict"):
        cuattn.rope_table(length, 32, scaling=rule)
    rule["max_position_embeddings"] = config.max_position_embeddings
    cos, _ = cuattn.rope_table(length, 32, scaling=rule)
    assert math.isclose(cos[0, 0], 1.1902 if longest > 4096 else 1.0, abs_tol=1e-4)
    angles = torch.arange(length)[:, None].float() * inverse[None].float()
    noise = 4e-7 * np.abs(angles.numpy()) + 1e-6
    assert (np.abs(cos - (angles.double().cos() * factor).numpy()) <= noise).all()


def test_longrope_of_phi35_moe_has_its_factors_of_cos_and_sin():
    rule = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 8, "short_mscale": 1.25,
            "long_mscale": 1.5}  # fmt: skip
    for length, factor in ((8, 1.25), (9, 1.5)):
        assert cuattn.rope_table(length, 8, scaling=rule)[0][0, 0] == factor


def test_ntk_slows_the_last_pair_by_its_factor():
    plain, slow = (cuattn.rope_table(50, 64, scaling=s)[1] for s in (
        None, {"rope_type": "ntk", "factor": 8.0}))  # fmt: skip
    assert np.allclose(slow[40, -1] * 8, plain[40, -1], rtol=1e-4)
    assert np.array_equal(slow[:, 0], plain[:, 0])


def test_tables_in_other_libraries():
    torch = frameworks.require("torch")
    cos, sin = cuattn.rope_table(9, 4, like=torch.zeros(1))
    assert isinstance(cos, torch.Tensor)
    assert math.isclose(float(sin[1, 0]), math.sin(1.0), rel_tol=1e-6)
    x = torch.ones(2, 9, 1, 4)
    assert cuattn.apply_rope(x, cos, sin).shape == x.shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8), "max_position must be an integer from 1 on, got 0"),
        ((4, 7), "rotary_dim must be even, got 7"),
        ((4, 8, -1.0), "theta must be positive"),
        ((4, 8, "ten"), "theta must be positive and finite, got 'ten'"),
        ((True, 8), "max_position must be an integer from 1 on, got True"),
        ((4, 8, 1e4, {"rope_type": "linear", "factor": math.inf}), "a factor from 1 on, got inf"),
        ((4, 8, 1e4, {"rope_type": "linear", "factor": "2"}), "a factor from 1 on, got '2'"),
        ((4, 8, 1e4, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}),
         "original_max_position_embeddings from 1 on, got 0"),
        ((4, 8, 1e4, {"rope_type": "new"}), "scaling must name a rope_type of 'default'"),
        ((4, 8, 1e4, {"rope_type": "yarn", "factor": 2.0}), "must have 'original_max_position"),
        ((4, 8, 1e4, {"rope_type": "linear", "factor": 0.5}), "a factor from 1 on, got 0.5"),
        (
            (4, 8, 1e4, {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                         "original_max_position_embeddings": 9}),
            "short_factor of 4 numbers",
        ),
    ],
)  # fmt: skip
def test_what_rope_table_refuses(arguments, message):
    *numbers, scaling = (*arguments, None) if len(arguments) < 4 else arguments
    with pytest.raises(ValueError, match=f"rope_table: .*{message}"):
        cuattn.rope_table(*numbers, scaling=scaling)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}  # fmt: skip
GEMMA = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
         "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (GEMMA, r"the rule of one layer type, .* pass one layer type's, as scaling\['full_"),
        ({"factor": 4.0}, "without a rope_type must have no factor, got 4.0; name the rope_type"),
        ({"low_freq_factor": 2.0}, "without a rope_type must have no low_freq_factor"),
        ({"rope_type": "default", "factor": 4.0}, "of rope_type 'default' must have no factor"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2.0}, "one rope_type, got 'linear' and"),
        ({"rope_type": "default", "alpha": 1000.0}, "no keys but those of published rules, got 'a"),
        ({"rope_type": "linear", "facter": 2.0, "factor": 2.0}, "got 'facter'; leave it out"),
        ({1: 2}, "no keys but those of published rules, got 1"),
        ({"rope_type": ["yarn"]}, r"must name a rope_type of .*, got \['yarn'\]"),
        ({"rope_type": "linear", "factor": True}, "a factor from 1 on, got True"),
        ({"rope_type": "linear", "factor": 10**400}, "a factor from 1 on, got 1000"),
        ({"rope_type": "ntk", "factor": 1e300}, "must leave theta within float32"),
        ({**YARN, "rope_theta": 1.0}, "theta must not be 1 for rope_type 'yarn'"),
        ({**YARN, "beta_fast": -1}, "a number from 0 on for beta_fast, got -1"),
        ({**YARN, "beta_fast": "32"}, "a number from 0 on for beta_fast, got '32'"),
        ({**YARN, "mscale": "a"}, "a number from 0 on for mscale, got 'a'"),
        ({**YARN, "attention_factor": "1"}, "a number from 0 on for attention_factor, got '1'"),
        ({**LONG, "original_max_position_embeddings": 1}, "position_embeddings above 1"),
        ({**LONG, "short_factor": [0.0] * 4}, r"positive numbers in short_factor, got \[0.0, 0.0"),
        ({**LONG, "short_factor": ["a"] * 4}, r"positive numbers in short_factor, got \['a', 'a'"),
    ],
)  # fmt: skip
def test_rules_that_are_not_understood_are_refused(rule, message):
    with pytest.raises(ValueError, match=f"rope_table: .*{message}"):
        cuattn.rope_table(4, 8, scaling=rule)


def test_rules_of_real_configurations_are_taken():
    plain = cuattn.rope_table(9, 8, 1e6)
    for rule in (
        {"type": "mrope", "mrope_section": [1, 1, 2], "rope_theta": 1e6, "rope_type": "default"},
        {"rope_type": "default", "partial_rotary_factor": 0.5, "factor": 1.0, "rope_theta": 1e6},
    ):
        assert np.array_equal(plain, cuattn.rope_table(9, 8, scaling=rule))
    rule = {**YARN, "type": "yarn", "beta_fast": None, "mscale": 1.0, "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1, "max_position_embeddings": 128}  # fmt: skip
    assert cuattn.rope_table(9, 8, scaling=rule)[0][0, 0] == 1.0
    assert cuattn.rope_table(9, 8, scaling=GEMMA["full_attention"])[0].shape == (9, 4)


def test_extents_of_tables_may_be_numpys():
    cos, _ = cuattn.rope_table(np.int64(9), np.int32(8))
    assert cos.shape == (9, 4)
    with pytest.raises(TypeError, match="rope_table: scaling must be a dict, got str"):
        cuattn.rope_table(9, 8, scaling="linear")


@pytest.mark.parametrize("rule", [{}, {"rope_type": "linear", "factor": 4.0}])
def test_the_base_may_stand_in_the_configuration(rule):
    wanted = cuattn.rope_table(50, 64, 500000.0, scaling=rule)
    assert not np.array_equal(wanted[0], cuattn.rope_table(50, 64, scaling=rule)[0])
    given = {**rule, "rope_theta": 500000.0}
    for theta in (None, 500000.0):
        assert np.array_equal(wanted, cuattn.rope_table(50, 64, theta, scaling=given))
    with pytest.raises(ValueError, match="rope_theta of scaling must be positive and finite"):
        cuattn.rope_table(50, 64, scaling={**rule, "rope_theta": -1})
