# `make package`: an archive and a Debian package for machines that have a LibTorch of their own.
set(CPACK_GENERATOR TGZ DEB)
set(CPACK_PACKAGE_CONTACT "the serried authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Distributed training for LibTorch 2.13, in C++")
set(CPACK_PACKAGE_FILE_NAME serried-${PROJECT_VERSION}-${CMAKE_SYSTEM_NAME}-${CMAKE_SYSTEM_PROCESSOR})
string(TOLOWER "${CPACK_PACKAGE_FILE_NAME}" CPACK_PACKAGE_FILE_NAME)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_COMPONENTS_ALL Unspecified)  # all but LibTorch
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
# Named by hand: dpkg-shlibdeps would ask which package LibTorch comes from. All of libssl3 are compatible; the others gain
# symbols with each version, so no older ones than those of the machine that builds will do.
set(CPACK_DEBIAN_PACKAGE_DEPENDS libssl3)
foreach(library libc6 libstdc++6)
  execute_process(COMMAND dpkg-query --show --showformat=\${source:Upstream-Version} ${library}
                  OUTPUT_VARIABLE version ERROR_QUIET)
  if(version MATCHES "^[0-9]+\\.[0-9]+")
    string(APPEND CPACK_DEBIAN_PACKAGE_DEPENDS ", ${library} (>= ${CMAKE_MATCH_0})")
  endif()
endforeach()
# For the plug-ins: without UCX gloo carries what it would, without Open MPI there is no mpi backend.
set(plugin_packages)
if(TARGET serried_ucx)
  list(APPEND plugin_packages libucx0)
endif()
if(TARGET serried_mpi)
  list(APPEND plugin_packages libopenmpi3)
endif()
list(JOIN plugin_packages ", " CPACK_DEBIAN_PACKAGE_RECOMMENDS)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
# Archives unpack to a folder of their own, the Debian package to one beside which a LibTorch fits: /opt/libtorch.
set(CPACK_PROJECT_CONFIG_FILE ${CMAKE_CURRENT_LIST_DIR}/package/per_generator.cmake)
set(CPACK_SERRIED_LIBDIR ${CMAKE_INSTALL_LIBDIR})
set(CPACK_PRE_BUILD_SCRIPTS ${CMAKE_CURRENT_LIST_DIR}/package/forget_this_machine.cmake)
include(CPack)
