# SPDX-License-Identifier: Apache-2.0
"""How models stretch rotary embedding to longer texts: the published rules, by their names.

A rule changes the frequencies, and some a factor of cos and sin. Their words are those of Hugging
Face's configurations. What is not understood is refused: tables of another rule look like tables.
Next: rope.py.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

LENGTH = "original_max_position_embeddings"
LONGEST = "max_position_embeddings"
NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", LENGTH),
    "yarn": ("factor", LENGTH),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", LENGTH),
    "longrope": ("short_factor", "long_factor", LENGTH),
}
# Numbers from 0 on, where a rule has them; 0 of the last four is as good as none.
NUMBERS = ("attention_factor", "low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale",
           LONGEST, "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # fmt: skip
FACTORS = ("factor", "attention_factor", "low_freq_factor", "high_freq_factor", "short_factor",
           "long_factor")  # fmt: skip
# What the tables do not depend on: rotary_dim is given, positions and queries are the caller's.
ASIDE = ("rope_theta", "rope_type", "type", "truncate", "partial_rotary_factor", "mrope_section",
         "mrope_interleaved", "xdrope_section", "llama_4_scaling_beta", "finetuned")  # fmt: skip
KNOWN = frozenset((LENGTH, *NUMBERS, *FACTORS, *ASIDE))


def name_of(rule: dict[str, Any]) -> str:
    """Return the name of a rule; raise where it is not known or lacks what it needs."""
    check_keys(rule)
    name = rule.get("rope_type", rule.get("type", "default"))
    if not isinstance(name, str) or name not in NEEDS:
        raise ValueError(
            f"rope_table: scaling must name a rope_type of {', '.join(map(repr, NEEDS))}, got "
            f"{name!r}; compute the tables yourself"
        )
    other = rule.get("type")
    if other not in (None, name) and (other, name) != ("mrope", "default"):  # Qwen2-VL has both
        raise ValueError(
            f"rope_table: scaling must have one rope_type, got {name!r} and type {other!r}; leave "
            "one of them out"
        )
    for word in NEEDS[name]:
        if rule.get(word) is None:
            raise ValueError(
                f"rope_table: scaling of rope_type {name!r} must have {word!r}, got "
                f"{sorted(rule)}; add it"
            )
    check_numbers(rule)
    if name == "default":
        refuse_factors(rule)
    return name


def check_keys(rule: dict[str, Any]) -> None:
    """Refuse the rules of several layer types, and words that none of the rules has."""
    nested = [key for key, value in rule.items() if isinstance(value, Mapping)]
    if nested:
        one = "full_attention" if "full_attention" in nested else nested[0]
        raise ValueError(
            "rope_table: scaling must be the rule of one layer type, got those of "
            f"{', '.join(map(repr, nested))}; pass one layer type's, as scaling[{one!r}]"
        )
    for key in rule:
        if key not in KNOWN:
            raise ValueError(
                f"rope_table: scaling must have no keys but those of published rules, got {key!r}; "
                "leave it out if it does not change the tables, or compute them yourself"
            )


def check_numbers(rule: dict[str, Any]) -> None:
    """Refuse what is no number, or none that the formulas can take."""
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
    for word in NUMBERS:
        value = rule.get(word)
        if value is not None and not (is_number(value) and value >= 0):
            raise ValueError(
                f"rope_table: scaling must have a number from 0 on for {word}, got {value!r}; pass "
                "that of the model's configuration"
            )


def refuse_factors(rule: dict[str, Any]) -> None:
    """Refuse factors beside the rule that has none: the name of theirs was forgotten."""
    for word in FACTORS:
        value = rule.get(word)
        if value is not None and not (is_number(value) and value == 1):
            named = {"rope_type", "type"} & rule.keys()
            which = "of rope_type 'default'" if named else "without a rope_type"
            raise ValueError(
                f"rope_table: scaling {which} must have no {word}, got {value!r}; name the "
                "rope_type that it belongs to"
            )


def is_number(value: Any) -> bool:
    """Whether a value of a configuration is a finite number."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


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
    try:
        base = theta * factor ** (dim / (dim - 2)) if dim > 2 else theta
    except OverflowError:
        base = math.inf
    if base > np.finfo(np.float32).max:
        raise ValueError(
            f"rope_table: scaling must leave theta within float32, got a factor of {factor} for "
            f"theta {theta}; check the factor"
        )
    return base


def yarn(rule: dict[str, Any], dim: int, theta: float) -> np.ndarray:
    """Slow pairs of few turns within the old length, keep those of many, blend between."""
    length, factor = float(rule[LENGTH]), np.float32(rule["factor"])
    if theta == 1.0:
        raise ValueError(
            "rope_table: theta must not be 1 for rope_type 'yarn', got 1.0, with which no pair is "
            "slower than another; models have 10000.0 or more"
        )

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
    try:
        factors = np.asarray(rule[word], np.float32)
    except (TypeError, ValueError, OverflowError):
        factors = np.full(dim // 2, np.nan, np.float32)
    if factors.shape != (dim // 2,):
        raise ValueError(
            f"rope_table: scaling must have a {word} of {dim // 2} numbers, one for each pair, got "
            f"{factors.size}; check rotary_dim"
        )
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError(
            f"rope_table: scaling must have positive numbers in {word}, got {rule[word]!r:.80}; "
            "pass that of the model's configuration"
        )
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers = np.power(np.float32(theta), exponents).astype(np.float32)
    return (np.float32(1.0) / (factors * powers)).astype(np.float32)


def attention_factor(rule: dict[str, Any], max_position: int) -> float:
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
        return longrope_factor(rule, max_position)
    return 1.0


def longrope_factor(rule: dict[str, Any], max_position: int) -> float:
    """Compute the factor of cos and sin of longrope, by how much longer the texts became."""
    length = float(rule[LENGTH])
    of_texts = rule.get("long_mscale" if max_position > length else "short_mscale")
    if of_texts:
        return float(of_texts)  # Phi-3.5-MoE has it in its configuration
    factor = rule.get("factor")
    if factor is None:
        if rule.get(LONGEST) is None:
            raise ValueError(
                "rope_table: scaling of rope_type 'longrope' must have one of 'factor', "
                f"'attention_factor' and {LONGEST!r}, got {sorted(rule)}; put the model's "
                f"{LONGEST} into the dict"
            )
        factor = rule[LONGEST] / length
    if factor <= 1.0:
        return 1.0
    if length == 1.0:
        raise ValueError(
            f"rope_table: scaling of rope_type 'longrope' must have {LENGTH} above 1, got "
            f"{rule[LENGTH]!r}; it is how long texts were in training"
        )
    return math.sqrt(1.0 + math.log(factor) / math.log(length))


def mscale(factor: Any, weight: float = 1.0) -> float:
    """YaRN's temperature of longer texts."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
