"""What the cases of same_results.py are made of: a list that they enter, and tensors whose sums are exact."""

import itertools
import sys

import torch
import torch.distributed as dist

RANKS = int(sys.argv[1]) if len(sys.argv) > 1 else 3
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
CASES = []


def case(where=True, **choices):
    """A case for each combination of the choices, with the numbers of ranks of which `where` is true."""

    def add(function):
        for values in itertools.product(*choices.values()) if where else ():
            CASES.append((function, dict(zip(choices, values))))
        return function

    return add


class Refused(str):
    """What PyTorch itself refuses, whatever the backend; the type of its error."""


def sample(shape, dtype=torch.float32, salt=0):
    """Small whole numbers, so that sums are exact in every dtype and every order."""
    seeded = torch.Generator().manual_seed(dist.get_rank() * 100 + salt)
    return torch.randint(0 if dtype in (torch.uint8, torch.bool) else -3, 4, shape, generator=seeded).to(dtype)


def strided(shape, dtype=torch.float32):
    return sample((shape[0], shape[1] * 2), dtype)[:, ::2]


def done(work):
    if work is not None:
        work.wait()
