# SPDX-License-Identifier: Apache-2.0
"""flash-attn's arguments as cuattn's: what they may be, said by flash-attn's names."""

from __future__ import annotations

import operator
import os
from typing import Any

import torch
from torch import Tensor

from .._arrays import wants_gradient
from ..torch.eager import rows_in_order
from ..torch.ops import traced

LONGEST_HEAD = 256
WIDEST = 2**62  # of a window: no sequence is as long
LARGEST_FLOAT = torch.finfo(torch.float32).max


def check_tensors(op: str, axes: int, **tensors: Any) -> None:
    """Refuse what is no tensor of so many axes, the last of which is head_dim."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{op}: {name} must be a torch tensor, got {type(tensor).__name__}; convert it, or "
                "call cuattn's own functions, which take the arrays of any library"
            )
        if tensor.dim() != axes:
            shape = "[batch, seqlen, ..., head_dim]" if axes > 3 else "[total, ..., head_dim]"
            raise ValueError(
                f"{op}: {name} must have {axes} axes, {shape}, got shape {tuple(tensor.shape)}; "
                "reshape it"
            )
        if tensor.shape[-1] > LONGEST_HEAD:
            raise ValueError(
                f"{op}: {name} must have head_dim at most {LONGEST_HEAD}, got {tensor.shape[-1]}; "
                "as in flash-attn: cuattn.attention takes 512 without a gradient"
            )


def check_packed(op: str, name: str, tensor: Any, axes: int, axis: int, count: int) -> None:
    """Refuse what is not `count` tensors packed along an axis."""
    check_tensors(op, axes, **{name: tensor})
    if tensor.shape[axis] != count:
        raise ValueError(
            f"{op}: {name} must hold {count} tensors along axis {axis}, got shape "
            f"{tuple(tensor.shape)}; torch.stack them there"
        )


def check_ints(op: str, name: str, tensor: Any, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse what is no int32 tensor of this shape on the device of `like`; -1 is any extent."""
    what = f"an int32 tensor {list(shape)}".replace("-1", "n")
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{op}: {name} must be {what}, got {type(tensor).__name__}; make it by "
            "torch.tensor(..., dtype=torch.int32, device=q.device)"
        )
    if tensor.dtype != torch.int32:
        raise ValueError(f"{op}: {name} must be {what}, got {tensor.dtype}; pass {name}.int()")
    same = tensor.dim() == len(shape) and all(
        wanted in (-1, found) for wanted, found in zip(shape, tensor.shape, strict=True)
    )
    if not same:
        raise ValueError(
            f"{op}: {name} must be {what}, got shape {tuple(tensor.shape)}; give one row to each "
            "sequence"
        )
    if tensor.device != like.device:
        raise ValueError(
            f"{op}: {name} must be on {like.device} like the other tensors, got {tensor.device}; "
            f"pass {name}.to({str(like.device)!r})"
        )


def check_range(op: str, name: str, values: Tensor, low: Any, high: Any, rule: str) -> None:
    """Refuse integers outside [low, high]: on the CPU, and on CUDA under CUATTN_CHECK=1 alone."""
    if are_looked_at(values) and values.numel() and bool(((values < low) | (values > high)).any()):
        raise ValueError(
            f"{op}: {name} must be {rule}, got {values.flatten().tolist()}; correct {name}, or "
            "make the cache larger"
        )


def are_looked_at(values: Tensor) -> bool:
    """Whether numbers of a tensor are checked: on CUDA under CUATTN_CHECK=1, and in no capture."""
    if values.device.type == "cpu":
        return True
    return os.environ.get("CUATTN_CHECK") == "1" and not torch.cuda.is_current_stream_capturing()


def window_of(op: str, window_size: Any) -> tuple[int, int]:
    """Read window_size, of which every negative number is no limit."""
    try:
        left, right = (int(side) for side in window_size)
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: window_size must hold two integers (left, right), got {window_size!r}; pass "
            "(-1, -1) for no limit"
        ) from None
    left, right = (min(side, WIDEST) for side in (left, right))
    return (-1 if left < 0 else left, -1 if right < 0 else right)


def refuse_truth(value: Any) -> Any:
    """Raise for True and False, which Python takes for 1 and 0; return others."""
    if isinstance(value, bool):
        raise TypeError
    return value


def number_of(op: str, name: str, value: Any, way_out: str) -> float:
    """Read a finite number."""
    if wants_gradient(value):
        raise NotImplementedError(
            f"{op}: {name} requires grad, but no gradient goes through it; pass {name}.item()"
        )
    try:
        number = float(refuse_truth(value))
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}; {way_out}") from None
    if not abs(number) <= LARGEST_FLOAT:
        raise ValueError(f"{op}: {name} must be finite in float32, got {value!r}; {way_out}")
    return number


def whole_number(op: str, name: str, value: Any) -> int:
    """Read a whole number."""
    try:
        return operator.index(refuse_truth(value))
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be a whole number, got {value!r}; pass 0 to let the library choose"
        ) from None


def check_slopes(op: str, slopes: Any, q: Tensor) -> None:
    """Refuse slopes that attention would refuse after new tokens were written."""
    if slopes is None:
        return
    batch, heads = q.shape[0], q.shape[2]
    shapes = ((heads,), (batch, heads))
    fits = isinstance(slopes, Tensor) and tuple(slopes.shape) in shapes
    if not fits or slopes.dtype != torch.float32 or slopes.device != q.device:
        got = type(slopes).__name__
        if isinstance(slopes, Tensor):
            got = f"{slopes.dtype} {list(slopes.shape)} on {slopes.device}"
        raise (ValueError if isinstance(slopes, Tensor) else TypeError)(
            f"{op}: alibi_slopes must be a float32 tensor [{heads}] or [{batch}, {heads}] on "
            f"{q.device} like q, got {got}; give one number per head"
        )


def scores_of(
    op: str,
    head_dim: int,
    softmax_scale: Any,
    causal: Any,
    window_size: Any,
    softcap: Any,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """Say in cuattn's words what becomes of the scores."""
    scale = head_dim**-0.5 if head_dim else 1.0
    if softmax_scale is not None:
        way_out = "leave it out for 1 / sqrt(head_dim)"
        scale = number_of(op, "softmax_scale", softmax_scale, way_out)
    cap = number_of(op, "softcap", softcap, "pass 0 to switch it off")
    return {
        "causal": bool(causal),
        "window": window_of(op, window_size),
        "scale": scale,
        "softcap": cap if cap > 0 else 0.0,
        "alibi_slopes": alibi_slopes,
    }


def refuse_gradients(op: str, what: str, way_out: str, *tensors: Tensor | None) -> None:
    """Raise where autograd wants a gradient that there is none of."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise NotImplementedError(
            f"{op}: {what}: no gradient goes through a cache, and a tensor requires grad; {way_out}"
        )


def in_eights(x: Tensor) -> Tensor:
    """Bring rows to what kernels read: head_dim padded with zeros to a multiple of 8, in order."""
    if x.shape[-1] % 8:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8))
    if traced(x):
        return x if x.stride(-1) == 1 else x.contiguous()
    return rows_in_order(x)


def cut(result: Any, head_dim: int) -> Any:
    """Cut the heads of out, which may be the first of several results, to their true size."""
    if isinstance(result, tuple):
        return (cut(result[0], head_dim), *result[1:])
    return result if result.shape[-1] == head_dim else result[..., :head_dim]


def refuse_probabilities(op: str, return_attn_probs: bool, dropout_p: float) -> None:
    """Raise where S_dmask would have to be more than empty."""
    if return_attn_probs and dropout_p:
        raise NotImplementedError(
            f"{op}: return_attn_probs must be False with dropout_p={dropout_p}, because no kernel "
            "writes the probabilities (S_dmask); leave it out, or ask for softmax_lse without "
            "dropout"
        )
