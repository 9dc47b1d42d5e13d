# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine over cuattn on the CPU: small random models beside transformers.

    pip install vllm==0.33.0 && pip install ./integrations/vllm
    python integrations/vllm/engine_on_cpu.py [MODEL...]

Scheduler, block manager, prefix cache, input batch, model and sampler are vLLM's. Its wheel has
CUDA code alone: what the engine takes from a CPU build stands below in torch, and its CPU platform,
which knows one backend, is told to take the one that was asked for.
"""

import os
import sys
import tempfile

os.environ.update(
    VLLM_TARGET_DEVICE="cpu",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # what is put in place below is in this process
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import torch
import transformers

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # with 0.02 all tokens are equally likely
}
MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 16}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 32, "attn_logit_softcapping": 5.0}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 8}),
}
PROMPTS, MORE = (5, 33, 100, 17, 70, 1), 48  # tokens of each prompt, and how many follow


def stand_in_for_the_cpu_build():
    """Give vLLM what its CPU build has in C++ and its CPU platform refuses."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.platforms.cpu import CpuPlatform

    def fill_slots(starts, positions, table, slots, size):
        count = int(starts[-1])
        owners = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
        at = positions[:count].long()
        slots[:count] = table[owners, at // size].long() * size + at % size
        slots[count:] = -1

    ops = {
        "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
        "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, "
        "Tensor(a!) slots, int size) -> ()": fill_slots,
    }
    library = torch.library.Library("_C", "FRAGMENT")
    for schema, function in ops.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native

    def backend(cls, selected_backend, attn_selector_config, num_heads=None):
        return selected_backend.get_path()

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    return library


def count_preemptions():
    """Have the scheduler append to a list when it takes a running sequence's blocks away."""
    from vllm.v1.core.sched.scheduler import Scheduler

    seen, preempt = [], Scheduler._preempt_request

    def counted(self, request, *more, **named):
        seen.append(request)
        return preempt(self, request, *more, **named)

    Scheduler._preempt_request = counted
    return seen


def compare(name, preempted, **options):
    """Generate by vLLM in float32; compare its log-probabilities with those of transformers."""
    from vllm import LLM, SamplingParams

    preempted.clear()
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **changes})
    cls = getattr(transformers, f"{kind}ForCausalLM")
    model = cls._from_config(config, attn_implementation="eager").eval()
    for module in model.modules():
        if hasattr(module, "gelu_impl"):  # vLLM's Bloom has the exact one
            module.gelu_impl = torch.nn.GELU()
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=192,
        attention_backend="CUSTOM",
        **options,
    )
    shared = torch.randint(SIZES["vocab_size"], (32,)).tolist()  # two blocks of the prefix cache
    prompts = [torch.randint(SIZES["vocab_size"], (n,)).tolist() for n in PROMPTS]
    prompts += [shared + prompt for prompt in prompts[:3]]
    asked = SamplingParams(temperature=0, max_tokens=MORE, logprobs=0, detokenize=False)
    asked.ignore_eos = True
    apart, behind = 0.0, 0.0
    answers = engine.generate([{"prompt_token_ids": p} for p in prompts], asked, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(answer.outputs[0].token_ids)
        assert len(tokens) == MORE
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.float().log_softmax(-1)
        chosen = wanted[torch.arange(MORE), tokens]
        found = [next(iter(step.values())).logprob for step in answer.outputs[0].logprobs]
        apart = max(apart, float((torch.tensor(found) - chosen).abs().max()))
        behind = max(behind, float((wanted.amax(-1) - chosen).max()))
    used = engine.llm_engine.vllm_config.attention_config.backend.name
    print(
        f"{name} {options}: log-probabilities at most {apart:.1e} apart, tokens {behind:.1e} "
        f"behind the likeliest, backend {used}, {len(preempted)} preemptions"
    )
    assert max(apart, behind) < 1e-4
    assert preempted or "num_gpu_blocks_override" not in options


if __name__ == "__main__":
    kept, preempted = stand_in_for_the_cpu_build(), count_preemptions()
    few = {"max_num_batched_tokens": 64, "max_num_seqs": 4}  # prompts come in chunks, beside decode
    for name in sys.argv[1:] or MODELS:
        compare(name, preempted, **few)
        if "sliding_window" not in MODELS[name][1]:  # else blocks behind the window are given back
            compare(name, preempted, **few, block_size=16, num_gpu_blocks_override=14)
