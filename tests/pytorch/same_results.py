#!/usr/bin/env python3
"""Runs cases on a gloo group and on a serried group of the same ranks: results are equal, and what one refuses the other refuses.

    same_results.py RANKS [MODULES [REGEX]]

collective_cases has every collective of torch.distributed, gloo_cases the tests of PyTorch's test_c10d_gloo, dtensor_cases and fsdp_cases what the
wheel's helpers for PyTorch's own tests of DTensor and FSDP2 can drive. Starts its ranks itself.
"""

import faulthandler
import importlib
import itertools
import os
import re
import sys
import tempfile
import time
import traceback
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402
from cases import CASES, RANKS, Refused  # noqa: E402
from collective_cases import all_reduce_of_strides, refusals  # noqa: E402
from gloo_cases import wrong_refusals  # noqa: E402

# Seconds of a case.
LIMIT = 60
MODULES = ["collective_cases", "gloo_cases", "dtensor_cases", "fsdp_cases"]


def close(ours, theirs):
    if isinstance(theirs, Refused):
        return True
    if isinstance(theirs, (list, tuple)):
        return isinstance(ours, (list, tuple)) and len(ours) == len(theirs) and all(close(a, b) for a, b in zip(ours, theirs))
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and ours.dtype == theirs.dtype and ours.shape == theirs.shape and values_are_close(ours, theirs)
    return ours == theirs


def values_are_close(ours, theirs):
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return torch.equal(ours, theirs)
    # Sums may be added in another order.
    rtol = 1e-2 if theirs.dtype in (torch.bfloat16, torch.float16) else 1e-5
    return torch.allclose(ours, theirs, rtol=rtol, atol=1e-6, equal_nan=True)


def refuses(group, name):
    try:
        refusals()[name](group)
    except (RuntimeError, ValueError, TypeError):
        return True
    return False


def outcome(function, group, choices):
    try:
        return function(group, **choices)
    except Exception as error:  # noqa: BLE001
        return error


def name_of(function, choices):
    return f"{function.__name__}({', '.join(f'{key}={value}' for key, value in choices.items())})"


class Judge:
    """Goes through the cases, on both groups one after the other."""

    def __init__(self, gloo, ours):
        self.gloo, self.ours = gloo, ours
        self.counts = {}
        # Dtypes and shapes that neither takes.
        self.num_neither = 0
        self.calls = self.num_refused = 0

    def differences(self, chosen):
        for function, choices in chosen:
            self.counts[function.__module__] = self.counts.get(function.__module__, 0) + 1
            name, begin = name_of(function, choices), time.perf_counter()
            # A case that hangs says where.
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            theirs, mine = outcome(function, self.gloo, choices), outcome(function, self.ours, choices)
            faulthandler.cancel_dump_traceback_later()
            took = time.perf_counter() - begin
            if took > 5 and dist.get_rank() == 0:
                print(f"{name} takes {took:.0f} s", flush=True)
            if isinstance(theirs, Exception) and function.__module__ != "collective_cases":
                yield f"{name}: judges nothing, since gloo raises {type(theirs).__name__}: {theirs}"
            yield from self.difference(name, theirs, mine)

    def difference(self, name, theirs, mine):
        # More than gloo can do is no difference; less is one.
        if isinstance(theirs, Exception):
            self.num_neither += isinstance(mine, Exception)
            return
        if isinstance(mine, Exception):
            yield f"{name}: raises {type(mine).__name__}: {mine}"
        elif not close(mine, theirs):
            yield f"{name}: gives {mine}, and gloo {theirs}"
        if isinstance(theirs, list):
            num_refused = sum(isinstance(each, Refused) for each in theirs)
            self.calls += len(theirs) - num_refused
            self.num_refused += num_refused

    def differing_refusals(self):
        for name in refusals():
            if refuses(self.gloo, name) and not refuses(self.ours, name):
                yield f"{name}: gloo refuses it"
        yield from wrong_refusals(self.ours)
        after = outcome(all_reduce_of_strides, self.ours, {"wait": True})
        if isinstance(after, Exception) or not close(after, all_reduce_of_strides(self.gloo, True)):
            yield f"after all refusals the group does not go on: {after}"


def chosen_cases(modules, pattern):
    return [(function, choices) for function, choices in CASES if function.__module__ in modules and re.search(pattern, name_of(function, choices))]


def run_rank(rank, meeting, chosen):
    import serried  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    judge = Judge(dist.new_group(backend="gloo"), dist.new_group(backend="serried"))
    num_found = 0
    for each in itertools.chain(judge.differences(chosen), judge.differing_refusals()):
        num_found += 1
        print(f"rank {rank}: {each[:2000]}", flush=True)
    dist.barrier()
    if rank == 0:
        counts = ", ".join(f"{count} of {module}" for module, count in judge.counts.items())
        print(f"{RANKS} ranks: {counts}, and {len(refusals())} refusals; {num_found} differ", flush=True)
        print(f"neither backend does {judge.num_neither}; {judge.calls} single results were compared, {judge.num_refused} calls PyTorch itself refuses", flush=True)
    dist.destroy_process_group()
    if num_found > 0:
        sys.exit(1)


def main():
    modules = sys.argv[2].split(",") if len(sys.argv) > 2 else MODULES
    for module in modules:
        importlib.import_module(module)
    chosen = chosen_cases(modules, sys.argv[3] if len(sys.argv) > 3 else "")
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=run_rank, args=(rank, f"{folder}/meeting", chosen)) for rank in range(RANKS)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    sys.exit(max(abs(each.exitcode) for each in ranks))


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        sys.exit(2)
