# SERRIED_SANITIZE=address,undefined or =thread builds everything of ours with these sanitizers; LibTorch itself stays as it is.
set(SERRIED_SANITIZE "" CACHE STRING "Sanitizers for all targets: address,undefined or thread")
if(SERRIED_SANITIZE)
  add_compile_options(-fsanitize=${SERRIED_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SERRIED_SANITIZE})
  # The bounds of every std::vector, span and string_view, which the address sanitizer sees only where memory ends.
  add_compile_definitions(_GLIBCXX_ASSERTIONS)
endif()
if(SERRIED_SANITIZE MATCHES "thread")
  # It does not see what fences order, which LibTorch's headers use as well; between ours everything is atomic.
  add_compile_options(-Wno-tsan)
endif()
if(SERRIED_SANITIZE MATCHES "undefined")
  # A report ends the test that caused it: a line in the middle of a passing run is read by nobody.
  add_compile_options(-fno-sanitize-recover=undefined)
  # Needs the type information of every class that is used through a base, and LibTorch does not export all of its own.
  add_compile_options(-fno-sanitize=vptr)
endif()
