# What Tilestone is built from. The installed package looks for the same things in the same way:
# cmake/TilestoneConfig.cmake.in.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(PkgConfig REQUIRED)
# Debian ships no CMake packages for these.
pkg_check_modules(isal REQUIRED IMPORTED_TARGET GLOBAL libisal)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET GLOBAL libxxhash)
pkg_check_modules(zlib REQUIRED IMPORTED_TARGET GLOBAL zlib)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET GLOBAL libzstd)
# Without it, plain calls on threads do the I/O.
pkg_check_modules(uring IMPORTED_TARGET GLOBAL liburing)
set(TILESTONE_HAVE_URING OFF)
if(TARGET PkgConfig::uring)
  set(TILESTONE_HAVE_URING ON)
endif()
# Used by sources only, as headers; a user of the installed library needs none of them.
find_package(nlohmann_json REQUIRED)
if(TILESTONE_CLI)
  find_package(CLI11 REQUIRED)
endif()

set(TILESTONE_HAVE_MPI OFF)
if(TILESTONE_MPI)
  find_package(MPI COMPONENTS C)
  if(MPI_C_FOUND)
    set(TILESTONE_HAVE_MPI ON)
  endif()
endif()

if(TILESTONE_TESTS)
  find_package(GTest REQUIRED)
endif()
