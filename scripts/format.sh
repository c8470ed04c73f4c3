#!/usr/bin/env bash
# Formats every C++ source in place; with --check changes nothing and fails, naming the files that differ.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mapfile -d '' files < <(find serried tools tests benchmarks examples python \( -name '*.h' -o -name '*.cpp' \) -print0)
if [[ ${1:-} != --check ]]; then
  clang-format -i "${files[@]}"
  exit 0
fi

differing=$(clang-format --dry-run "${files[@]}" 2>&1 | sed -n 's/^\(.*\):[0-9]*:[0-9]*: warning: .*/\1/p' | sort -u)
[[ -z $differing ]] && exit 0
printf 'not formatted as .clang-format says:\n%s\n  fix: make format\n' "$differing" >&2
exit 1
