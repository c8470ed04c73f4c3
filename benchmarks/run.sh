#!/usr/bin/env bash
# Runs the benchmarks beside their references and leaves <build>/bench/results.json: run.sh <build> [name|all]. A missed goal is shown, not an error.
set -euo pipefail

readonly names=(comm start)
readonly build=${1:?usage: run.sh <build> [name|all]; names: ${names[*]}}
readonly wanted=${2:-all}
readonly results=$build/bench/results.json

# Open MPI refuses root otherwise, and there is nothing here that root could break.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

say() { printf '\n== %s\n' "$*"; }

bench_comm() {
  say "comm: 2 ranks beside Open MPI and Gloo (a few minutes)"
  mpirun -n 2 "$build/benchmarks/bench_comm" "$results"
  say "comm: 4 ranks"
  mpirun --oversubscribe -n 4 "$build/benchmarks/bench_comm" "$results"
}

bench_start() {
  say "start: 4 ranks to their first all_reduce, beside mpirun"
  "$build/benchmarks/bench_start_driver" "$build/bin/serried" "$build/benchmarks/bench_start" "$results"
}

known=" ${names[*]} all "
if [[ $known != *" $wanted "* ]]; then
  printf '[bench] unknown benchmark "%s"; known: %s, all\n  fix: make bench BENCH=%s\n' "$wanted" "$(IFS=,; echo "${names[*]}" | sed 's/,/, /g')" "${names[0]}" >&2
  exit 2
fi

mkdir -p "$build/bench"
rm -f "$results"
for name in "${names[@]}"; do
  if [[ $wanted == all || $wanted == "$name" ]]; then "bench_$name"; fi
done
say "results: $results"
