#!/usr/bin/env python3
"""Training steps of PyTorch on serried and on gloo, in turns in the same processes: serried run -n 2 python3 train_steps.py

Models are those of PyTorch's own examples in small: a GPT of 4 layers and 3.4 M parameters, and an MLP of 20 layers of 64.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

import serried  # noqa: F401, E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402

BACKENDS = ("gloo", "serried")
# What a step on serried may take of one on gloo: FSDP2 and tensor parallel 1.2 times as fast, an MLP in DDP 1.8 times, and nothing slower.
GOALS = {"mlp ddp": 1 / 1.8, "gpt ddp": 1.0} | {f"{model} {mode}": 1 / 1.2 for model in ("mlp", "gpt") for mode in ("fsdp", "tp")}


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head_dim).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).contiguous().view(batch, length, -1))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, words=512, length=128, dim=256, layers=4, heads=8):
        super().__init__()
        self.token, self.position = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]).unsqueeze(0))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MLP(nn.Module):
    def __init__(self, dim=64, layers=20):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x


def spread(mode, net, group):
    """`net` over the ranks of `group`, and whether every rank has a batch of its own."""
    if mode == "ddp":
        return nn.parallel.DistributedDataParallel(net, process_group=group), True
    mesh = DeviceMesh.from_group(group, "cpu")
    if mode == "fsdp":
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(net, mesh=mesh), True
    if isinstance(net, MLP):
        return parallelize_module(net, mesh, {f"blocks.{i}": ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(20)}), False
    rows = {"attention.o": RowwiseParallel(), "down": RowwiseParallel()}
    columns = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "up")}
    for block in net.blocks:
        parallelize_module(block, mesh, columns | rows)
    return net, False


class Training:
    def __init__(self, model, mode, group):
        torch.manual_seed(0)
        self.is_gpt = model == "gpt"
        self.net, own_batch = spread(mode, GPT() if self.is_gpt else MLP(), group)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.batches = torch.Generator().manual_seed(1 + dist.get_rank() * own_batch)
        self.group = group

    def loss(self):
        if self.is_gpt:
            ids, targets = (torch.randint(0, 512, (4, 128), generator=self.batches) for _ in range(2))
            return F.cross_entropy(self.net(ids).view(-1, 512), targets.view(-1))
        x, y = (torch.randn(8, 64, generator=self.batches) for _ in range(2))
        return F.mse_loss(self.net(x), y)

    def step(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def milliseconds(self, steps):
        dist.barrier(self.group)
        times = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            times.append((time.perf_counter() - begin) * 1e3)
        return times


def append_rows(path, rows):
    """As benchmarks/support/results.h writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps(before + rows, indent=1) + "\n")


def row_of(case, gloo_ms, serried_ms, ratio):
    return {"bench": "python", "case": case, "ours": serried_ms, "reference": gloo_ms, "reference_name": "gloo", "ratio": 1 / ratio, "unit": "ms", "goal": GOALS[case]}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help="of a round, on each backend")
    parser.add_argument("--modes", nargs="+", default=["mlp ddp", "mlp fsdp", "mlp tp", "gpt ddp", "gpt fsdp", "gpt tp"])
    parser.add_argument("--results", type=pathlib.Path, help="the JSON file that rows are added to")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("serried")
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    if dist.get_rank() == 0:
        print(f"| {dist.get_world_size()} ranks, ms a step | gloo | serried | gloo / serried | goal | fastest tenth: gloo | serried | gloo / serried |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for text in given.modes:
        model, mode = text.split()
        trainings = {name: Training(model, mode, group) for name, group in groups.items()}
        for training in trainings.values():
            training.milliseconds(4)
        times, ratios = {name: [] for name in BACKENDS}, []
        for turn in range(given.rounds):
            measured = {name: trainings[name].milliseconds(given.steps) for name in (BACKENDS if turn % 2 == 0 else BACKENDS[::-1])}
            ratios.append(statistics.median(measured["gloo"]) / statistics.median(measured["serried"]))
            for name in BACKENDS:
                times[name] += measured[name]
        if dist.get_rank() == 0:
            middle = [statistics.median(times[name]) for name in BACKENDS]
            # Other programs only make steps longer.
            fast = [sorted(times[name])[len(times[name]) // 10] for name in BACKENDS]
            ratio = statistics.median(ratios)
            rows.append(row_of(text, *middle, ratio))
            row = [text, *(f"{ms:.2f}" for ms in middle), f"{ratio:.2f}", f"{1 / GOALS[text]:.1f}", *(f"{ms:.2f}" for ms in fast), f"{fast[0] / fast[1]:.2f}"]
            print(f"| {' | '.join(row)} |", flush=True)
    if rows and given.results:
        append_rows(given.results, rows)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
