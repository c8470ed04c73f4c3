#!/usr/bin/env bash
# Runs the benchmarks beside their references and leaves <build>/bench/results.json: run.sh <build> [name|all]. A missed goal is shown, not an error.
set -euo pipefail

readonly names=(comm start dtensor redistribute ddp capture sharded experts context checkpoint pipeline hosts simulate python)
readonly build=${1:?usage: run.sh <build> [name|all]; names: ${names[*]}}
readonly wanted=${2:-all}
readonly results=$build/bench/results.json
hosts=$(dirname "$0")/../tests/hosts/hosts.sh
readonly hosts

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

# PyTorch's numbers stand beside ours where a Python with torch is at hand; the LibTorch of the set-up came with one.
has_pytorch() { python3 -c 'import torch' 2>/dev/null; }
if ! has_pytorch; then export PYTHONPATH="$build/deps/libtorch${PYTHONPATH:+:$PYTHONPATH}"; fi

beside_pytorch() {
  if has_pytorch; then
    say "PyTorch's DTensor on the same programs"
    python3 "$(dirname "$0")/dtensor/pytorch.py" "$1"
  fi
}

bench_dtensor() {
  say "dtensor: host cost of ops beside plain LibTorch"
  taskset -c 0 "$build/benchmarks/bench_dtensor" "$results"
  beside_pytorch host
}

bench_redistribute() {
  say "redistribute: 2 ranks beside the raw collectives"
  "$build/bin/serried" run -n 2 "$build/benchmarks/bench_redistribute" "$results"
  beside_pytorch redistribute
}

# Both programs in turn, often: the machine's speed drifts.
bench_ddp() {
  local -r lines=$build/bench/ddp.jsonl run=("$build/bin/serried" run -n 2)
  local theirs=() round model mode
  if has_pytorch; then theirs=("${run[@]}" --master-port 29619 python3 "$(dirname "$0")/ddp/pytorch.py"); fi
  say "ddp: training steps on 2 ranks, in turn with PyTorch where python3 has it (some minutes)"
  rm -f "$lines"
  for round in 1 2 3; do
    for model in mlp transformer resnet gpt deep; do
      for mode in first step; do
        SERRIED_BENCH_START=$(date +%s%N) "${run[@]}" "$build/benchmarks/bench_ddp" "$mode" "$model" "$lines"
        if [[ ${#theirs[@]} -gt 0 ]]; then SERRIED_BENCH_START=$(date +%s%N) "${theirs[@]}" "$mode" "$model" "$lines"; fi
      done
    done
  done
  "$build/benchmarks/bench_ddp_report" "$lines" "$results"
}

bench_capture() {
  local -r lines=$build/bench/capture_pytorch.jsonl
  local name ranks
  say "capture: captured steps beside eager ones, and beside PyTorch's compiled ones where python3 has it (some minutes)"
  rm -f "$lines"
  for name in mlp20 mlp3 mlp20_tp gpt_ddp gpt_tp; do
    if [[ $name == *_* ]]; then ranks=2; else ranks=1; fi
    if has_pytorch; then
      SERRIED_BENCH_START=$(date +%s%N) "$build/bin/serried" run -n $ranks --master-port 29621 \
        python3 "$(dirname "$0")/graph/pytorch.py" $name "$lines"
    fi
    SERRIED_BENCH_START=$(date +%s%N) "$build/bin/serried" run -n $ranks "$build/benchmarks/bench_graph" $name "$results" "$lines"
  done
}

bench_sharded() {
  local -r lines=$build/bench/sharded_pytorch.jsonl run=("$build/bin/serried" run -n 2)
  local name
  say "sharded: tensor parallel and fully_shard on 2 ranks beside the plain model, and beside PyTorch where python3 has it (some minutes)"
  rm -f "$lines"
  if has_pytorch; then
    for name in deep_tp deep_fsdp gpt_tp gpt_fsdp; do
      SERRIED_BENCH_START=$(date +%s%N) "${run[@]}" --master-port 29623 python3 "$(dirname "$0")/graph/pytorch.py" $name "$lines"
    done
  fi
  for name in deep gpt; do "${run[@]}" "$build/benchmarks/bench_sharded" $name "$results" "$lines"; done
  # Without it glibc before 2.38 leaves holes between tensors that no other fits into, whoever trains.
  MALLOC_MMAP_THRESHOLD_=1048576 "$build/bin/serried" run -n 4 "$build/benchmarks/bench_sharded_memory" 32 1024 "$results"
}

bench_experts() {
  say "experts: a mixture of experts on 2 ranks beside its raw all_to_alls and products"
  "$build/bin/serried" run -n 2 "$build/benchmarks/bench_experts" "$results"
}

bench_context() {
  local -r lines=$build/bench/context_pytorch.jsonl run=("$build/bin/serried" run -n 2)
  local way
  say "context: causal attention of 4096 positions on 2 ranks beside one, and beside PyTorch where python3 has it"
  rm -f "$lines"
  if has_pytorch; then
    for way in allgather alltoall; do
      "${run[@]}" --master-port 29627 python3 "$(dirname "$0")/context_parallel/pytorch.py" $way "$lines" || say "PyTorch does not take $way here"
    done
  fi
  "${run[@]}" "$build/benchmarks/bench_context_parallel" "$results" "$lines"
}

bench_python() {
  [[ -e $build/python/serried/__init__.py ]] && has_pytorch || return 0
  say "python: PyTorch's training steps on 2 ranks, on serried and on gloo in turns"
  local -rx PYTHONPATH="$build/python${PYTHONPATH:+:$PYTHONPATH}"
  python3 "$(dirname "$0")/python/import_time.py" "$results"
  "$build/bin/serried" run -n 2 python3 "$(dirname "$0")/python/train_steps.py" --results "$results"
}

bench_checkpoint() {
  local -r lines=$build/bench/checkpoint_pytorch.jsonl folder=$build/bench/checkpoints run=("$build/bin/serried" run -n 2)
  say "checkpoint: 2 ranks save and load 384 MiB beside raw writes and reads, and beside PyTorch where python3 has it"
  rm -rf "$lines" "$folder"
  if has_pytorch; then
    "${run[@]}" --master-port 29625 python3 "$(dirname "$0")/checkpoint/pytorch.py" 32 1024 "$folder/pytorch" "$lines"
  fi
  "${run[@]}" "$build/benchmarks/bench_checkpoint" 32 1024 "$folder" "$results" "$lines"
  "${run[@]}" "$build/benchmarks/bench_checkpoint_plan" "$folder" "$results"
  rm -rf "$folder"
}

bench_pipeline() {
  local -r lines=$build/bench/pipeline_pytorch.jsonl run=("$build/bin/serried" run -n 2)
  local name
  say "pipeline: every schedule on 2 ranks beside its simulation, and in turn with PyTorch on Gloo where python3 has it"
  rm -f "$lines"
  for name in GPipe 1F1B Interleaved LoopedBFS InterleavedZeroBubble ZBV DualPipeV; do
    if has_pytorch; then "${run[@]}" --master-port 29627 python3 "$(dirname "$0")/pipeline/pytorch.py" $name "$lines"; fi
    "${run[@]}" "$build/benchmarks/bench_pipeline" "$results" $name "$lines"
  done
  "${run[@]}" "$build/benchmarks/bench_pipeline" "$results" host
}

# Starts in the hosts what mpirun asks for; until nobody holds the pipe any more.
serve_agents() {
  local host command
  while read -r host command; do "$hosts" run "${host#h}" bash -c "$command" </dev/null & done <"$1"
  wait
}

# Ranks on both hosts, started by an mpirun in host 0: mpirun_on_hosts RANKS MBITS [ddp].
mpirun_on_hosts() {
  local pipe agent
  pipe=$(realpath "$build/bench")/agents
  agent=$(realpath "$(dirname "$0")/hosts/agent.sh")
  rm -f "$pipe" && mkfifo "$pipe"
  exec {held}<>"$pipe"
  serve_agents "$pipe" {held}>&- &
  SERRIED_AGENT_PIPE=$pipe "$hosts" run 0 mpirun --oversubscribe --bind-to none -H "h0:$1,h1:$1" -np $((2 * $1)) \
    --mca plm_rsh_agent "$agent" --mca pml ob1 --mca btl tcp,vader,self --mca btl_tcp_if_include eth0 \
    --mca oob_tcp_if_include eth0 -x MASTER_ADDR=10.77.0.1 -x MASTER_PORT=29500 \
    "$build/benchmarks/bench_hosts" "$2" "$results" "${@:3}"
  exec {held}>&-
  wait
  rm -f "$pipe"
}

bench_hosts() {
  local ranks
  say "hosts: two hosts that are namespaces, 1, 2 and 4 ranks on each, beside Open MPI, Gloo, sockets and the link"
  "$hosts" can || return 0
  begin_hosts
  mpirun_on_hosts 1 0
  limit_hosts 500
  for ranks in 1 2 4; do mpirun_on_hosts $ranks 500; done
  limit_hosts 1000
  mpirun_on_hosts 2 1000 ddp
  end_hosts
}

# Ranks of a command on both hosts, each with a launcher: run_on_hosts RANKS COMMAND...
run_on_hosts() {
  local host
  local -r ranks=$1 token=$("$build/bin/serried" token)
  shift
  for host in 1 0; do
    SERRIED_TOKEN=$token "$hosts" run $host "$build/bin/serried" run --nnodes 2 --node-rank $host --rendezvous h0:29500 -n "$ranks" "$@" &
  done
  wait
}

bench_simulate() {
  local mbits ranks machine
  say "simulate: collectives and steps of two hosts beside what is simulated on a machine that was calibrated there"
  "$hosts" can || return 0
  begin_hosts
  for mbits in 200 500 1000; do
    limit_hosts $mbits
    for ranks in 1 2; do
      machine=$build/bench/machine_${mbits}_$ranks.json
      say "$mbits Mbit/s, $ranks ranks on each host"
      run_on_hosts $ranks "$build/bin/serried" bench --calibrate -o "$machine"
      run_on_hosts $ranks "$build/bin/serried" bench --check "$machine"
    done
  done
  end_hosts
}

begin_hosts() {
  SERRIED_HOSTS=$("$hosts" up 2)
  export SERRIED_HOSTS
  trap '"$hosts" down' EXIT
}

end_hosts() {
  "$hosts" down
  trap - EXIT
}

limit_hosts() { for host in 0 1; do "$hosts" link $host rate="$1"; done; }

known=" ${names[*]} all "
if [[ $known != *" $wanted "* ]]; then
  printf '[bench] unknown benchmark "%s"; known: %s, all\n  fix: make bench BENCH=%s\n' "$wanted" "$(IFS=,; echo "${names[*]}" | sed 's/,/, /g')" "${names[0]}" >&2
  exit 2
fi

mkdir -p "$build/bench"
rm -f "$results"
count=0
for name in "${names[@]}"; do
  count=$((count + 1))
  # Those who watch see how far it is; a log has the headings.
  if [[ $wanted == all && -t 2 ]]; then printf '\n[bench] %d/%d: %s, %d min so far\n' $count ${#names[@]} "$name" $((SECONDS / 60)) >&2; fi
  if [[ $wanted == all || $wanted == "$name" ]]; then "bench_$name"; fi
done
say "results: $results"
