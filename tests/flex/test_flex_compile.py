# SPDX-License-Identifier: Apache-2.0
"""flex_attention in graphs of torch.compile whose masks and scores the compiled code makes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import cuattn
import frameworks
from cuattn import flex

torch = frameworks.require("torch")

LENGTH = 256


@pytest.fixture(autouse=True)
def flex_ops():
    """The module by which graphs call cuattn, of a fresh compiler; which loads it."""
    torch.manual_seed(0)
    torch.compiler.reset()
    from cuattn.torch import flex_ops

    return flex_ops


def causal(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def of_function(q):
    def mask(b, h, i, j):
        return j <= i

    return cuattn.flex_attention(q, q, q, mask_mod=mask)


def of_closure(q):
    width = 40
    return cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: (j <= i) & (i - j < width))


def of_joined_masks(q):
    mask = flex.masks.and_masks(causal, flex.masks.chunked(50))
    return cuattn.flex_attention(q, q, q, mask_mod=mask)


def of_score(q):
    return cuattn.flex_attention(
        q, q, q, score_mod=lambda s, b, h, i, j: s - 0.1 * flex.abs(i - j), mask_mod=causal
    )


def of_block_mask(q):
    blocks = flex.create_block_mask(causal, None, None, q.shape[1], q.shape[1], exact=True)
    return cuattn.flex_attention(q, q, q, block_mask=blocks)


def of_block_mask_of_a_function(q):
    blocks = flex.create_block_mask(lambda b, h, i, j: j <= i, None, None, LENGTH, LENGTH)
    return cuattn.flex_attention(q, q, q, block_mask=blocks, mask_mod=causal)


STEPS = (
    *(of_function, of_closure, of_joined_masks, of_score),
    *(of_block_mask, of_block_mask_of_a_function),
)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("grad", [False, True])
def test_what_compiled_code_makes_is_in_one_graph(step, grad):
    q = torch.randn(1, LENGTH, 2, 16).requires_grad_(grad)
    want, got = step(q), torch.compile(step, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(got, want)
    if grad:
        dq = [torch.autograd.grad(x.square().sum(), q)[0] for x in (got, want)]
        assert torch.equal(*dq)


def test_a_block_mask_of_a_graph_reads_its_arrays_whenever_the_graph_runs():
    ids = torch.arange(LENGTH) // 32
    mask = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731

    def step(q):
        blocks = flex.create_block_mask(mask, None, None, LENGTH, LENGTH)
        return cuattn.flex_attention(q, q, q, block_mask=blocks)

    compiled, q = (
        torch.compile(step, fullgraph=True, backend="aot_eager"),
        torch.randn(1, 256, 2, 16),
    )
    assert torch.equal(compiled(q), step(q))
    ids //= 2
    assert torch.equal(compiled(q), step(q))


def test_a_block_mask_from_outside_is_a_constant_of_the_graph(flex_ops):
    """Another one is another graph; ours, and torch's."""
    masks = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.randn(1, LENGTH, 2, 16)

    def step(q, blocks):
        return cuattn.flex_attention(q, q, q, block_mask=blocks)

    whole = flex_ops.HOLDS_OBJECTS  # torch from 2.12 on
    compiled = torch.compile(step, fullgraph=whole, backend="aot_eager")
    for mask in (causal, flex.masks.chunked(50)):
        ours = flex.create_block_mask(mask, None, None, LENGTH, LENGTH)
        assert torch.equal(compiled(q, ours), step(q, ours))
    theirs = masks.create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    assert torch.equal(compiled(q, theirs), step(q, theirs))


def test_a_block_mask_from_outside_breaks_a_graph_of_an_older_torch(flex_ops, monkeypatch):
    """Its compiler knows no constant objects, and raised an internal error."""
    monkeypatch.setattr(flex_ops, "HOLDS_OBJECTS", False)
    q, blocks = torch.randn(1, LENGTH, 2, 16), None

    def step(q):
        return cuattn.flex_attention(q, q, q, block_mask=blocks)

    blocks = flex.create_block_mask(causal, None, None, LENGTH, LENGTH)
    assert torch.equal(torch.compile(step, backend="aot_eager")(q), step(q))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"is in no graph of torch below 2\.12"):
        torch.compile(step, fullgraph=True, backend="aot_eager")(q)


def made_beside(x):
    """Code without a tensor would make no graph."""
    return flex.create_block_mask(causal, None, None, LENGTH, LENGTH), x + 1


def test_a_block_mask_leaves_a_graph_as_what_it_is():
    q = torch.randn(1, LENGTH, 2, 16)
    (blocks, _), (want, _) = torch.compile(made_beside, backend="eager")(q), made_beside(q)
    assert isinstance(blocks, flex.BlockMask)
    assert str(copy.copy(blocks)) == str(blocks) == str(want)
    assert str(blocks & want) == str(want)
    got = cuattn.flex_attention(q, q, q, block_mask=blocks)
    assert torch.equal(got, cuattn.flex_attention(q, q, q, block_mask=want))


def test_a_block_mask_of_a_graph_is_pickled_as_what_it_is(flex_ops, monkeypatch):
    """Its number was, by which another process finds another mask or none."""
    q = torch.ones(1)
    (blocks, _), (want, _) = torch.compile(made_beside, backend="eager")(q), made_beside(q)
    kept = pickle.dumps(blocks)
    monkeypatch.setattr(flex_ops, "recipes", [])  # as there
    got = pickle.loads(kept)
    assert type(got) is flex.BlockMask
    assert (got.mask_mod, got.shape, got.block_size) == (causal, want.shape, want.block_size)
    np.testing.assert_array_equal(got.states, want.states)


def of_a_tensor(q, width):
    ids = torch.arange(LENGTH) // 32
    return cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: ids[i] == ids[j])


def of_a_number_that_changes(q, width):
    return cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: (j <= i) & (i - j < width))


def of_torchs_block_mask(q, width):
    from torch.nn.attention.flex_attention import create_block_mask

    blocks = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    return cuattn.flex_attention(q, q, q, block_mask=blocks)


@pytest.mark.parametrize("step", [of_a_tensor, of_a_number_that_changes, of_torchs_block_mask])
def test_what_no_graph_can_hold_breaks_it_and_says_why(step):
    """torch.compile raised an internal error, also where a graph may be broken."""
    q = torch.randn(1, LENGTH, 2, 16)
    compiled = torch.compile(step, backend="aot_eager")
    for width in (8, 9, 10):
        assert torch.equal(compiled(q, width), step(q, width))
    torch.compiler.reset()
    whole = torch.compile(step, fullgraph=True, backend="aot_eager")
    message = "flex_attention: a (mask_mod or score_mod that is made|BlockMask of torch)"
    if step is of_a_number_that_changes:
        assert torch.equal(whole(q, 8), step(q, 8))  # a constant until there is another
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        whole(q, 9)
