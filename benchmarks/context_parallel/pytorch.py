#!/usr/bin/env python3
"""PyTorch's context_parallel on the sequence of step.cpp: pytorch.py <allgather|alltoall> <out>, under serried run -n 2."""

import json
import os
import sys
import time
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BATCH, HEADS, LENGTH, SIZE = 1, 4, 4096, 64
WARM_UP, STEPS = 2, 8


def main():
    way, path = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    set_rotate_method(way)
    torch.manual_seed(1)
    tensors = [torch.randn(BATCH, HEADS, LENGTH, SIZE) for _ in range(4)]
    with torch.no_grad():
        whole = scaled_dot_product_attention(*tensors[:3], is_causal=True)
    tensors.append(whole)
    times = []
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 5, no_restore_buffers=set(tensors)):
        q, k, v, grad, expected = tensors
        for t in (q, k, v):
            t.requires_grad_()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(WARM_UP + STEPS):
                for t in (q, k, v):
                    t.grad = None
                dist.barrier()
                begin = time.perf_counter()
                out = scaled_dot_product_attention(q, k, v, is_causal=True)
                out.backward(grad)
                own = torch.tensor([time.perf_counter() - begin])
                dist.all_reduce(own, op=dist.ReduceOp.MAX)
                times.append(own.item() * 1e6)
    # On CPU PyTorch 2.13 gives other values than one process here: then its time is no comparison.
    difference = torch.tensor([(out.detach() - expected).abs().max().item()])
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    is_right = difference.item() < 1e-4
    times = sorted(times[WARM_UP:])
    step_us = times[len(times) // 4]
    if dist.get_rank() == 0 and not is_right:
        what = f"PyTorch's {way} takes {step_us / 1e3:.0f} ms and differs from one process by {difference.item():.2g}"
        print(f"{what}: not compared")
    if dist.get_rank() == 0 and is_right:
        with open(path, "a") as lines:
            lines.write(json.dumps({"case": way, "step_us": step_us}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
