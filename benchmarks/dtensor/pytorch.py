#!/usr/bin/env python3
"""PyTorch's DTensor on the programs of host_cost.cpp and redistribute.cpp, for the tables beside ours: pytorch.py host|redistribute."""

import os
import statistics
import sys
import time
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh


def median_us(run, calls, repetitions=9, before=lambda: None):
    for _ in range(calls // 10 + 3):
        run()
    times = []
    for _ in range(repetitions):
        before()
        start = time.perf_counter_ns()
        for _ in range(calls):
            run()
        times.append((time.perf_counter_ns() - start) / calls / 1e3)
    return statistics.median(times)


def mlp_step(parameters, x, optimizer):
    weight1, bias1, weight2, bias2 = parameters

    def step():
        optimizer.zero_grad()
        hidden = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight1, bias1))
        torch.nn.functional.linear(hidden, weight2, bias2).sum().backward()
        optimizer.step()

    return step


def host():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,))
    x, w, b = torch.randn(4, 4), torch.randn(4, 4), torch.randn(4)
    functional = torch.nn.functional
    ops = {
        "add": (lambda a, c: a + c, [(x, Shard(0)), (w, Shard(0))]),
        "mm": (torch.mm, [(x, Shard(0)), (w, Replicate())]),
        "view": (lambda a: a.view(-1, 2, 2), [(x, Shard(0))]),
        "layer_norm": (lambda a, c, d: functional.layer_norm(a, (4,), c, d), [(x, Shard(0)), (b, Replicate()), (b.clone(), Replicate())]),
        "softmax": (lambda a: torch.softmax(a, -1), [(x, Shard(0))]),
    }
    with torch.no_grad():
        for name, (op, inputs) in ops.items():
            plain = [tensor for tensor, _ in inputs]
            placed = [DTensor.from_local(tensor, mesh, [placement], run_check=False) for tensor, placement in inputs]
            start = time.perf_counter_ns()
            op(*placed)
            first = (time.perf_counter_ns() - start) / 1e3
            print(f"{name}: plain {median_us(lambda: op(*plain), 3000):.2f} us, DTensor {median_us(lambda: op(*placed), 1000):.2f} us, first call {first:.0f} us")
    shapes = [((32, 16), Shard(0)), ((32,), Shard(0)), ((16, 32), Shard(1)), ((16,), Replicate())]
    plain = [torch.nn.Parameter(torch.randn(shape)) for shape, _ in shapes]
    placed = [torch.nn.Parameter(distribute_tensor(torch.randn(shape), mesh, [placement])) for shape, placement in shapes]
    inputs = torch.randn(8, 16)
    times = []
    for parameters, x in ((plain, inputs), (placed, distribute_tensor(inputs, mesh, [Replicate()]))):
        times.append(median_us(mlp_step(parameters, x, torch.optim.AdamW(parameters, 1e-3)), 50))
    print(f"MLP step with AdamW: plain {times[0]:.0f} us, DTensor {times[1]:.0f} us")


def redistribute_rank(rank, world_size):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29617")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    with torch.no_grad():
        for text, n, calls in (("1 KiB", 16, 300), ("4 MiB", 1024, 20)):
            whole = torch.randn(n, n)
            rows = distribute_tensor(whole, mesh, [Shard(0)])
            pending = DTensor.from_local(whole.clone(), mesh, [Partial()], run_check=False)
            moves = {"S0 -> R": (rows, Replicate()), "S0 -> S1": (rows, Shard(1)), "P -> R": (pending, Replicate()), "P -> S0": (pending, Shard(0))}
            for name, (tensor, target) in moves.items():
                us = median_us(lambda: tensor.redistribute(mesh, [target]), calls, before=dist.barrier)
                if rank == 0:
                    print(f"{name}, {text}: {us:.1f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["host"]:
        host()
    elif sys.argv[1:] == ["redistribute"]:
        multiprocessing.spawn(redistribute_rank, (2,), nprocs=2)
    else:
        sys.exit(__doc__)
