# SPDX-License-Identifier: Apache-2.0
"""Layers of Llama-3-8B through Hugging Face transformers, by its attention implementations.

    python benchmarks/transformers_layers.py [--rounds 9] [-o [transformers.json]]

One model with random weights, whose implementation is changed between calls: "cuattn", torch's
"sdpa" and, where fa3-fwd can be imported and nothing is padded, FlashAttention-3 called the same
way. A round times every row by every implementation in a new order; shown are the medians, and the
medians of the ratios within a round. Kinds of row:

    prefill   the whole model over a prompt, logits of the last token
    generate  one token of generate() behind a prompt, its share of the prompt's time included
    attention the function that transformers calls, alone, on queries and keys of that prompt

`padded` rows are batches whose prompts are a quarter to the whole of the length, padded at the
left. The last column is the distance of an implementation's logits from those of float32 math, by
that of sdpa: of numbers that are seen. Without a GPU a tiny model runs, to try the program.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import cuattn
from cuattn.integrations.transformers import register

RESULTS = Path(__file__).parent / "results" / "transformers.json"
IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "num_hidden_layers": 4, "max_position_embeddings": 16384}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
TINY |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 256}
VOCABULARY, PADDING = 1024, 0
FA3 = "fa3"


class Row(NamedTuple):
    """A prompt, and what is timed over it."""

    kind: str
    batch: int
    length: int
    padded: bool = False
    tokens: int = 0  # that generate() adds

    @property
    def name(self) -> str:
        padded = ", padded" if self.padded else ""
        return f"{self.kind} {self.batch} x {self.length}{padded}"


def rows() -> list[Row]:
    """Rows of this machine."""
    short, long, tokens = (2048, 8192, 32) if IS_CUDA else (24, 48, 4)
    return [
        Row("attention", 1, short),
        Row("attention", 1, long),
        Row("attention", 4, short, padded=True),
        Row("prefill", 1, short),
        Row("prefill", 1, long),
        Row("prefill", 4, short, padded=True),
        Row("generate", 1, short, tokens=tokens),
        Row("generate", 4, short, padded=True, tokens=tokens),
    ]


def register_fa3() -> bool:
    """Make FlashAttention-3 an implementation, where its package is there; it sees no mask."""
    if not IS_CUDA or importlib.util.find_spec("fa3_fwd_interface") is None:
        return False
    from fa3_fwd_interface import flash_attn_func

    def forward(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **_: Any):
        swapped = (x.transpose(1, 2) for x in (q, k, v))
        out = flash_attn_func(*swapped, softmax_scale=scaling, causal=q.shape[2] > 1)
        return (out[0] if isinstance(out, tuple) else out), None

    transformers.AttentionInterface.register(FA3, forward)
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(FA3, lambda *_, **__: None)
    return True


def prompt(row: Row) -> dict[str, torch.Tensor]:
    """Tokens, and the mask of what is no padding."""
    ids = torch.randint(1, VOCABULARY, (row.batch, row.length), device=DEVICE)
    mask = torch.ones_like(ids)
    if row.padded:
        for i in range(1, row.batch):
            mask[i, : row.length * 3 * i // (4 * (row.batch - 1))] = 0
        ids[mask == 0] = PADDING
    return {"input_ids": ids, "attention_mask": mask}


def call_of(row: Row, model: Any, given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    """Make the call that is timed, by the implementation that the model has then."""
    if row.kind == "prefill":
        return lambda: model(**given, use_cache=False, logits_to_keep=1).logits
    if row.kind == "generate":
        counts = {"max_new_tokens": row.tokens, "min_new_tokens": row.tokens}
        return lambda: model.generate(**given, **counts, do_sample=False)
    from transformers.masking_utils import create_causal_mask

    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = config.hidden_size // heads
    layer = model.model.layers[0].self_attn
    embeds = model.model.embed_tokens(given["input_ids"])
    q, k, v = (
        torch.randn(row.batch, row.length, n, dim, device=DEVICE, dtype=model.dtype).transpose(1, 2)
        for n in (heads, kv_heads, kv_heads)
    )
    masks: dict[str, Any] = {}  # a model makes it once for all its layers

    def attend() -> Any:
        name = config._attn_implementation
        if name not in masks:
            masks[name] = create_causal_mask(
                config=config,
                inputs_embeds=embeds,
                attention_mask=given["attention_mask"] if row.padded else None,
                past_key_values=None,
                position_ids=None,
            )
        function = transformers.AttentionInterface()[name]
        return function(layer, q, k, v, masks[name], dropout=0.0, scaling=dim**-0.5)[0]

    return attend


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Time of one call among some, from the first's begin to the last's end on the device."""
    if IS_CUDA:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if IS_CUDA:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls


def errors(model: Any, given: dict[str, torch.Tensor], names: list[str]) -> dict[str, float]:
    """RMS distance of the last token's logits from eager math in float32, by implementation."""

    def logits(name: str) -> torch.Tensor:
        model.set_attn_implementation(name)
        return model(**given, use_cache=False, logits_to_keep=1).logits.double()

    found = {name: logits(name) for name in names}
    dtype = model.dtype
    exact = (model.float(), logits("eager"))[1]
    model.to(dtype)
    return {name: float((x - exact).square().mean().sqrt()) for name, x in found.items()}


@torch.inference_mode()
def measure(model: Any, chosen: list[Row], names: list[str], rounds: int) -> list[dict[str, Any]]:
    """Time every row by every implementation in every round."""
    entries, order = [], random.Random(0)
    for row in chosen:
        given = prompt(row)
        mine = [name for name in names if name != FA3 or not row.padded]
        call = call_of(row, model, given)
        times: dict[str, list[float]] = {name: [] for name in mine}
        calls = 1 if row.kind == "generate" or not IS_CUDA else 20 if row.kind == "attention" else 3
        for i in range(rounds + 1):
            order.shuffle(mine)
            for name in mine:
                model.set_attn_implementation(name)
                took = seconds(call, calls)
                if i > 0:  # the first round warms up
                    times[name].append(took / max(row.tokens, 1))
        entry: dict[str, Any] = {"row": row.name, "ms": {}, "of_sdpa": {}}
        for name in sorted(times):
            entry["ms"][name] = 1e3 * statistics.median(times[name])
            ratios = [a / b for a, b in zip(times["sdpa"], times[name], strict=True)]
            entry["of_sdpa"][name] = statistics.median(ratios)
        if row.kind == "prefill" and row.length == min(r.length for r in chosen):
            entry["error"] = errors(model, given, mine)
        entries.append(entry)
        print(
            entry["row"],
            *(f"{n} {t:.3f} ms ({entry['of_sdpa'][n]:.2f})" for n, t in entry["ms"].items()),
            entry.get("error", ""),
            sep="  ",
            flush=True,
        )
    return entries


def main() -> None:
    """Measure, print, and write the rows where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("-o", "--output", type=Path, nargs="?", const=RESULTS)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    register()
    names = ["cuattn", "sdpa"] + ([FA3] if register_fa3() else [])
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        pad_token_id=PADDING,
        eos_token_id=None,
        **(LLAMA if IS_CUDA else TINY),
    )
    dtype = torch.bfloat16 if IS_CUDA else torch.float32
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    chosen = [row for row in rows() if arguments.rows in row.name]
    entries = measure(model, chosen, names, arguments.rounds)
    if arguments.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "model": LLAMA if IS_CUDA else TINY,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuattn": cuattn.info(),
            "rows": entries,
        }
        arguments.output.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
