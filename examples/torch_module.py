# SPDX-License-Identifier: Apache-2.0
"""A self-attention layer in PyTorch that calls cuattn, checked against torch's own attention."""

import sys

import cuattn

try:
    import torch
    from torch import nn
except ImportError:
    print("skipped: this example needs PyTorch (pip install torch)")
    sys.exit()


class SelfAttention(nn.Module):
    """Causal self-attention with grouped queries; train_gpt.py trains some."""

    def __init__(self, hidden: int, num_heads_q: int, num_heads_kv: int, head_dim: int):
        super().__init__()
        self.heads = (num_heads_q, num_heads_kv, num_heads_kv)
        self.head_dim = head_dim
        self.project_in = nn.Linear(hidden, sum(self.heads) * head_dim, bias=False)
        self.project_out = nn.Linear(num_heads_q * head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        batch, seqlen, _ = x.shape
        rows = self.project_in(x).view(batch, seqlen, -1, self.head_dim)
        q, k, v = rows.split(self.heads, dim=2)  # strided views: cuattn takes them as they are
        return self.project_out(attend(q, k, v).reshape(batch, seqlen, -1))


def ours(q, k, v):
    return cuattn.attention(q, k, v, causal=True)


def torchs(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() and cuattn.info()["cuda"] else "cpu"
    layer = SelfAttention(256, num_heads_q=8, num_heads_kv=2, head_dim=64).to(device)
    x = torch.randn(2, 200, 256, device=device)
    error = (layer(x, ours) - layer(x, torchs)).abs().max().item()
    assert error < 1e-4, error
    print(f"on {device}: max difference from torch's scaled_dot_product_attention {error:.1e}")


if __name__ == "__main__":
    main()
