# Read by CPack once per kind of package.
if(CPACK_GENERATOR STREQUAL DEB)
  set(CPACK_PACKAGING_INSTALL_PREFIX /opt/serried)
endif()
