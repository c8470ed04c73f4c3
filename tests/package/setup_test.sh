#!/usr/bin/env bash
# Runs scripts/setup.sh, in a copy whose path has a space, on machines that are made up: a PATH of stand-ins and a LibTorch of two files.
set -euo pipefail

source=$1
work="$2/a folder"
rm -rf "$2"
mkdir -p "$work/scripts" "$work/bin" "$work/calls"
cp "$source/scripts/setup.sh" "$work/scripts/"

# Always a new file, never a link: writing to a link would change the real tool.
stand_in() {
  rm -f "$work/bin/$1"
  printf '#!/bin/bash\n%s\n' "$2" >"$work/bin/$1"
  chmod +x "$work/bin/$1"
}
# The tools that the script itself calls are passed on to the real ones.
for tool in bash env dirname sort head mkdir rm mv touch; do stand_in $tool "exec $(command -v $tool) \"\$@\""; done
for tool in ninja ccache clang-format g++ objdump nm script ip tc mpirun mpicxx; do stand_in $tool ''; done
stand_in sudo 'exit 1'
stand_in cmake 'echo "cmake version 3.25.1"'
stand_in id 'echo ${FAKE_UID:-1000}'
stand_in apt-get 'echo "apt-get $*" >>"$CALLS/apt"'
stand_in python3 '
[[ "$*" == "-m pip --version" ]] && exit ${FAKE_NO_PIP:-0}
[[ "$1" == -c ]] && { [[ -n ${FAKE_TORCH:-} ]] && echo "$FAKE_TORCH" && exit 0; exit 1; }
echo "python3 $*" >>"$CALLS/pip"
while [[ $1 != --target ]]; do shift; done
target=$2
shift 2
for package; do [[ $package == torch* ]] && make_torch "$target/torch" 2.13.0 || mkdir -p "$target/$package"; done'

make_torch() {
  mkdir -p "$1/share/cmake/Torch"
  echo >"$1/share/cmake/Torch/TorchConfig.cmake"
  echo "set(PACKAGE_VERSION \"$2\")" >"$1/share/cmake/Torch/TorchConfigVersion.cmake"
}
export CALLS="$work/calls"
export -f make_torch

setup() {
  status=0
  output=$(cd / && PATH="$work/bin" "$work/scripts/setup.sh" "$@" 2>&1) || status=$?
}
readonly newline=$'\n' from_python="(python3's torch)"
expect() {
  eval "$1" && return 0
  printf 'expected: %s\nstatus %s, output:\n%s\n' "$1" "$status" "$output" >&2
  exit 1
}
# Headers are looked for under CMAKE_PREFIX_PATH too.
mkdir -p "$work/prefix/include"/{gtest,gmock,CLI,nlohmann,openssl,benchmark,ucp/api}
touch "$work/prefix/include"/{gtest/gtest.h,gmock/gmock.h,CLI/CLI.hpp,nlohmann/json.hpp,openssl/hmac.h,benchmark/benchmark.h,xxhash.h,ucp/api/ucp.h}
export CMAKE_PREFIX_PATH="$work/prefix"
unset Torch_DIR CXX SERRIED_BUILD_DIR

# Without root: one command, nothing done.
rm "$work/bin/ccache" "$work/bin/clang-format"
setup
expect '[[ $status != 0 && $output == *"  sudo apt-get install -y ccache clang-format" ]]'
expect '[[ ! -e $work/build && ! -e $CALLS/apt && ! -e $CALLS/pip ]]'

# Without apt-get: the names.
mv "$work/bin/apt-get" "$work/apt-get"
setup
expect '[[ $status != 0 && $output == *"missing: ccache clang-format "* && $output != *sudo* ]]'
mv "$work/apt-get" "$work/bin/apt-get"

# As root: what is missing and nothing else, and a LibTorch of our own, with exactly one spec.
FAKE_UID=0 setup
expect '[[ $status == 0 && $output == *"installing ccache clang-format"* && $output == *"(installed now)"* ]]'
expect '[[ $(<"$CALLS/apt") == *"install ccache clang-format" && $(<"$CALLS/apt") != *update* ]]'
expect '[[ $(<"$CALLS/pip") == *" torch==2.13.0" ]]'
stand_in ccache '' && stand_in clang-format ''

# The second time: one line, nothing done.
rm "$CALLS"/*
setup
expect '[[ $status == 0 && $output == "set-up: nothing to do (LibTorch 2.13.0 in "* && $output != *"$newline"* && ! -e $CALLS/apt && ! -e $CALLS/pip ]]'

# The user's own LibTorch comes before python3's, and that before one installed here; another version is passed over.
make_torch "$work/mine" 2.13.1
make_torch "$work/python" 2.13.0
touch "$work/python/Python.h"
make_torch "$work/old" 2.12.0
rm "$work/build/deps/torch_key"
FAKE_TORCH="$work/python" setup
expect '[[ $status == 0 && $output == *"$work/python/share/cmake/Torch $from_python" ]]'
rm "$work/build/deps/torch_key"
FAKE_TORCH="$work/old" setup
expect '[[ $status == 0 && $output == *"(installed here before)" ]]'
CMAKE_PREFIX_PATH="$work/prefix;$work/old;$work/mine" FAKE_TORCH="$work/python" setup
expect '[[ $status == 0 && $output == *"LibTorch 2.13.1 from $work/mine/share/cmake/Torch (CMAKE_PREFIX_PATH)" ]]'
Torch_DIR="$work/old/share/cmake/Torch" setup
expect '[[ $status != 0 && $output == *"holds LibTorch 2.12.0; serried needs LibTorch 2.13"* ]]'

# An interrupted install is not taken for a good one, and pip itself may be missing.
rm -rf "$work/build" && mkdir -p "$work/build/deps" && make_torch "$work/build/deps/libtorch.partial/torch" 2.13.0
FAKE_NO_PIP=1 setup
expect '[[ $status != 0 && $output == *"sudo apt-get install -y python3-pip" ]]'

# The tests need packages of Python's, once.
FAKE_TORCH="$work/python" setup test
expect '[[ $status == 0 && $output == *"installing safetensors numpy expecttest with pip into "* && $(<"$CALLS/pip") == *" safetensors numpy expecttest" ]]'
rm "$CALLS/pip"
FAKE_TORCH="$work/python" setup test
expect '[[ $status == 0 && $output == "set-up: nothing to do "* && ! -e $CALLS/pip ]]'

# One of them has pip install the wheel.
FAKE_TORCH="$work/python" FAKE_NO_PIP=1 setup test
expect '[[ $status != 0 && $output == *"python3-pip" ]]'

# One that is there from before, without the newer ones, is made again; and the headers of Python are part of it.
rm -r "$work/build/deps/python/expecttest" "$work/python/Python.h"
FAKE_UID=0 FAKE_TORCH="$work/python" setup test
expect '[[ $status == 0 && $(<"$CALLS/apt") == *"install python3-dev" && $(<"$CALLS/pip") == *" safetensors numpy expecttest" ]]'
expect '[[ -d $work/build/deps/python/expecttest ]]'
touch "$work/python/Python.h"

# Hosts of namespaces are for root.
mv "$work/bin/tc" "$work/tc"
FAKE_TORCH="$work/python" setup test
expect '[[ $status == 0 && $output == "set-up: nothing to do "* ]]'
FAKE_UID=0 FAKE_TORCH="$work/python" setup test
expect '[[ $status == 0 && $output == *"installing iproute2"* && $(<"$CALLS/apt") == *"install iproute2" ]]'
mv "$work/tc" "$work/bin/tc"

# The benchmarks need more, and the tests a part of that.
rm "$work/bin/mpirun"
FAKE_TORCH="$work/python" setup test
expect '[[ $status != 0 && $output == *"sudo apt-get install -y openmpi-bin" ]]'
setup bench
expect '[[ $status != 0 && $output == *"sudo apt-get install -y openmpi-bin" ]]'
setup nonsense
expect '[[ $status != 0 && $output == *"unknown argument \"nonsense\""* ]]'
echo "set-up: fine"
