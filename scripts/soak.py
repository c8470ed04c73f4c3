#!/usr/bin/env python3
"""Runs every kind of random program for its share of the time, from a seed that differs each day unless one is given."""

import argparse
import os
import subprocess
import sys
import time

from progress import Progress, add_progress_option
from run_gtests import list_tests


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400 * 1_000_000)
    add_progress_option(parser)
    options = parser.parse_args()
    tests = [(program, test) for program in options.programs for test in list_tests(program)]
    share = max(1, round(options.minutes / len(tests)))
    failed = []
    with Progress("soak", len(tests), options.progress) as progress:
        for number, (program, test) in enumerate(tests):
            print(f"soak: {test} for {share} min, seeds from {options.seed}", flush=True)
            progress.at(number, test)
            environment = os.environ | {"SERRIED_SOAK_MINUTES": str(share), "SERRIED_SEED": str(options.seed)}
            if subprocess.run([program, "--gtest_brief=1", "--gtest_filter=" + test], env=environment).returncode != 0:
                failed.append(test)
    print(f"soak: {len(tests) - len(failed)} of {len(tests)} kinds right" + "".join(f"\n  failed: {t}" for t in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
