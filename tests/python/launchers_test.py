#!/usr/bin/env python3
"""Jobs of Python under torchrun and under `serried run`: what a user types, Ctrl-C, a rank that is killed, an end without destroy_process_group."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

from ranks import environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["SERRIED_BUILD"])
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"],
    "serried run": [BUILD / "bin/serried", "run", "-n"],
}


def command(launcher, size, program):
    words = [*LAUNCHERS[launcher], str(size)]
    return [*words, program] if launcher == "torchrun" else [*words, sys.executable, program]


class Job:
    """`body` on `size` ranks under a launcher, in a process group of its own: what a terminal sends a signal to."""

    def __init__(self, launcher, size, body, **more):
        self.folder = tempfile.TemporaryDirectory()
        program = pathlib.Path(self.folder.name) / "program.py"
        program.write_text("import os, signal, sys, time\nimport serried, torch, torch.distributed as dist\n" + textwrap.dedent(body))
        self.output = pathlib.Path(self.folder.name) / "output"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                command(launcher, size, program),
                env=environment(**more),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        self.said = None

    def text(self):
        return self.output.read_text() if self.said is None else self.said

    def wait_for(self, line, count, seconds=60):
        deadline = time.time() + seconds
        while self.text().count(line) < count:
            if time.time() > deadline or self.process.poll() is not None:
                self.end()
                raise AssertionError(f"not {count} times {line}: {self.text()}")
            time.sleep(0.02)

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, seconds=60):
        """The exit code; AssertionError where the job goes on. Nothing of it stays."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job goes on after {seconds} s: {self.text()}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.said = self.text()
            self.folder.cleanup()


class Launchers(unittest.TestCase):
    def test_examples_learn(self):
        for launcher in LAUNCHERS:
            for name in ("ddp", "fsdp", "tp"):
                with self.subTest(f"{launcher} {name}"):
                    words = command(launcher, 2, ROOT / f"python/examples/{name}.py")
                    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
                    self.assertEqual(len(losses), 3, done.stdout)
                    self.assertLess(losses[2], losses[0])

    def test_ranks_are_seen_from_outside(self):
        body = """
        dist.init_process_group('serried')
        dist.all_reduce(torch.ones(7))
        if dist.get_rank() == 0: print(serried.watch.report())
        dist.barrier()
        """
        job = Job("serried run", 2, body)
        self.assertEqual(job.end(), 0, job.text())
        self.assertIn("all_reduce f32[7] sum", job.text())

    def test_a_mesh_of_two_dims_runs_on_serried(self):
        body = """
        from torch.distributed.device_mesh import init_device_mesh
        dist.init_process_group("serried")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.ones(3) * (dist.get_rank() + 1)
        dist.all_reduce(x, group=mesh.get_group("tp"))
        names = [dist.get_backend(mesh.get_group(name)) for name in ("dp", "tp")]
        sys.stdout.write(f"{dist.get_rank()} {x[0].item()} {names}\\n")
        sys.stdout.flush()
        dist.destroy_process_group()
        """
        for launcher in LAUNCHERS:
            with self.subTest(launcher):
                job = Job(launcher, 4, body)
                self.assertEqual(job.end(), 0, job.text())
                for rank, total in enumerate((3, 3, 7, 7)):
                    self.assertIn(f"{rank} {total}.0 ['serried', 'serried']\n", job.text())

    def test_a_program_may_end_without_destroying_its_groups(self):
        body = """
        dist.init_process_group("serried")
        groups = [dist.new_group(backend=name) for name in ("serried", "hierarchical")]
        dist.all_reduce(torch.ones(4), group=groups[1])
        work = dist.all_reduce(torch.ones(4), group=groups[0], async_op=True)
        never = dist.irecv(torch.ones(4), 1 - dist.get_rank())
        print("ends", flush=True)
        """
        for launcher in LAUNCHERS:
            with self.subTest(launcher):
                job = Job(launcher, 2, body)
                self.assertEqual(job.end(30), 0, job.text())
                self.assertEqual(job.text().count("ends"), 2, job.text())

    def test_ctrl_c_ends_a_job(self):
        body = """
        dist.init_process_group("serried")
        dist.barrier()
        print("waits", flush=True)
        if dist.get_rank() == 0:
            dist.barrier()
        time.sleep(600)
        """
        for launcher in LAUNCHERS:
            with self.subTest(launcher):
                job = Job(launcher, 2, body)
                job.wait_for("waits", 2)
                job.interrupt()
                self.assertNotEqual(job.end(25), 0)
                self.assertIn("KeyboardInterrupt", job.text())

    def test_a_killed_rank_ends_a_job(self):
        body = """
        dist.init_process_group("serried")
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            dist.all_reduce(torch.ones(4))
        except dist.DistBackendError as error:
            print("told:", str(error).splitlines()[0], flush=True)
            raise
        """
        for launcher in LAUNCHERS:
            with self.subTest(launcher):
                job = Job(launcher, 2, body)
                self.assertNotEqual(job.end(40), 0)
                # The launcher may be as fast as the message.
                told = [line for line in job.text().splitlines() if "told:" in line]
                self.assertTrue(all("rank 1" in line for line in told), told)
                self.assertRegex(job.text(), "(?i)sigkill|signal 9|exitcode *: *-9")


if __name__ == "__main__":
    unittest.main(verbosity=2)
