# SPDX-License-Identifier: Apache-2.0
"""integrations/vllm under a stand-in for vLLM's classes, against attention in float64."""

import importlib
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

import frameworks

torch = frameworks.require("torch")

import fake_vllm  # noqa: E402

import reference  # noqa: E402

PACKAGE = Path(__file__).resolve().parents[2] / "integrations/vllm"


@pytest.fixture
def vllm(monkeypatch):
    """The fake in the place of vLLM; the paths that were registered."""
    found, registered = fake_vllm.modules()
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(PACKAGE))
    yield registered
    for name in ("cuattn_vllm", "cuattn_vllm.backend"):
        sys.modules.pop(name, None)


def backend_of(registered):
    """The class that vLLM would take, by the road it takes: entry point, registry, path."""
    text = (PACKAGE / "pyproject.toml").read_text()
    group = r'\[project.entry-points."vllm.general_plugins"\]\ncuattn = "(\w+):(\w+)"'
    module, function = re.search(group, text).groups()
    getattr(importlib.import_module(module), function)()
    assert set(registered) == {fake_vllm.AttentionBackendEnum.CUSTOM}
    module, name = registered[fake_vllm.AttentionBackendEnum.CUSTOM].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def expected(queries, keys, values, layer, causal):
    """Plain attention of one request, float64; the queries are its last tokens."""
    left = layer.get("sliding_window", 0) - 1 if layer.get("sliding_window") else -1
    slopes, sinks = layer.get("alibi_slopes"), layer.get("sinks")
    out, _ = reference.attention(
        *(x.double().numpy()[None] for x in (queries, keys, values)),
        causal=causal,
        window=(left, -1 if causal else left),
        softcap=layer.get("logits_soft_cap") or 0.0,
        alibi_slopes=None if slopes is None else np.asarray(slopes),
        sinks=None if sinks is None else sinks.double().numpy(),
    )
    return out[0]


LAYERS = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.5, 3.0]).to(torch.bfloat16)},
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("layout", fake_vllm.LAYOUTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_requests_of_all_ages_are_served(vllm, layer, layout, rng):
    heads = ((4, 2), (4, 1), (4, 4))[int(rng.integers(3))]
    dtype = torch.bfloat16 if layout == "LBNHC" else torch.float32
    size, block = int(rng.choice([16, 40])), int(rng.choice([16, 32]))
    runner = fake_vllm.Runner(
        backend_of(vllm), rng, layout, heads, size, dtype, block, **LAYERS[layer]
    )
    old, young, late = (fake_vllm.Request() for _ in range(3))
    steps = (  # requests, new tokens of each, tokens of padding, causal
        ((old,), (37,), 0, True),  # a prompt
        ((old, young), (1, 20), 5, True),  # decode beside a prompt
        ((young, old, late), (13, 1, 1), 0, True),  # the rest of a prompt
        ((late, old), (1, 1), 6, True),  # decode alone
        ((old, young, late), (3, 3, 3), 0, True),  # drafts
        ((old, late), (4, 2), 0, False),  # a draft model that looks both ways
    )
    for requests, counts, padding, causal in steps:
        results = runner.step(requests, counts, padding, causal)
        for request, (queries, out) in zip(requests, results, strict=True):
            wanted = expected(
                queries, torch.cat(request.keys), torch.cat(request.values), LAYERS[layer], causal
            )
            assert np.abs(out.double().numpy() - wanted).max() < TOLERANCE[dtype]


def test_encoders_attend_without_a_cache(vllm, rng):
    backend = backend_of(vllm)
    kind = fake_vllm.AttentionType.ENCODER_ONLY
    layer = {"attn_type": kind, "sliding_window": 5}
    runner = fake_vllm.Runner(backend, rng, "LBHNC", (4, 2), 16, torch.float32, 16, **layer)
    requests = [fake_vllm.Request(), fake_vllm.Request()]
    for request, (queries, out) in zip(requests, runner.step(requests, (9, 21), 3), strict=True):
        wanted = expected(queries, request.keys[0], request.values[0], layer, causal=False)
        assert np.abs(out.numpy() - wanted).max() < 1e-5
    assert torch.isnan(runner.cache).all()


def test_requests_without_new_tokens_and_batches_without_requests(vllm, rng):
    """As a batch that is padded to a size holds them: empty rows, of length 0 or with a past."""
    backend = backend_of(vllm)
    runner = fake_vllm.Runner(backend, rng, "LBHNC", (4, 2), 16, torch.float32, 16)
    idle, busy = fake_vllm.Request(), fake_vllm.Request()
    runner.step((idle,), (5,))
    ((_, nothing), (queries, out)) = runner.step((idle, busy), (0, 3), 2)
    assert nothing.shape == (0, 4, 16)
    wanted = expected(queries, busy.keys[0], busy.values[0], {}, True)
    assert np.abs(out.numpy() - wanted).max() < 1e-5
    none = torch.zeros(1, dtype=torch.int32)
    table, slots = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
    batch = fake_vllm.CommonAttentionMetadata(none, none, none[:0], 0, 0, 0, 0, table, slots)
    metadata = runner.builder.build(0, batch)
    x = torch.full((3, 4, 16), torch.nan)
    runner.impl.do_kv_cache_update(None, x[:, :2], x[:, :2], runner.cache, slots)
    assert runner.impl.forward(None, x, x, x, runner.cache, metadata, output=x).isnan().all()


def test_every_block_size_that_is_offered_is_served(vllm, rng):
    backend = backend_of(vllm)
    sizes = backend.get_supported_kernel_block_sizes()
    assert (sizes[0], sizes[-1]) == (16, 256)
    for size in (sizes[0], sizes[2], sizes[-1]):
        runner = fake_vllm.Runner(backend, rng, "LBNHC", (2, 1), 8, torch.float32, size, blocks=3)
        request = fake_vllm.Request()
        ((queries, out),) = runner.step((request,), (size + 1,))
        wanted = expected(queries, request.keys[0], request.values[0], {}, True)
        assert np.abs(out.numpy() - wanted).max() < 1e-5


@pytest.mark.parametrize("shape", [(2, 9, 16, 2, 16), (9, 2, 16, 16), (9, 2, 16, 64)])
def test_a_cache_of_another_layout_is_refused_by_name(vllm, shape):
    layer = backend_of(vllm).get_impl_cls()(4, 16, 1.0, 2)
    x, slots = torch.ones(2, 2, 16), torch.zeros(2, dtype=torch.int64)
    cache = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"kv_cache must be \[num_blocks, .*head_size 16, got"):
        layer.do_kv_cache_update(None, x, x, cache, slots)
    assert not cache.any()


def test_the_class_answers_what_vllm_asks(vllm):
    backend = backend_of(vllm)
    assert fake_vllm.AttentionBackendEnum[backend.get_name()].name == "CUSTOM"
    assert [backend.supports_head_size(n) for n in (4, 8, 100, 128, 256, 264)] == [
        *(False, True, False, True, True, False)
    ]
    assert not backend.supports_kv_cache_dtype("fp8")
    assert not backend.supports_attn_type(fake_vllm.AttentionType.ENCODER_DECODER)
    assert backend.supports_compute_capability((8, 0))
    assert not backend.supports_compute_capability((7, 5))
    assert not backend.forward_includes_kv_cache_update


def test_what_is_not_served_raises_by_name(vllm):
    backend = backend_of(vllm)
    impl = backend.get_impl_cls()
    with pytest.raises(NotImplementedError, match=r"kv_cache_dtype must be .*got 'fp8'"):
        impl(4, 16, 1.0, kv_cache_dtype="fp8")
    with pytest.raises(NotImplementedError, match=r"attn_type .* is not served"):
        impl(4, 16, 1.0, attn_type=fake_vllm.AttentionType.ENCODER_DECODER)
    layer = impl(4, 16, 1.0)
    x = torch.ones(2, 4, 16)
    with pytest.raises(NotImplementedError, match="output_scale"):
        layer.forward(None, x, x, x, None, None, x, output_scale=torch.ones(1))
    assert not layer.forward(None, x, x, x, None, None, x.clone()).any()  # the memory is measured
    builder = backend.get_builder_cls()(None, [], None, None)
    lens = torch.ones(2, dtype=torch.int32)
    batch = fake_vllm.CommonAttentionMetadata(lens, lens, lens, 1, 1, 1, 1, lens[None], lens)
    batch.causal = torch.ones(1, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match=r"causal must be one bool .* got Tensor"):
        builder.build(0, batch)


@pytest.mark.parametrize("version", ["0.32.1", "0.34.0rc1", "1.0.0"])
def test_another_release_is_named_and_nothing_registered(vllm, version, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    module = importlib.import_module("cuattn_vllm")
    with pytest.warns(UserWarning, match=f"vLLM must be 0.33, got {version}.*pip install"):
        module.register()
    assert not vllm
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.2+cu130")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.register()
        module.register()
    assert len(vllm) == 1


def test_the_engine_of_vllm_finds_what_transformers_does():
    """vLLM itself, where somebody has installed it; the script judges its own results."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    command = [sys.executable, str(PACKAGE / "engine_on_cpu.py"), "llama"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.count("backend CUSTOM") == 2
