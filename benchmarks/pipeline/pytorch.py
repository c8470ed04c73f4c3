#!/usr/bin/env python3
"""PyTorch's pipeline schedules on the model of step.cpp: pytorch.py <schedule> <out>, under serried run -n 2."""

import json
import os
import pathlib
import sys
import warnings

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "ddp"))
from pytorch import Block, seconds_of, slowest

MICROBATCHES, BLOCKS, WIDTH, HEADS, BATCH, TOKENS = 8, 8, 128, 4, 16, 64
WARM_UP, STEPS = 3, 20

# The name of step.cpp, PyTorch's class, stages per rank, whether they lie as a V.
SCHEDULES = {
    "GPipe": (pipelining.ScheduleGPipe, 1, False),
    "1F1B": (pipelining.Schedule1F1B, 1, False),
    "Interleaved": (pipelining.ScheduleInterleaved1F1B, 2, False),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2, False),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2, False),
    "ZBV": (pipelining.ScheduleZBVZeroBubble, 2, True),
    "DualPipeV": (pipelining.schedules.ScheduleDualPipeV, 2, True),
}


def stages_of(rank, ranks, per_rank, is_v):
    if is_v:
        return [rank, 2 * ranks - 1 - rank]
    return list(range(rank, ranks * per_rank, ranks))


def make_schedule(name):
    kind, per_rank, is_v = SCHEDULES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks = BLOCKS // (ranks * per_rank)
    stages = []
    for index in stages_of(rank, ranks, per_rank, is_v):
        module = nn.Sequential(*(Block(WIDTH, HEADS, False, True, functional.gelu) for _ in range(blocks)))
        stages.append(pipelining.PipelineStage(module, index, ranks * per_rank, torch.device("cpu")))
    return kind(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=functional.mse_loss), stages


def make_step(name):
    schedule, stages = make_schedule(name)
    indices = [stage.stage_index for stage in stages]
    last = stages[0].num_stages - 1
    batch, target = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)

    def step():
        for stage in stages:
            stage.submod.zero_grad()
        inputs = (batch,) if 0 in indices else ()
        schedule.step(*inputs, **({"target": target, "losses": []} if last in indices else {}))

    return step


def main(name, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    step = make_step(name)
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(STEPS):
        dist.barrier()
        times.append(seconds_of(step))
    times = sorted(slowest(times))
    if dist.get_rank() == 0:
        with open(path, "a") as out:
            out.write(json.dumps({"case": name, "step_us": times[len(times) // 4] * 1e6}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SCHEDULES:
        sys.exit(__doc__)
    main(*sys.argv[1:])
