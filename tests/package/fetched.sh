#!/usr/bin/env bash
# Configures a project that fetches the last commit of this tree: fetched.sh <source> <work> <cmake and its options>
set -euo pipefail
source=$1 work=$2
shift 2
rm -rf "$work"
# The clone may belong to another user, as in a container.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
commit=$(git -C "$source" rev-parse HEAD)
"$@" -S "$(dirname "$0")/fetched" -B "$work" -DSERRIED="$source" -DCOMMIT="$commit"
test -d "$work/_deps/serried-src/serried"
