# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="cuattn": models that it refuses, and arrays that sdpa takes."""

import pytest

import frameworks

torch = frameworks.require("torch")
transformers = frameworks.require_transformers()

from cuattn.integrations import transformers as door  # noqa: E402  after what it needs

VOCABULARY = 97
# Models that compute attention themselves, and would add True and False to their scores.
OWN_ATTENTION = {
    "bloom": ("BloomForCausalLM", {"hidden_size": 64, "n_layer": 1, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"d_model": 64, "n_layers": 1, "n_heads": 4}),
    "big_bird": (
        "BigBirdModel",
        {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "attention_type": "original_full",
        },
    ),
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    door.register()


def build(name, kind, **sizes):
    model = getattr(transformers, name)
    config = model.config_class(vocab_size=VOCABULARY, **sizes)
    torch.manual_seed(1)
    return model._from_config(config, attn_implementation=kind).eval()


@pytest.mark.parametrize("name", OWN_ATTENTION)
@pytest.mark.parametrize("way", ["eager", "a graph"])
def test_models_that_hand_no_attention_over_are_refused(name, way):
    model, sizes = OWN_ATTENTION[name]
    made = build(model, "cuattn", **sizes)
    torch.compiler.reset()
    call = torch.compile(made, backend="eager") if way == "a graph" else made
    why = f"{type(made.config).__name__} .* compute attention themselves .*_implementation='eager'"
    with pytest.raises(NotImplementedError, match=why):
        call(input_ids=torch.arange(5)[None])


@pytest.mark.parametrize("head_dim", [12, 20])
@pytest.mark.parametrize("way", ["eager", "a graph"])
def test_head_dims_that_are_no_multiple_of_8(head_dim, way, rng):
    ids = torch.from_numpy(rng.integers(1, VOCABULARY, (2, 9)))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded at the left
    out = []
    for kind in ("cuattn", "eager"):
        made = build(
            "LlamaForCausalLM",
            kind,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
        )
        torch.compiler.reset()
        call = torch.compile(made, backend="aot_eager") if way == "a graph" else made
        with torch.no_grad():
            out.append(call(input_ids=ids, attention_mask=mask).logits[mask.bool()])
    torch.testing.assert_close(*out)


@pytest.mark.parametrize("case", ["strided", "one for all", "more queries", "values of 12"])
def test_arrays_that_sdpa_takes(case):
    """Strided last axes, a batch of 1 that stands for all, more queries than keys."""
    queries = 9 if case == "more queries" else 6
    q = torch.randn(1 if case == "one for all" else 3, 4, queries, 16)
    k, v = torch.randn(2, 3, 2, 6, 16)
    if case == "strided":
        q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    if case == "values of 12":
        v = v[..., :12]
    causal = case != "one for all"
    ours, _ = door.attention_forward(torch.nn.Module(), q, k, v, None, is_causal=causal)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.expand(3, -1, -1, -1), k, v, is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
    assert ours.is_contiguous()
