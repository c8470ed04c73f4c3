#!/bin/sh
# Compiles through ccache: ccache_launcher.sh <ccache> <compiler and its arguments>. A precompiled header that is made anew is removed first: the preprocessor that ccache runs would
# read the old one in place of the headers, and ccache then find what was made of others.
output=false
for argument; do
  if $output; then
    case $argument in *.gch) rm -f "$argument" ;; esac
  fi
  [ "$argument" = -o ] && output=true || output=false
done
# Without these every lookup of what uses a precompiled header misses.
CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime exec "$@"
