# SPDX-License-Identifier: Apache-2.0
"""flex_attention differentiated by torch's autograd, beside that of the dense composition."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
import frameworks
from cuattn import flex

torch = frameworks.require("torch")


class Foreign:
    """An array of a library that shares its memory by DLPack alone; on a device as CuPy's are."""

    def __init__(self, values, on_device=False):
        self.values, self.on_device = values, on_device
        self.shape, self.dtype = values.shape, values.dtype
        if on_device:
            self.get = values.copy

    def __dlpack__(self, **options):
        assert not self.on_device
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return (2, 0) if self.on_device else (1, 0)


def leaves(rng, *shapes, dtype=None):
    made = (torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in shapes)
    return [x.to(dtype or torch.float32).requires_grad_() for x in made]


def dense(q, k, v, mask, score):
    """The composition in float64, every step one that autograd knows."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    s = score(q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)
    lse = torch.logsumexp(s, 3)
    return (torch.exp(s - lse[..., None]) @ v).transpose(1, 2), lse


def test_gradients_are_those_of_the_dense_composition(rng):
    shapes = (2, 50, 4, 32), (2, 70, 2, 32), (2, 70, 2, 24), (4, 21), (4,)
    q, k, v, table, sinks = leaves(rng, *shapes)
    ids = torch.from_numpy(np.sort(rng.integers(0, 3, 70)))
    i, j = torch.arange(50)[:, None], torch.arange(70)[None, :]
    mask = lambda b, h, i, j: (ids[i] == ids[j]) | (j < 4)  # noqa: E731
    mod = lambda s, b, h, i, j: 5 * torch.tanh(s / 5) + table[h, (i - j) % 21]  # noqa: E731
    weights = torch.from_numpy(rng.standard_normal((2, 50, 4, 24)).astype(np.float32))

    def gradients(out, lse):
        loss = (out * weights).sum() + (lse * lse).mean()
        return [out.detach(), *torch.autograd.grad(loss, (q, k, v, table))]

    got = cuattn.flex_attention(q, k, v, mask_mod=mask, score_mod=mod, return_lse=True)
    bias = table.double()[:, (i - j) % 21]
    want = dense(q, k, v, mask(0, 0, i, j), lambda s: 5 * torch.tanh(s / 5) + bias)
    for x, y in zip(gradients(*got), gradients(*want), strict=True):
        assert x.shape == y.shape
        assert float((x - y).abs().max()) < 3e-5 * max(1.0, float(y.abs().max()))
    out = cuattn.flex_attention(q, k, v, mask_mod=mask, sinks=sinks)
    (of_sinks,) = torch.autograd.grad(out.sum(), (sinks,))
    assert of_sinks.shape == sinks.shape
    assert bool(of_sinks.abs().sum() > 0)


def test_a_learned_array_alone_and_checkpointing(rng):
    q, k, v = (x.detach() for x in leaves(rng, *[(1, 40, 2, 16)] * 3))
    (slopes,) = leaves(rng, (2,), dtype=torch.bfloat16)
    mod = flex.scores.alibi(slopes)

    def loss():
        return cuattn.flex_attention(q, k, v, score_mod=mod, causal=True).square().sum()

    (plain,) = torch.autograd.grad(loss(), (slopes,))
    again = torch.utils.checkpoint.checkpoint(loss, use_reentrant=False)
    (checkpointed,) = torch.autograd.grad(again, (slopes,))
    assert plain.dtype == torch.bfloat16
    assert torch.equal(plain, checkpointed)
    assert bool(plain.abs().sum() > 0)


def test_a_step_of_an_optimizer_changes_the_next_call(rng):
    q, k, v = (x.detach() for x in leaves(rng, *[(1, 30, 2, 16)] * 3))
    table = torch.nn.Parameter(torch.zeros(2, 9))
    mod = flex.scores.relative_bias(table)
    optimizer = torch.optim.SGD([table], lr=1.0)
    losses = []
    for _ in range(5):
        loss = (cuattn.flex_attention(q, k, v, score_mod=mod) - v).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_what_is_refused(rng):
    q, k, v = leaves(rng, *[(1, 8, 1, 16)] * 3)
    with pytest.raises(NotImplementedError, match="out must not be given where a gradient"):
        cuattn.flex_attention(q, k, v, out=torch.empty_like(q))
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(lambda x: cuattn.flex_attention(x, k, v).sum())(q.detach())
    out = cuattn.flex_attention(q, k, v, mask_mod=flex.masks.streaming(3))
    (dq,) = torch.autograd.grad(out.sum(), (q,), create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(out.sum(), (q,), retain_graph=True)[0])
    for x in (q, k, v):  # of a constant dout, too
        with pytest.raises(
            NotImplementedError, match="_backward: a gradient of a gradient does not"
        ):
            torch.autograd.grad(dq.sum() + x.sum(), x, retain_graph=True)
    with pytest.raises(NotImplementedError, match="is_grads_batched must be False"):
        torch.autograd.grad(out, (q,), torch.ones(2, *out.shape), is_grads_batched=True)
    with torch.no_grad():
        assert not cuattn.flex_attention(q, k, v).requires_grad


def test_a_learned_number_behind_an_attribute_is_refused_and_not_lost(rng):
    q, gain = leaves(rng, (1, 9, 2, 16), ())
    owner = type("Owner", (), {"gain": gain, "gains": gain[None]})()
    for score in (
        lambda s, b, h, i, j: s * owner.gain,
        lambda s, b, h, i, j: torch.tanh(owner.gains[0] * s),
        lambda s, b, h, i, j: torch.where(i > j, s, owner.gain),
    ):
        with pytest.raises(NotImplementedError, match="must not reach a tensor that requires grad"):
            cuattn.flex_attention(q, q, q, score_mod=score)
        with torch.no_grad():
            assert cuattn.flex_attention(q, q, q, score_mod=score).isfinite().all()
    number = lambda s, b, h, i, j: s * owner.gain.item()  # noqa: E731
    mask = lambda b, h, i, j: i - j < owner.gain + 5  # noqa: E731  has no gradient by it
    cuattn.flex_attention(q, q, q, score_mod=number, mask_mod=mask).sum().backward()
    assert q.grad is not None
    assert gain.grad is None
    own = owner.gain
    cuattn.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * own).sum().backward()
    assert gain.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_whole_step_is_one_graph_of_torch_compile(rng):
    q, k, v = leaves(rng, (1, 50, 4, 16), (1, 60, 2, 16), (1, 60, 2, 24))
    (bias,) = leaves(rng, (4, 50, 60))
    begins = torch.tensor([0, 20, 50], dtype=torch.int32)
    keys = torch.tensor([0, 31, 60], dtype=torch.int32)

    def document(n):
        ids = torch.arange(60) % n
        return lambda b, h, i, j: ids[i] == ids[j]

    def step(q, k, v, bias, mask, mod):
        out, lse = cuattn.flex_attention(
            q, k, v, mask_mod=mask, score_mod=mod, bias=bias, return_lse=True
        )
        packed = cuattn.flex_attention(
            *(x[0] for x in (q, k, v)),
            **{"cu_seqlens_q": begins, "cu_seqlens_k": keys},
            **{"max_seqlen_q": 30, "max_seqlen_k": 31, "mask_mod": mask},
        )
        return out.square().sum() + lse.sum() + packed.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    mod = flex.scores.softcap(5.0)
    for n in (2, 3):  # functions of the same code that capture other arrays
        mask = document(n)
        results = []
        for run in (compiled, step):
            loss = run(q, k, v, bias, mask, mod)
            results.append([loss.detach(), *torch.autograd.grad(loss, (q, k, v, bias))])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)
    (table,) = leaves(rng, (4, 9))
    with pytest.raises(Exception, match="must not capture a tensor that requires a gradient"):
        compiled(q, k, v, bias, mask, flex.scores.relative_bias(table))


@pytest.mark.parametrize("per", ["batch", "head"])
def test_a_block_mask_of_torch_has_one_of_two_axes(per):
    """(B, None) and (None, H), as documents and distances of each head have."""
    masks = pytest.importorskip("torch.nn.attention.flex_attention")
    ids = torch.randint(0, 3, (2, 200)).sort(-1).values

    def of_batch(b, h, i, j):
        return ids[b, i] == ids[b, j]

    def of_head(b, h, i, j):
        return (i - j).abs() <= 20 * h

    mask, extents = (of_batch, (2, None)) if per == "batch" else (of_head, (None, 4))
    q = torch.randn(2, 4, 200, 16)
    made = masks.create_block_mask(mask, *extents, 200, 200, device="cpu")
    found = cuattn.flex_attention(q, q, q, block_mask=made, layout="bhsd")
    want = cuattn.flex_attention(q, q, q, mask_mod=mask, layout="bhsd")
    torch.testing.assert_close(found, want)


def test_both_passes_have_the_numbers_of_the_forward_pass():
    """A loop's variable in a lambda is another number by the time of the way back."""
    q, k, v = torch.randn(3, 1, 64, 2, 16)
    q.requires_grad_()
    outs = [
        cuattn.flex_attention(
            q, k, v, mask_mod=lambda b, h, i, j: (i - j <= w) & (j <= i),  # noqa: B023
            score_mod=lambda s, b, h, i, j: s * (1 + w),  # noqa: B023
        )
        for w in (0, 30)
    ]  # fmt: skip
    (found,) = torch.autograd.grad(outs[0].square().sum(), q)
    torch.testing.assert_close(found, torch.zeros_like(q), atol=1e-4, rtol=0)  # rows of one key


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("which", ["mask", "score", "seqused_k"])
def test_arrays_written_before_the_way_back_are_refused(which, library):
    q, k, v = torch.randn(3, 1, 64, 2, 16)
    q.requires_grad_()
    ids, table, used = torch.arange(64) // 8, torch.randn(64), torch.tensor([50]).int()
    if library == "numpy":
        ids, table = ids.numpy(), table.numpy()  # over the same memory
    out = cuattn.flex_attention(
        q, k, v, mask_mod=lambda b, h, i, j: ids[i] == ids[j],
        score_mod=lambda s, b, h, i, j: s + table[j], seqused_k=used,
    )  # fmt: skip
    torch.autograd.grad(out.sum(), q, retain_graph=True)
    written = {"mask": ids, "score": table, "seqused_k": used}[which]
    written += 1
    with pytest.raises(RuntimeError, match=r"inplace operation|captured arrays must be .* numpy"):
        torch.autograd.grad(out.sum(), q)


def test_another_number_beside_a_block_mask_is_refused():
    q, k, v = torch.randn(3, 1, 200, 2, 16)
    q.requires_grad_()
    made = flex.create_block_mask(flex.masks.causal(), None, None, 200, 200)
    outs = [
        cuattn.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i - j <= w, block_mask=made)  # noqa: B023
        for w in (2, 30)
    ]
    torch.autograd.grad(outs[1].sum(), q)
    with pytest.raises(RuntimeError, match="mask_mod must be on the way back what it was"):
        torch.autograd.grad(outs[0].sum(), q)


def ids_of(library, values):
    if library == "torch":
        return torch.from_numpy(values)
    return values if library == "numpy" else Foreign(values, library == "device")


def asked_everywhere(mask_mod):
    """A BlockMask of torch for 200 queries and keys, whose every block is asked."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, columns = torch.tensor([[[2, 2]]]).int(), torch.tensor([[[[0, 1], [0, 1]]]]).int()
    return BlockMask.from_kv_blocks(counts, columns, mask_mod=mask_mod, seq_lengths=(200, 200))


@pytest.mark.parametrize("library", ["numpy", "torch", "dlpack", "device"])
@pytest.mark.parametrize("way", ["mask_mod", "block_mask", "beside", "torch's"])
def test_captured_arrays_of_a_mask_are_not_written_before_the_way_back(library, way, rng):
    """Those of a block mask and of other libraries were read anew, and gave other gradients."""
    values = (np.arange(200, dtype=np.int32) // 16) % 5
    ids = ids_of(library, values)
    q = leaves(rng, (1, 200, 2, 16))[0]
    mod = lambda b, h, i, j: ids[i] == ids[j]  # noqa: E731
    if way == "mask_mod":
        given = {"mask_mod": mod}
    elif way == "torch's":
        given = {"block_mask": asked_everywhere(mod)}
    else:
        given = {"block_mask": flex.create_block_mask(mod, None, None, 200, 200)}
    if way == "beside":
        given["mask_mod"] = lambda b, h, i, j: j <= i
    out = cuattn.flex_attention(q, q, q, **given)
    want = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), q, retain_graph=True)[0], want)
    if library == "torch":
        ids[3] = 4
        message = "modified by an inplace operation"
    else:
        values[3] = 4
        message = r"captured arrays must be on the way back .* of shape \(200,\) that was written"
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


def test_lists_of_torchs_block_mask_are_not_written_before_the_way_back(rng):
    q, blocks = leaves(rng, (1, 200, 2, 16))[0], asked_everywhere(flex.masks.causal())
    out = cuattn.flex_attention(q, q, q, block_mask=blocks)
    blocks.kv_num_blocks[..., 1] = 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("library", ["dlpack", "device"])
def test_captured_arrays_of_another_library_are_read_by_what_they_offer(library, rng):
    q = torch.from_numpy(rng.standard_normal((1, 70, 2, 16)).astype(np.float32))
    ids, bias = np.arange(70) // 9, rng.standard_normal((2, 70)).astype(np.float32)
    others = Foreign(ids, library == "device"), Foreign(bias, library == "device")

    def call(ids, bias):
        return cuattn.flex_attention(
            q, q, q,
            mask_mod=lambda b, h, i, j: ids[i] == ids[j],
            score_mod=lambda s, b, h, i, j: s + bias[h, j],
        )  # fmt: skip

    assert torch.equal(call(*others), call(ids, bias))


def test_a_state_of_another_library_may_hold_a_seed_of_64_bits(rng):
    """It was taken for a captured array, whose numbers are of 32."""
    q = leaves(rng, (1, 20, 2, 16))[0]
    state = Foreign(np.array([2**40, 3]))
    out, want = (
        cuattn.flex_attention(q, q, q, dropout_p=0.5, dropout_state=x)
        for x in (state, torch.tensor([2**40, 3]))
    )
    assert torch.equal(out, want)
    dq = [torch.autograd.grad(x.sum(), q, retain_graph=True)[0] for x in (out, want)]
    assert torch.equal(*dq)
    state.values[0] += 1
    with pytest.raises(RuntimeError, match=r"of shape \(2,\) that was written since"):
        out.sum().backward()


def test_a_captured_tensor_that_vmap_maps_over_is_refused_with_the_way_out():
    q = torch.ones(1, 9, 2, 16)
    calls = (
        lambda x: cuattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: x[i] == x[j]),
        lambda x: cuattn.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[j]),
        lambda x: cuattn.create_block_mask(lambda b, h, i, j: x[i] == x[j], None, None, 9, 9),
        torch.func.grad(
            lambda x: cuattn.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s + x[j]).sum()
        ),
    )
    message = (
        r"flex_attention: a captured array of shape \(9,\) is batched by torch.func.vmap, .* a "
        "part of the batch, or call flex_attention in a loop"
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=message):
            torch.func.vmap(call)(torch.zeros(3, 9))
    zeros = torch.zeros(9)  # one for all, which nothing maps over
    mod = lambda s, b, h, i, j: s + zeros[j]  # noqa: E731
    out = torch.func.vmap(lambda x: cuattn.flex_attention(q, q, q, score_mod=mod) + x)(zeros)
    assert torch.equal(out[1], cuattn.flex_attention(q, q, q))


def test_dropout_without_a_seed_draws_one_from_torchs_generator():
    """As `attention` does: both ways have the same, and torch.manual_seed repeats it."""
    q = torch.randn(2, 40, 2, 16, requires_grad=True)
    mask = lambda b, h, i, j: j <= i  # noqa: E731

    def call(q, **options):
        return cuattn.flex_attention(q, q, q, mask_mod=mask, dropout_p=0.5, **options)

    for run in (call, torch.compile(call, backend="eager")):
        torch.manual_seed(3)
        first, other = run(q), run(q)
        torch.manual_seed(3)
        assert torch.equal(run(q), first)
        assert not torch.equal(other, first)
        torch.manual_seed(3)
        state = torch.stack((torch.randint(2**62, ()), torch.tensor(0)))
        want = call(q, dropout_state=state)
        assert torch.equal(want, first)
        found = [torch.autograd.grad(x.sum(), q)[0] for x in (first, want)]
        assert torch.equal(*found)
        with torch.no_grad():
            assert call(q).shape == q.shape
