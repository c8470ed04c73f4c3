# What `cmake --install` puts where: the library, its headers, the CMake package and the programs.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(serried_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/serried)

install(TARGETS serried EXPORT serriedTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(program serried_cli serried_doctor)
  if(TARGET ${program})
    install(TARGETS ${program} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()

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
