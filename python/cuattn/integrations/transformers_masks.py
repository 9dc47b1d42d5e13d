# SPDX-License-Identifier: Apache-2.0
"""transformers' masks as options of cuattn.attention: padding and sliding windows without a bias.

The mask function makes the bool mask that sdpa gets, whatever the model does with it, and writes on
that tensor which options mean the same: a model that hands the tensor on untouched pays for no
bias. Where the mask is of another kind, or is traced, there is no such note. Next: transformers.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

NOTE = "_cuattn_sight"  # the attribute of a mask


class Sight(NamedTuple):
    """What the mask of `queries` x `keys` means."""

    queries: int
    keys: int
    used: int  # keys that any query may see, from the first on: the rest of a static cache is empty
    options: dict[str, Any]
    version: int = 0  # of the mask that it was written on: torch counts what is written to it


def mask(**given: Any) -> Tensor | None:
    """Make transformers' own mask for sdpa, with a note of what it means."""
    from transformers.masking_utils import sdpa_mask

    why = why_not(type(given.get("config")))
    if why is not None:
        raise NotImplementedError(f"attn_implementation='cuattn': {why}")
    if torch.compiler.is_compiling():
        return sdpa_mask(**given)
    with torch.inference_mode(False):  # whose tensors do not count what is written to them
        made = sdpa_mask(**given)
    if made is not None and not given.get("use_vmap"):
        sight = sight_of(given)
        if sight is not None:
            setattr(made, NOTE, sight._replace(version=made._version))
    return made


@functools.cache
def refusal(config: type) -> str | None:
    """Say why models of a config cannot use this mask: they do not hand attention over.

    transformers asks a model whether it supports sdpa, but not about names that are registered. One
    that supports nothing computes attention itself, and would add True and False to its scores.
    """
    models = [model for model in loaded() if model.config_class is config]
    ways = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    if not models or any(getattr(model, way, False) for model in models for way in ways):
        return None
    names = sorted(model.__name__ for model in models)
    return (
        f"models of {config.__name__} ({names[0]}) compute attention themselves and take neither "
        "sdpa nor another; use attn_implementation='eager'"
    )


def asked(config: type) -> str | None:
    """Ask `refusal`: torch.compile warns of a function that is itself a cache."""
    return refusal(config)


why_not: Callable[[type], str | None] = torch.compiler.assume_constant_result(asked)


def loaded() -> Iterator[Any]:
    """Yield the classes of models that have been defined so far."""
    from transformers import PreTrainedModel

    found: list[Any] = [PreTrainedModel]
    for model in found:
        below = model.__subclasses__()
        found += below
        yield from below


def noted(attention_mask: Tensor | None, queries: int, keys: int) -> Sight | None:
    """Return the note of a mask that is still as made, and for so many queries and keys.

    A graph of torch.compile, which cannot ask whether it is, reads no note: the mask counts.
    """
    if attention_mask is None or torch.compiler.is_compiling():
        return None
    sight = getattr(attention_mask, NOTE, None)
    if sight is None or sight[:2] != (queries, keys):
        return None
    return sight if sight.version == attention_mask._version else None


def sight_of(given: dict[str, Any]) -> Sight | None:
    """Say by options what a mask function and the padding say, or return None."""
    options = pattern_of(given["mask_function"])
    padding = given.get("attention_mask")
    if options is None or (padding is not None and padding.ndim != 2):
        return None
    queries, keys = given["q_length"], given["kv_length"]
    offset = int(given.get("kv_offset", 0))
    end = int(given.get("q_offset", 0)) + queries - offset  # behind the newest query's own key
    used = end if options["causal"] else keys
    if not 0 < used <= keys or not (options["causal"] or options["window"] == (-1, -1)):
        return None
    if padding is None:
        return Sight(queries, keys, used, options)
    padding = padding[:, offset : offset + used]
    missing = used - padding.shape[1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    bounds = bounds_of(padding, queries == used, options["causal"])
    return None if bounds is None else Sight(queries, keys, used, options | bounds)


def pattern_of(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """Recognise the plain patterns of transformers; None is anything else."""
    from transformers import masking_utils as theirs

    if mask_function is theirs.causal_mask_function:
        return {"causal": True, "window": (-1, -1)}
    if mask_function is theirs.bidirectional_mask_function:
        return {"causal": False, "window": (-1, -1)}
    parts = captured(mask_function, "mask_functions")
    if parts is None or len(parts) != 2 or parts[1] is not theirs.causal_mask_function:
        return None
    if parts[0].__code__ is not theirs.sliding_window_overlay(1).__code__:
        return None
    width = captured(parts[0], "sliding_window")
    return {"causal": True, "window": (width - 1, -1)} if isinstance(width, int) else None


def captured(function: Callable[..., Any], name: str) -> Any:
    """Return what a function has captured under a name, or None."""
    return inspect.getclosurevars(function).nonlocals.get(name)


def bounds_of(padding: Tensor, aligned: bool, causal: bool) -> dict[str, Tensor] | None:
    """Say by lengths which keys padding leaves, bool [batch, keys]; None: no one run of each row.

    Rows of queries behind the end of a causal batch that is padded on the right give 0.
    """
    keys = padding.shape[1]
    count = padding.sum(1, dtype=torch.int32)
    first = padding.to(torch.uint8).argmax(1).int().masked_fill(count == 0, keys)
    end = first + count
    runs = (padding[:, 1:] & ~padding[:, :-1]).sum(1) + padding[:, 0]
    flags = torch.stack([(runs <= 1).all(), (first > 0).any(), (end < keys).any()])
    one_run, is_left, is_right = flags.tolist()  # waits for the device once, as sdpa's mask does
    if not one_run or (is_right and causal and not aligned):
        return None
    found: dict[str, Tensor] = {}
    if is_left:
        found["kv_start"] = first
    if is_right:
        found |= {"seqused_k": end, "seqused_q": end} if causal else {"seqused_k": end}
    return found
