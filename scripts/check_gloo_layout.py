#!/usr/bin/env python3
"""Proves that Gloo behind stand-in headers is sound: our object holds nothing of gloo's, and our sizeof is LibTorch's."""

import re
import shutil
import subprocess
import sys

# Virtual tables, type infos and members of gloo's classes: whatever would depend on what the stand-ins look like.
FORBIDDEN = re.compile(r"^_ZT[VIST]N?K?4gloo|^_ZNK?4gloo|^_ZTV\w*N4c10d16ProcessGroupGloo")
PROBE = "serried_gloo_engine_size"
DESTRUCTOR = "_ZN4c10d16ProcessGroupGlooD0Ev"
# The size that the deleting destructor hands to operator delete, on x86-64 and on arm64.
SIZE = re.compile(r"mov\s+\$0x([0-9a-f]+),%[er]si|mov\s+[xw]1, #0x([0-9a-f]+)")


def run(*command):
    if shutil.which(command[0]) is None:
        sys.exit(f"{command[0]} is not installed\n  fix: apt-get install binutils")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def check_symbols(obj):
    names = [line.split()[-1] for line in run("nm", obj).splitlines()]
    return [f"{obj} holds or needs {name}" for name in names if FORBIDDEN.match(name)]


def size_here(obj):
    sizes = [line.split()[1] for line in run("nm", "-S", obj).splitlines() if PROBE in line]
    if len(sizes) != 1:
        sys.exit(f"{obj} has {len(sizes)} symbols named {PROBE}, not one")
    return int(sizes[0], 16)


def size_in(library):
    entry = [line.split() for line in run("nm", "-D", "-S", library).splitlines() if line.endswith(" " + DESTRUCTOR)]
    if len(entry) != 1:
        sys.exit(f"{library} exports {len(entry)} symbols named {DESTRUCTOR}, not one")
    begin, length = (int(word, 16) for word in entry[0][:2])
    code = run("objdump", "-d", "--no-show-raw-insn", f"--start-address={begin}", f"--stop-address={begin + length}", library)
    sizes = {int(a or b, 16) for a, b in SIZE.findall(code)}
    if len(sizes) != 1:
        sys.exit(f"cannot tell what {DESTRUCTOR} frees, found {sorted(sizes)}:\n{code}")
    return sizes.pop()


def main(obj, library):
    problems = check_symbols(obj)
    ours, theirs = size_here(obj), size_in(library)
    if ours != theirs:
        problems.append(f"sizeof(c10d::ProcessGroupGloo) is {ours} here, but {library} frees {theirs} bytes")
    if problems:
        sys.exit("\n".join(problems) + "\n  fix: make serried/comm/backends/gloo/standin match this LibTorch's headers")
    print(f"no layout of gloo's is used; sizeof(c10d::ProcessGroupGloo) is {ours} here and in LibTorch")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: check_gloo_layout.py engine.cpp.o libtorch_cpu.so")
    main(sys.argv[1], sys.argv[2])
