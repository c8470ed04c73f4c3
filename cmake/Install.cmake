# What `cmake --install` puts where: the library, its headers, the CMake package and the programs.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(serried_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/serried)

# What the command finds beside itself; it would otherwise have to load LibTorch to start ranks.
set(serried_commands serried_doctor serried_explain serried_plan)
# CMake leaves out libraries inside the build folder, where the set-up puts LibTorch, so their folder is named here.
set_target_properties(serried PROPERTIES INSTALL_RPATH "${TORCH_INSTALL_PREFIX}/lib")
set_target_properties(${serried_commands} PROPERTIES
                      INSTALL_RPATH "$ORIGIN/../../${CMAKE_INSTALL_LIBDIR};${TORCH_INSTALL_PREFIX}/lib")

# `cmake --install` builds nothing by itself, and `make demo` builds less than is installed: what is missing is built now.
add_custom_target(serried_installed DEPENDS serried serried_cli ${serried_commands})
set(built "\"$<TARGET_FILE:serried>\" \"$<TARGET_FILE:serried_cli>\"")
foreach(command ${serried_commands})
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
install(TARGETS serried_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS ${serried_commands} RUNTIME DESTINATION ${CMAKE_INSTALL_LIBEXECDIR}/serried)

# Private: the precompiled header, details, and the insides of the backends and the launcher.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/serried DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h"
        PATTERN "pch.h" EXCLUDE
        PATTERN "detail" EXCLUDE
        PATTERN "backends" EXCLUDE
        PATTERN "launch" EXCLUDE)

install(EXPORT serriedTargets NAMESPACE serried:: DESTINATION ${serried_package_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/serriedConfig.cmake.in serriedConfig.cmake
                              INSTALL_DESTINATION ${serried_package_dir})
write_basic_package_version_file(serriedConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/serriedConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/serriedConfigVersion.cmake
        DESTINATION ${serried_package_dir})
