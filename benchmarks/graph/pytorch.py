#!/usr/bin/env python3
"""PyTorch's training steps, eager and compiled, on the cases of trainings.h and ../sharded/step.cpp: pytorch.py <case> <out>, under serried run -n <ranks>."""

import json
import os
import pathlib
import sys
import time
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a first compilation, every time
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "ddp"))
from pytorch import Deep, Gpt, seconds_of, slowest

ROUNDS = 8
BLOCK_SECONDS = 0.1


class Layers(nn.Module):
    loss = staticmethod(functional.mse_loss)

    def __init__(self, count, width):
        super().__init__()
        self.width = width
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        for linear in self.linears:
            x = linear(x).relu()
        return x

    def batch(self):
        return torch.randn(8, self.width), torch.randn(8, self.width)


class FewerHeads(Gpt):
    """After tensor parallel projections a rank has its part of the heads, in plain tensors."""

    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in self.blocks:
            block.heads //= mesh.size()
            plan = {f"projections.{i}": ColwiseParallel() for i in range(3)}
            parallelize_module(block, mesh, plan | {"out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})


def by_turns(module, layers):
    """Tensor parallel: cut by columns, then by rows."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"{layers}.{i}": RowwiseParallel() if i % 2 else ColwiseParallel() for i in range(len(getattr(module, layers)))}
    return parallelize_module(module, mesh, plan)


def sharded(module, layers):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in getattr(module, layers):
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


CASES = {
    "mlp20": lambda: Layers(20, 64),
    "mlp3": lambda: Layers(3, 16),
    "mlp20_tp": lambda: by_turns(Layers(20, 64), "linears"),
    "gpt_ddp": Gpt,
    "gpt_tp": FewerHeads,
    "gpt_fsdp": lambda: sharded(Gpt(), "blocks"),
    "deep_tp": lambda: by_turns(Deep(), "layers"),
    "deep_fsdp": lambda: sharded(Deep(), "layers"),
}


def make_step(name, is_compiled):
    module = CASES[name]()
    net = DistributedDataParallel(module, gradient_as_bucket_view=True) if name.endswith("_ddp") else module
    if is_compiled:
        net = torch.compile(net)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3) if isinstance(module, Layers) else torch.optim.AdamW(module.parameters(), lr=1e-3)
    inputs, target = module.batch()

    def step():
        optimizer.zero_grad()
        module.loss(net(inputs), target).backward()
        optimizer.step()

    return step


def lower_quartile_us(times):
    return sorted(slowest(times))[len(times) // 4] * 1e6


def measure(name):
    compiled = make_step(name, True)
    compiled()
    first = slowest([(time.time_ns() - int(os.environ["SERRIED_BENCH_START"])) / 1e9])[0]
    eager = make_step(name, False)
    for step in (compiled, eager):
        for _ in range(5):
            step()
    steps = min(200, max(2, int(BLOCK_SECONDS / slowest([seconds_of(eager)])[0])))
    times = {compiled: [], eager: []}
    for _ in range(ROUNDS):
        for step, mine in times.items():
            step()  # the caches still hold the other model
            for _ in range(steps):
                dist.barrier()
                mine.append(seconds_of(step))
    return {"compiled_us": lower_quartile_us(times[compiled]), "eager_us": lower_quartile_us(times[eager]), "first_s": first}


def main(name, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank() if name.endswith(("_ddp", "_fsdp")) else 0)
    numbers = measure(name)
    if dist.get_rank() == 0:
        with open(path, "a") as out:
            out.write(json.dumps({"case": name} | numbers) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in CASES:
        sys.exit(__doc__)
    main(*sys.argv[1:])
