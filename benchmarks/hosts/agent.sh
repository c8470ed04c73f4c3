#!/usr/bin/env bash
# What mpirun, in one host, starts in place of ssh to have a command run in another: agent.sh HOST COMMAND...
# It hands both to who reads the pipe outside of all hosts, and leaves.
set -euo pipefail
printf '%s %s\n' "$1" "${*:2}" >"${SERRIED_AGENT_PIPE:?}"
