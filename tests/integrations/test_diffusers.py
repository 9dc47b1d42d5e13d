# SPDX-License-Identifier: Apache-2.0
"""cuattn.integrations.diffusers: a tiny random transformer and the dispatch by itself."""

import pytest

import frameworks

torch = frameworks.require("torch")
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
