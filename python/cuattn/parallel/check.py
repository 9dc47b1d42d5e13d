# SPDX-License-Identifier: Apache-2.0
"""What every rank must say alike, compared before anything is posted.

Each rank gives 32 bytes over the host: a digest of its call. Where all are equal nothing else
happens. Else the ranks exchange their words, and all raise the same error: what differs, on which
ranks. A rank that refuses its own call takes part and says so; the others raise, too.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .team import NoAnswer, Team

ALWAYS = os.environ.get("CUATTN_CHECK", "") not in ("", "0")
FIRST_CALLS = 100  # of a group: all are checked
EVERY = 16  # of those after
LONG_SECONDS = 20e-3  # beside a call as long as this the check does not count


def is_due(team: Team, check: bool | None) -> bool:
    """Decide whether this call is checked, from what all ranks know to be equal.

    A call that a CUDA graph captures is not: a replay would not repeat it.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    if check is not None:
        return check or ALWAYS
    is_long = team.last_seconds >= LONG_SECONDS
    return ALWAYS or team.calls < FIRST_CALLS or team.calls % EVERY == 0 or is_long


class Said:
    """What must be equal everywhere, by name, in words that are found when they are needed."""

    def __init__(self, function: str, values: Mapping[str, Any], seconds: float = 0.0) -> None:
        self.function, self.values, self.seconds = function, values, seconds

    @functools.cached_property
    def fields(self) -> dict[str, str]:
        """The words."""
        return {"function": self.function, **{n: str(x) for n, x in self.values.items()}}

    @functools.cached_property
    def text(self) -> str:
        """All of them as one."""
        return repr(sorted(self.fields.items()))


def agree(function: str, team: Team, check: bool | None, contract: Callable[[], Said]) -> None:
    """Check a call and hold it against those of the other ranks.

    `contract` checks the call of this rank and returns what must be equal everywhere. Raises what
    it raises here, ValueError on the others, and RuntimeError where a rank does not answer.
    """
    due = is_due(team, check)
    team.calls += 1
    refusal: Exception | None = None
    said = Said(function, {})
    try:
        said = contract()
    except Exception as error:
        refusal = error
    if due and team.size > 1:
        compare(function, team, said, refusal)
        team.last_seconds = said.seconds
    if refusal is not None:
        raise refusal


def compare(function: str, team: Team, said: Said, refusal: Exception | None) -> None:
    """Raise on every rank where the fields of any differ, or where any refused."""
    before = str(team.calls - 1)
    text = f"{before} {said.text}" if refusal is None else f"refused by {team.rank}"
    digest = hashlib.sha256(text.encode()).digest()
    try:
        if all(words == digest for words in team.gather_words(digest)):
            return
        own: Any = {**said.fields, "calls before this": before}
        if refusal is not None:
            own = f"{type(refusal).__name__}: {refusal}"
        words = gather_words(team, own)
    except NoAnswer as error:
        raise no_answer(function, "the calls were compared", error) from error
    if refusal is not None:
        return
    refused = {rank: x for rank, x in enumerate(words) if isinstance(x, str)}
    if refused:
        text = "; ".join(f"rank {rank}: {x}" for rank, x in refused.items())
        raise ValueError(f"{function}: refused by other ranks of the group, so by all ({text})")
    raise ValueError(
        f"{words[0]['function']}: every rank must make the same call, but they differ: "
        f"{differences(words)}; nothing was sent"
    )


def no_answer(function: str, when: str, error: NoAnswer) -> RuntimeError:
    """Make the error of a rank that others left alone."""
    word = str(error).partition("\n")[0]
    return RuntimeError(
        f"{function}: a rank of the group did not answer when {when}; see its own log, and start "
        f"the job again ({word})"
    )


def gather_words(team: Team, own: Any) -> list[Any]:
    """Return what every rank says, of any length, in order of ranks."""
    mine = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    counts = team.gather_on_host(torch.tensor([len(mine)], device="cpu")).flatten().tolist()
    box = mine.new_zeros(max(counts))
    box[: len(mine)] = mine
    found = team.gather_on_host(box)
    said = zip(found, counts, strict=True)
    return [json.loads(x[:count].numpy().tobytes()) for x, count in said]


def differences(words: list[dict[str, str]]) -> str:
    """Say which fields differ: each value with the ranks that gave it."""
    found = []
    for name in dict.fromkeys(name for said in words for name in said):
        ranks: dict[str, list[int]] = {}
        for rank, said in enumerate(words):
            ranks.setdefault(said.get(name, "nothing"), []).append(rank)
        if len(ranks) > 1:
            sides = (
                f"{value} on rank{'s' if len(on) > 1 else ''} {', '.join(map(str, on))}"
                for value, on in ranks.items()
            )
            found.append(f"{name} is " + " and ".join(sides))
    return "; ".join(found)
