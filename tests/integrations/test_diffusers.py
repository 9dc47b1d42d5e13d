# SPDX-License-Identifier: Apache-2.0
"""cuattn.integrations.diffusers: a tiny random transformer and the dispatch by itself."""

import contextlib
import re
import warnings

import pytest

import frameworks

torch = frameworks.require("torch")
frameworks.require("diffusers")
diffusers = pytest.importorskip("diffusers", minversion="0.42.0")

from diffusers.models import attention_dispatch as dispatch  # noqa: E402

from cuattn.integrations import diffusers as door  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """The options of each call of cuattn while it is enabled."""
    seen, real = [], door.scaled_dot_product_attention

    def counted(*arrays, **options):
        seen.append(options)
        return real(*arrays, **options)

    monkeypatch.setattr(door, "scaled_dot_product_attention", counted)
    door.told.clear()
    with door.enable():
        yield seen
    assert not hasattr(native(), "handle")


def native():
    return dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName.NATIVE]


def flux(seed=0):
    torch.manual_seed(seed)
    return diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )


def test_a_model_gives_the_same_image_and_gradients(calls):
    model = flux()
    given = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 9, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(9, 3),
    }
    results = []
    for enabled in (True, False):
        if not enabled:
            native().handle.remove()
        out = model(**given, return_dict=False)[0]
        out.square().mean().backward()
        results.append((out.detach(), [p.grad.clone() for p in model.parameters()]))
        model.zero_grad()
    assert len(calls) == 2  # one block of each kind
    (ours, our_gradients), (theirs, their_gradients) = results
    assert theirs.std() > 1e-3
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for a, b in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "rows", "added", "causal", "gqa"])
def test_masks_mean_what_they_mean_there(kind, calls):
    q = torch.randn(2, 7, 4, 16)
    k, v = torch.randn(2, 2, 11, 2 if kind == "gqa" else 4, 16)
    options = {
        "none": {},
        "rows": {"attn_mask": torch.rand(2, 11) > 0.3},
        "added": {"attn_mask": torch.randn(2, 1, 7, 11), "scale": 0.2},
        "causal": {"is_causal": True},
        "gqa": {"enable_gqa": True},
    }[kind]
    ours = dispatch.dispatch_attention_fn(q, k, v, **options)
    assert len(calls) == 1
    native().handle.remove()
    theirs = dispatch.dispatch_attention_fn(q, k, v, **options)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


EXTENTS = [(2, 7, 11), (0, 3, 4), (2, 0, 3), (3, 5, 0), (1, 1, 9)]
MASKS = {
    "row of each sequence": lambda b, q, k, h: (b, k),
    "of all": lambda b, q, k, h: (q, k),
    "keys": lambda b, q, k, h: (b, 1, 1, k),
    "heads": lambda b, q, k, h: (1, h, q, k),
    "queries": lambda b, q, k, h: (b, 1, q, 1),
    "column": lambda b, q, k, h: (b, 1),
}


@pytest.mark.filterwarnings("ignore:cuattn")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_a_call_that_ran_without_cuattn_runs_with_it(extents, is_causal, calls):
    """Masks of every shape and type, in three types, some with causal, which we alone refuse."""
    batch, rows, keys = extents
    ours, own = native(), native().handle.own
    for number, (name, shape_of) in enumerate(MASKS.items()):
        dtype = (torch.float32, torch.float64, torch.bfloat16)[number % 3]
        q = torch.randn(batch, rows, 4, 20, dtype=dtype)
        k, v = torch.randn(2, batch, keys, 2, 20, dtype=dtype)
        shape = shape_of(batch, rows, keys, 4)
        for mask in (torch.rand(shape) > 0.3, torch.randn(shape, dtype=dtype)):
            options = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True}
            try:
                theirs = own(q, k, v, **options)
            except RuntimeError as refusal:
                with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
                    ours(q, k, v, **options)
                continue
            tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
            found = ours(q, k, v, **options)
            torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance, msg=name)
    assert len(calls) == 2 * len(MASKS)


def test_a_refusal_is_told_once_for_all_extents(calls):
    def refused(n):
        q = torch.randn(1, n, 2, 8)
        with contextlib.suppress(RuntimeError):  # older torch refuses it too
            dispatch.dispatch_attention_fn(q, q, q, torch.ones(n, n).bool(), is_causal=True)

    with pytest.warns(UserWarning, match="attn_mask must be None with is_causal=True"):
        refused(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(6)


def test_what_is_refused_goes_to_their_function_and_says_so_once(monkeypatch, calls):
    def refuse(*arrays, **options):
        raise NotImplementedError("no kernel for it")

    monkeypatch.setattr(door, "scaled_dot_product_attention", refuse)
    q = torch.randn(1, 5, 2, 8)
    with pytest.warns(UserWarning, match="diffusers' own attention runs: no kernel") as told:
        out = [dispatch.dispatch_attention_fn(q, q, q) for _ in range(2)]
    assert len(told) == 1
    assert torch.isfinite(out[1]).all()
    with pytest.raises(ValueError, match="return_lse"):
        dispatch.dispatch_attention_fn(q, q, q, attention_kwargs={"return_lse": True})


def test_a_second_enable_removes_nothing_and_other_backends_are_left_alone(calls):
    ours = native()
    with door.enable():
        assert native() is ours
    assert native() is ours
    others = dispatch._AttentionBackendRegistry._backends
    assert sum(hasattr(f, "handle") for f in others.values()) == 1


@pytest.mark.parametrize("version", ["0.41.2", "0.43.0.dev0", "1.0"])
def test_other_versions_are_named_with_the_one_wanted(version, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["diffusers"], "__version__", version)
    with pytest.raises(ImportError, match=rf">=0.42 and <0.43, got {version}; pip install"):
        door.enable()
    assert not hasattr(native(), "handle")
