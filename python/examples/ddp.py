"""Data parallel: torchrun --nproc-per-node 2 ddp.py, or serried run -n 2 python ddp.py."""

import serried  # noqa: F401
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main():
    dist.init_process_group("serried")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    mine = torch.Generator().manual_seed(rank)
    teacher = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)) / 8
    for step in range(60):
        x = torch.randn(32, 64, generator=mine)
        loss = torch.nn.functional.mse_loss(net(x), x @ teacher)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
