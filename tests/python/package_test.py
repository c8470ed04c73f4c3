#!/usr/bin/env python3
"""The package as a program meets it: its import, its groups, its ends, its launchers."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from ranks import Ranks, environment, outputs

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["SERRIED_BUILD"])


def python(program, **environment_more):
    return subprocess.run([sys.executable, "-c", program], env=environment(**environment_more), capture_output=True, text=True, timeout=60)


class Import(unittest.TestCase):
    def test_another_torch_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "torch.py").write_text('__version__ = "2.12.1+cpu"\n')
            done = python("import serried", PYTHONPATH=f"{folder}:{os.environ['PYTHONPATH']}")
        self.assertNotEqual(done.returncode, 0)
        self.assertRegex(done.stderr, r"ImportError: serried 0\.\d+\.\d+ was built with torch 2\.13\.\d+, and this is torch 2\.12\.1\+cpu in /")
        self.assertIn("fix: pip install torch==2.13.*, or build serried with the other one (make wheel)", done.stderr)

    def test_no_torch_is_named(self):
        done = python("import sys; sys.modules['torch'] = None; import serried")
        self.assertRegex(done.stderr, r"ImportError: serried .* needs torch 2\.13: ")

    def test_a_second_libtorch_is_refused(self):
        maps = "7f00-7f01 r-xp 0 fe:00 1   /a/torch/lib/libtorch_cpu.so\n7f02-7f03 rw-p 0 0:0 0\n7f04-7f05 r-xp 0 fe:00 2   /b/libtorch_cpu.so\n"
        done = python(f"import serried; serried._check.one_libtorch({maps!r})")
        self.assertIn("ImportError: two LibTorch in one process: /a/torch/lib/libtorch_cpu.so, /b/libtorch_cpu.so", done.stderr)

    def test_one_libtorch_is_loaded_and_gloo_stays_the_default(self):
        done = python(
            "import serried, torch.distributed as dist\n"
            "print(len(serried._check.libtorch_files(open('/proc/self/maps').read())))\n"
            "print(dist.Backend.default_device_backend_map['cpu'], sorted(serried._BACKENDS))"
        )
        self.assertEqual(done.stdout, "1\ngloo ['hierarchical', 'serried', 'threads']\n", done.stderr)

    def test_the_command_can_be_asked(self):
        done = python(
            "import serried\n"
            "print(serried.doctor()['healthy'])\n"
            "print('result: S0 S1' in serried.explain('aten::mm', 'S0 R', 'R S1', mesh='dp=2,tp=2'))\n"
            "serried.explain('aten::mm', 'S0 R', mesh='dp=two')"
        )
        self.assertEqual(done.stdout, "True\nTrue\n", done.stderr)
        self.assertIn('RuntimeError: [explain] "two" is not a number of ranks', done.stderr)


class Groups(unittest.TestCase):
    def test_subgroups_and_options_of_the_backend(self):
        texts = outputs(
            3,
            """
            begin()
            pair = dist.new_group([0, 2], backend="serried", pg_options={"heap_mb": 1})
            x = torch.ones(3) * (rank + 1)
            if rank != 1:
                dist.all_reduce(x, group=pair)
            y = torch.zeros(3)
            dist.all_gather_into_tensor(y, torch.tensor([float(rank)]))
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            print(x.tolist(), y.tolist(), backend.options is backend.options, dist.get_backend())
            try:
                dist.new_group([0, 1, 2], backend="serried", pg_options={"heap": 1})
            except ValueError as error:
                print("refused:", str(error).splitlines()[0])
            dist.destroy_process_group()
            """,
        )
        for rank, x in enumerate(("[4.0, 4.0, 4.0]", "[2.0, 2.0, 2.0]", "[4.0, 4.0, 4.0]")):
            self.assertTrue(texts[rank].startswith(x), texts[rank])
        self.assertIn("[0.0, 1.0, 2.0] True serried", texts[0])
        self.assertIn('refused: [new_group] unknown backend option "heap"; known: heap_mb, always_stage', texts[0])

    def test_a_group_made_again_has_the_same_name(self):
        texts = outputs(
            2,
            """
            import torch.distributed._functional_collectives as funcol
            kept = []
            for turn in range(3):
                os.environ["MEETING"] += str(turn)
                begin()
                kept.append(dist.group.WORLD)
                x = funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD))
                dist.destroy_process_group()
                del kept[:-1]  # the one before last goes only now, while there is a newer one of its name
                gc.collect()
            print(x.tolist())
            """,
        )
        self.assertEqual(texts, ["[2.0, 2.0]"] * 2)

    def test_a_thousand_groups_leave_nothing(self):
        texts = outputs(
            2,
            """
            begin()
            def state():
                gc.collect()
                return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), sum(1 for _ in open("/proc/self/maps")), serried._C.num_alive()
            def memory():
                return int(open("/proc/self/statm").read().split()[1]) * 4096
            def groups(count):
                for _ in range(count):
                    group = dist.new_group([0, 1], backend="serried")
                    work = dist.all_reduce(torch.ones(10), group=group, async_op=True)
                    work.wait()
                    dist.destroy_process_group(group)
                    del group, work
            groups(20)
            before, bytes_before = state(), memory()
            groups(1000)
            after, grown = state(), memory() - bytes_before
            assert all(b <= a + 4 for a, b in zip(before, after)), (before, after)
            assert grown < 64 << 20, grown
            print("fine")
            dist.destroy_process_group()
            """,
            seconds=150,
        )
        self.assertEqual(texts, ["fine"] * 2)

    def test_other_threads_run_while_one_waits(self):
        texts = outputs(
            2,
            """
            begin()
            counted = 0
            def count():
                global counted
                while not done:
                    counted += 1
                    time.sleep(0.001)
            done = False
            thread = threading.Thread(target=count)
            thread.start()
            if rank == 1:
                time.sleep(0.5)
            dist.barrier()
            done = True
            thread.join()
            assert counted > 50, counted
            dist.destroy_process_group()
            print("fine")
            """,
        )
        self.assertEqual(texts, ["fine"] * 2)

    # A binding that held the GIL while it joined the group's thread, which ran such a callback, hung.
    def test_a_group_goes_while_callbacks_of_python_run(self):
        texts = outputs(
            2,
            """
            begin()
            called = []
            for turn in range(30):
                group = dist.new_group([0, 1], backend="serried")
                works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for _ in range(4)]
                futures = [work.get_future().then(lambda future: (time.sleep(0.001), called.append(1))) for work in works]
                dist.destroy_process_group(group)
                del group, works
                for future in futures:
                    future.wait()
            print(len(called))
            dist.destroy_process_group()
            """,
        )
        self.assertEqual(texts, ["120"] * 2)

    def test_nan_is_found_before_it_is_sent(self):
        texts = outputs(
            1,
            """
            begin()
            serried.watch.set_nan_check("raise")
            for mode, fn in (("nan", lambda: dist.all_reduce(torch.tensor([float("nan")]))), ("mode", lambda: serried.watch.set_nan_check("loud"))):
                try:
                    fn()
                except Exception as error:
                    print(type(error).__name__, str(error).splitlines()[0])
            """,
        )
        self.assertIn("NaN", texts[0])
        self.assertIn('ValueError [set_nan_check] unknown mode "loud"', texts[0])


class Ends(unittest.TestCase):
    def test_an_interpreter_may_end_with_groups_and_calls_open(self):
        texts = outputs(
            2,
            """
            begin()
            group = dist.new_group([0, 1], backend="serried")
            dist.barrier()
            work = dist.all_reduce(torch.ones(100_000), group=group, async_op=True)
            work.get_future().then(lambda future: None)
            print("ends")
            """,
            seconds=30,
        )
        self.assertEqual(texts, ["ends"] * 2)

    def test_a_killed_rank_ends_the_others_with_its_name(self):
        ranks = Ranks(
            3,
            """
            begin()
            dist.barrier()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(4))
            """,
        )
        results = ranks.ends(30)
        self.assertEqual(results[1][0], -signal.SIGKILL)
        for rank in (0, 2):
            self.assertEqual(results[rank][0], 1)
            self.assertRegex(results[rank][2], r"DistBackendError: \[(all_reduce|barrier)\].*rank 1")

    def test_ctrl_c_ends_whatever_a_rank_waits_for(self):
        for wait in ("dist.barrier()", "dist.all_reduce(torch.ones(100_000), async_op=True).wait()", "dist.recv(torch.ones(3), 1)"):
            with self.subTest(wait):
                ranks = Ranks(
                    2,
                    f"""
                    begin()
                    dist.barrier()
                    if rank == 0:
                        print("waits", flush=True)
                        {wait}
                    else:
                        time.sleep(1.5)
                        dist.all_reduce(torch.ones(4))
                    """,
                )
                ranks.wait_for_line(0, "waits")
                time.sleep(0.3)
                ranks.ranks[0].send_signal(signal.SIGINT)
                results = ranks.ends(30)
                self.assertIn("KeyboardInterrupt", results[0][2])
                self.assertIn("rank 0 was interrupted", results[1][2])


class Launchers(unittest.TestCase):
    def expect_learning(self, words):
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
        self.assertEqual(len(losses), 3, done.stdout)
        self.assertLess(losses[2], losses[0])

    def test_examples_under_torchrun(self):
        for name in ("ddp", "fsdp", "tp"):
            with self.subTest(name):
                self.expect_learning([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", ROOT / f"python/examples/{name}.py"])

    def test_ranks_are_seen_from_outside(self):
        program = (
            "import serried, torch, torch.distributed as dist\n"
            "dist.init_process_group('serried')\n"
            "dist.all_reduce(torch.ones(7))\n"
            "if dist.get_rank() == 0: print(serried.watch.report())\n"
            "dist.barrier()\n"
        )
        done = subprocess.run(
            [BUILD / "bin/serried", "run", "-n", "2", sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=60
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("all_reduce f32[7] sum", done.stdout)

    def test_examples_under_serried_run(self):
        for name in ("ddp", "fsdp", "tp"):
            with self.subTest(name):
                self.expect_learning([BUILD / "bin/serried", "run", "-n", "2", sys.executable, ROOT / f"python/examples/{name}.py"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
