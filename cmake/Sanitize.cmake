# SERRIED_SANITIZE=address,undefined or =thread builds everything of ours with these sanitizers; LibTorch itself stays as it is.
set(SERRIED_SANITIZE "" CACHE STRING "Sanitizers for all targets: address,undefined or thread")
if(SERRIED_SANITIZE)
  add_compile_options(-fsanitize=${SERRIED_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SERRIED_SANITIZE})
endif()
