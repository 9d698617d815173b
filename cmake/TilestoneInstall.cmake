# `cmake --install`: headers, library, CMake package and tilestone.pc (component `development`); the
# command line (component `runtime`) is installed where it is built.

include(CMakePackageConfigHelpers)

set(tilestone_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tilestone)

install(TARGETS tilestone EXPORT TilestoneTargets COMPONENT development)
install(
  EXPORT TilestoneTargets
  NAMESPACE Tilestone::
  DESTINATION ${tilestone_package_dir}
  COMPONENT development)
# The list of headers is made during the installation, so a changed #include does not need a new
# configuration.
install(
  CODE "set(tilestone_source \"${PROJECT_SOURCE_DIR}\")
        set(tilestone_include \"${CMAKE_INSTALL_INCLUDEDIR}\")"
  COMPONENT development)
install(SCRIPT ${CMAKE_CURRENT_LIST_DIR}/TilestoneInstallHeaders.cmake COMPONENT development)

configure_package_config_file(
  cmake/TilestoneConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/TilestoneConfig.cmake
  INSTALL_DESTINATION ${tilestone_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/TilestoneConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/TilestoneConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/TilestoneConfigVersion.cmake
        DESTINATION ${tilestone_package_dir}
        COMPONENT development)

# A program that links the static library links what that library links; with a shared one it need
# not. The folders are relative to the file, so that the installation can be moved.
set(tilestone_requires Requires)
if(BUILD_SHARED_LIBS)
  set(tilestone_requires Requires.private)
endif()
set(tilestone_requires_uring)
if(TILESTONE_HAVE_URING)
  set(tilestone_requires_uring " liburing")
endif()
set(tilestone_requires_s3)
if(TILESTONE_S3)
  set(tilestone_requires_s3 " libcurl pugixml")
endif()
file(RELATIVE_PATH tilestone_prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/tilestone.pc.in ${CMAKE_CURRENT_BINARY_DIR}/tilestone.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tilestone.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT development)
