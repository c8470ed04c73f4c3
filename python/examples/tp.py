"""Tensor parallel: torchrun --nproc-per-node 2 tp.py, or serried run -n 2 python tp.py."""

import os

import serried  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    # Before the mesh, which would take gloo for the CPU.
    dist.init_process_group("serried")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = torch.Generator().manual_seed(1)  # the same on all ranks
    for step in range(60):
        x = torch.randn(32, 64, generator=batches)
        loss = torch.nn.functional.mse_loss(net(x), x.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
