# The libcurl of a wheel: HTTP and HTTPS only, by the OpenSSL that the wheel has anyway. Debian's
# needs ten more libraries for protocols that no object store speaks.

# Defines PkgConfig::curl from the sources in `folder`, which tools/setup gets from Debian. Users
# compile against the installed headers, which are of the same version.
function(tilestone_add_curl folder)
  file(GLOB sources ${folder}/lib/*.c ${folder}/lib/v*/*.c)
  if(NOT sources)
    message(FATAL_ERROR "There are no sources of libcurl in \"${folder}\" (TILESTONE_CURL_SOURCES). "
                        "tools/wheel gets and passes them.")
  endif()
  find_library(tilestone_archive_ssl libssl.a HINTS ${crypto_LIBDIR} REQUIRED)
  mark_as_advanced(tilestone_archive_ssl)
  add_library(tilestone_curl STATIC ${sources})
  target_include_directories(tilestone_curl PRIVATE ${PROJECT_SOURCE_DIR}/cmake ${folder}/include
                                                    ${folder}/lib)
  target_compile_definitions(tilestone_curl PRIVATE BUILDING_LIBCURL CURL_STATICLIB HAVE_CONFIG_H)
  target_compile_options(tilestone_curl PRIVATE -O2 -g0 -w)
  target_link_libraries(tilestone_curl PUBLIC ${tilestone_archive_ssl} PkgConfig::crypto
                                              Threads::Threads)
  # A third of the time; one unit for each of two processors. The others define names twice.
  list(LENGTH sources count)
  math(EXPR half "(${count} + 1) / 2")
  set_target_properties(tilestone_curl PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${half})
  set_source_files_properties(
    ${folder}/lib/easy.c ${folder}/lib/hostip.c ${folder}/lib/version.c
    PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  add_library(PkgConfig::curl ALIAS tilestone_curl)
endfunction()
