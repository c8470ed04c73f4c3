"""Fully sharded: torchrun --nproc-per-node 2 fsdp.py, or serried run -n 2 python fsdp.py."""

import os

import serried  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    # Before the mesh, which would take gloo for the CPU.
    dist.init_process_group("serried")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.ReLU()) for _ in range(4)], torch.nn.Linear(128, 8))
    for block in net[:-1]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    mine = torch.Generator().manual_seed(dist.get_rank())
    for step in range(60):
        x = torch.randn(32, 128, generator=mine)
        loss = torch.nn.functional.mse_loss(net(x), x[:, :8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
