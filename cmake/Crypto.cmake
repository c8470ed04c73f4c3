# Finds libcrypto, the part of OpenSSL that signs what ranks tell each other. Global, as LibTorch's targets are.
find_package(OpenSSL 3.0 QUIET COMPONENTS Crypto GLOBAL)
if(NOT OpenSSL_FOUND)
  message(FATAL_ERROR "libcrypto of OpenSSL 3 was not found.\n"
                      "  fix: run scripts/setup.sh, or install libssl-dev, or pass -DOPENSSL_ROOT_DIR=<OpenSSL>")
endif()
