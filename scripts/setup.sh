#!/usr/bin/env bash
# Installs what a build of serried needs and is not there yet: Debian packages and LibTorch. `setup.sh bench` adds what the benchmarks compare with,
# `setup.sh fuzz` clang with libFuzzer, `setup.sh test` what makes hosts of namespaces, Open MPI for the mpi backend, Python's headers, and Python's
# safetensors, which reads our files and writes some for us, with what PyTorch's own tests import.
# Does nothing the second time. Leaves the folder of TorchConfig.cmake in build/deps/torch_dir, where CMake looks for it.
set -euo pipefail

readonly torch_version=2.13
readonly torch_spec=torch==2.13.0
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
readonly root
readonly deps="${SERRIED_BUILD_DIR:-$root/build}/deps"

say() { printf 'set-up: %s\n' "$*"; }
fail() {
  printf 'set-up: %s\n' "$@" >&2
  exit 1
}

# ---- Packages: found by what they bring, so that a cmake or a GoogleTest from elsewhere counts.

has_header() {
  local folder
  local -a folders
  IFS=':;' read -ra folders <<<"${CMAKE_PREFIX_PATH:-}"
  for folder in /usr /usr/local ${folders[@]+"${folders[@]}"}; do
    [[ -e "$folder/include/$1" ]] && return 0
  done
  return 1
}

has_command() { command -v "$1" >/dev/null; }

missing_packages() {
  has_command ninja || echo ninja-build
  has_command ccache || echo ccache
  has_command clang-format || echo clang-format
  has_command cmake || echo cmake
  has_command "${CXX:-g++}" || echo g++
  has_command python3 || echo python3
  has_command objdump && has_command nm || echo binutils
  has_command script || echo bsdutils
  has_header gtest/gtest.h || echo libgtest-dev
  has_header gmock/gmock.h || echo libgmock-dev
  has_header CLI/CLI.hpp || echo libcli11-dev
  has_header nlohmann/json.hpp || echo nlohmann-json3-dev
  has_header openssl/hmac.h || echo libssl-dev
  has_header xxhash.h || echo libxxhash-dev
  # Not needed, but faster between hosts than what LibTorch brings.
  has_header ucp/api/ucp.h || echo libucx-dev
  # Only root can use it.
  if [[ $mode == test ]] && has_command python3; then has_python_headers || echo python3-dev; fi
  if [[ $mode == test && $(id -u) == 0 ]]; then has_command ip && has_command tc || echo iproute2; fi
  if [[ $mode == fuzz ]]; then has_libfuzzer || printf '%s\n' clang libclang-rt-14-dev llvm; fi
  [[ $mode == bench || $mode == test ]] || return 0
  has_command mpirun || echo openmpi-bin
  has_command mpicxx || echo libopenmpi-dev
  [[ $mode == bench ]] || return 0
  has_header benchmark/benchmark.h || echo libbenchmark-dev
}

# Clang comes without its runtime libraries where only the compiler was asked for.
has_libfuzzer() {
  has_command clang++ && [[ -e $(clang++ -print-file-name=libclang_rt.fuzzer-x86_64.a) || -e $(clang++ -print-file-name=libclang_rt.fuzzer.a) ]]
}

# Root as it is, or sudo where it asks no password; empty and false where there is neither.
find_root() {
  as_root=()
  [[ $(id -u) == 0 ]] && return 0
  as_root=(sudo)
  has_command sudo && sudo -n true 2>/dev/null
}

install_packages() {
  local -a wanted=("$@")
  has_command apt-get || fail "missing: ${wanted[*]} (Debian's names); install them with this system's package manager"
  if ! find_root; then
    fail "some packages are missing and this user cannot install them; run this, then try again:" \
      "  sudo apt-get install -y ${wanted[*]}"
  fi
  say "installing ${wanted[*]}"
  local -a apt=(${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -qq -y)
  # A simulated install fails where the package lists are absent; a real one where they are stale.
  if ! apt-get -s install "${wanted[@]}" >/dev/null 2>&1; then "${apt[@]}" update; fi
  "${apt[@]}" install "${wanted[@]}" && return 0
  "${apt[@]}" update
  "${apt[@]}" install "${wanted[@]}"
}

# ---- LibTorch: the user's own, python3's, one installed here before, else a new one in build/deps.

# The version that a folder with TorchConfig.cmake is of; empty where it has none.
version_of() {
  [[ -f "$1/TorchConfig.cmake" && -f "$1/TorchConfigVersion.cmake" ]] || return 0
  local line
  while IFS= read -r line; do
    [[ $line =~ PACKAGE_VERSION\ \"([0-9.]+)\" ]] && echo "${BASH_REMATCH[1]}" && return 0
  done <"$1/TorchConfigVersion.cmake"
}

fits() { [[ $(version_of "$1") == "$torch_version".* ]]; }

take() {
  torch_dir=$1
  torch_source=$2
}

# Torch_DIR that does not fit is a mistake to report; a prefix that does not fit is just not the one.
find_users_torch() {
  local given="${Torch_DIR:-}" version prefix tail
  if [[ -n $given ]]; then
    version=$(version_of "$given")
    fits "$given" || fail "Torch_DIR=$given holds ${version:+LibTorch }${version:-no TorchConfig.cmake}; serried needs LibTorch $torch_version" \
      "  fix: point Torch_DIR to the share/cmake/Torch folder of a LibTorch $torch_version, or unset it"
    take "$given" Torch_DIR
    return 0
  fi
  local -a prefixes
  IFS=':;' read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in ${prefixes[@]+"${prefixes[@]}"}; do
    for tail in "" /Torch /share/cmake/Torch; do
      if fits "$prefix$tail"; then
        take "$prefix$tail" CMAKE_PREFIX_PATH
        return 0
      fi
    done
  done
  return 1
}

# Found without importing it: an import of torch takes more than a second.
find_pythons_torch() {
  local folder
  folder=$(python3 -c 'import importlib.util as u, os; s = u.find_spec("torch"); print(os.path.dirname(s.origin))' 2>/dev/null) || return 1
  fits "$folder/share/cmake/Torch" || return 1
  take "$folder/share/cmake/Torch" "python3's torch"
}

find_own_torch() {
  fits "$deps/libtorch/torch/share/cmake/Torch" || return 1
  take "$deps/libtorch/torch/share/cmake/Torch" "installed here before"
}

install_torch() {
  local partial="$deps/libtorch.partial"
  say "no LibTorch $torch_version found: installing $torch_spec with pip into $deps/libtorch (a few hundred MB)"
  rm -rf "$partial" "$deps/libtorch"
  python3 -m pip install --quiet --no-warn-script-location --target "$partial" "$torch_spec" ||
    fail "pip could not install $torch_spec" "  fix: check the network, or set Torch_DIR to a LibTorch $torch_version you have"
  # Renamed only when whole: an interrupted install is not taken for a good one.
  mv "$partial" "$deps/libtorch"
  find_own_torch || fail "the $torch_spec that pip installed has no CMake files in $deps/libtorch/torch/share/cmake"
  torch_source="installed now"
  if [[ -e "$deps/libtorch/torch/lib/libtorch_cuda.so" ]] && ! has_command nvcc; then
    fail "pip gave a CUDA build of $torch_spec, which CMake can use only with the CUDA toolkit (nvcc)" \
      "  fix: install the toolkit, or rm -r $deps/libtorch, let PIP_INDEX_URL point to PyTorch's index of CPU wheels, and try again"
  fi
}

# Into a folder of its own, for the tests alone; none of them needs torch to be installed.
readonly python_packages=(safetensors numpy expecttest)
has_python_packages() {
  local package
  for package in "${python_packages[@]}"; do [[ -d $deps/python/$package ]] || return 1; done
}
install_python_packages() {
  local partial="$deps/python.partial"
  say "installing ${python_packages[*]} with pip into $deps/python"
  rm -rf "$partial"
  python3 -m pip install --quiet --no-warn-script-location --target "$partial" "${python_packages[@]}" ||
    fail "pip could not install ${python_packages[*]}" "  fix: check the network, or install them into $deps/python by hand"
  rm -rf "$deps/python"
  mv "$partial" "$deps/python"
}

# Not every Python has them; the package that `make wheel` makes needs them.
has_python_headers() { [[ -e $(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h ]]; }

find_torch() { find_users_torch || find_pythons_torch || find_own_torch; }

# ---- Once through.

mode=${1:-build}
[[ $mode == build || $mode == bench || $mode == fuzz || $mode == test ]] || fail "unknown argument \"$mode\"; known: bench, fuzz, test"
torch_dir='' torch_source='' did=''

# What the earlier answer depended on; python3 is asked again only where this changed.
key="${Torch_DIR:-}|${CMAKE_PREFIX_PATH:-}|$(command -v python3 || true)"
if [[ -f $deps/torch_dir && -f $deps/torch_key && $(<"$deps/torch_key") == "$key" ]] && fits "$(<"$deps/torch_dir")"; then
  take "$(<"$deps/torch_dir")" "as before"
fi

mapfile -t missing < <(missing_packages)
needs_pip=''
if [[ -z $torch_dir ]] && ! find_torch; then needs_pip=yes; fi
# Tests import what pip brings, and one installs our wheel with it.
if [[ $mode == test ]]; then needs_pip=yes; fi
if [[ -n $needs_pip ]] && ! python3 -m pip --version >/dev/null 2>&1; then
  missing+=(python3-pip)
fi
if ((${#missing[@]})); then
  install_packages "${missing[@]}"
  did=yes
fi

cmake_version=$(cmake --version | { read -r _ _ version && echo "$version"; })
[[ $(printf '%s\n' 3.25 "$cmake_version" | sort -V | head -1) == 3.25 ]] ||
  fail "cmake is $cmake_version; serried needs 3.25 or newer" "  fix: install a newer one, for instance with: python3 -m pip install cmake"

mkdir -p "$deps"
if [[ -z $torch_dir ]]; then
  find_torch || install_torch
fi
if [[ $torch_source != "as before" ]]; then
  printf '%s\n' "$torch_dir" >"$deps/torch_dir"
  printf '%s\n' "$key" >"$deps/torch_key"
  say "LibTorch $(version_of "$torch_dir") from $torch_dir ($torch_source)"
  did=yes
fi
if [[ $mode == test ]] && ! has_python_packages; then
  install_python_packages
  did=yes
fi
[[ -n $did ]] || say "nothing to do (LibTorch $(version_of "$torch_dir") in ${torch_dir%/share/cmake/Torch})"
