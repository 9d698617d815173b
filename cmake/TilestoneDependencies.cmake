# Tilestone's dependencies. cmake/TilestoneConfig.cmake.in and tilestone.pc.in find the same ones for
# the installed package.
#
# All of them are looked for before anything is said about those that are missing.
# tilestone_missing_packages is then the list of Debian packages that have them.

set(tilestone_missing_packages)
# What a wheel brings along, by the Debian packages that have the licences.
set(tilestone_bundled_packages)

# Finds a library by its CMake package.
macro(tilestone_find name package)
  find_package(${name} QUIET)
  list(APPEND tilestone_bundled_packages ${package})
  if(NOT ${name}_FOUND)
    list(APPEND tilestone_missing_packages ${package})
  endif()
endmacro()

# Finds a library without a CMake package in Debian by pkg-config: PkgConfig::<name>. In a wheel it
# is the static archive, if there is one.
macro(tilestone_find_by_pkg_config name module package)
  if(PkgConfig_FOUND)
    pkg_check_modules(${name} QUIET IMPORTED_TARGET GLOBAL ${module})
  endif()
  if(TARGET PkgConfig::${name})
    list(APPEND tilestone_bundled_packages ${package})
    if(TILESTONE_WHEEL)
      _tilestone_link_archive(${name})
    endif()
  else()
    list(APPEND tilestone_missing_packages ${package})
  endif()
endmacro()

function(_tilestone_link_archive name)
  foreach(library IN LISTS ${name}_LIBRARIES)
    find_library(tilestone_archive_${library} lib${library}.a HINTS ${${name}_LIBDIR})
    mark_as_advanced(tilestone_archive_${library})
    if(tilestone_archive_${library})
      set_target_properties(PkgConfig::${name} PROPERTIES INTERFACE_LINK_LIBRARIES
                                                          ${tilestone_archive_${library}})
    endif()
  endforeach()
endfunction()

find_package(Threads REQUIRED)
find_package(PkgConfig QUIET)
if(NOT PkgConfig_FOUND)
  list(APPEND tilestone_missing_packages pkg-config)
endif()
tilestone_find(fmt libfmt-dev)
tilestone_find(spdlog libspdlog-dev)
tilestone_find_by_pkg_config(isal libisal libisal-dev)
tilestone_find_by_pkg_config(crypto libcrypto libssl-dev)
tilestone_find_by_pkg_config(xxhash libxxhash libxxhash-dev)
tilestone_find_by_pkg_config(zlib zlib zlib1g-dev)
tilestone_find_by_pkg_config(zstd libzstd libzstd-dev)
# Header libraries that only sources use. A user of the installed library does not need them.
tilestone_find(nlohmann_json nlohmann-json3-dev)
if(TILESTONE_CLI)
  tilestone_find(CLI11 libcli11-dev)
endif()
if(TILESTONE_S3)
  if(TILESTONE_WHEEL)
    include(TilestoneCurl)
    tilestone_add_curl("${TILESTONE_CURL_SOURCES}")
    list(APPEND tilestone_bundled_packages libcurl4-openssl-dev)
  else()
    tilestone_find_by_pkg_config(curl libcurl libcurl4-openssl-dev)
  endif()
  tilestone_find_by_pkg_config(pugixml pugixml libpugixml-dev)
endif()
if(TILESTONE_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    list(APPEND tilestone_missing_packages libgtest-dev libgmock-dev)
  endif()
endif()

# Without liburing, threads do the I/O with blocking calls. A wheel always has it.
set(tilestone_required_packages ${tilestone_missing_packages})
tilestone_find_by_pkg_config(uring liburing liburing-dev)
set(TILESTONE_HAVE_URING OFF)
if(TARGET PkgConfig::uring)
  set(TILESTONE_HAVE_URING ON)
elseif(NOT TILESTONE_WHEEL)
  set(tilestone_missing_packages ${tilestone_required_packages})
endif()

# A wheel has no MPI: a program must have the MPI library of the machine that it runs on.
set(TILESTONE_HAVE_MPI OFF)
if(TILESTONE_MPI AND NOT TILESTONE_WHEEL)
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(TILESTONE_HAVE_MPI ON)
  endif()
endif()
message(STATUS "Tilestone: io_uring ${TILESTONE_HAVE_URING}, MPI ${TILESTONE_HAVE_MPI}")
