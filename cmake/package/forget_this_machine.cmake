# Run by CPack on what goes into a package: LibTorch is looked for inside of the folder or beside it, and not where it was
# on the machine that built this.
file(GLOB_RECURSE files ${CPACK_TEMPORARY_DIRECTORY}/*)
foreach(file ${files})
  cmake_path(GET file FILENAME name)
  if(name STREQUAL serriedBuiltWith.cmake)
    file(REMOVE ${file})
  elseif(name MATCHES "^libserried(_[a-z]+)?\\.so")
    file(RPATH_SET FILE ${file} NEW_RPATH "$ORIGIN/../libtorch/lib:$ORIGIN/../../libtorch/lib")
  elseif(name MATCHES "^serried-(doctor|explain|plan)$")
    file(RPATH_SET FILE ${file} NEW_RPATH "$ORIGIN/../../${CPACK_SERRIED_LIBDIR}:$ORIGIN/../../libtorch/lib:$ORIGIN/../../../libtorch/lib")
  endif()
endforeach()
