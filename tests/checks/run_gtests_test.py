#!/usr/bin/env python3
"""Tests of scripts/run_gtests.py with a program whose tests fail in every way: each is named, and no other is lost."""

import os
import pathlib
import subprocess
import sys
import unittest

RUNNER = pathlib.Path(__file__).resolve().parents[2] / "scripts/run_gtests.py"
PROGRAM = sys.argv.pop()


def run(filter, *options):
    """The exit status and the output for the tests that `filter` selects."""
    result = subprocess.run([sys.executable, RUNNER, PROGRAM, *options], env=os.environ | {"GTEST_FILTER": filter},
                            capture_output=True, text=True, check=False)
    return result.returncode, result.stdout


class Runner(unittest.TestCase):
    def test_good_tests_pass_and_say_nothing(self):
        status, output = run("Good.*")
        self.assertEqual((status, output.count("\n")), (0, 1))
        self.assertRegex(output, r"^2 tests in .* s, 0 failed, 0 skipped\n$")

    def test_what_fails_is_named_with_its_output_and_the_rest_runs(self):
        status, output = run("Good.*:Bad.*:All/*", "--limit", "2")
        self.assertEqual(status, 1)
        self.assertRegex(output, r"\n9 tests in .* s, 5 failed, 0 skipped\n")
        for line in ["Bad.Fails: failed", "Bad.Crashes: ended by SIGSEGV in this test", "Bad.Exits: exited with 0 in this test",
                     "Bad.Hangs: killed after 2 s in this test", "All/Numbered.IsNotTwo/1: failed"]:
            self.assertIn(f"\n  {line}\n", output)
        for line in ["said by the test", "last words"]:
            self.assertIn(line, output)
        self.assertTrue(output.endswith(f"{PROGRAM} --gtest_filter=Bad.Fails\n"), output)

    def test_a_crash_after_the_last_test_is_a_failure(self):
        status, output = run("Late*")
        self.assertEqual(status, 1)
        self.assertRegex(output, r"\n  \w+: ended by SIGABRT after the last test\n")

    def test_shards_share_all_tests(self):
        outputs = [run("Good.*:All/*", "--shard", shard)[1] for shard in ("1/2", "2/2")]
        self.assertRegex(outputs[0], r"^3 tests in .* s, 0 failed")
        self.assertRegex(outputs[1], r"\n2 tests in .* s, 1 failed")


if __name__ == "__main__":
    unittest.main()
