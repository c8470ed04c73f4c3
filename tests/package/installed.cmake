# Installs serried to a prefix of its own, then configures, builds and runs a project that finds it there.
set(work ${BUILD}/package/installed)
set(prefix ${work}/prefix)
file(REMOVE_RECURSE ${work})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
foreach(private pch.h comm/launch comm/backends comm/detail)
  if(EXISTS ${prefix}/include/serried/${private})
    message(FATAL_ERROR "include/serried/${private} is private but was installed")
  endif()
endforeach()
foreach(program serried)
  if(NOT EXISTS ${prefix}/bin/${program})
    message(FATAL_ERROR "bin/${program} was not installed")
  endif()
endforeach()

find_program(ccache ccache)
if(ccache)
  set(launcher -DCMAKE_CXX_COMPILER_LAUNCHER=${ccache})
endif()
run(${CMAKE_COMMAND} -S ${SOURCE}/installed -B ${work}/build -G Ninja -DCMAKE_BUILD_TYPE=Debug
    -DCMAKE_PREFIX_PATH=${prefix} -DTorch_DIR=${TORCH_DIR} -DCMAKE_CXX_COMPILER=${COMPILER}
    ${launcher} -DSANITIZE=${SANITIZE})
run(${CMAKE_COMMAND} --build ${work}/build)
run(${work}/build/consumer)
run(${prefix}/bin/serried run -n 2 ${work}/build/consumer)
