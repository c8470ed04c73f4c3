#!/usr/bin/env python3
"""What `import serried` takes after `import torch`, in new processes, beside that of torch: import_time.py [RESULTS.json]"""

import json
import pathlib
import statistics
import subprocess
import sys

PROGRAM = """
import time
begin = time.perf_counter()
import torch
between = time.perf_counter()
import serried
print(between - begin, time.perf_counter() - between)
"""
GOAL_MS = 50


def main():
    times = [[1e3 * float(word) for word in subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, check=True, text=True).stdout.split()] for _ in range(9)]
    torch_ms, serried_ms = (statistics.median(column) for column in zip(*times))
    print(f"import torch {torch_ms:.0f} ms, import serried after it {serried_ms:.1f} ms, the fastest {min(each for _, each in times):.1f} ms; goal {GOAL_MS} ms")
    if len(sys.argv) > 1:
        path = pathlib.Path(sys.argv[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = json.loads(path.read_text()) if path.exists() else []
        row = {"bench": "python", "case": "import serried", "ours": serried_ms, "reference": torch_ms, "reference_name": "import torch"}
        rows.append(row | {"ratio": serried_ms / torch_ms, "unit": "ms", "goal": GOAL_MS / torch_ms})
        path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
