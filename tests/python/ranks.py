"""Starts small programs of Python as ranks, and says how each of them ended."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

BEFORE = """
import os, sys, time, signal, threading, gc, warnings
import torch, torch.distributed as dist
import serried
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def begin(backend="serried", seconds=60):
    from datetime import timedelta
    dist.init_process_group(backend, init_method="file://" + os.environ["MEETING"], rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
"""


def environment(**more):
    return os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in more.items()}


class Ranks:
    """`body` on `size` ranks."""

    def __init__(self, size, body, **more):
        self.folder = tempfile.TemporaryDirectory()
        program = pathlib.Path(self.folder.name) / "program.py"
        program.write_text(BEFORE + textwrap.dedent(body))
        self.ranks = [
            subprocess.Popen(
                [sys.executable, program],
                env=environment(RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, MEETING=f"{self.folder.name}/meeting", **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
            for rank in range(size)
        ]

    def wait_for_line(self, rank, line):
        for said in self.ranks[rank].stdout:
            if said.strip() == line:
                return
        raise AssertionError(f"rank {rank} never said {line}: {self.ranks[rank].stderr.read()}")

    def ends(self, seconds=60):
        """(exit code, output, errors) of each rank, all within `seconds`."""
        deadline = time.time() + seconds
        try:
            return [(rank.wait(deadline - time.time()), *rank.communicate()) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                if rank.poll() is None:
                    rank.kill()
            self.folder.cleanup()


def outputs(size, body, seconds=60, **more):
    """What each rank prints; AssertionError where one does not end well."""
    results = Ranks(size, body, **more).ends(seconds)
    for rank, (code, _, errors) in enumerate(results):
        assert code == 0, f"rank {rank} ended with {code}: {errors}"
    return [output.strip() for _, output, _ in results]
