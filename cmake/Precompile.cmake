# For projects that use serried: LibTorch's headers take most of the time of every file that includes them.
#
#   serried_precompile(train)
#
# compiles <serried/serried.h> once, for all files of the target. Calls for further targets with the same options share
# that one: serried_precompile(evaluate FROM train).
function(serried_precompile target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "FROM" "")
  if(NOT TARGET ${target})
    message(FATAL_ERROR "serried_precompile: there is no target \"${target}\"\n  fix: call it after add_executable or add_library")
  endif()
  if(arg_FROM)
    target_precompile_headers(${target} REUSE_FROM ${arg_FROM})
  else()
    target_precompile_headers(${target} PRIVATE <serried/serried.h>)
  endif()
endfunction()
