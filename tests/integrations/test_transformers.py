# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="cuattn": transformers' own models, tiny and random, against its own ways."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import frameworks

torch = frameworks.require("torch")
transformers = frameworks.require_transformers()

from cuattn.integrations import transformers as door  # noqa: E402  after what it needs

VOCABULARY = 97
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 16}
WINDOWED = {**GROUPED, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
ENCODER = {k: v for k, v in SMALL.items() if k != "attention_dropout"}

# Name: class of the model, class of its config, arguments, whether sdpa computes the same.
DECODERS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, True),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 7}, True),
    "qwen3": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**WINDOWED, "use_sliding_window": True},
        True,
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**WINDOWED, "attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 4},
        False,
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**WINDOWED, "query_pre_attn_scalar": 4},
        True,
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
        False,
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **SMALL,
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        True,
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 128,
            "bos_token_id": 1,
            "eos_token_id": None,
            "pad_token_id": 0,
        },
        True,
    ),
}
T5 = (
    "T5ForConditionalGeneration",
    "T5Config",
    {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 2,
        "num_heads": 4,
        "pad_token_id": 0,
        "eos_token_id": None,
        "decoder_start_token_id": 0,
    },
    True,
)
ENCODERS = {
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER, True),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **ENCODER,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
        True,
    ),
}
VIT = (
    "ViTForImageClassification",
    "ViTConfig",
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
        "num_labels": 5,
    },
    True,
)
MODELS = {**DECODERS, "t5": T5, **ENCODERS, "vit": VIT}
PADDED = [*DECODERS, "t5"]


@pytest.fixture(autouse=True, scope="module")
def registered():
    door.register()


def build(name, kind="cuattn", seed=0):
    """A model of random weights, large enough that attention decides its logits."""
    model_class, config_class, arguments, _ = MODELS[name]
    config = getattr(transformers, config_class)(**arguments)
    torch.manual_seed(seed)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation=kind)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.15)
            elif weight.shape == (4,):  # the sinks of GPT-OSS
                weight.normal_()
    return model.eval()


def peers(name):
    return ["eager", "sdpa"] if MODELS[name][3] else ["eager"]


def inputs(name, batch=2, length=19, padding=0):
    """Input of a model; `padding` tokens at the left of the first sequence."""
    random = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, 32, 32, generator=random)}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=random)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    given = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}
    return given


def run(model, given):
    given = dict(given)
    if model.config.model_type == "t5":
        given["decoder_input_ids"] = given["input_ids"].flip(1)
    return model(**given).logits


def count_calls(monkeypatch):
    """The options of each call of cuattn, so that no test passes by another implementation."""
    calls = []
    real = door.attention

    def seen(q, k, v, **options):
        calls.append(options)
        return real(q, k, v, **options)

    monkeypatch.setattr(door, "attention", seen)
    return calls


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_eager_and_sdpa(name, padding, monkeypatch):
    if name == "vit" and padding:
        padding = 0
    given = inputs(name, padding=padding)
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        ours = run(build(name), given)
        assert len(calls) == (6 if name == "t5" else 2)
        rows = slice(None) if name == "vit" else given["attention_mask"].bool()
        if name == "t5":
            rows = slice(None)
        for peer in peers(name):
            theirs = run(build(name, peer), given)
            assert theirs.std() > 0.01
            torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", PADDED)
def test_generate_gives_the_tokens_and_scores_of_eager(name, cache, padding, monkeypatch):
    given = inputs(name, length=11, padding=padding)
    words = {
        "max_new_tokens": 24,
        "do_sample": False,
        "cache_implementation": cache,
        "return_dict_in_generate": True,
        "output_logits": True,
        "disable_compile": True,  # on the CPU a static cache would be compiled for
    }
    calls = count_calls(monkeypatch)
    ours = build(name).generate(**given, **words)
    assert len(calls) >= 24 * 2
    assert ours.sequences.shape[1] == 24 + (1 if name == "t5" else 11)
    for peer in peers(name) if cache == "dynamic" else ["eager"]:
        theirs = build(name, peer).generate(**given, **words)
        assert torch.equal(ours.sequences, theirs.sequences)
        for a, b in zip(ours.logits, theirs.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_options_reach_the_kernel_and_not_a_copy_of_it(monkeypatch):
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        run(build("gemma2"), inputs("gemma2"))
        run(build("gpt_oss"), inputs("gpt_oss"))
        run(build("llama"), inputs("llama"))
    assert [c["softcap"] for c in calls] == [0.5, 0.5, 0, 0, 0, 0]
    assert [c["sinks"] is not None for c in calls] == [False, False, True, True, False, False]
    assert all(c["bias"] is None and c["causal"] for c in calls)
    wide, narrow = (-1, -1), (6, -1)
    windows = [narrow, wide, narrow, wide, wide, wide]
    assert [c.get("window", wide) for c in calls] == windows


PADDINGS = {  # tokens at the left and at the right of the two sequences, and what they become
    "left": ((5, 0), (0, 0), {"kv_start": [5, 0]}),
    "right": ((0, 3), (0, 0), {"seqused_k": [16, 19]}),
    "both": ((2, 0), (0, 4), {"kv_start": [2, 0], "seqused_k": [19, 15]}),
    "all": ((19, 0), (1, 0), {"kv_start": [19, 1]}),
    "hole": None,
}


@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "bert"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_goes_in_as_lengths_and_not_as_a_bias(name, padding, monkeypatch):
    given = inputs(name)
    mask, lengths = given["attention_mask"], {}
    if padding == "hole":
        mask[0, 7] = 0
    else:
        *ends, lengths = PADDINGS[padding]
        for row, (left, right) in zip(mask, ends, strict=True):
            row[:left] = 0
            row[19 - right :] = 0
    calls = count_calls(monkeypatch)
    with torch.no_grad():
        ours, theirs = run(build(name), given), run(build(name, "eager"), given)
    rows = mask.any(1) if name == "t5" else mask.bool()  # eager gives a row without keys all keys
    torch.testing.assert_close(ours[rows], theirs[rows], rtol=1e-4, atol=1e-4)
    for call in calls[:2]:
        assert (call["bias"] is None) == (padding != "hole" and name != "t5")
        found = {n: call[n].tolist() for n in ("kv_start", "seqused_k") if n in call}
        assert found == lengths
        assert ("seqused_q" in call) == ("seqused_k" in call and name != "bert" and name != "t5")


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_mask_that_the_model_has_changed_counts_as_it_is(monkeypatch, mode):
    """The note is on the tensor that the mask function made, and on no other."""
    with mode():
        attend_to_changed_masks(monkeypatch)


def attend_to_changed_masks(monkeypatch):
    calls = count_calls(monkeypatch)
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    words = {"batch_size": 1, "q_length": 6, "kv_length": 6}
    padding = torch.tensor([[False, False, True, True, True, True]])
    from transformers.masking_utils import causal_mask_function

    mask = door.masks.mask(**words, mask_function=causal_mask_function, attention_mask=padding)
    changed = mask.clone()
    changed[..., 3] = False
    layer = torch.nn.Module()
    calls.clear()
    for given in (mask, changed, mask[:, :, :, :4], None):
        if given is None:
            given = mask
            mask[..., 3] = False  # in place: the note is of what stood there
        keys = given.shape[-1]
        out, _ = door.attention_forward(layer, q, k[:, :, :keys], k[:, :, :keys], given)
        scores = (q @ k[:, :, :keys].mT / 4).masked_fill(~given, -torch.inf)
        wanted = scores.softmax(-1).nan_to_num() @ k[:, :, :keys]
        torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-5, atol=1e-5)
    assert [c["bias"] is None for c in calls] == [True, False, False, False]


@pytest.mark.parametrize("written", ["never", "before the graph", "in the graph"])
def test_a_graph_reads_the_mask_and_not_its_note(written):
    """A mask that was written since it was made hid what it had hidden then."""
    from transformers.masking_utils import causal_mask_function

    q, layer = torch.randn(2, 4, 6, 16), torch.nn.Module()
    words = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": causal_mask_function}
    padding = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    mask = door.masks.mask(**words, attention_mask=padding)
    assert door.masks.noted(mask, 6, 6)

    def attend(q, mask):
        if written == "in the graph":
            mask[..., 3] = False
        return door.attention_forward(layer, q, q, q, mask)[0]

    if written == "before the graph":
        mask[..., 3] = False
    wanted = attend(q, mask.clone())
    torch.compiler.reset()
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, mask)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("without", ["mask", "window", "softcap", "s_aux"])
def test_what_is_left_out_is_seen(without, monkeypatch):
    """Each of these changes the logits of the tests above, which therefore would not pass."""
    name = {"mask": "llama", "window": "mistral", "softcap": "gemma2", "s_aux": "gpt_oss"}[without]
    given = inputs(name, padding=5 if without == "mask" else 0)
    model = build(name)
    real = door.attention

    def lacking(q, k, v, **options):
        if without in ("mask", "window"):
            options |= {"kv_start": None, "window": (-1, -1)}
        else:
            options |= {"softcap": 0.0} if without == "softcap" else {"sinks": None}
        return real(q, k, v, **options)

    with torch.no_grad():
        right = run(model, given)
        monkeypatch.setattr(door, "attention", lacking)
        wrong = run(model, given)
    rows = given["attention_mask"].bool()
    assert (right[rows] - wrong[rows]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "t5", "bert"])
def test_gradients_are_those_of_eager(name):
    given = inputs(name, padding=5)
    ours, theirs = build(name), build(name, "eager")
    for model in (ours, theirs):
        out = run(model, given)
        rows = slice(None) if name == "t5" else given["attention_mask"].bool()
        out[rows].square().mean().backward()
    pairs = list(zip(ours.named_parameters(), theirs.parameters(), strict=True))
    assert any(a.grad is not None and a.grad.abs().max() > 0 for (_, a), _ in pairs)
    for (label, a), b in pairs:
        assert (a.grad is None) == (b.grad is None), label
        if a.grad is not None:
            torch.testing.assert_close(
                a.grad, b.grad, rtol=1e-3, atol=1e-4 * float(b.grad.abs().max() + 1e-3), msg=label
            )


def test_dropout_in_training_drops_by_torchs_generator():
    model = build("llama").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    given = inputs("llama")
    torch.manual_seed(3)
    first = run(model, given)
    torch.manual_seed(3)
    assert torch.equal(run(model, given), first)
    assert not torch.equal(run(model, given), first)
    assert not torch.equal(run(model.eval(), given), first)


def test_dropout_without_kernel_is_refused_by_name(monkeypatch):
    def refuse(*arrays, **options):
        raise NotImplementedError("dropout_p: no kernel")

    monkeypatch.setattr(door, "attention", refuse)
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=r"dropout=0.1 .*attention_dropout=0"):
        door.attention_forward(torch.nn.Module(), x, x, x, None, dropout=0.1)


@pytest.mark.parametrize("name", door.REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name):
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=f"'cuattn': {name}: .*; use "):
        door.attention_forward(torch.nn.Module(), x, x, x, None, **{name: torch.ones(2)})
    door.attention_forward(torch.nn.Module(), x, x, x, None, **{name: None})


@pytest.mark.parametrize(
    ("version", "why"),
    [("4.57.1", "too old"), ("5.16.0", "too old"), ("6.0.0.dev0", "newer than")],
)
def test_other_versions_are_named_with_the_one_wanted(version, why, monkeypatch):
    # transformers puts a new module in its own place while it loads its models.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=f">=5.17 and <6, got {version}, which is {why}"):
        door.register()


def test_nothing_changes_before_register_is_called():
    code = (
        "import sys, cuattn; assert 'cuattn.integrations' not in sys.modules\n"
        "import cuattn.integrations.transformers as door\n"
        "assert 'transformers' not in sys.modules\n"
        "import transformers\n"
        "from transformers.masking_utils import AttentionMaskInterface as masks\n"
        "tables = transformers.AttentionInterface(), masks()\n"
        "assert not any('cuattn' in table for table in tables)\n"
        "door.register(); door.register()\n"
        "assert all('cuattn' in table for table in tables)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5.17,<6'"):
        door.register()


def test_the_benchmark_of_layers_runs_on_a_tiny_model(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    layers = importlib.import_module("transformers_layers")
    monkeypatch.setattr(layers, "IS_CUDA", False)
    monkeypatch.setattr(layers, "DEVICE", "cpu")
    written = tmp_path / "transformers.json"
    monkeypatch.setattr(sys, "argv", ["layers", "--rounds", "1", "-o", str(written)])
    layers.main()
    entries = json.loads(written.read_text())["rows"]
    assert [entry["row"] for entry in entries] == [row.name for row in layers.rows()]
    assert any("error" in entry for entry in entries)
    for entry in entries:
        assert entry["ms"].keys() == {"cuattn", "sdpa"}
        if "error" in entry:  # of float32, whose math is the judge
            assert entry["error"]["cuattn"] < 1e-5 < entry["ms"]["cuattn"]
