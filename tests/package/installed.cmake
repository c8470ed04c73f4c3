# Installs serried to a prefix of its own, then configures, builds and runs a project that finds it there.
set(work ${BUILD}/package/installed)
set(prefix ${work}/prefix)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# As after `make demo`, which builds less than is installed.
file(REMOVE ${BUILD}/bin/serried-plan)
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/installed)
# What is installed may be moved.
file(RENAME ${work}/installed ${prefix})
foreach(private pch.h launch tape comm/backends graph/record/recorder.h)
  if(EXISTS ${prefix}/include/serried/${private})
    message(FATAL_ERROR "include/serried/${private} is private but was installed")
  endif()
endforeach()
foreach(program bin/serried libexec/serried/serried-doctor libexec/serried/serried-bench libexec/serried/serried-explain libexec/serried/serried-plan)
  if(NOT EXISTS ${prefix}/${program})
    message(FATAL_ERROR "${program} was not installed")
  endif()
endforeach()
# With nothing in the environment, so that libraries are found by the programs' own means.
execute_process(COMMAND env -i ${prefix}/bin/serried doctor OUTPUT_VARIABLE report COMMAND_ERROR_IS_FATAL ANY)
message("${report}")
if(EXISTS ${BUILD}/serried/libserried_ucx.so AND NOT report MATCHES "yes  ucx ")
  message(FATAL_ERROR "the plug-in libserried_ucx.so was not installed, or cannot be opened there")
endif()
if(EXISTS ${BUILD}/serried/libserried_mpi.so AND NOT report MATCHES "not started by mpirun")
  message(FATAL_ERROR "the plug-in libserried_mpi.so was not installed, or cannot be opened there")
endif()
run(env -i ${prefix}/bin/serried explain aten::mm S0 R --mesh 2)
run(env -i ${prefix}/bin/serried plan --ranks 8)

find_program(ccache ccache)
if(ccache)
  set(launcher -DCMAKE_CXX_COMPILER_LAUNCHER=${ccache})
endif()
run(${CMAKE_COMMAND} -S ${SOURCE}/installed -B ${work}/build -G Ninja -DCMAKE_BUILD_TYPE=Debug
    -DCMAKE_PREFIX_PATH=${prefix} -DTorch_DIR=${TORCH_DIR} -DCMAKE_CXX_COMPILER=${COMPILER}
    ${launcher} -DSANITIZE=${SANITIZE})
run(${CMAKE_COMMAND} --build ${work}/build)
run(env -i ${work}/build/consumer)
run(${prefix}/bin/serried run -n 2 ${work}/build/consumer)
