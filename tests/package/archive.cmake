# Makes the archive, unpacks it beside a LibTorch, and uses it there from an empty environment.
set(work ${BUILD}/package/archive)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

run(${CMAKE_COMMAND} -E chdir ${BUILD} ${CPACK} -G TGZ -B ${work}/packages)
file(GLOB archive ${work}/packages/*.tar.gz)
file(ARCHIVE_EXTRACT INPUT ${archive} DESTINATION ${work})
file(GLOB prefix ${work}/serried-*)

# Of the machine that built it nothing is left that a program or CMake would read.
file(GLOB_RECURSE cmake_files ${prefix}/*.cmake)
foreach(file ${cmake_files})
  file(READ ${file} text)
  string(FIND "${text}" "${TORCH_PREFIX}" found)
  if(NOT found EQUAL -1)
    message(FATAL_ERROR "${file} names ${TORCH_PREFIX}")
  endif()
endforeach()
execute_process(COMMAND env -i ${prefix}/bin/serried doctor RESULT_VARIABLE status OUTPUT_QUIET ERROR_QUIET)
if(status EQUAL 0)
  message(FATAL_ERROR "serried doctor found a LibTorch where there is none")
endif()

file(CREATE_LINK ${TORCH_PREFIX} ${work}/libtorch SYMBOLIC)
run(env -i ${prefix}/bin/serried doctor)
run(env -i ${prefix}/bin/serried plan --ranks 8)
# No Torch_DIR, no build type: the defaults are right.
run(${CMAKE_COMMAND} -S ${SOURCE}/defaults -B ${work}/build -G Ninja -DCMAKE_PREFIX_PATH=${prefix}
    -DCMAKE_CXX_COMPILER=${COMPILER} -DLIBTORCH=${work}/libtorch)

# dpkg refuses it where the libraries are older than those it was built with.
find_program(DPKG_DEB dpkg-deb)
if(DPKG_DEB)
  run(${CMAKE_COMMAND} -E chdir ${BUILD} ${CPACK} -G DEB -B ${work}/packages)
  file(GLOB package ${work}/packages/*.deb)
  execute_process(COMMAND ${DPKG_DEB} --field ${package} Depends OUTPUT_VARIABLE depends)
  if(NOT depends MATCHES "^libssl3, libc6 \\(>= [0-9]+\\.[0-9]+\\), libstdc\\+\\+6 \\(>= [0-9]+\\.[0-9]+\\)\n$")
    message(FATAL_ERROR "the package depends on ${depends}")
  endif()
endif()
