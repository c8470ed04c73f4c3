#!/usr/bin/env bash
# Makes several hosts out of this machine: each has network, process, mount, name and IPC namespaces and a /dev/shm of its own, so that
# nothing but TCP connects two of them. The bridge between them is in a namespace too: the machine's own network stays as it is.
#
#   hosts.sh can                        exit 0 if hosts can be made here, else 77, which ctest calls skipped, and the reason
#   hosts.sh up N [--trap] [--while FD] hosts h0, h1.. at 10.77.0.1..; prints the number that SERRIED_HOSTS must hold for all below.
#                                       --trap: a host's own name resolves to 127.0.1.1, as on Debian; --while: until FD is at its end
#   hosts.sh run I COMMAND...           in host I, in the foreground, with its exit code; ends when this process is killed
#   hosts.sh cut I [J]                  packets of I, or those between I and J, vanish without a word; connections stay open
#   hosts.sh heal I [J]                 undoes it
#   hosts.sh freeze I | thaw I          SIGSTOP, SIGCONT to every process of I, whose kernel goes on acknowledging
#   hosts.sh kill I                     SIGKILL to every process of I; the host stays, and closes their connections
#   hosts.sh off I                      power cut: all of I ends and nobody is told
#   hosts.sh on I                       an empty host I again, at the same address
#   hosts.sh link I [rate=MBIT]         how fast I sends; without a rate as fast as it goes
#   hosts.sh bad PROGRAM LOSS REORDER DELAY MBIT  the link of hosts 0 and 1 in user space (bad_wire.cpp): two percentages, ms, Mbit/s
#   hosts.sh down                       ends all of it
#
# Two terminals less:
#   export SERRIED_HOSTS=$(tests/hosts/hosts.sh up 2)
#   for i in 1 0; do tests/hosts/hosts.sh run $i serried run --nnodes 2 --node-rank $i --rendezvous h0:29500 ./train & done; wait
#   tests/hosts/hosts.sh down
set -euo pipefail

self=$(realpath "${BASH_SOURCE[0]}")
readonly self
# Of the keeper: process 1 of a namespace in which the hosts are nested, so that all ends with it, however it ends. Files of ours are only here.
readonly state=/dev/shm
readonly namespaces=(--net --pid --mount --uts --ipc)

fail() {
  printf 'hosts: %s\n' "$@" >&2
  exit 2
}

address() { echo "10.77.0.$(($1 + 1))"; }

# What a process 1 says first: its number, or what went wrong.
read_number() {
  local line
  read -r line <&"$1" && [[ $line =~ ^[0-9]+$ ]] || fail "cannot start: ${line#hosts: }"
  echo "$line"
}

# ---- From outside.

can() {
  local command why
  for command in ip tc unshare nsenter setpriv; do
    command -v $command >/dev/null || { echo "hosts: skipped, $command is missing; fix: scripts/setup.sh test" && return 77; }
  done
  [[ $(id -u) == 0 ]] || { echo "hosts: skipped, only root may make network namespaces" && return 77; }
  why=$(unshare "${namespaces[@]}" --fork --kill-child sh -c 'mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && ip link add br0 type bridge &&
    ip link add x type veth peer name y && tc qdisc add dev x root tbf rate 1mbit burst 32k latency 50ms' 2>&1) && return 0
  echo "hosts: skipped, this machine does not allow them: ${why//$'\n'/; }"
  return 77
}

up() {
  can >&2 || exit
  exec {ready}< <(exec setsid unshare "${namespaces[@]}" --fork --kill-child "$self" keep "$@" 2>&1)
  read_number "$ready"
}

hosts_are_up() { [[ -n ${SERRIED_HOSTS:-} && -e /proc/$SERRIED_HOSTS/root$state/count ]]; }

run() {
  local root=/proc/$SERRIED_HOSTS/root init
  init=$(cat "$root$state/$1.init" 2>/dev/null) || fail "there is no host $1"
  local of=$root/proc/$init/ns
  # nsenter alone would stop itself with a command that is frozen, and leave it behind when killed. The shell stays outside; what it would say
  # about signals is not said.
  exec nsenter --no-fork --net="$of/net" --pid="$of/pid" --mount="$of/mnt" --uts="$of/uts" --ipc="$of/ipc" \
    bash -c 'cd "$0" && exec 3>&2 2>/dev/null; setpriv --pdeathsig KILL "$@" 2>&3 3>&-; exit $?' "$PWD" "${@:2}"
}

down() {
  local stat
  kill -KILL "$SERRIED_HOSTS"
  # Waits for all that was in it, too.
  while stat=$(cat "/proc/$SERRIED_HOSTS/stat" 2>/dev/null) && [[ $stat != *") Z "* ]]; do sleep 0.01; done
}

in_keeper() { exec nsenter --no-fork --target "$SERRIED_HOSTS" --net --pid --mount unshare --fork "$self" inside "$@"; }

# ---- In the keeper.

# As process 1, until the descriptor is at its end. The kernel reaps what has lost its parent, since SIGCHLD is ignored.
stay() {
  trap '' CHLD
  if [[ -n $1 ]]; then exec cat <&"$1" >/dev/null 2>&1; fi
  exec sleep infinity </dev/null >/dev/null 2>&1
}

keep() {
  local count=$1 trap='' held='' pid i
  shift
  while (($#)); do
    case $1 in
      --trap) trap=yes ;;
      --while) held=$2 && shift ;;
      *) fail "unknown option $1" ;;
    esac
    shift
  done
  read -r pid _ </proc/self/stat  # as the machine counts: /proc is still its own
  mount --make-rprivate /
  mount -t proc proc /proc
  mount -t tmpfs tmpfs $state
  echo "$count" >$state/count
  [[ -z $trap ]] || touch $state/trap
  ip link add br0 type bridge
  ip link set br0 up
  for ((i = 0; i < count; ++i)); do on $i; done
  echo "$pid"
  stay "$held"
}

init_of() { cat $state/"$1".init 2>/dev/null || fail "there is no host $1"; }
in_network_of() { nsenter --target "$(init_of "$1")" --net "${@:2}"; }

names_seen_by() {
  local i
  echo "127.0.0.1 localhost"
  for ((i = 0; i < $(<$state/count); ++i)); do
    if [[ -e $state/trap && $i == "$1" ]]; then echo "127.0.1.1 h$i"; else echo "$(address $i) h$i"; fi
  done
}

# Run by process 1 of a host.
start_as() {
  local pid
  read -r pid _ </proc/self/stat  # as the keeper counts
  mount --bind "$state/$1.names" /etc/hosts
  mount -t tmpfs tmpfs /dev/shm
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys 2>/dev/null || true
  hostname "h$1"
  ip link set lo up
  # Where the machine has bbr, it takes twice the time between namespaces.
  echo reno >/proc/sys/net/ipv4/tcp_congestion_control
  echo "$pid"
  stay ''
}

on() {
  local i=$1 init
  [[ ! -e $state/$i.init ]] || fail "host $i is on already"
  names_seen_by "$i" >"$state/$i.names"
  exec {ready}< <(exec unshare "${namespaces[@]}" --fork --kill-child "$self" start_as "$i" 2>&1)
  init=$(read_number "$ready")
  exec {ready}<&-
  # The same hardware address every time: neighbours remember it for a while after off and on.
  ip link add "p$i" type veth peer name eth0 address "$(printf 02:00:00:00:01:%02x "$i")" netns "$init"
  ip link set "p$i" master br0 up
  echo "$init" >"$state/$i.init"
  in_network_of "$i" ip addr add "$(address "$i")/24" dev eth0
  in_network_of "$i" ip link set eth0 up
}

off() {
  local init
  init=$(init_of "$1")
  cut "$1"
  kill -KILL "$init"
  while [[ -e /proc/$init ]]; do sleep 0.01; done
  ip link del "p$1" 2>/dev/null || true  # unless it is gone already, with the other end
  rm "$state/$1.init"
}

# A wrong hardware address for good: frames go out and reach nobody.
lose() { in_network_of "$1" ip neigh replace "$(address "$2")" lladdr 02:00:00:00:00:ff dev eth0 nud permanent; }
find_again() { in_network_of "$1" ip neigh del "$(address "$2")" dev eth0; }

cut() {
  if (($# == 1)); then
    ip link set "p$1" nomaster
    return
  fi
  lose "$1" "$2"
  lose "$2" "$1"
}

heal() {
  if (($# == 1)); then
    ip link set "p$1" master br0
    return
  fi
  find_again "$1" "$2"
  find_again "$2" "$1"
}

# To all in the namespace but its first process and the one that asks.
signal() { nsenter --no-fork --target "$(init_of "$2")" --pid unshare --fork bash -c "kill -s $1 -- -1" 2>/dev/null || true; }

link() {
  local rate=${2:-}
  in_network_of "$1" tc qdisc del dev eth0 root 2>/dev/null || true
  [[ -n $rate ]] || return 0
  [[ $rate == rate=* ]] || fail "unknown word $rate; known: rate=MBIT"
  in_network_of "$1" tc qdisc add dev eth0 root tbf rate "${rate#rate=}mbit" burst 256k latency 50ms
}

bad() {
  local ready
  ip link set p0 nomaster
  ip link set p1 nomaster
  exec {ready}< <(exec setsid "$1" p0 p1 "${@:2}" 2>&1)
  [[ $(head -n 1 <&"$ready") == ready ]] || fail "no bad wire"
}

inside() {
  case $1 in
    freeze) signal STOP "$2" ;;
    thaw) signal CONT "$2" ;;
    kill) signal KILL "$2" ;;
    *) "$@" ;;
  esac
}

case ${1:-} in
  can | up | keep | start_as | inside) "$@" ;;
  down) if hosts_are_up; then down; fi ;;
  run | cut | heal | freeze | thaw | kill | off | on | link | bad)
    hosts_are_up || fail "there are no hosts" "  fix: export SERRIED_HOSTS=\$($0 up 2)"
    if [[ $1 == run ]]; then "$@"; else in_keeper "$@"; fi
    ;;
  *) fail "unknown word ${1:-}; the first lines of $self say what there is" ;;
esac
