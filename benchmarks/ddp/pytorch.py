#!/usr/bin/env python3
"""PyTorch's DistributedDataParallel on the models of models.h, one rank: pytorch.py step|first <model> <out>, under serried run -n 2."""

import json
import os
import statistics
import sys
import time

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

ROUNDS = 8
BLOCK_SECONDS = 0.12


def cross_entropy(output, target):
    return functional.cross_entropy(output.view(-1, output.shape[-1]), target.view(-1))


class Mlp(nn.Module):
    optimizer, loss = "sgd", staticmethod(cross_entropy)

    def __init__(self):
        super().__init__()
        widths = [1024, 2048, 2048, 2048, 16]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)

    def batch(self):
        return torch.randn(4, 1024), torch.randint(16, (4,))


class Block(nn.Module):
    def __init__(self, width, heads, fused, causal, activation):
        super().__init__()
        self.heads, self.fused, self.causal, self.activation = heads, fused, causal, activation
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections = nn.ModuleList([nn.Linear(width, 3 * width)] if fused else [nn.Linear(width, width) for _ in range(3)])
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = x + self.attention(self.norm1(x))
        return y + self.down(self.activation(self.up(self.norm2(y))))

    def attention(self, x):
        parts = self.projections[0](x).chunk(3, -1) if self.fused else [projection(x) for projection in self.projections]
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    optimizer, loss = "sgd", staticmethod(cross_entropy)

    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(512, 384), nn.Linear(384, 512)
        self.blocks = nn.Sequential(*(Block(384, 6, True, False, functional.relu) for _ in range(6)))

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids)))

    def batch(self):
        return torch.randint(512, (4, 64)), torch.randint(512, (4, 64))


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.norm2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Identity() if inner == outer and stride == 1 else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


class ResNet(nn.Module):
    optimizer, loss = "sgd", staticmethod(cross_entropy)

    def __init__(self):
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.Linear(512, 10)
        widths = [64, 64, 128, 256, 512]
        pairs = zip(widths, widths[1:])
        self.blocks = nn.Sequential(*(block for a, b in pairs for block in (Residual(a, b, 1 if a == b else 2), Residual(b, b, 1))))

    def forward(self, images):
        x = self.blocks(self.norm(self.stem(images)).relu())
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    def batch(self):
        return torch.randn(8, 3, 32, 32), torch.randint(10, (8,))


class Deep(nn.Module):
    optimizer, loss = "adamw", staticmethod(functional.mse_loss)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(20))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x

    def batch(self):
        return torch.randn(8, 64), torch.randn(8, 64)


class Gpt(nn.Module):
    optimizer, loss = "adamw", staticmethod(cross_entropy)

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, 256), nn.Embedding(128, 256)
        self.blocks = nn.Sequential(*(Block(256, 8, False, True, functional.gelu) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 512, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))

    def batch(self):
        return torch.randint(512, (4, 128)), torch.randint(512, (4, 128))


MODELS = {"mlp": Mlp, "transformer": Transformer, "resnet": ResNet, "deep": Deep, "gpt": Gpt}


def make_step(module, net):
    sgd = module.optimizer == "sgd"
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4) if sgd else torch.optim.AdamW(module.parameters(), lr=1e-3)
    inputs, target = module.batch()

    def step():
        optimizer.zero_grad(set_to_none=not sgd)
        module.loss(net(inputs), target).backward()
        optimizer.step()

    return step


def slowest(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def seconds_of(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure_steps(model):
    plain, parallel = model(), model()
    # Without the second copy of the gradients: the faster of PyTorch's two ways.
    contenders = {
        "PyTorch, compute only": make_step(plain, plain),
        "PyTorch": make_step(parallel, DistributedDataParallel(parallel, gradient_as_bucket_view=True)),
    }
    for step in contenders.values():
        for _ in range(3):
            step()
    dist.barrier()
    steps = min(200, max(2, int(BLOCK_SECONDS / slowest([seconds_of(contenders["PyTorch, compute only"])])[0])))
    times = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, step in contenders.items():
            step()  # the caches still hold another model
            for _ in range(steps):
                dist.barrier()
                times[name].append(seconds_of(step) * 1e6)
    return [(name, {"step": statistics.median(slowest(mine))}) for name, mine in times.items()]


def memory(field):
    with open("/proc/self/status") as status:
        return next(float(line.split()[1]) for line in status if line.startswith(field + ":"))


def measure_first_step(model):
    before = memory("VmRSS")
    module = model()
    step = make_step(module, DistributedDataParallel(module))
    step()
    first = (time.time_ns() - int(os.environ["SERRIED_BENCH_START"])) / 1e3
    for _ in range(5):
        step()
    peak = memory("VmHWM")
    return [("PyTorch", dict(zip(("first step", "peak memory", "memory for training"), slowest([first, peak, peak - before]))))]


def main(mode, name, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    results = (measure_steps if mode == "step" else measure_first_step)(MODELS[name])
    if dist.get_rank() == 0:
        with open(path, "a") as out:
            for contender, numbers in results:
                out.write(json.dumps({"model": name, "contender": contender} | numbers) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("step", "first") or sys.argv[2] not in MODELS:
        sys.exit(__doc__)
    main(*sys.argv[1:])
