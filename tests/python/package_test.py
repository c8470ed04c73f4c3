#!/usr/bin/env python3
"""The package as a program meets it: its import, its groups, its ends, its launchers."""

import ast
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from ranks import Ranks, environment, outputs


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

    # Any library of that name will do: what counts is that two files of it are mapped.
    def test_a_second_libtorch_that_is_preloaded_is_refused(self):
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
        some_library = next(line.split()[-1] for line in maps if ".so" in line and "/lib" in line and "ld-linux" not in line)
        with tempfile.TemporaryDirectory() as folder:
            other = pathlib.Path(folder) / "libtorch_cpu.so"
            shutil.copy(some_library, other)
            done = python("import serried", LD_PRELOAD=other)
            self.assertNotEqual(done.returncode, 0)
            self.assertRegex(done.stderr, rf"ImportError: two LibTorch in one process: .*{other}")
            self.assertIn("fix: unset LD_LIBRARY_PATH and LD_PRELOAD", done.stderr)

    def test_it_takes_less_than_50_ms_more_than_torch(self):
        program = "import time, torch\nbegin = time.perf_counter()\nimport serried\nprint(time.perf_counter() - begin)"
        # Other programs only make it longer.
        self.assertLess(min(float(python(program).stdout) for _ in range(5)), 0.05)

    def test_one_libtorch_is_loaded_and_gloo_stays_the_default(self):
        done = python(
            "import serried, torch.distributed as dist\n"
            "print(len(serried._check.libtorch_files(open('/proc/self/maps').read())))\n"
            "print(dist.Backend.default_device_backend_map['cpu'], sorted(serried._BACKENDS))"
        )
        self.assertEqual(done.stdout, "1\ngloo ['hierarchical', 'serried', 'threads']\n", done.stderr)

    def test_a_report_needs_a_job(self):
        done = python("import serried; print(serried.watch.report('no-such-job'))")
        self.assertIn("RuntimeError: ", done.stderr)
        self.assertIn("no-such-job", done.stderr)

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

    def test_every_name_and_the_names_of_devices(self):
        texts = outputs(
            2,
            """
            begin("cpu:serried")
            totals = []
            for name in ("serried", "hierarchical", "gloo", "cpu:serried"):
                group = dist.new_group(backend=name)
                x = torch.ones(2)
                dist.all_reduce(x, group=group)
                totals.append(x[0].item())
            print(totals)
            dist.destroy_process_group()
            """,
        )
        self.assertEqual(texts, ["[2.0, 2.0, 2.0, 2.0]"] * 2)

    def test_ranks_that_are_threads(self):
        texts = outputs(
            1,
            """
            begin("threads")
            x = torch.ones(2)
            dist.all_reduce(x)
            store, totals = dist.HashStore(), [None] * 3
            def run(rank):
                from datetime import timedelta
                group = dist.ProcessGroup(store, rank, 3)
                backend = serried._C.make_backend("threads", store, rank, 3, timedelta(seconds=20), {})
                group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
                y = torch.ones(2) * (rank + 1)
                group.allreduce(y).wait()
                totals[rank] = y[0].item()
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
            for each in threads: each.start()
            for each in threads: each.join()
            print(x[0].item(), totals)
            dist.destroy_process_group()
            """,
        )
        self.assertEqual(texts, ["1.0 [6.0, 6.0, 6.0]"])

    def test_a_mesh_may_name_it(self):
        texts = outputs(
            2,
            """
            from torch.distributed.device_mesh import init_device_mesh
            begin("gloo")
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), backend_override={"dp": "serried"})
            x = torch.ones(2)
            dist.all_reduce(x, group=mesh.get_group())
            print(x.tolist(), dist.get_backend(mesh.get_group()))
            dist.destroy_process_group()
            """,
        )
        self.assertEqual(texts, ["[2.0, 2.0] serried"] * 2)

    def test_pytorchs_own_comparison_of_calls_goes_around_it(self):
        texts = outputs(
            2,
            """
            begin()
            x = torch.ones(2)
            dist.all_reduce(x)
            try:
                dist.all_reduce(torch.ones(2 + rank))
            except RuntimeError as error:
                print(x.tolist(), "Detected mismatch between collectives on ranks" in str(error))
            """,
            TORCH_DISTRIBUTED_DEBUG="DETAIL",
        )
        self.assertEqual(texts, ["[2.0, 2.0] True"] * 2)

    def test_a_monitored_barrier_names_who_is_missing(self):
        texts = outputs(
            2,
            """
            from datetime import timedelta
            begin()
            dist.group.WORLD.monitored_barrier(timedelta(seconds=20))
            if rank == 0:
                try:
                    dist.group.WORLD.monitored_barrier(timedelta(milliseconds=100))
                except RuntimeError as error:
                    print(str(error).splitlines()[0])
                open(os.environ["MEETING"] + ".told", "w")
            else:
                while not os.path.exists(os.environ["MEETING"] + ".told"): time.sleep(0.01)
            """,
        )
        self.assertIn("Rank 1 failed to pass monitoredBarrier in 100 ms", texts[0])

    def test_timeouts_are_those_that_were_asked_for(self):
        texts = outputs(
            2,
            """
            from datetime import timedelta
            begin(seconds=7)
            backend = dist.group.WORLD._get_backend(torch.device("cpu"))
            print(backend.options._timeout.total_seconds())
            backend._set_default_timeout(timedelta(seconds=9))
            print(backend.options._timeout.total_seconds())
            if rank == 0:
                none = dist.AllreduceOptions()
                none.timeout = timedelta(0)
                start = time.time()
                try:
                    dist.group.WORLD.allreduce([torch.ones(3)], none).wait()
                except RuntimeError as error:
                    print("timed out" in str(error), "rank 1" in str(error), time.time() - start < 5)
                open(os.environ["MEETING"] + ".told", "w")
            else:
                while not os.path.exists(os.environ["MEETING"] + ".told"): time.sleep(0.01)
            """,
        )
        self.assertEqual(texts, ["7.0\n9.0\nTrue True True", "7.0\n9.0"])

    def test_wrong_arguments_raise_at_the_call_and_the_group_goes_on(self):
        texts = outputs(
            2,
            """
            begin()
            group = dist.group.WORLD
            root = dist.BroadcastOptions()
            root.rootRank, root.rootTensor = 0, 1
            calls = (
                lambda: group.broadcast([torch.ones(3)], root),
                lambda: group.allreduce([torch.ones(3), torch.ones(3)]),
                lambda: group._get_backend(torch.device("cpu")).allreduce_coalesced([]),
                lambda: dist.all_gather([torch.ones(4 if peer == rank else 3) for peer in range(2)], torch.ones(3), async_op=True),
            )
            for call in calls:
                try:
                    call()
                    print("nothing was raised")
                except ValueError as error:
                    print(str(error).splitlines()[0])
            x = torch.ones(1)
            dist.all_reduce(x)
            print(x.item())
            dist.destroy_process_group()
            """,
        )
        for text in texts:
            lines = text.splitlines()
            self.assertEqual(lines[0], "[broadcast] the root tensor is 1, and every rank has one")
            self.assertEqual(lines[1], "[all_reduce] got 2 tensors, and every rank passes one: there is one device, the CPU")
            self.assertEqual(lines[2], "[all_reduce_coalesced] got no tensors")
            self.assertEqual(lines[3], "[all_gather] this rank's own piece is f32[3], and its place f32[4]")
            self.assertEqual(lines[4], "2.0")

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
                counts = [len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")]
                return *counts, len(os.listdir("/dev/shm")), sum(1 for _ in open("/proc/self/maps")), serried._C.num_alive()
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
            assert grown < 16 << 20, grown
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


class Profiles(unittest.TestCase):
    def test_pytorchs_profiler_and_our_trace_agree(self):
        with tempfile.TemporaryDirectory() as folder:
            texts = outputs(
                2,
                """
                begin()
                dist.barrier()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
                    for size in (1, 1000, 2_000_000):
                        dist.all_reduce(torch.ones(size))
                        dist.all_reduce(torch.ones(size), async_op=True).wait()
                    dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
                events = sorted((event for event in profiler.events() if event.name.startswith("shm:")), key=lambda event: event.time_range.start)
                print([[event.name.removeprefix("shm:"), event.time_range.elapsed_us(), event.input_shapes[:1]] for event in events])
                dist.destroy_process_group()
                """,
                SERRIED_TRACE=folder,
            )
            for rank, text in enumerate(texts):
                seen = ast.literal_eval(text)
                self.assertEqual([name for name, _, _ in seen], ["all_reduce"] * 6 + ["all_gather"])
                self.assertEqual([shapes for _, _, shapes in seen], [[[size]] for size in (1, 1, 1000, 1000, 2_000_000, 2_000_000, 4)])
                ours = self.communication(folder, rank)[-7:]
                self.assertEqual([name for name, _ in ours], [name for name, _, _ in seen])
                for (name, theirs, shapes), (_, own) in zip(seen, ours):
                    self.assertLess(abs(theirs - own), 5_000 + 0.2 * own, f"{name} of {shapes}: {theirs} us, and {own} us in our trace")

    def communication(self, folder, rank):
        """Names and microseconds of a rank's collectives but for barriers, as the trace has them."""
        found = []
        for path in pathlib.Path(folder).rglob("*.json"):
            text = path.read_text().rstrip().rstrip(",")
            events = json.loads(text if text.endswith("]") or text.endswith("}") else text + "]")
            events = events["traceEvents"] if isinstance(events, dict) else events
            found += [event for event in events if event.get("cat") == "communication" and event["pid"] == rank]
        found.sort(key=lambda event: event["ts"])
        return [(event["name"].split(":")[0], event["dur"]) for event in found if not event["name"].startswith("barrier")]


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

    def test_an_interpreter_may_end_with_a_receive_that_nothing_answers(self):
        texts = outputs(
            2,
            """
            begin()
            dist.barrier()
            work = dist.irecv(torch.ones(3), 1 - rank)
            print("ends")
            """,
            seconds=30,
        )
        self.assertEqual(texts, ["ends"] * 2)

    # Such a thread comes back from its call when the group is closed, and asks for the GIL.
    def test_an_interpreter_may_end_with_threads_that_wait(self):
        for wait in (0, 0.3):
            texts = outputs(
                2,
                f"""
                begin()
                group = dist.new_group([0, 1], backend="serried")
                threads = [
                    threading.Thread(target=lambda: dist.recv(torch.ones(3), 1 - rank), daemon=True),
                    threading.Thread(target=lambda: dist.all_reduce(torch.ones(3), group=group) if rank == 0 else time.sleep(600), daemon=True),
                ]
                for thread in threads: thread.start()
                time.sleep({wait})
                print("ends")
                """,
                seconds=30,
            )
            self.assertEqual(texts, ["ends"] * 2)

    def test_an_exception_ends_a_rank_and_the_others_hear_of_it(self):
        ranks = Ranks(
            2,
            """
            begin()
            dist.barrier()
            if rank == 1:
                raise LookupError("a mistake of rank 1")
            dist.all_reduce(torch.ones(4))
            """,
        )
        results = ranks.ends(30)
        self.assertEqual([code for code, _, _ in results], [1, 1])
        self.assertIn("LookupError: a mistake of rank 1", results[1][2])
        self.assertRegex(results[0][2], r"DistBackendError: \[all_reduce\].*rank 1")

    # As the workers of a DataLoader do.
    def test_children_come_and_go_beside_a_group(self):
        texts = outputs(
            2,
            """
            import torch.utils.data as data
            begin()
            for x in data.DataLoader(list(range(8)), batch_size=4, num_workers=2, multiprocessing_context="fork"):
                dist.all_reduce(x)
            child = os.fork()
            if child == 0:
                try:
                    dist.all_reduce(torch.ones(2))
                except RuntimeError as error:
                    sys.exit(7 if "made" in str(error) else 8)
                sys.exit(9)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            dist.all_reduce(x)
            print(x.tolist(), code)
            dist.destroy_process_group()
            """,
        )
        self.assertEqual(texts, ["[16, 20, 24, 28] 7"] * 2)

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


if __name__ == "__main__":
    unittest.main(verbosity=2)
