# SPDX-License-Identifier: Apache-2.0
"""Ranks whose calls differ, that refuse theirs, die or never come: an error on all, no hang."""

from __future__ import annotations

import os
import signal
import time

import pytest

import frameworks

torch = frameworks.require("torch")
from jobs import draw  # noqa: E402
from pool import Pool, why_no_nccl  # noqa: E402

import cuattn.parallel as parallel  # noqa: E402
from cuattn.parallel import Layout  # noqa: E402


def call(ranks, **options):
    q, k, v = draw(1, 64, (4, 2))
    return parallel.attention(q, k, v, **{"group": ranks.group, "check": True, **options})


def other_call(ranks, name):
    """The call of the rank that differs."""
    q, k, v = draw(1, 64, (4, 2))
    n = 64 * ranks.size
    run = {
        "causal": lambda: call(ranks, causal=True),
        "dtype": lambda: parallel.attention(
            q.half(), k.half(), v.half(), group=ranks.group, check=True
        ),
        "batch": lambda: parallel.attention(q[:1], k[:1], v[:1], group=ranks.group, check=True),
        "num_heads_q": lambda: parallel.attention(q[:, :, :2], k, v, group=ranks.group, check=True),
        "layout": lambda: call(ranks, layout="zigzag"),
        "seqlen": lambda: call(ranks, layout=Layout("contiguous", n - 1, ranks.size, chunk=64)),
        "scheme": lambda: call(ranks, scheme="ring"),
        "sinks": lambda: call(ranks, sinks=torch.ones(4)),
        "memory_limit": lambda: call(ranks, memory_limit=1 << 40),
        "function": lambda: parallel.attention_varlen(
            *(x[0] for x in (q, k, v)), [0, n], group=ranks.group, check=True
        ),
        "head_dim": lambda: parallel.attention(q, k[..., :8], v, group=ranks.group, check=True),
        "list": lambda: parallel.attention([1], k, v, group=ranks.group, check=True),
        "softcap": lambda: call(ranks, softcap=-1.0),
        "seed": lambda: call(ranks, dropout_p=0.1),
        "share": lambda: call(ranks, dropout_p=1.5, dropout_seed=1),
        "dropout_p": lambda: call(ranks, dropout_p=0.1, dropout_seed=1),
    }
    return run[name]()


def differ(ranks, name, victim):
    """One rank calls something else; then all call the same, which runs."""
    try:
        other_call(ranks, name) if ranks.rank == victim else call(ranks)
    except Exception as error:
        found = type(error).__name__, str(error)
    else:
        found = "", ""
    call(ranks)
    return found


DIFFER = ("causal", "dtype", "batch", "num_heads_q", "layout", "seqlen", "scheme", "sinks")


@pytest.mark.parametrize("size", [2, 4])
def test_calls_that_differ_raise_the_same_error_on_every_rank(size, pool):
    names = (*DIFFER, "memory_limit", "function", "dropout_p")
    for index, name in enumerate(names):
        victim = index % size
        found = pool.run(size, differ, name, victim)
        kinds, texts = zip(*found, strict=True)
        assert set(kinds) == {"ValueError"}, (name, found)
        if name == "seqlen" and victim == size - 1:  # its own rows do not fit: it refuses
            continue
        assert len(set(texts)) == 1, (name, found)
        word = "layout" if name == "seqlen" else name
        assert f"{word} is " in texts[0], texts[0]
        assert f"on rank {victim}" in texts[0] or size == 2, texts[0]
        assert "every rank must make the same call" in texts[0]
        assert "nothing was sent" in texts[0]


REFUSED = {
    "head_dim": ("ValueError", "k must have head_dim 32 like q, got 8"),
    "list": ("TypeError", "q must be a torch tensor, got list"),
    "softcap": ("ValueError", "softcap must be"),
    "seed": ("ValueError", "dropout_seed or dropout_state must be given"),
    "share": ("ValueError", "dropout_p must lie in [0, 1)"),
}


def test_a_rank_that_refuses_its_call_is_named_on_all_others(pool):
    for name, (kind, words) in REFUSED.items():
        found = pool.run(4, differ, name, 2)
        assert found[2][0] == kind, found
        assert words in found[2][1], found[2][1]
        for rank in (0, 1, 3):
            assert found[rank][0] == "ValueError", found
            assert "refused by other ranks" in found[rank][1]
            assert f"rank 2: {kind}: " in found[rank][1]
            assert words in found[rank][1]


def refusals(ranks):
    """What is refused by name, the same on all ranks."""
    n = 64 * ranks.size
    layout = Layout("contiguous", n + 2 * ranks.size, ranks.size)
    bias, slopes = torch.zeros(1, 4, 64, n), torch.ones(4)
    q, k, v = draw(1, 64, (4, 2))
    packed = [x[0] for x in (q, k, v)]
    calls = {
        "rows": lambda: call(ranks, layout=layout),
        "odd": lambda: parallel.attention(
            *(x[:, :63] for x in (q, k, v)), group=ranks.group, layout="zigzag", check=True
        ),
        "word": lambda: call(ranks, layout="striped"),
        "size": lambda: call(ranks, layout=Layout("contiguous", n, ranks.size + 1)),
        "scheme": lambda: call(ranks, scheme="flash"),
        "partial": lambda: call(ranks, partial_dtype="bfloat16"),
        "memory": lambda: call(ranks, scheme="gather", memory_limit=10),
        "heads": lambda: parallel.attention(
            q[:, :, :3], k[:, :, :1], v[:, :, :1], group=ranks.group, scheme="heads", check=True
        ),
        "bias": lambda: call(ranks, scheme="heads", bias=bias),
        "bias shape": lambda: call(ranks, bias=bias[..., :-1]),
        "alibi": lambda: call(ranks, scheme="ring", alibi_slopes=slopes),
        "alibi and bias": lambda: call(
            ranks, scheme="ring", alibi_slopes=slopes, bias=bias, causal=True
        ),
        "sinks list": lambda: call(ranks, sinks=torch.ones(4).cpu().numpy()),
        "bias list": lambda: call(ranks, bias=[0.0]),
        "limit": lambda: call(ranks, memory_limit="1 GB"),
        "float8": lambda: parallel.attention(
            *(x.to(torch.float8_e4m3fn) for x in (q, k, v)), group=ranks.group, check=True
        ),
        "no heads": lambda: parallel.attention(
            *(x[:, :, :0] for x in (q, k, v)), group=ranks.group, check=True
        ),
        "no documents": lambda: parallel.attention_varlen(
            *packed, None, group=ranks.group, check=True
        ),
        "used": lambda: call(ranks, seqused=torch.ones(2)),
        "used beyond": lambda: call(
            ranks, seqused=torch.tensor([n + 1, 3], dtype=torch.int32, device="cpu")
        ),
        "used list": lambda: call(ranks, seqused=[64, 3]),
        "used window": lambda: call(
            ranks, scheme="ring", window=(9, 0), seqused=torch.ones(2, dtype=torch.int32)
        ),
        "used right": lambda: call(
            ranks, scheme="gather", window=(9, 9), seqused=torch.ones(2, dtype=torch.int32)
        ),
        "offsets": lambda: parallel.attention_varlen(
            *packed, [0, 9, n + 1], group=ranks.group, check=True
        ),
        "group": lambda: call(ranks._replace(group="all")),
        "three groups": lambda: call(ranks._replace(group=(ranks.group,) * 3)),
    }
    found = {}
    for name, run in calls.items():
        try:
            run()
        except Exception as error:
            found[name] = type(error).__name__, str(error)
    return found


WORDS = {
    "rows": ("ValueError", "q must hold the "),
    "odd": ("ValueError", "needs an even number of tokens on each rank, got 63"),
    "word": ("ValueError", "layout must be 'contiguous', 'zigzag' or a Layout, got 'striped'"),
    "size": ("ValueError", "layout must be of the group's ranks 2"),
    "scheme": (
        "ValueError",
        "scheme must be one of 'auto', 'gather', 'heads', 'ring', got 'flash'",
    ),
    "partial": ("ValueError", "partial_dtype must be 'float32' or 'input', got 'bfloat16'"),
    "memory": ("ValueError", "exceed memory_limit 10; take one of ['heads', 'ring']"),
    "heads": ("NotImplementedError", "num_heads_q 3 is no multiple of 2 ranks"),
    "bias": ("NotImplementedError", "a bias of rows is not exchanged"),
    "bias shape": ("ValueError", "bias must be float32, bool or of q's dtype and broadcast to"),
    "alibi": ("NotImplementedError", "alibi_slopes without a causal mask go by heads alone"),
    "alibi and bias": ("NotImplementedError", "alibi_slopes or bias, not both"),
    "sinks list": ("TypeError", "sinks must be a torch tensor, got ndarray"),
    "bias list": ("TypeError", "bias must be a torch tensor, got list"),
    "limit": ("ValueError", "memory_limit must be None or a number of bytes >= 0, got '1 GB'"),
    "float8": ("ValueError", "q must be float32, float16 or bfloat16, got torch.float8_e4m3fn"),
    "no heads": ("ValueError", "q and k must have a head, got 0 and 0"),
    "no documents": ("ValueError", "cu_seqlens must be integers [documents + 1]"),
    "used": ("ValueError", "seqused must be int32 (2,) on "),
    "used beyond": ("ValueError", "seqused must "),  # lie within, or on the device of q
    "used list": ("TypeError", "seqused must be a torch tensor, got list"),
    "used window": ("NotImplementedError", "seqused and a window go by gather and heads"),
    "used right": ("NotImplementedError", "a window that looks right go by heads alone"),
    "offsets": ("ValueError", "cu_seqlens must end with the 128 tokens of the whole sequence"),
    "group": ("ValueError", "group must be a ProcessGroup that holds this rank"),
    "three groups": ("ValueError", "group must be one group or (inner, outer), got 3"),
}


def test_what_cannot_run_is_refused_by_name(pool):
    for found in pool.run(2, refusals):
        assert found.keys() == WORDS.keys()
        for name, (kind, words) in WORDS.items():
            assert found[name][0] == kind, (name, found[name])
            assert words in found[name][1] or "refused by other ranks" in found[name][1], name
            assert found[name][1].startswith("parallel.attention"), found[name]


def unshard_with_a_gradient(ranks):
    x = torch.zeros(1, 4, requires_grad=True)
    layout = Layout("contiguous", 4 * ranks.size, ranks.size, chunk=4)
    with torch.no_grad():
        assert layout.unshard(x, ranks.group).shape == (1, 4 * ranks.size)
    assert layout.unshard([x] * ranks.size).requires_grad  # no rank is asked for its rows
    with pytest.raises(NotImplementedError, match=r"x requires grad, .* or pass x\.detach\(\)"):
        layout.unshard(x, ranks.group)


@pytest.mark.parametrize("size", [1, 2])
def test_unshard_refuses_what_wants_a_gradient(size, gloo):
    gloo.run(size, unshard_with_a_gradient)


def lose_a_rank(ranks, victim, how):
    """A rank dies or never comes, after a call that went well."""
    call(ranks)
    if ranks.rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(12)
        return "", 0.0
    begin = time.monotonic()
    try:
        for check in (True, False):
            call(ranks, check=check)
    except Exception as error:
        return type(error).__name__, time.monotonic() - begin
    return "", 0.0


@pytest.mark.parametrize("how", ["killed", pytest.param("absent", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_without_a_rank_the_others_raise_in_time(how, backend):
    size = 3 if backend == "gloo" else 2
    if backend == "nccl" and why_no_nccl() is not None:
        pytest.skip(why_no_nccl())
    pool = Pool(size, timeout=20 if how == "killed" else 5, backend=backend)
    try:
        pool.send(size, lose_a_rank, 1, how)
        for rank in (0, 2)[: size - 1]:
            error, (kind, seconds) = pool.receive(rank)
            assert not error
            assert kind == "RuntimeError"
            assert seconds < 30
    finally:
        pool.close()


def test_without_torch_distributed_the_way_out_is_said():
    q, k, v = draw(1, 8, (4, 2))
    with pytest.raises(ValueError, match=r"parallel\.attention: .*init_process_group first"):
        parallel.attention(q, k, v)
