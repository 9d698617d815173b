# Tilestone's dependencies. cmake/TilestoneConfig.cmake.in finds the same ones in the same way for
# the installed package.

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(spdlog REQUIRED)
find_package(PkgConfig REQUIRED)
# Debian ships no CMake packages for these.
pkg_check_modules(isal REQUIRED IMPORTED_TARGET GLOBAL libisal)
pkg_check_modules(xxhash REQUIRED IMPORTED_TARGET GLOBAL libxxhash)
pkg_check_modules(zlib REQUIRED IMPORTED_TARGET GLOBAL zlib)
pkg_check_modules(zstd REQUIRED IMPORTED_TARGET GLOBAL libzstd)
# Without liburing, threads do the I/O with blocking calls.
pkg_check_modules(uring IMPORTED_TARGET GLOBAL liburing)
set(TILESTONE_HAVE_URING OFF)
if(TARGET PkgConfig::uring)
  set(TILESTONE_HAVE_URING ON)
endif()
# Header libraries that only sources use. A user of the installed library does not need them.
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
