# SPDX-License-Identifier: Apache-2.0
"""How models stretch rotary embedding to longer texts: the published rules, by their names.

A rule changes the frequencies, and some a factor of cos and sin. Their words are those of Hugging
Face's configurations. Next: rope.py.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

LENGTH = "original_max_position_embeddings"
NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", LENGTH),
    "yarn": ("factor", LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "longrope": ("short_factor", "long_factor", LENGTH),
}


def name_of(rule: dict[str, Any]) -> str:
    """Return the name of a rule; raise where it is not known or lacks what it needs."""
    name = rule.get("rope_type", rule.get("type", "default"))
    if name not in NEEDS:
        raise ValueError(
            f"rope_table: scaling must name a rope_type of {', '.join(map(repr, NEEDS))}, got "
            f"{name!r}; compute the tables yourself"
        )
    for word in NEEDS[name]:
        if rule.get(word) is None:
            raise ValueError(
                f"rope_table: scaling of rope_type {name!r} must have {word!r}, got "
                f"{sorted(rule)}; add it"
            )
    factor, length = rule.get("factor"), rule.get(LENGTH)
    if factor is not None and not (is_number(factor) and factor >= 1.0):
        raise ValueError(
            f"rope_table: scaling must have a factor from 1 on, got {factor!r}; it is how much "
            "longer texts become"
        )
    if length is not None and not (is_number(length) and length >= 1):
        raise ValueError(
            f"rope_table: scaling must have {LENGTH} from 1 on, got {length!r}; it is how long "
            "texts were in training"
        )
    return str(name)


def is_number(value: Any) -> bool:
    """Whether a value of a configuration is a finite number."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def plain(dim: int, theta: float) -> np.ndarray:
    """Compute theta ** (-2 i / dim) in float32, as models do."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)


def frequencies(rule: dict[str, Any], dim: int, theta: float, max_position: int) -> np.ndarray:
    """Compute the float32 angle per position of each pair."""
    name = name_of(rule)
    if name == "linear":
        return plain(dim, theta) / np.float32(rule["factor"])
    if name == "ntk":
        return plain(dim, stretched(theta, float(rule["factor"]), dim))
    if name == "dynamic":
        length, factor = float(rule[LENGTH]), float(rule["factor"])
        longest = max(max_position, length)
        return plain(dim, stretched(theta, factor * longest / length - (factor - 1.0), dim))
    if name == "yarn":
        return yarn(rule, dim, theta)
    if name == "llama3":
        return llama3(rule, dim, theta)
    if name == "longrope":
        return longrope(rule, dim, theta, max_position)
    return plain(dim, theta)


def stretched(theta: float, factor: float, dim: int) -> float:
    """Compute the base with which the slowest pair turns `factor` times as slowly."""
    return theta * factor ** (dim / (dim - 2)) if dim > 2 else theta


def yarn(rule: dict[str, Any], dim: int, theta: float) -> np.ndarray:
    """Slow pairs of few turns within the old length, keep those of many, blend between."""
    length, factor = float(rule[LENGTH]), np.float32(rule["factor"])

    def pair_of(turns: float) -> float:
        return dim * math.log(length / (turns * 2.0 * math.pi)) / (2.0 * math.log(theta))

    first, last = pair_of(rule.get("beta_fast") or 32.0), pair_of(rule.get("beta_slow") or 1.0)
    if rule.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (last - first) or 0.001  # a step, where both ends are one pair
    pairs = np.arange(dim // 2, dtype=np.float32)
    slow = np.clip((pairs - np.float32(first)) / np.float32(width), 0.0, 1.0).astype(np.float32)
    base = plain(dim, theta)
    return (base / factor * slow + base * (np.float32(1.0) - slow)).astype(np.float32)


def llama3(rule: dict[str, Any], dim: int, theta: float) -> np.ndarray:
    """Slow pairs whose waves are long beside the old length, keep short ones, blend between."""
    base = plain(dim, theta)
    low, high = float(rule["low_freq_factor"]), float(rule["high_freq_factor"])
    if not 0.0 < low < high:
        raise ValueError(
            f"rope_table: scaling of rope_type 'llama3' must have 0 < low_freq_factor < "
            f"high_freq_factor, got {low} and {high}; exchange them"
        )
    waves = np.float32(rule[LENGTH]) / (np.float32(2.0 * math.pi) / base)  # in the old length
    kept = np.clip((waves - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    kept = kept.astype(np.float32)
    slow = base / np.float32(rule["factor"])
    return ((np.float32(1.0) - kept) * slow + kept * base).astype(np.float32)


def longrope(rule: dict[str, Any], dim: int, theta: float, max_position: int) -> np.ndarray:
    """Divide each pair's frequency by its own factor, for short texts or for long ones."""
    word = "long_factor" if max_position > rule[LENGTH] else "short_factor"
    factors = np.asarray(rule[word], np.float32)
    if factors.shape != (dim // 2,):
        raise ValueError(
            f"rope_table: scaling must have a {word} of {dim // 2} numbers, one for each pair, got "
            f"{factors.size}; check rotary_dim"
        )
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(np.float32(theta), exponents).astype(np.float32)
    return (np.float32(1.0) / (factors * powers)).astype(np.float32)


def attention_factor(rule: dict[str, Any]) -> float:
    """Compute what cos and sin are multiplied by; its square is in the scores."""
    name = name_of(rule)
    if rule.get("attention_factor") is not None:
        return float(rule["attention_factor"])
    if name == "yarn":
        factor, part, all_of_it = (rule.get(w) for w in ("factor", "mscale", "mscale_all_dim"))
        if part and all_of_it:
            return float(mscale(factor, part) / mscale(factor, all_of_it))
        return float(mscale(factor))
    if name == "longrope":
        length = float(rule[LENGTH])
        factor = rule.get("factor") or rule.get("max_position_embeddings", length) / length
        return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(length))
    return 1.0


def mscale(factor: Any, weight: float = 1.0) -> float:
    """YaRN's temperature of longer texts."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
