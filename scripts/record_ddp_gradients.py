#!/usr/bin/env python3
"""Records the gradients that PyTorch's DistributedDataParallel gives the models of tests/support/models.h: record_ddp_gradients.py > tests/data/ddp_gradients.inc"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def values(sizes, salt):
    places = torch.arange(torch.Size(sizes).numel(), dtype=torch.float64)
    return (places * 0.37 + salt).sin().float().view(sizes)


def indices(count, length, limit, rank):
    return (torch.arange(count * length) * 3 + rank).remainder(limit).view(count, length)


def fill_parameters(module):
    with torch.no_grad():
        for salt, parameter in enumerate(module.parameters()):
            parameter.copy_(values(parameter.shape, salt) * 0.5)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.dropout, self.out = nn.Linear(5, 7), nn.Dropout(0.0), nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.dropout(self.hidden(x).tanh()))

    def batch(self, count, rank):
        return (values((count, 5), rank),)


class ConvNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, stride=2)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).relu())

    def batch(self, count, rank):
        return (values((count, 2, 6, 5), rank),)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.lstm(x)[0].select(1, -1))

    def batch(self, count, rank):
        return (values((count, 5, 3), rank),)


class Lookup(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.table, self.out = nn.Embedding(11, 4, sparse=sparse), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.out(self.table(tokens).mean(1))

    def batch(self, count, rank):
        return (indices(count, 3, 11, rank),)


class SparseLookup(Lookup):
    def __init__(self):
        super().__init__(sparse=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.score = self.table.weight

    def forward(self, tokens):
        return nn.functional.linear(self.table(tokens).tanh(), self.score)

    def batch(self, count, rank):
        return (indices(count, 4, 7, rank),)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x, both):
        return self.always(x) + self.sometimes(x) if both else self.always(x)

    def batch(self, count, rank):
        return values((count, 4), rank), rank == 0


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.fixed, self.out = nn.Linear(4, 6), nn.Linear(6, 3)
        self.fixed.requires_grad_(False)

    def forward(self, x):
        return self.out(self.fixed(x).tanh())

    def batch(self, count, rank):
        return (values((count, 4), rank),)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 2)

    def forward(self, x):
        y = self.trunk(x).tanh()
        return self.left(y), self.right(y)

    def batch(self, count, rank):
        return (values((count, 4), rank),)


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x).tanh()
        return x

    def batch(self, count, rank):
        return (values((count, 5), rank),)


MODELS = [Mlp, ConvNorm, Recurrent, Lookup, SparseLookup, Tied, Branches, Frozen, TwoHeads, Reused]


def loss_of(output):
    if isinstance(output, tuple):
        left, right = output
        return left.square().mean() + 2 * right.abs().mean()
    return output.square().mean()


def numbers(gradient):
    if gradient is None:
        return ""
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    texts = [str(value) for value in dense.flatten().numpy()]  # the shortest that read back as the same float
    return ", ".join(text + "f" for text in texts)


def record_rank(rank, world_size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29618")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    for model in MODELS:
        module = model()
        fill_parameters(module)
        parallel = DistributedDataParallel(module, find_unused_parameters=model is Branches)
        loss_of(parallel(*module.batch(rank + 2, rank))).backward()
        for name, parameter in module.named_parameters():
            if rank == 0:
                print(f'{{"{model.__name__}", {world_size}, "{name}", {{{numbers(parameter.grad)}}}}},', flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    print("// What PyTorch's DistributedDataParallel gives on Gloo ranks, by scripts/record_ddp_gradients.py: model, ranks, parameter, gradient (empty: none).")
    for ranks in (2, 3):
        multiprocessing.spawn(record_rank, (ranks,), nprocs=ranks)
