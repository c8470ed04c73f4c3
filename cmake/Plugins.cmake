# Plug-ins: shared libraries beside libserried.so that it opens where they are used. serried/base/plugin.h finds them.
set(serried_plugins "" CACHE INTERNAL "The plug-ins that are built")

# A plug-in from all sources of a folder. Only a shared library can be shared with them.
function(serried_add_plugin name folder)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/serried/${folder}/*.cpp)
  add_library(serried_${name} MODULE ${sources})
  target_link_libraries(serried_${name} PRIVATE serried ${ARGN})
  target_compile_options(serried_${name} PRIVATE -Wall -Wextra -Wno-unused-parameter)
  target_compile_definitions(serried_${name} PRIVATE SERRIED_VERSION="${PROJECT_VERSION}")
  target_precompile_headers(serried_${name} REUSE_FROM serried)
  set_target_properties(serried_${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY $<TARGET_FILE_DIR:serried>)
  set(serried_plugins ${serried_plugins} serried_${name} CACHE INTERNAL "The plug-ins that are built")
endfunction()

# UCX: messages between hosts.
find_path(UCX_INCLUDE_DIR ucp/api/ucp.h)
find_library(UCX_UCP_LIBRARY ucp)
find_library(UCX_UCS_LIBRARY ucs)
mark_as_advanced(UCX_INCLUDE_DIR UCX_UCP_LIBRARY UCX_UCS_LIBRARY)
if(BUILD_SHARED_LIBS AND UCX_INCLUDE_DIR AND UCX_UCP_LIBRARY AND UCX_UCS_LIBRARY)
  serried_add_plugin(ucx comm/net/ucx ${UCX_UCP_LIBRARY} ${UCX_UCS_LIBRARY})
  target_include_directories(serried_ucx SYSTEM PRIVATE ${UCX_INCLUDE_DIR})
else()
  message(STATUS "UCX was not found: between hosts only gloo carries messages (scripts/setup.sh installs libucx-dev)")
endif()

# MPI: a backend where only MPI drives the network, or starts the ranks.
set(MPI_CXX_SKIP_MPICXX ON)
find_package(MPI QUIET COMPONENTS CXX)
if(BUILD_SHARED_LIBS AND MPI_CXX_FOUND)
  serried_add_plugin(mpi comm/backends/mpi MPI::MPI_CXX)
else()
  message(STATUS "MPI was not found: no \"mpi\" backend (scripts/setup.sh test installs libopenmpi-dev)")
endif()
