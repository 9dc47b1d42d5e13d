# SPDX-License-Identifier: Apache-2.0
"""Calls of tensors without memory (meta, fake, exported) are held to the rules of real ones."""

from __future__ import annotations

import pytest

import frameworks

torch = frameworks.require("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import cuattn.torch  # noqa: E402

OPS = {"attention": cuattn.torch.attention, "attention_varlen": cuattn.torch.attention_varlen}
CU = ((3,), torch.int32)
SAME = [((1, 5, 2, 8), torch.float32)] * 3

# Name: the op, its arrays as shape and dtype, options, of which tuples of both are tensors.
WRONG = {
    "axes": ("attention", [((5, 2, 8), torch.float32)] * 3, {}),
    "heads": ("attention", [((1, 5, 3, 8), torch.float32), *SAME[:2]], {}),
    "head_dim": ("attention", [SAME[0], ((1, 5, 2, 16), torch.float32), SAME[0]], {}),
    "columns": ("attention", [((1, 5, 2, 7), torch.float32)] * 3, {}),
    "batch": ("attention", [((2, 5, 2, 8), torch.float32), *SAME[:2]], {}),
    "keys": ("attention", [*SAME[:2], ((1, 6, 2, 8), torch.float32)], {}),
    "dtypes": ("attention", [SAME[0], ((1, 5, 2, 8), torch.float16), SAME[0]], {}),
    "float64": ("attention", [((1, 5, 2, 8), torch.float64)] * 3, {}),
    "bias": ("attention", SAME, {"bias": ((4, 4), torch.float32)}),
    "bias of ints": ("attention", SAME, {"bias": ((5, 5), torch.int64)}),
    "sinks": ("attention", SAME, {"sinks": ((3,), torch.float32)}),
    "lengths": ("attention", SAME, {"seqused_k": ((1,), torch.int64)}),
    "softcap": ("attention", SAME, {"softcap": -1.0}),
    "window": ("attention", SAME, {"window": (-2, 0)}),
    "layout": ("attention", SAME, {"layout": "heads first"}),
    "backend": ("attention", SAME, {"backend": "sm99"}),
    "packed axes": ("attention_varlen", [*SAME, CU, CU, 3, 3], {}),
    "offsets": (
        "attention_varlen",
        [*[((5, 2, 8), torch.float32)] * 3, ((3,), torch.int64), CU, 3, 3],
        {},
    ),
    "one more offset": (
        "attention_varlen",
        [*[((5, 2, 8), torch.float32)] * 3, CU, ((4,), torch.int32), 3, 3],
        {},
    ),
}


def made(x, device="cpu"):
    """A tensor of shape and dtype, or what is none."""
    is_tensor = isinstance(x, tuple) and isinstance(x[-1], torch.dtype)
    return torch.zeros(x[0], dtype=x[1], device=device) if is_tensor else x


class Model(torch.nn.Module):
    def __init__(self, op, options):
        super().__init__()
        self.op, self.options = op, options

    def forward(self, *arrays):
        return OPS[self.op](*arrays, **self.options)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_in_the_words_of_eager_code(name):
    """It gave a result whose shape was that of q."""
    op, arrays, options = WRONG[name]

    def call(device):
        given = {key: made(x, device) for key, x in options.items()}
        return OPS[op](*(made(x, device) for x in arrays), **given)

    with pytest.raises(ValueError, match=f"^{op}: .*; ") as eager:
        call("cpu")
    with pytest.raises(ValueError, match=f"^{op}: ") as of_meta:
        call("meta")
    with FakeTensorMode(), pytest.raises(ValueError, match=f"^{op}: ") as of_fake:
        call("cpu")
    model = Model(op, {key: made(x) for key, x in options.items()})
    with pytest.raises(ValueError, match=f"^{op}: ") as exported:
        torch.export.export(model, tuple(made(x) for x in arrays))
    assert str(of_meta.value) == str(eager.value) == str(of_fake.value) == str(exported.value)
    torch.compiler.reset()
    # torch below 2.12 says it within its own error
    with pytest.raises((ValueError, RuntimeError)) as compiled:
        torch.compile(model, backend="aot_eager")(*(made(x) for x in arrays))
    assert str(eager.value) in str(compiled.value)


def test_what_a_device_decides_is_not_asked_of_shapes():
    q = torch.empty(1, 5, 2, 8, device="meta")
    assert cuattn.torch.attention(q, q, q, backend="sm90").shape == q.shape


def test_extents_that_are_not_known_are_not_asked():
    q = torch.randn(2, 5, 2, 8)
    tokens = torch.export.Dim("tokens")
    axes = {"arrays": ({1: tokens},) * 3}
    model = Model("attention", {"causal": True})
    program = torch.export.export(model, (q, q, q), dynamic_shapes=axes)
    longer = torch.randn(2, 7, 2, 8)
    want = cuattn.attention(longer, longer, longer, causal=True)
    assert torch.equal(program.module()(longer, longer, longer), want)


def test_codes_and_scales_without_memory_have_the_result_of_real_ones():
    codes = torch.zeros(1, 16, 2, 16, dtype=torch.float8_e4m3fn, device="meta")
    options = {"q_scale": 0.5, "k_scale": torch.ones(2, device="meta"), "accumulate": "fast"}
    out = cuattn.torch.attention(codes, codes, codes, **options)
    assert (out.shape, out.dtype) == (codes.shape, torch.bfloat16)
    raw = codes.view(torch.uint8)
    assert cuattn.torch.attention(raw, raw, raw, dtype="float8_e4m3fn").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"^attention: q must be float32, float16 or bfloat16"):
        cuattn.torch.attention(raw, raw, raw)
