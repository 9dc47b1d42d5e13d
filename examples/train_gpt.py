# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on the manual that Python ships, by cuattn and by torch, from the same seed.

python examples/train_gpt.py [steps]
"""

import statistics
import sys
import time

try:
    import torch
    from torch import nn
except ImportError:
    print("skipped: this example needs PyTorch (pip install torch)")
    sys.exit()

import pydoc_data.topics

import cuattn
import cuattn.torch

DEVICE = "cuda" if torch.cuda.is_available() and cuattn.info()["cuda"] else "cpu"
TEXT = "".join(pydoc_data.topics.topics.values()).encode()
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 128, 4


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        wide = 4 * WIDTH
        self.mlp = nn.Sequential(nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH))

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(*heads, is_causal=True).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


def train(attend, steps):
    torch.manual_seed(0)
    blocks = [Block(attend) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(256, WIDTH), *blocks, nn.Linear(WIDTH, 256)).to(DEVICE)
    places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH, device=DEVICE))
    optimizer = torch.optim.AdamW([*model.parameters(), places], lr=3e-3)
    text, losses, times = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8), [], []
    for _ in range(steps):
        begin = time.perf_counter()
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH, 1))
        tokens = text[starts + torch.arange(LENGTH + 1)].to(DEVICE).long()
        logits = model[1:](model[0](tokens[:, :-1]) + places)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - begin)
    return losses, 1e3 * statistics.median(times)


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
ours, ours_ms = train(cuattn.torch.scaled_dot_product_attention, steps)
torchs, torchs_ms = train(nn.functional.scaled_dot_product_attention, steps)
for step in range(0, steps, max(1, steps // 8)):
    print(f"step {step:4d}  loss {ours[step]:.4f} by cuattn, {torchs[step]:.4f} by torch")
print(f"{DEVICE}: {ours_ms:.1f} ms a step by cuattn, {torchs_ms:.1f} by torch")
apart = max(abs(a - b) for a, b in zip(ours, torchs, strict=True))
print(f"the curves lie {apart:.1e} apart at most")
assert apart < 0.01, "cuattn does not learn as torch does"
assert steps < 20 or ours[-1] < ours[0] - 1, "nothing was learned"
