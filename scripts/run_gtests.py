#!/usr/bin/env python3
"""Runs a GoogleTest program, all tests in one process. One that crashes or hangs is named, and the tests after it run in a new process."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time


def list_tests(program):
    """The names of all enabled tests; GTEST_FILTER in the environment selects."""
    listing = subprocess.run([program, "--gtest_list_tests"], check=True, capture_output=True, text=True).stdout
    tests, suite = [], ""
    for line in listing.splitlines():
        name = line.split("#")[0].rstrip()
        if name.startswith("  "):
            tests.append(suite + name.strip())
        elif name.endswith("."):
            suite = name
    return [test for test in tests if "DISABLED_" not in test]


def end_of(status):
    """How a process ended, in words."""
    if status >= 0:
        return f"exited with {status}"
    return f"ended by {signal.Signals(-status).name}"


class Batch:
    """One process that runs `tests`: which of them are done, and what failed with a reason each."""

    def __init__(self, program, tests, limit):
        self.program, self.limit = program, limit
        self.left, self.failures, self.skipped = dict.fromkeys(tests), {}, 0
        self.current, self.output, self.timed_out = None, [], False

    def run(self):
        # In a file, since thousands of names are too long for an argument.
        with tempfile.NamedTemporaryFile("w", suffix=".flags") as flags:
            flags.write("--gtest_color=no\n--gtest_filter=" + ":".join(self.left))
            flags.flush()
            # A session of its own, so that what hangs is killed with all processes it has started.
            self.process = subprocess.Popen([self.program, "--gtest_flagfile=" + flags.name], stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True)
            signal.signal(signal.SIGALRM, self.kill)
            signal.alarm(self.limit)
            for line in self.process.stdout:
                self.read(line)
            status = self.process.wait()
            signal.alarm(0)
        self.finish(f"killed after {self.limit} s" if self.timed_out else end_of(status), status)

    def kill(self, *_):
        self.timed_out = True
        os.killpg(self.process.pid, signal.SIGKILL)

    def read(self, line):
        # GoogleTest's words are not at the start of the line where a test leaves one unfinished.
        if "[ RUN      ] " in line:
            self.current, self.output = line.split()[-1], []
            signal.alarm(self.limit)
        self.output.append(line)
        if self.current is None:
            return
        for word in ["[       OK ] ", "[  SKIPPED ] ", "[  FAILED  ] "]:
            if any(f"{word}{self.current}{end}" in line for end in (" (", ", where ")):
                self.end_test("failed" if "FAILED" in word else None)
                self.skipped += "SKIPPED" in word
                return

    def end_test(self, failure):
        if failure:
            self.fail(self.current, failure)
        self.left.pop(self.current, None)
        self.current, self.output = None, []

    def fail(self, name, reason):
        self.failures[name] = reason
        print("".join(self.output), f"[  {name}: {reason}  ]\n", sep="", flush=True)

    def finish(self, end, status):
        if self.current is not None:
            self.end_test(end + " in this test")
        elif self.left:
            # Nothing says which test to leave out, so the rest is not tried again.
            self.fail(next(iter(self.left)), f"{end} before this test, {len(self.left)} tests did not run")
            self.left = {}
        elif status != (1 if self.failures else 0):
            self.fail(os.path.basename(self.program), f"{end} after the last test")


def run(program, tests, limit):
    """Runs `tests`, in a new process after each crash. Returns the failures with their reasons and the number skipped."""
    failures, skipped = {}, 0
    while tests:
        batch = Batch(program, tests, limit)
        batch.run()
        failures |= batch.failures
        skipped += batch.skipped
        tests = list(batch.left)
    return failures, skipped


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("--shard", default="1/1", help="which share of the tests, as 1/2 and 2/2")
    parser.add_argument("--limit", type=int, default=60, help="seconds that one test may take")
    options = parser.parse_args()
    shard, num_shards = map(int, options.shard.split("/"))

    start = time.monotonic()
    tests = list_tests(options.program)[shard - 1::num_shards]
    failures, skipped = run(options.program, tests, options.limit)
    print(f"{len(tests)} tests in {time.monotonic() - start:.1f} s, {len(failures)} failed, {skipped} skipped")
    for name, reason in failures.items():
        print(f"  {name}: {reason}")
    if failures:
        print(f"again, one of them: {shlex.quote(options.program)} --gtest_filter={shlex.quote(next(iter(failures)))}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
