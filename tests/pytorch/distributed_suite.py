#!/usr/bin/env python3
"""Runs torch's own distributed_test.py, as it is in the wheel, on gloo or with serried in gloo's place; prints one JSON line per test.

Most of its tests for the CPU run only where the backend is called gloo. So the name stays, and what makes the group is exchanged: every
test that gloo runs, serried runs. Ranks are forked from one process that has imported torch, which takes a tenth of the time.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
import unittest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=["gloo", "serried"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", metavar="FILE", help="names of tests, one per line")
    parser.add_argument("--match", help="a regular expression that names contain")
    parser.add_argument("--limit", type=int, default=90, help="seconds for one test")
    return parser.parse_args()


class GlooIsSerried(type):
    def __instancecheck__(cls, instance):
        return True


class InGloosPlace(metaclass=GlooIsSerried):
    """Called like ProcessGroupGloo, makes a backend of serried."""

    def __new__(cls, store, rank, size, timeout):
        from serried import _C

        return _C.make_backend("auto", store, rank, size, timeout, {})


def named_after_gloo(events_of):
    """The function, for events that begin with the name of another backend."""

    def get_profiling_event(name, *args, **kwargs):
        events = events_of(re.sub("^gloo:", "shm:", name), *args, **kwargs)
        for event in events:
            event.name = re.sub("^shm:", "gloo:", event.name)
        return events

    return get_profiling_event


def put_serried_in_gloos_place(distributed_test):
    import torch.distributed.distributed_c10d as c10d

    import serried  # noqa: F401

    gloo = c10d.ProcessGroupGloo
    wrap = c10d._create_process_group_wrapper

    def wrap_with_gloo(**kwargs):
        # The wrapper that compares calls talks through a gloo of its own.
        c10d.ProcessGroupGloo = gloo
        try:
            return wrap(**kwargs)
        finally:
            c10d.ProcessGroupGloo = InGloosPlace

    c10d.ProcessGroupGloo = InGloosPlace
    c10d._create_process_group_wrapper = wrap_with_gloo
    distributed_test.get_profiling_event = named_after_gloo(distributed_test.get_profiling_event)


class Lines(unittest.TestResult):
    """Prints what each test came to."""

    def startTest(self, test):
        super().startTest(test)
        self.began, self.said = time.time(), False

    def say(self, test, outcome, why=""):
        self.said = True
        line = {"test": test._testMethodName, "outcome": outcome, "seconds": round(time.time() - self.began, 2)}
        print(json.dumps(line | ({"why": why} if why else {})), file=REPORT, flush=True)

    def addSuccess(self, test):
        self.say(test, "passes")

    def addSkip(self, test, reason):
        self.say(test, "skipped", reason)

    def addFailure(self, test, error):
        self.say(test, "fails", self._exc_info_to_string(error, test))

    addError = addFailure


def suite_of(distributed_test, only, match):
    class Tests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._fork_processes()

        def _fork_processes(self):
            import torch

            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    names = unittest.TestLoader().getTestCaseNames(Tests)
    wanted = None if only is None else set(open(only).read().split())
    chosen = [name for name in names if (wanted is None or name in wanted) and (match is None or re.search(match, name))]
    return unittest.TestSuite(Tests(name) for name in chosen)


def main():
    given = arguments()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(given.ranks), TEMP_DIR=tempfile.gettempdir(), LOCAL_WORLD_SIZE=str(given.ranks))
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    torch.set_num_threads(1)
    common_distributed.TIMEOUT_DEFAULT = given.limit
    common_distributed.TIMEOUT_OVERRIDE.clear()
    if given.backend == "serried":
        put_serried_in_gloos_place(distributed_test)
    suite = suite_of(distributed_test, given.only, given.match)
    suite.run(Lines())


if __name__ == "__main__":
    # Tests print as they like.
    REPORT = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main()
    sys.stdout.flush()
    os._exit(0)
