# SPDX-License-Identifier: Apache-2.0
"""kv_cache_bytes: the sizes of each kind of attention, and those of a cache."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from paged_engine import make

MODEL = {"num_layers": 32, "head_dim": 128}


def test_kv_cache_bytes_of_every_kind_of_attention():
    heads = {"mha": 32, "gqa": 8, "mqa": 1}
    found = {k: cuattn.kv_cache_bytes(2048, num_heads_kv=n, **MODEL) for k, n in heads.items()}
    assert found == {"mha": 1_073_741_824, "gqa": 268_435_456, "mqa": 33_554_432}
    latent = cuattn.kv_cache_bytes(2048, num_layers=32, latent_dim=512, rope_dim=64)
    assert latent == 32 * 2048 * 576 * 2
    assert 14.2 < found["mha"] / latent < 14.3
    assert (
        cuattn.kv_cache_bytes(5, num_layers=1, num_heads_kv=3, head_dim=24, head_dim_v=16) == 1200
    )
    for dtype, item in (("float32", 4), (np.float16, 2), ("bfloat16", 2), ("float8_e4m3fn", 1)):
        assert cuattn.kv_cache_bytes(1, num_heads_kv=1, dtype=dtype, **MODEL) == 32 * 256 * item


def test_kv_cache_bytes_are_those_of_the_cache():
    cache = make(num_layers=3, num_blocks=10, block_size=16, num_heads_kv=2, head_dim=64)
    options = {"num_layers": 3, "num_heads_kv": 2, "head_dim": 64, "dtype": "float32"}
    assert cuattn.kv_cache_bytes(160, **options) == cache.stats()["cache_bytes"]
    assert cuattn.kv_cache_bytes(145, block_size=16, **options) == cache.stats()["cache_bytes"]
    halves = cuattn.kv_cache_bytes(65, num_seqs=2, block_size=16, **options)
    assert halves == cache.stats()["cache_bytes"]


KINDS = "MHA, GQA and MQA have heads, MLA has a latent"


@pytest.mark.parametrize(
    ("options", "exception", "message"),
    [
        ({}, ValueError, f"got num_heads_kv = None, head_dim = None, latent_dim = None; {KINDS}"),
        ({"num_heads_kv": 8}, ValueError, "give either num_heads_kv and head_dim or latent_dim"),
        ({"num_heads_kv": 8, "latent_dim": 512}, ValueError, "give either num_heads_kv and"),
        ({"head_dim_v": 8, "latent_dim": 512}, ValueError, "give either num_heads_kv and head_dim"),
        ({"num_heads_kv": 8, "head_dim": 64, "latent_dim": 512}, ValueError, "give either num_"),
        ({"num_heads_kv": 8, "head_dim": 64, "rope_dim": 64}, ValueError, "rope_dim must be 0"),
        ({"num_heads_kv": -8, "head_dim": 64}, ValueError, "num_heads_kv must be >= 0, got -8"),
        ({"latent_dim": 512, "block_size": 0}, ValueError, "block_size must be >= 1, got 0"),
        ({"latent_dim": 51.2}, TypeError, "latent_dim must be an integer, got 51.2"),
        ({"latent_dim": 512, "dtype": "int8"}, ValueError, "dtype must be one of float32"),
    ],
)
def test_kv_cache_bytes_refuses(options, exception, message):
    with pytest.raises(exception) as caught:
        cuattn.kv_cache_bytes(16, num_layers=2, **options)
    assert str(caught.value).startswith("kv_cache_bytes: ")
    assert message in str(caught.value)
