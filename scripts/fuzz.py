#!/usr/bin/env python3
"""Runs every fuzz target for some seconds, some at a time, and prints how many inputs each has read. What breaks one is kept in tests/fuzz/found."""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys

from progress import Progress, add_progress_option

INPUTS = pathlib.Path(__file__).resolve().parent.parent / "tests" / "fuzz"
# An input of some bytes must not ask for more memory than this.
LARGEST_ALLOCATION_MB = 256


def run(program, target, seconds, scratch):
    """Fuzzes one target. Returns its whole output and whether all went well."""
    found = INPUTS / "found" / target
    folders = [scratch / target, INPUTS / "corpus" / target, found]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    command = [program, f"--target={target}", f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=4096",
               f"-malloc_limit_mb={LARGEST_ALLOCATION_MB}", "-print_final_stats=1", f"-artifact_prefix={found}/", *folders]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if not any(found.iterdir()):
        found.rmdir()
    return result.stdout, result.returncode == 0


def last_number(pattern, output):
    numbers = re.findall(pattern, output)
    return int(numbers[-1]) if numbers else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--seconds", type=int, default=300, help="per target")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--targets", nargs="*", default=sorted(folder.name for folder in (INPUTS / "corpus").iterdir()))
    add_progress_option(parser)
    options = parser.parse_args()
    scratch = options.program.resolve().parent / "corpus"

    failed, total = [], 0
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool, Progress("fuzz", len(options.targets), options.progress) as progress:
        runs = {target: pool.submit(run, options.program.resolve(), target, options.seconds, scratch) for target in options.targets}
        for number, (target, future) in enumerate(runs.items()):
            progress.at(number, target)
            output, is_good = future.result()
            inputs = last_number(r"stat::number_of_executed_units: *(\d+)", output)
            branches = last_number(r"cov: (\d+)", output)
            total += inputs
            print(f"fuzz: {target:12} {inputs:>10} inputs, {branches:>5} branches" + ("" if is_good else ", FAILED"), flush=True)
            if not is_good:
                failed.append(target)
                print(output[-6000:])
    print(f"fuzz: {total} inputs, {len(failed)} of {len(options.targets)} targets failed" + "".join(f"\n  {target}" for target in failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
