# Fewer, larger units. LibTorch's headers leave so many templates to instantiate that a file costs 5 to 9 s before its
# first own line, so the files of a folder are compiled some at a time: a clean build takes half as long.
option(SERRIED_UNITY "Compile several files of a folder as one unit" ON)

# Lets a small program of ours use the library's precompiled header, which was not made for PIE.
function(serried_reuse_header target)
  target_compile_options(${target} PRIVATE -fPIC)
  target_precompile_headers(${target} REUSE_FROM serried)
endfunction()

# Sets `out` to the name of the folder whose units `source` belongs to.
function(serried_unit_folder out source base)
  cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${base})
  cmake_path(GET source PARENT_PATH folder)
  file(GLOB neighbours ${folder}/*.cpp)
  list(LENGTH neighbours count)
  # One or two files are not worth a unit of their own.
  if(count LESS 3 AND NOT folder STREQUAL base)
    cmake_path(GET folder PARENT_PATH folder)
  endif()
  file(RELATIVE_PATH folder ${PROJECT_SOURCE_DIR} ${folder})
  string(MAKE_C_IDENTIFIER "${folder}" folder)
  set(${out} ${folder} PARENT_SCOPE)
endfunction()

# Compiles the files of `target` in units of at most `size`, all of one folder: a change recompiles only neighbours.
# A file with SKIP_UNITY_BUILD_INCLUSION stays alone.
function(serried_unity target size)
  if(NOT SERRIED_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  get_target_property(base ${target} SOURCE_DIR)
  list(FILTER sources INCLUDE REGEX "^[^$]*\\.cpp$")
  set(folders)
  foreach(source ${sources})
    get_source_file_property(alone ${source} TARGET_DIRECTORY ${target} SKIP_UNITY_BUILD_INCLUSION)
    if(NOT alone)
      serried_unit_folder(folder ${source} ${base})
      list(APPEND folders ${folder})
      list(APPEND files_${folder} ${source})
    endif()
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(folder ${folders})
    # As many units as it takes, all of about the same length.
    list(LENGTH files_${folder} count)
    math(EXPR units "(${count} + ${size} - 1) / ${size}")
    set(index 0)
    foreach(source ${files_${folder}})
      math(EXPR unit "${index} * ${units} / ${count}")
      math(EXPR index "${index} + 1")
      set_property(SOURCE ${source} TARGET_DIRECTORY ${target} PROPERTY UNITY_GROUP ${folder}_${unit})
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()
