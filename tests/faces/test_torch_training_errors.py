# SPDX-License-Identifier: Apache-2.0
"""What training with torch tensors refuses, word for word; nothing is written then, and the next
call is right.
"""

from __future__ import annotations

import pytest

import cuattn
import frameworks

torch = frameworks.require("torch")
import cuattn.torch  # noqa: E402
from torch_steps import arrays, ragged  # noqa: E402

I32 = torch.int32
E4M3 = torch.float8_e4m3fn


def plain_call(**changed):
    """attention_backward on torch tensors, with results of NaN that a refusal must leave so."""
    given = {n: x.detach() for n, x in arrays(rows=5, keys=7).items()}
    given["out"], given["lse"] = cuattn.attention(**given, return_lse=True)
    given["dout"] = torch.randn_like(given["out"])
    results = {f"d{n}": torch.full_like(given[n], torch.nan) for n in "qkv"}
    changed = {n: make(given) for n, make in changed.items()}
    given.update(changed)
    if "need" in changed:
        results.clear()
    positional = [given.pop(n) for n in ("dout", "q", "k", "v", "out", "lse")]
    return results, lambda: cuattn.attention_backward(*positional, **results, **given)


# fmt: off
REFUSALS = {
    "dout_shape": ({"dout": lambda x: x["dout"][:, :4]}, ValueError,
        "dout must have the shape of out (2, 5, 4, 16), got (2, 4, 4, 16); make them equal"),
    "dout_dtype": ({"dout": lambda x: x["dout"].half()}, ValueError,
        "dout must be float32 like q, got float16; cast it"),
    "dout_device": ({"dout": lambda x: x["dout"].to("meta")}, ValueError,
        "dout must be a dense array in memory"),
    "out_shape": ({"out": lambda x: x["out"].transpose(1, 2).contiguous()}, ValueError,
        "out must have the shape of the forward call's out (2, 5, 4, 16), got (2, 4, 5, 16); make "
        "them equal"),
    "lse_shape": ({"lse": lambda x: x["lse"].transpose(1, 2).contiguous()}, ValueError,
        "lse must have the shape of the forward call's lse (2, 4, 5), got (2, 5, 4); make them "
        "equal"),
    "lse_dtype": ({"lse": lambda x: x["lse"].double()}, ValueError,
        "lse must be float32, got float64; cast it"),
    "lse_device": ({"lse": lambda x: x["lse"].to("meta")}, ValueError,
        "lse must be a dense array in memory"),
    "need_dbias": ({"need": lambda x: ("dbias",)}, ValueError,
        "need must not name dbias where no bias is given; pass bias=, or leave it out"),
    "need_dsinks": ({"need": lambda x: ("dsinks",)}, ValueError,
        "need must not name dsinks where no sinks is given; pass sinks=, or leave it out"),
    "need_unknown": ({"need": lambda x: ("dw",)}, ValueError,
        "need must name one or more of dq, dk, dv, dbias, dsinks, dslopes, each once"),
    "dropout_p": ({"dropout_p": lambda x: 1.0, "dropout_seed": lambda x: 1}, ValueError,
        "dropout_p must lie in [0, 1), got 1"),
    "dropout_without_seed": ({"dropout_p": lambda x: 0.5}, ValueError,
        "dropout_seed or dropout_state must be given with dropout_p > 0, got none"),
    "dropout_offset": ({"dropout_p": lambda x: 0.5,
        "dropout_state": lambda x: torch.tensor([1, 2**32])}, ValueError,
        "dropout_state must hold an offset in [0, 2^32), got 4294967296"),
    "dropout_state_dtype": ({"dropout_p": lambda x: 0.5,
        "dropout_state": lambda x: torch.tensor([1, 2], dtype=I32)}, ValueError,
        "dropout_state must be int64, got int32; cast it"),
    "workspace": ({"workspace": lambda x: torch.empty(3)}, MemoryError,
        "workspace must hold 192 bytes for backend 'cpu', got 12; allocate as explain() says"),
    "requires_grad": ({"q": lambda x: x["q"].clone().requires_grad_()}, NotImplementedError,
        "q requires grad, but no gradient goes through attention_backward"),
}
# fmt: on


@pytest.mark.parametrize("name", REFUSALS)
def test_the_plain_call_refuses(name):
    changed, error, message = REFUSALS[name]
    results, call = plain_call(**changed)
    with pytest.raises(error) as raised:
        call()
    assert f"attention_backward: {message}" in str(raised.value)
    for n, x in results.items():
        assert x.isnan().all(), f"a refused call wrote {n}"
    assert all(not x.isnan().any() for x in plain_call()[1]())


def leaves_of(change=lambda x: x):
    return [change(x.detach()).requires_grad_() for x in arrays(rows=5, keys=7).values()]


# Of a call that autograd differentiates: function, its arguments, what it says.
# fmt: off
DIFFERENTIATED = {
    "fp8": (lambda: cuattn.torch.attention(*leaves_of(lambda x: x.to(E4M3))),
        NotImplementedError,
        "attention: no gradient goes through float8_e4m3fn; compute with bfloat16"),
    "fp8_keys": (lambda: cuattn.torch.attention(leaves_of()[0], *leaves_of(
        lambda x: x.to(E4M3))[1:]), ValueError,
        "attention: q, k and v must all be float8_e4m3fn or none of them, got float32, float8"),
    "fp8_scale": (lambda: cuattn.torch.attention(*leaves_of(), k_scale=2.0), ValueError,
        "attention: k_scale belongs to float8_e4m3fn arrays, these are float32; leave it out"),
    "head_dim": (lambda: cuattn.torch.attention(*[torch.zeros(1, 3, 2, 264, requires_grad=True)
        for _ in range(3)]), NotImplementedError,
        "attention: no gradient goes through heads of more than 256 columns, got head_dim 264"),
    "name": (lambda: cuattn.torch.attention(*leaves_of(), is_causal=True), TypeError,
        "attention: there is no argument is_causal; here it is called causal"),
    "out": (lambda: cuattn.torch.attention(*leaves_of(), out=torch.empty(2, 5, 4, 16)),
        NotImplementedError, "attention: out must be None while torch traces or differentiates"),
    "out_alone": (lambda: cuattn.attention(*[x.detach() for x in leaves_of()],
        out=torch.empty(2, 5, 4, 16, requires_grad=True)), NotImplementedError,
        "attention: out must be None while torch traces or differentiates"),
    "workspace": (lambda: cuattn.torch.attention(*leaves_of(), workspace=torch.empty(3)),
        NotImplementedError, "attention: workspace must be None while torch traces"),
    "stream": (lambda: cuattn.torch.attention(*leaves_of(), stream=0),
        NotImplementedError, "attention: stream must be None while torch traces"),
    "other_device": (lambda: cuattn.torch.attention(leaves_of()[0], *leaves_of(
        lambda x: x.to("meta"))[1:]), ValueError, "attention: k must be a dense array in memory"),
    "dropout_p": (lambda: cuattn.torch.attention(*leaves_of(), dropout_p=1.5), ValueError,
        "attention: dropout_p must lie in [0, 1), got 1.5"),
    "dropout_offset": (lambda: cuattn.torch.attention(*leaves_of(), dropout_p=0.5,
        dropout_seed=1, dropout_offset=2**32), ValueError,
        "attention: dropout_offset must lie in [0, 2^32), got 4294967296"),
    "both_seeds": (lambda: cuattn.torch.attention(*leaves_of(), dropout_p=0.5, dropout_seed=1,
        dropout_state=torch.tensor([1, 2])), ValueError,
        "attention: dropout_seed or dropout_state must be given with dropout_p > 0, got both"),
    "seqused": (lambda: cuattn.torch.attention(*leaves_of(),
        seqused_k=torch.tensor([8, 0], dtype=I32)), ValueError,
        "attention: seqused_k must lie within [0, 7], got 8 at index 0"),
    "backend": (lambda: cuattn.torch.attention(*leaves_of(), backend="sm90"), NotImplementedError,
        "attention: backend 'sm90' cannot run this call: it runs on CUDA arrays"),
    "merge_states": (lambda: cuattn.merge_states(leaves_of()[0], torch.zeros(2, 4, 5),
        leaves_of()[0], torch.zeros(2, 4, 5)), NotImplementedError,
        "no gradient goes through merge_states"),
}
# fmt: on


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_a_differentiated_call_refuses(name):
    call, error, message = DIFFERENTIATED[name]
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    cuattn.torch.attention(*leaves_of()).sum().backward()


def test_pages_and_their_caches_have_no_gradient():
    rows, cache = torch.randn(3, 2, 16, requires_grad=True), torch.randn(4, 8, 2, 16)
    cu = torch.tensor([0, 3], dtype=I32)
    tables, used = torch.zeros(1, 2, dtype=I32), torch.tensor([9], dtype=I32)
    with pytest.raises(NotImplementedError, match=r"block_tables must be .*gather_cache first"):
        cuattn.torch.attention_varlen(
            rows, cache, cache, cu, None, 3, 16, block_tables=tables, seqused_k=used
        )
    for k_cache in (cache, cache.to(E4M3)):
        with pytest.raises(NotImplementedError, match="no gradient goes through paged_attention"):
            cuattn.paged_attention(rows[:1], k_cache, k_cache, tables, used)


def sdpa_call(q, k, v, scale):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return cuattn.torch.scaled_dot_product_attention(q, k, v, scale=scale)


def flash_call(q, k, v, scale):
    from cuattn.compat import flash_attn

    return flash_attn.flash_attn_func(*(x.bfloat16() for x in (q, k, v)), softmax_scale=scale)


NUMBERS = {  # of which no gradient is known
    "scale": lambda q, k, v, x: cuattn.attention(q, k, v, scale=x),
    "softcap": lambda q, k, v, x: cuattn.torch.attention(q, k, v, softcap=x),
    "scale of SDPA": sdpa_call,
    "softmax_scale": flash_call,
    "scale of flex": lambda q, k, v, x: cuattn.flex_attention(q, k, v, scale=x),
    "weight_offset": lambda q, k, v, x: cuattn.rms_norm(q, k[0, 0, 0], weight_offset=x),
}


TRACKED = [(name, of_q) for name in NUMBERS for of_q in (False, True)]
TRACKED.remove(("weight_offset", True))  # x of rms_norm has no gradient either


@pytest.mark.parametrize(("name", "of_q"), TRACKED)
def test_a_number_that_requires_grad(name, of_q):
    """It would stay without a gradient; as a number it may be given."""
    q, k, v = (torch.randn(1, 9, 2, 16) for _ in range(3))
    number = torch.nn.Parameter(torch.tensor(0.3))
    with pytest.raises(NotImplementedError, match=f"{name.split()[0]} requires grad, but no grad"):
        NUMBERS[name](q.clone().requires_grad_(of_q), k, v, number)
    with torch.no_grad():
        got = NUMBERS[name](q, k, v, number)
    assert torch.equal(got, NUMBERS[name](q, k, v, number.item()))


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("function", [cuattn.attention, cuattn.torch.attention])
def test_a_scale_that_requires_grad(function, name):
    codes = cuattn.quantize(*(torch.randn(1, 20, 2, 16) for _ in range(3))).arrays
    scale = torch.ones(1, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"{name} requires grad, but no gradient goes"):
        function(*codes, **{name: scale})
    with torch.no_grad():
        assert not function(*codes, **{name: scale}).requires_grad


def test_a_gradient_of_the_wrong_shape_is_torchs_to_refuse():
    out = cuattn.torch.attention(*leaves_of())
    for bad in (torch.zeros(2, 5, 4, 15), torch.zeros(5, 4, 16)):
        with pytest.raises(RuntimeError, match=r"[Mm]ismatch in shape"):
            out.backward(bad, retain_graph=True)


def test_lengths_of_a_ragged_call_are_judged_before_anything_runs():
    qkv, (cu_q, cu_k, rows, keys) = ragged()
    falling = cu_q.flip(0).contiguous()
    with pytest.raises(ValueError, match="attention_varlen: cu_seqlens_q must"):
        cuattn.torch.attention_varlen(*qkv, falling, cu_k, rows, keys)
    with pytest.raises(ValueError, match="attention_varlen: cu_seqlens_k must be int32, got int64"):
        cuattn.torch.attention_varlen(*qkv, cu_q, cu_k.long(), rows, keys)
