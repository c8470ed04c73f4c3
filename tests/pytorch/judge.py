#!/usr/bin/env python3
"""Holds serried to what gloo passes of PyTorch's own distributed_test.py: a test that passes on gloo passes on serried, or stands in listed.txt with its reason.

`--recorded` runs serried alone and takes what gloo passes from gloo_passes.txt; without it gloo runs too, and `--record` writes that file anew.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
MOST_LISTED = 5


def run(backend, ranks, only=None):
    """The outcomes of a suite by the names of its tests. What crashed the process that runs them is left out, and the rest goes on."""
    outcomes = {}
    words = [sys.executable, HERE / "distributed_suite.py", backend, "--ranks", str(ranks)]
    if only is not None:
        words += ["--only", only]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in done.stdout.splitlines():
        said = json.loads(line)
        outcomes[said["test"]] = said
    if done.returncode != 0:
        sys.exit(f"[judge] the suite on {backend} with {ranks} ranks ended with {done.returncode} after {len(outcomes)} tests\n  fix: run {' '.join(map(str, words))} and look at its errors")
    return outcomes


def read_recorded(path):
    """Names by numbers of ranks: lines of "test_name 2 3 4"."""
    passes = collections.defaultdict(set)
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, *ranks = line.split()
            for each in ranks:
                passes[int(each)].add(name)
    return passes


def write_recorded(path, passes):
    names = sorted(set().union(*passes.values()))
    lines = [f"{name} {' '.join(str(ranks) for ranks in sorted(passes) if name in passes[ranks])}" for name in names]
    path.write_text("# What gloo passes of torch's distributed_test.py, and with how many ranks: judge.py --record\n" + "\n".join(lines) + "\n")


def read_listed(path):
    """Reasons by names: lines of "test_name: reason"."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return {name: reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def passing(outcomes):
    return {name for name, said in outcomes.items() if said["outcome"] == "passes"}


def judge(ranks, gloo, ours, listed):
    """Prints what differs; how many differ without a reason."""
    missing = sorted(gloo - passing(ours))
    wrong = [name for name in missing if name not in listed]
    seconds = sum(said["seconds"] for said in ours.values())
    print(f"{ranks} ranks: gloo passes {len(gloo)}, serried {len(passing(ours))} of {len(ours)} in {seconds:.0f} s; of gloo's it lacks {len(missing)}")
    for name in missing:
        said = ours.get(name, {"outcome": "not run"})
        print(f"  {name}: {said['outcome']}" + (f" (listed: {listed[name]})" if name in listed else ""))
        if name not in listed:
            print("    " + "\n    ".join(said.get("why", "").splitlines()[-12:]))
    return len(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--record", action="store_true")
    given = parser.parse_args()
    listed = read_listed(HERE / "listed.txt")
    if len(listed) > MOST_LISTED:
        sys.exit(f"[judge] {len(listed)} tests are listed, and {MOST_LISTED} may be\n  fix: mend serried")
    recorded = read_recorded(HERE / "gloo_passes.txt")
    num_wrong = 0
    for ranks in given.ranks:
        if given.recorded:
            names = HERE / "gloo_passes.txt"
            gloo = recorded[ranks]
            ours = run("serried", ranks, only=names)
        else:
            gloo = passing(run("gloo", ranks))
            recorded[ranks] = gloo
            ours = run("serried", ranks)
        num_wrong += judge(ranks, gloo, ours, listed)
    if given.record:
        write_recorded(HERE / "gloo_passes.txt", recorded)
    sys.exit(1 if num_wrong > 0 else 0)


if __name__ == "__main__":
    main()
