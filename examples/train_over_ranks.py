# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer whose sequence lies on two ranks: the losses are those of one process.

python examples/train_over_ranks.py [steps]
"""

import sys
import tempfile

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError:
    print("skipped: this example needs PyTorch (pip install torch)")
    sys.exit()

import cuattn.parallel as parallel

WIDTH, HEADS, LENGTH, LETTERS, RANKS = 32, 4, 512, 26, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS))

    def forward(self, tokens, positions, layout, group):
        x = self.embed(tokens) + self.places(positions)
        q, k, v = self.qkv(x).view(*x.shape[:2], HEADS, -1).chunk(3, -1)
        out = parallel.attention(q, k, v, group=group, layout=layout, causal=True)
        return self.head(x + self.out(out.flatten(2)))


def train(group, steps):
    """Train on the rows of this rank; gradients of the weights are summed over the ranks."""
    torch.manual_seed(0)
    model, rank, size = Model(), dist.get_rank(group), dist.get_world_size(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    layout = parallel.Layout("zigzag", LENGTH, size)
    positions, losses = torch.from_numpy(layout.positions(rank)), []
    for _ in range(steps):
        text = (torch.arange(LENGTH + 1) * 3 + torch.randint(LETTERS, (4, 1))) % LETTERS
        tokens, wanted = (layout.shard(x, rank) for x in (text[:, :-1], text[:, 1:]))
        logits = model(tokens, positions, layout, group).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, wanted.flatten(), reduction="sum")
        loss = loss / text[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        for weight in model.parameters():
            dist.all_reduce(weight.grad, group=group)
        optimizer.step()
        dist.all_reduce(total := loss.detach(), group=group)
        losses.append(float(total))
    return losses


def work(rank, steps, store):
    from torch import _dynamo  # noqa: F401  loaded after a group, it would hold it past its end

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    alone = dist.new_group([0])
    ours = train(None, steps)
    if rank == 0:
        ones = train(alone, steps)
        apart = max(abs(a - b) for a, b in zip(ours, ones, strict=True))
        print(f"losses of {RANKS} ranks: {', '.join(f'{x:.4f}' for x in ours[:: steps // 4])}")
        print(f"those of one process lie {apart:.1e} apart at most")
        assert apart < 1e-3
        assert ours[-1] < ours[0], "nothing was learned"
    dist.barrier()  # nobody leaves while another still works
    dist.destroy_process_group()


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    path = tempfile.mkdtemp() + "/store"
    torch.multiprocessing.spawn(work, (count, path), nprocs=RANKS)
