# Finds LibTorch: Torch_DIR or CMAKE_PREFIX_PATH first, then what scripts/setup.sh has found or installed.
if(NOT Torch_DIR AND EXISTS ${PROJECT_SOURCE_DIR}/build/deps/torch_dir)
  file(STRINGS ${PROJECT_SOURCE_DIR}/build/deps/torch_dir serried_torch_dir LIMIT_COUNT 1)
  list(APPEND CMAKE_PREFIX_PATH ${serried_torch_dir})
endif()

# LibTorch warns that it has no static kineto library; its shared one has kineto inside, so any name of a library will do.
set(kineto_LIBRARY torch)
# Global, so that a project which has serried as a subdirectory sees LibTorch's targets too.
set(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL ON)
find_package(Torch 2.13 QUIET)
unset(CMAKE_FIND_PACKAGE_TARGETS_GLOBAL)
if(NOT Torch_FOUND)
  message(FATAL_ERROR "LibTorch 2.13 was not found.\n"
                      "  fix: run scripts/setup.sh, or pass -DTorch_DIR=<LibTorch>/share/cmake/Torch")
endif()
message(STATUS "LibTorch ${Torch_VERSION}: ${TORCH_INSTALL_PREFIX}")

# LibTorch's headers give some classes other members where NDEBUG is missing (at::RecordFunction), and the LibTorch that is
# linked was built with it.
add_compile_definitions($<$<CONFIG:Debug>:NDEBUG>)
