# SPDX-License-Identifier: Apache-2.0
"""Bad input of the functions of latent attention: the error names function, argument, rule and
value, and nothing is written.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import cuattn
import frameworks

F32 = np.float32


def decode_arrays():
    return {
        "q_nope": np.ones((2, 4, 512), F32),
        "q_pe": np.ones((2, 4, 64), F32),
        "ckv_cache": np.ones((3, 8, 512), F32),
        "kpe_cache": np.ones((3, 8, 64), F32),
        "block_tables": np.zeros((2, 2), np.int32),
        "context_lens": np.array([5, 16], np.int32),
    }


DECODE = [  # what is changed, and what the message says
    ({"scale": None}, "mla_decode: scale must be a number, got None"),
    ({"scale": float("nan")}, r"scale must be finite in float32, got nan; pass 1 / sqrt\(nope"),
    ({"scale": 1e39}, "scale must be finite in float32"),
    ({"q_nope": np.ones((2, 4, 500), F32), "ckv_cache": np.ones((3, 8, 500), F32)},
     r"q_nope must have a latent \(last axis\) a multiple of 16 up to 1024, got 500"),
    ({"q_nope": np.ones((2, 4, 2048), F32)}, "multiple of 16 up to 1024, got 2048"),
    ({"q_nope": np.ones((2, 512), F32)}, "q_nope must have axes"),
    ({"q_nope": np.ones((2, 4, 512), np.float64)}, "q_nope must be float32, float16 or bfloat16"),
    ({"q_pe": np.ones((2, 4, 60), F32), "kpe_cache": np.ones((3, 8, 60), F32)},
     r"q_pe must have rope columns \(last axis\) a multiple of 8 up to 128, got 60"),
    ({"q_pe": np.ones((2, 5, 64), F32)}, "q_pe must have num_heads 4 like q_nope, got 5"),
    ({"q_pe": np.ones((2, 1, 4, 64), F32)}, "q_pe must have as many axes as q_nope, 3, got 4"),
    ({"q_pe": np.ones((2, 4, 64), np.float16)}, "q_pe must be float32 like q_nope, got float16"),
    ({"q_pe": None}, "q_pe and kpe_cache must be given together, got one"),
    ({"kpe_cache": None}, "q_pe and kpe_cache must be given together, got one"),
    ({"ckv_cache": np.ones((3, 8, 1, 512), F32)},
     "ckv_cache must have axes .*drop that of one head"),
    ({"ckv_cache": np.ones((3, 8, 256), F32)},
     "ckv_cache must have columns 512 like q_nope, got 256"),
    ({"ckv_cache": np.ones((3, 300, 512), F32)}, "kpe_cache must have block_size 300"),
    ({"kpe_cache": np.ones((3, 4, 64), F32)},
     "kpe_cache must have block_size 8 like ckv_cache, got 4"),
    ({"kpe_cache": np.ones((4, 8, 64), F32)},
     "kpe_cache must have num_blocks 3 like ckv_cache, got 4"),
    ({"ckv_cache": np.ones((3, 8, 512), np.float16)}, "ckv_cache must be float32 like q_nope"),
    ({"block_tables": np.zeros((2, 2), np.int64)}, "block_tables must be int32, got int64"),
    ({"block_tables": np.zeros((3, 2), np.int32)}, "block_tables must have num_seqs 2"),
    ({"block_tables": np.full((2, 2), 9, np.int32)}, r"block ids within \[0, 2\], got 9"),
    ({"context_lens": np.array([5, 17], np.int32)},
     r"context_lens must lie within \[0, 16\], got 17"),
    ({"context_lens": np.array([5], np.int32)}, "context_lens must have num_seqs 2"),
    ({"softcap": -1.0}, "softcap must be >= 0"),
    ({"window": (-2, 0)}, "window must hold two integers >= -1"),
    ({"num_splits": -1}, "num_splits must be >= 0, got -1"),
    ({"num_splits": 2, "batch_invariant": True}, "num_splits must be 0, got 2"),
    ({"sinks": np.ones(5, F32)}, r"sinks must have shape \(num_heads_q,\) = \(4,\), got"),
    ({"backend": "fast"}, "backend must be"),
    ({"out": np.zeros((2, 4, 256), F32)}, "out must have shape"),
    ({"lse_out": np.zeros((2, 4), np.float64)}, "lse_out must be float32"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), DECODE, ids=range(len(DECODE)))
def test_decode_refuses(change, message):
    arrays = decode_arrays()
    options = {"scale": 0.1, "out": np.full((2, 4, 512), 7, F32)}
    for name, value in change.items():
        (arrays if name in arrays else options)[name] = value
    with pytest.raises(ValueError, match=message):
        cuattn.mla_decode(*arrays.values(), **options)
    assert (options["out"] == options["out"].flat[0]).all()


def test_decode_refuses_other_things():
    arrays = decode_arrays()
    with pytest.raises(
        TypeError, match="mla_decode: block_tables must be an int32 array, got None"
    ):
        cuattn.mla_decode(*{**arrays, "block_tables": None}.values(), scale=1.0)
    with pytest.raises(ValueError, match="out must not share memory with q_nope"):
        cuattn.mla_decode(*arrays.values(), scale=1.0, out=arrays["q_nope"])
    with pytest.raises(NotImplementedError, match="backend 'sm80' cannot run this"):
        cuattn.mla_decode(*arrays.values(), scale=1.0, backend="sm80")
    with pytest.raises(TypeError, match="alibi_slopes"):
        cuattn.mla_decode(*arrays.values(), scale=1.0, alibi_slopes=np.ones(4, F32))


def attention_arrays():
    return {
        "q": np.ones((1, 2, 3, 16), F32),
        "k_latent": np.ones((1, 5, 32), F32),
        "v_latent": np.ones((1, 5, 32), F32),
        "k_proj": np.ones((2, 32, 16), F32),
        "v_proj": np.ones((2, 32, 24), F32),
    }


ATTENTION = [
    ({"q": np.ones((1, 2, 16), F32)}, ValueError, "mla_attention: q must have axes"),
    ({"q": np.ones((2, 2, 3, 16), F32)}, ValueError, "k_latent must have batch 2 like q, got 1"),
    ({"v_latent": np.ones((1, 6, 32), F32)}, ValueError,
     "v_latent must have seqlen_kv 5 like k_latent, got 6"),
    ({"k_proj": np.ones((3, 32, 16), F32)}, ValueError,
     "k_proj must have num_heads 2 like q, got 3"),
    ({"k_proj": np.ones((2, 24, 16), F32)}, ValueError,
     "k_proj must have latent_k 32 like k_latent, got 24"),
    ({"v_proj": np.ones((2, 32, 20), F32)}, ValueError,
     "v_proj must have head_dim_v a multiple of 8 up to 256"),
    ({"v_proj": np.ones((2, 32, 24), np.float16)}, ValueError,
     "v_proj must be float32 like q, got float16"),
    ({"v_proj": [1.0]}, TypeError, "v_proj must be an array, got list"),
    ({"q_rope": np.ones((1, 2, 3, 8), F32)}, ValueError,
     "q_rope and k_rope must be given together, got no k_rope"),
    ({"form": "both"}, ValueError, "form must be 'explicit', 'absorbed' or None, got 'both'"),
    ({"v_latent": np.ones((1, 5, 48), F32), "v_proj": np.ones((2, 48, 24), F32),
      "form": "absorbed"},
     NotImplementedError, "form 'absorbed' cannot run this call: .*one width"),
    ({"q": np.ones((1, 2, 3, 256), F32), "k_proj": np.ones((2, 32, 256), F32), "form": "explicit",
      "q_rope": np.ones((1, 2, 3, 8), F32), "k_rope": np.ones((1, 5, 8), F32)},
     NotImplementedError, "form 'explicit' cannot run this call: .*up to 256"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), ATTENTION, ids=range(len(ATTENTION)))
def test_attention_refuses(change, error, message):
    arrays = {**attention_arrays(), **change}
    positional = [arrays.pop(n) for n in attention_arrays()]
    with pytest.raises(error, match=message):
        cuattn.mla_attention(*positional, **arrays)


@pytest.mark.parametrize("form", ["explicit", "absorbed"])
def test_attention_refuses_before_it_writes(form):
    """In its own words, whichever step finds it; lse_out is written by a step before the last."""
    torch = frameworks.require("torch")
    given = attention_arrays()
    v_proj = given["v_proj"]
    inside = v_proj.reshape(-1)[:6].reshape(1, 2, 3)
    out, lse = np.zeros((1, 2, 3, 24), F32), np.full((1, 2, 3), 7, F32)
    for change, message in [
        ({"out": np.zeros((1, 2, 3, 16), F32)}, "out must have (shape .*|columns )24"),
        ({"out": np.zeros((1, 2, 3, 24), np.float16)}, "out must be float32"),
        ({"out": np.broadcast_to(out[..., :1, :], out.shape)}, "out is read-only"),
        ({"out": out, "lse_out": out.reshape(-1)[:6].reshape(1, 2, 3)},
         "out must not share memory with lse_out|lse_out must not share memory with out"),
        ({"lse_out": lse[0]}, "lse_out must have shape"),
        ({"k_latent": given["k_latent"][:, ::-1]}, "k_latent must not have negative strides"),
        ({"v_latent": given["v_latent"][:, ::-1]}, "v_latent must not have negative strides"),
        ({"q": np.ones((1, 2, 3, 32), F32)[..., ::2]}, "q must be contiguous in its last axis"),
        ({"v_proj": np.ones((2, 32, 48), F32)[..., ::2]}, "v_proj must be contiguous"),
        ({"scale": float("nan")}, "scale must be (a )?finite"),
        ({"backend": "sm80"}, "backend 'sm80' cannot run this call"),
        ({"causal": 1}, "causal must be True or False"),
    ]:  # fmt: skip
        arguments = {**given, "lse_out": lse, "form": form, **change}
        with pytest.raises(
            (ValueError, NotImplementedError, TypeError), match=f"^mla_attention: .*({message})"
        ):
            cuattn.mla_attention(**arguments)
        assert (lse == 7).all()
    with pytest.raises(ValueError, match="lse_out must not share memory with v_proj"):
        cuattn.mla_attention(**given, form=form, lse_out=inside)
    assert (v_proj == 1).all()
    for name in given:
        tensors = {n: torch.ones(a.shape, requires_grad=n == name) for n, a in given.items()}
        message = f"^mla_attention: {name} requires grad.*through mla_attention.*{name}.detach"
        with pytest.raises(NotImplementedError, match=message):
            cuattn.mla_attention(**tensors, form=form)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("form", ["explicit", "absorbed"])
def test_attention_writes_over_nothing_that_it_reads(form, library):
    make = np.asarray if library == "numpy" else frameworks.require("torch").from_numpy
    given = {n: make(np.ones(a.shape, F32)) for n, a in attention_arrays().items()}
    given |= {"v_proj": make(np.ones((2, 32, 16), F32)), "q_rope": make(np.ones((1, 2, 3, 8), F32)),
              "k_rope": make(np.ones((1, 5, 8), F32))}  # fmt: skip
    for name, array in given.items():
        memory = make(np.ones(math.prod(array.shape) + 96, F32))
        read = memory[: len(memory) - 96].reshape(array.shape)
        out = memory[len(memory) - 97 : -1].reshape(1, 2, 3, 16)
        with pytest.raises(
            ValueError, match=f"^mla_attention: out must not share memory with {name}, got"
        ):
            cuattn.mla_attention(**{**given, name: read}, form=form, out=out)
        assert (memory == 1).all()
        out = memory[len(memory) - 96 :].reshape(1, 2, 3, 16)
        assert cuattn.mla_attention(**{**given, name: read}, form=form, out=out) is out
    joined = make(np.ones((1, 2, 3, 32), F32))  # q and out between each other's rows
    cuattn.mla_attention(**{**given, "q": joined[..., :16]}, form=form, out=joined[..., 16:])


def test_outputs_are_compared_under_torch_compile_too():
    torch = frameworks.require("torch")
    given = {n: torch.ones(a.shape) for n, a in attention_arrays().items()}
    given["v_proj"] = torch.ones(2, 32, 16)
    step = torch.compile(lambda out: cuattn.mla_attention(**given, out=out), backend="eager")
    assert step(torch.empty(1, 2, 3, 16)).shape == (1, 2, 3, 16)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        step(given["q"])


def test_attention_takes_the_form_that_the_backend_has():
    arrays = {**attention_arrays(), "q": np.ones((1, 2, 1, 16), F32)}
    arrays |= {n: np.ones((1, 3000, 32), F32) for n in ("k_latent", "v_latent")}
    assert "absorbed: the smaller" in cuattn.explain("mla_attention", *arrays.values()).reason
    plan = cuattn.explain("mla_attention", *arrays.values(), backend="naive")
    assert plan.kernel == "project + naive"
    assert "cannot: mla_decode has no backend 'naive'" in plan.ladder
    cuattn.mla_attention(**arrays, backend="naive")
    with pytest.raises(NotImplementedError, match="mla_decode has no backend 'naive'"):
        cuattn.mla_attention(**arrays, backend="naive", form="absorbed")


def test_write_and_project_refuse():
    ckv, kpe = np.ones((2, 32), F32), np.ones((2, 8), F32)
    cache, ropes = np.zeros((3, 4, 32), F32), np.zeros((3, 4, 8), F32)
    slots = np.array([0, 11])
    for change, message in [
        ({"ckv": np.ones((2, 1, 32), F32)}, "mla_write: ckv must have 2 axes|ckv must have axes"),
        ({"kpe": np.ones((3, 8), F32)}, "kpe must have num_tokens 2 like ckv, got 3"),
        ({"kpe": np.ones((2, 8), np.float16)}, "kpe must be float32 like ckv"),
        ({"ckv_cache": np.zeros((3, 4, 16), F32)},
         "ckv_cache must have columns 32 like ckv, got 16"),
        ({"kpe_cache": np.zeros((3, 5, 8), F32)},
         "kpe_cache must have block_size 4 like ckv_cache"),
        ({"slot_mapping": np.array([0, 12])},
         r"mla_write: slot_mapping must lie within \[-1, 12\)"),
        ({"slot_mapping": np.array([0, 1], np.int32)}, "slot_mapping must be int64"),
        ({"cos": np.ones((4, 4), F32)}, "mla_write: cos, sin and positions must be given together"),
        ({"ckv_cache": ropes.reshape(-1)[:0].reshape(0, 4, 32)},
         "kpe_cache must have num_blocks 0"),
    ]:  # fmt: skip
        given = {"ckv": ckv, "kpe": kpe, "ckv_cache": cache, "kpe_cache": ropes,
                 "slot_mapping": slots, **change}  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cuattn.mla_write(**given)
    assert not cache.any()
    assert not ropes.any()
    for x, proj, transpose, message in [
        (np.ones((2, 3, 16), F32), np.ones((2, 16, 8), F32), False,
         "proj must have heads 3 like x, got 2"),
        (np.ones((2, 2, 8), F32), np.ones((2, 16, 8), F32), False,
         "proj must have latent 8 like the columns of x, got 16"),
        (np.ones((2, 2, 16), F32), np.ones((2, 16, 8), F32), True,
         "proj must have head_dim 16 like the columns of x, got 8"),
        (np.ones((2, 2, 12), F32), np.ones((2, 12, 8), F32), False,
         "x must have columns a multiple of 8"),
        (np.ones(16, F32), np.ones((2, 16, 8), F32), False, "x must have 2 to 4 axes, got 1"),
        (np.ones((2, 16), F32), np.ones((16, 8), F32), False,
         r"proj must have axes \[heads, latent, head_dim\]"),
        (np.ones((2, 16), F32), np.ones((2, 16, 8), np.float16), False,
         "proj must be float32 like x"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            cuattn.mla_project(x, proj, transpose=transpose)
    x = np.ones((2, 2, 16), F32)
    with pytest.raises(TypeError, match="mla_project: proj must be an array, got None"):
        cuattn.mla_project(x, None)
    with pytest.raises(TypeError, match="mla_project: transpose must be True or False, got None"):
        cuattn.mla_project(x, np.ones((2, 16, 16), F32), transpose=None)
    with pytest.raises(TypeError, match=r"mla_write: kpe must be an array .*got NoneType"):
        cuattn.mla_write(ckv, None, cache, ropes, slots)
    with pytest.raises(TypeError, match=r"mla_write: kpe_cache must be an array .*got NoneType"):
        cuattn.mla_write(ckv, kpe, cache, None, slots)
    turns = {"cos": np.ones((4, 4), F32), "sin": np.ones((4, 4), F32), "positions": slots}
    with pytest.raises(ValueError, match="cos, sin and positions must not be given without kpe"):
        cuattn.mla_write(ckv, None, cache, None, slots, **turns)
    with pytest.raises(ValueError, match="mla_write: ckv"):  # shares memory with the cache
        cuattn.mla_write(cache[0, :2], None, cache, None, slots)
    with pytest.raises(TypeError, match="rope_interleaved must be True or False, got 'x'"):
        cuattn.mla_write(ckv, kpe, cache, ropes, slots, rope_interleaved="x")
    with pytest.raises(ValueError, match="mla_project: out"):
        cuattn.mla_project(x, np.ones((2, 16, 16), F32), out=x)
