#!/usr/bin/env python3
"""PyTorch's distributed checkpoint on the model of save_load.cpp: pytorch.py <layers> <width> <folder> <out>, under serried run -n <ranks>."""

import json
import os
import pathlib
import shutil
import sys
import time
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "ddp"))
from pytorch import seconds_of, slowest

ROUNDS = 5


def sharded(layers, width):
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in module:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    return module, optimizer


def state(module, optimizer):
    model, optim = get_state_dict(module, optimizer)
    return {"model": model, "optim": optim}


def measure(layers, width, folder):
    module, optimizer = sharded(layers, width)
    saves, stalls, loads = [], [], []

    def clear():
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        dist.barrier()

    for _ in range(ROUNDS):
        clear()
        saves.append(seconds_of(lambda: dcp.save(state(module, optimizer), checkpoint_id=folder)))
        loads.append(seconds_of(lambda: dcp.load(state(module, optimizer), checkpoint_id=folder)))
        clear()
        pending = []
        stalls.append(seconds_of(lambda: pending.append(dcp.async_save(state(module, optimizer), checkpoint_id=folder))))
        pending[0].result()
    clear()
    return {name: min(slowest(times)) * 1e3 for name, times in {"save_ms": saves, "load_ms": loads, "stall_ms": stalls}.items()}


def main(layers, width, folder, path):
    torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo")
    numbers = measure(int(layers), int(width), folder)
    if dist.get_rank() == 0:
        with open(path, "a") as out:
            out.write(json.dumps({"case": f"{layers} x {width}"} | numbers) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
