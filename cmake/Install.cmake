# What `cmake --install` puts where: the library, its headers, the CMake package and the programs.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(serried_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/serried)

# What the command finds beside itself; it would otherwise have to load LibTorch to start ranks.
set(serried_commands serried_calibrate serried_checkpoint serried_doctor serried_explain serried_plan)
# Where an installed library looks for LibTorch: in a folder libtorch of its own prefix, then beside that, then where it
# was at build time. CMake leaves out libraries inside the build folder, where the set-up puts LibTorch.
set(serried_torch_folders "libtorch/lib" "../libtorch/lib")
list(TRANSFORM serried_torch_folders PREPEND "$ORIGIN/../" OUTPUT_VARIABLE library_rpath)
list(TRANSFORM serried_torch_folders PREPEND "$ORIGIN/../../" OUTPUT_VARIABLE command_rpath)
list(PREPEND command_rpath "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR}")
set_target_properties(serried PROPERTIES INSTALL_RPATH "${library_rpath};${TORCH_INSTALL_PREFIX}/lib")
if(serried_plugins)
  set_target_properties(${serried_plugins} PROPERTIES INSTALL_RPATH "$ORIGIN;${library_rpath};${TORCH_INSTALL_PREFIX}/lib")
endif()
set_target_properties(${serried_commands} PROPERTIES INSTALL_RPATH "${command_rpath};${TORCH_INSTALL_PREFIX}/lib")

# `cmake --install` builds nothing by itself, and `make demo` builds less than is installed: what is missing is built now.
add_custom_target(serried_installed DEPENDS serried serried_cli ${serried_commands} ${serried_plugins})
set(built "\"$<TARGET_FILE:serried>\" \"$<TARGET_FILE:serried_cli>\"")
foreach(command ${serried_commands} ${serried_plugins})
  string(APPEND built " \"$<TARGET_FILE:${command}>\"")
endforeach()
install(CODE "
  foreach(file ${built})
    if(NOT EXISTS \"\${file}\")
      message(STATUS \"Building: \${file} is missing\")
      execute_process(COMMAND \"${CMAKE_COMMAND}\" --build \"${PROJECT_BINARY_DIR}\" --target serried_installed
                      COMMAND_ERROR_IS_FATAL ANY)
      break()
    endif()
  endforeach()")

install(TARGETS serried EXPORT serriedTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
if(serried_plugins)
  install(TARGETS ${serried_plugins} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
install(TARGETS serried_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS ${serried_commands} RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/serried)

# Public is what serried.h reaches through includes; all else is private and stays here.
function(serried_public_headers out)
  set(found serried/serried.h)
  set(unread ${found})
  while(unread)
    list(POP_FRONT unread header)
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} includes REGEX "^#include \"serried/")
    foreach(include ${includes})
      string(REGEX REPLACE "^#include \"(.*)\"$" "\\1" include "${include}")
      if(NOT include IN_LIST found)
        list(APPEND found ${include})
        list(APPEND unread ${include})
      endif()
    endforeach()
  endwhile()
  set(${out} ${found} PARENT_SCOPE)
endfunction()
serried_public_headers(public_headers)
foreach(header ${public_headers})
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${PROJECT_SOURCE_DIR}/${header} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/${folder})
endforeach()

install(EXPORT serriedTargets NAMESPACE serried:: DESTINATION ${serried_package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/serriedConfig.cmake.in serriedConfig.cmake
                              INSTALL_DESTINATION ${serried_package_dir})
write_basic_package_version_file(serriedConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/serriedBuiltWith.cmake
     "# The LibTorch of the machine that serried was built on.\nlist(APPEND serried_torch_folders \"${TORCH_INSTALL_PREFIX}\")\n")
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/serriedConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/serriedConfigVersion.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/serriedBuiltWith.cmake ${CMAKE_CURRENT_LIST_DIR}/Precompile.cmake
        DESTINATION ${serried_package_dir})

# Half a gigabyte, so only where it is asked for: make install LIBTORCH=copy. One among the system's files is no folder to
# copy.
if(TORCH_INSTALL_PREFIX MATCHES "^/usr(/local)?$")
  install(CODE "message(FATAL_ERROR \"LibTorch is in ${TORCH_INSTALL_PREFIX}, among other files: leave out LIBTORCH=copy\")"
          COMPONENT libtorch EXCLUDE_FROM_ALL)
  include(Package)
  return()
endif()
install(DIRECTORY ${TORCH_INSTALL_PREFIX}/lib ${TORCH_INSTALL_PREFIX}/include ${TORCH_INSTALL_PREFIX}/share
        DESTINATION libtorch COMPONENT libtorch EXCLUDE_FROM_ALL USE_SOURCE_PERMISSIONS
        PATTERN "libtorch_python.so" EXCLUDE)

include(Package)
