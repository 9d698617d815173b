# Each folder under tilestone/ is a layer: an object library, a test program, and helpers that only
# tests link. ARCHITECTURE.md has the table of layers, and tools/check_includes checks it.

include(CMakeParseArguments)

# tilestone_layer(<name> [DEPS <layer>...] [LINK <target>...] [SOURCES_EXCLUDE <file>...]
#                 [TEST_LINK <target>...] [TEST_TIMEOUT <seconds>] [TEST_SHARDS <number>]
#                 [WITH_SUBFOLDERS] [HOT] [UNITS <folders>...]
#                 [THREADS | THREADED_TESTS <file>...] [UNTHREADED_TESTS <file>...])
#
# Uses the *.cc files of the current folder (with WITH_SUBFOLDERS, also of its subfolders):
#   *_test.cc     the program <name>_test, with one ctest entry of the same name
#   *_testing.cc  helpers and conformance suites for tests of this layer, and of all layers that
#                 have it among their DEPS directly or indirectly
#   all others    the object library tilestone_<name>, part of libtilestone
# DEPS are the layers that this one includes; their own dependencies are added automatically.
# LINK are external libraries. THREADS: all of the test runs under TSan too. THREADED_TESTS: only
# these *_test.cc do, or with TILESTONE_SANITIZE_WHOLE all of them. UNTHREADED_TESTS never do.
# HOT: the tests spend much of their time in this layer's loops over bytes and elements. With
# TILESTONE_OPTIMISE_HOT_ONLY the other layers are compiled without optimisation, in half the time.
# UNITS: with TILESTONE_UNITY the subfolders that one string names (`.` is the layer's own folder)
# are compiled as one; a subfolder that none names is a unit of its own.
function(tilestone_layer name)
  cmake_parse_arguments(
    PARSE_ARGV 1 arg "THREADS;WITH_SUBFOLDERS;HOT" "TEST_TIMEOUT;TEST_SHARDS"
    "DEPS;LINK;SOURCES_EXCLUDE;TEST_LINK;THREADED_TESTS;UNTHREADED_TESTS;UNITS")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "tilestone_layer(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()

  if(NOT arg_TEST_TIMEOUT)
    set(arg_TEST_TIMEOUT 300) # seconds; three times as long in sanitizer builds
  endif()
  if(NOT arg_TEST_SHARDS)
    set(arg_TEST_SHARDS 1)
  endif()

  set(globbing GLOB)
  if(arg_WITH_SUBFOLDERS)
    set(globbing GLOB_RECURSE)
  endif()
  file(${globbing} sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR} *.cc)
  set(tests ${sources})
  set(helpers ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  if(arg_THREADED_TESTS)
    set(arg_THREADS TRUE)
    if(TILESTONE_SANITIZE STREQUAL "thread" AND NOT TILESTONE_SANITIZE_WHOLE)
      set(tests ${arg_THREADED_TESTS})
    endif()
  endif()
  if(arg_UNTHREADED_TESTS AND TILESTONE_SANITIZE STREQUAL "thread")
    list(REMOVE_ITEM tests ${arg_UNTHREADED_TESTS})
  endif()
  list(FILTER helpers INCLUDE REGEX "_testing\\.cc$")
  list(FILTER sources EXCLUDE REGEX "_(test|testing)\\.cc$")
  if(arg_SOURCES_EXCLUDE)
    list(REMOVE_ITEM sources ${arg_SOURCES_EXCLUDE})
  endif()

  _tilestone_closure(layers ${arg_DEPS})
  set(links ${arg_LINK})
  foreach(layer IN LISTS layers)
    get_property(layer_links GLOBAL PROPERTY TILESTONE_LINK_${layer})
    list(APPEND links ${layer_links})
  endforeach()
  list(REMOVE_DUPLICATES links)

  set_property(GLOBAL APPEND PROPERTY TILESTONE_ALL_LAYERS ${name})
  set_property(GLOBAL PROPERTY TILESTONE_LAYERS_OF_${name} ${layers} ${name})
  set_property(GLOBAL PROPERTY TILESTONE_LINK_${name} ${links})

  _tilestone_objects(tilestone_${name} "${sources}" "${links}" "${arg_HOT}" ${arg_UNITS})
  if(TILESTONE_TESTS)
    _tilestone_objects(tilestone_${name}_testing "${helpers}" "${links};GTest::gmock" FALSE)
    if(helpers)
      _tilestone_test_code(tilestone_${name}_testing ${layers} ${name})
    endif()
    if(tests)
      tilestone_test(
        ${name}_test
        SOURCES ${tests}
        LAYERS ${layers} ${name}
        LINK ${arg_TEST_LINK}
        TIMEOUT ${arg_TEST_TIMEOUT}
        THREADS ${arg_THREADS}
        SHARDS ${arg_TEST_SHARDS})
      if(NOT TILESTONE_UNIT_TESTS_IN_ALL)
        tilestone_on_demand(${name}_test)
      endif()
    endif()
  endif()
endfunction()

# tilestone_test(<name> SOURCES <file>... LAYERS <layer>... [LINK <target>...]
#                [TIMEOUT <seconds>] [THREADS <bool>] [SHARDS <number>])
# A GoogleTest program (with its main) for the named layers and their dependencies. It is one ctest
# entry, or SHARDS entries where it is slow (sanitizer builds). tests/ uses it for tests that cross
# folders.
function(tilestone_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;THREADS;SHARDS" "SOURCES;LAYERS;LINK")
  add_executable(${name} ${arg_SOURCES})
  _tilestone_link_layers(${name} TESTING ${arg_LAYERS})
  target_link_libraries(${name} PRIVATE GTest::gmock GTest::gtest_main ${arg_LINK})
  tilestone_warnings(${name})
  _tilestone_test_code(${name} ${arg_LAYERS})
  if(TILESTONE_UNITY)
    # Each file has its own namespace, named like the file, so names don't clash.
    set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 16)
  endif()
  if(arg_SHARDS GREATER 1 AND TILESTONE_SANITIZE)
    foreach(shard RANGE 1 ${arg_SHARDS})
      math(EXPR index "${shard} - 1")
      add_test(NAME ${name}_${shard} COMMAND ${name})
      set_tests_properties(
        ${name}_${shard}
        PROPERTIES ENVIRONMENT "GTEST_TOTAL_SHARDS=${arg_SHARDS};GTEST_SHARD_INDEX=${index}")
      _tilestone_test_properties(${name}_${shard} "${arg_TIMEOUT}" "${arg_THREADS}" ${name})
      # Each part takes longer than other tests, so all of them begin first.
      set_tests_properties(${name}_${shard} PROPERTIES COST 10000)
    endforeach()
  else()
    add_test(NAME ${name} COMMAND ${name})
    _tilestone_test_properties(${name} "${arg_TIMEOUT}" "${arg_THREADS}" ${name})
  endif()
endfunction()

# tilestone_on_demand(<test>): excludes the test's program (of the same name) from the target `all`,
# and sets a label, so that `ctest -LE on_demand` leaves out the test.
function(tilestone_on_demand test)
  set_target_properties(${test} PROPERTIES EXCLUDE_FROM_ALL TRUE)
  set_property(TEST ${test} APPEND PROPERTY LABELS on_demand)
endfunction()

# tilestone_mpi_test(<name> <program target> <ranks>)
# Runs an existing program under mpirun. Does nothing if MPI was not found.
function(tilestone_mpi_test name target ranks)
  if(NOT TILESTONE_HAVE_MPI)
    return()
  endif()
  add_test(NAME ${name} COMMAND ${MPIEXEC_EXECUTABLE} --oversubscribe --allow-run-as-root -n
                                ${ranks} $<TARGET_FILE:${target}> ${ARGN})
  set_tests_properties(${name} PROPERTIES TIMEOUT 300 LABELS mpi PROCESSORS 2)
  # Leaks inside Open MPI itself are not reported.
  set_property(
    TEST ${name}
    APPEND
    PROPERTY ENVIRONMENT "ASAN_OPTIONS=detect_leaks=0" "OMPI_MCA_btl_vader_single_copy_mechanism=none"
             "OMPI_MCA_rmaps_base_oversubscribe=1")
endfunction()

# tilestone_program(<target> [TEST] LAYERS <layer>...): links a plain program of tests/, bench/ or
# fuzz/ with the objects of these layers and of their dependencies. TEST: its code is compiled like
# that of the tests.
function(tilestone_program target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TEST" "" "LAYERS")
  _tilestone_link_layers(${target} "" ${arg_LAYERS})
  tilestone_warnings(${target})
  if(arg_TEST)
    if(TILESTONE_TEST_PCH)
      target_link_libraries(${target} PRIVATE GTest::gmock) # for the precompiled headers
    endif()
    _tilestone_test_code(${target} ${arg_LAYERS})
  endif()
endfunction()

# Makes the library of all declared layers: tilestone, alias Tilestone::tilestone.
function(tilestone_library)
  get_property(layers GLOBAL PROPERTY TILESTONE_ALL_LAYERS)
  add_library(tilestone)
  add_library(Tilestone::tilestone ALIAS tilestone)
  _tilestone_link_layers(tilestone "" ${layers})
  target_include_directories(
    tilestone PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                     $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(tilestone PUBLIC cxx_std_20)
  set_target_properties(tilestone PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION
                                                                        ${PROJECT_VERSION_MAJOR})
endfunction()

function(tilestone_add_subdirectory_if_present folder)
  if(EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/${folder}/CMakeLists.txt)
    add_subdirectory(${folder})
  endif()
endfunction()

# Sets `out` to the named layers and all their dependencies, each one once.
function(_tilestone_closure out)
  set(all)
  foreach(layer IN LISTS ARGN)
    get_property(known GLOBAL PROPERTY TILESTONE_LAYERS_OF_${layer} SET)
    if(NOT known)
      message(FATAL_ERROR "layer ${layer} is named before it is declared")
    endif()
    get_property(below GLOBAL PROPERTY TILESTONE_LAYERS_OF_${layer})
    list(APPEND all ${below})
  endforeach()
  list(REMOVE_DUPLICATES all)
  set(${out} ${all} PARENT_SCOPE)
endfunction()

# The tests' own code is the larger part of a build. To build it fast, it is compiled without the
# undefined behaviour sanitizer and with little optimisation. In a sanitizer build the helpers share
# the libraries' precompiled headers and therefore their flags, and only the programs' own code is
# compiled without optimisation.
function(_tilestone_test_flags target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Dev>:-O1>)
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    target_compile_options(${target} PRIVATE $<$<CONFIG:Sanitized>:-O0>)
  endif()
  tilestone_test_warnings(${target})
  if(TILESTONE_SANITIZE_WHOLE)
    target_compile_definitions(${target} PRIVATE TILESTONE_SANITIZE_WHOLE)
  endif()
  if(TILESTONE_SANITIZE MATCHES "undefined")
    target_compile_options(${target} PRIVATE -fno-sanitize=undefined)
  endif()
endfunction()

# Further arguments are the layers that the target uses.
function(_tilestone_test_code target)
  _tilestone_test_flags(${target})
  get_target_property(type ${target} TYPE)
  if(TILESTONE_TEST_PCH AND type STREQUAL "EXECUTABLE")
    _tilestone_closure(layers ${ARGN})
    _tilestone_reuse_test_headers(${target} "${layers}")
  endif()
endfunction()

# GoogleTest's headers take a third of a test's compile time, so they are precompiled once. In unity
# builds so are the library's public headers, for tests that use the engine; in other builds a
# change of one header would rebuild all of these tests. This is done in a program, because objects
# of libraries have other flags.
function(_tilestone_reuse_test_headers target layers)
  set(program tilestone_test_headers)
  set(headers <gmock/gmock.h> <gtest/gtest.h>)
  if(TILESTONE_UNITY AND engine IN_LIST layers)
    set(program tilestone_engine_test_headers)
    list(APPEND headers <filesystem> <tilestone/tilestone.h>)
  endif()
  if(NOT TARGET ${program})
    _tilestone_empty_source(source ${program} "int main() { return 0; }\n")
    add_executable(${program} ${source})
    target_include_directories(${program} PRIVATE ${PROJECT_SOURCE_DIR})
    target_link_libraries(${program} PRIVATE GTest::gmock)
    tilestone_warnings(${program})
    _tilestone_test_flags(${program})
    target_precompile_headers(${program} PRIVATE ${headers})
    _tilestone_cacheable(${program})
  endif()
  _tilestone_reuse(${target} ${program})
endfunction()

# The standard library's headers take a fifth of a source's compile time. They are not precompiled
# in builds whose warnings are errors, so that a missing #include is found there. Precompiled headers
# have the flags of their users, so there are two sets of them.
function(_tilestone_reuse_standard_headers target hot)
  set(library tilestone_standard_headers)
  if(hot)
    set(library tilestone_standard_headers_hot)
  endif()
  if(NOT TARGET ${library})
    _tilestone_empty_source(source ${library} "")
    add_library(${library} OBJECT ${source})
    if(TILESTONE_OPTIMISE_HOT_ONLY AND NOT hot)
      target_compile_options(${library} PRIVATE -O0)
    endif()
    tilestone_warnings(${library})
    target_precompile_headers(
      ${library}
      PRIVATE
      <algorithm>
      <functional>
      <map>
      <memory>
      <mutex>
      <optional>
      <set>
      <span>
      <string>
      <tuple>
      <unordered_map>
      <variant>
      <vector>)
    _tilestone_cacheable(${library})
  endif()
  _tilestone_reuse(${target} ${library})
endfunction()

function(_tilestone_empty_source out name content)
  set(source ${CMAKE_BINARY_DIR}/${name}.cc)
  file(GENERATE OUTPUT ${source} CONTENT "${content}")
  set(${out} ${source} PARENT_SCOPE)
endfunction()

function(_tilestone_reuse target headers)
  target_precompile_headers(${target} REUSE_FROM ${headers})
  _tilestone_cacheable(${target})
endfunction()

# Sets the options that ccache needs for precompiled headers, besides CCACHE_SLOPPINESS
# (tools/steps.sh).
function(_tilestone_cacheable target)
  target_compile_options(
    ${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>
                      "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endfunction()

# Makes an object library, or an interface library if there are no sources, because CMake has no
# empty object libraries. Further arguments are the layer's UNITS.
function(_tilestone_objects target sources links hot)
  if(NOT sources)
    add_library(${target} INTERFACE)
    return()
  endif()
  add_library(${target} OBJECT ${sources})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${target} PRIVATE ${links})
  tilestone_warnings(${target})
  if(TILESTONE_OPTIMISE_HOT_ONLY AND NOT hot)
    target_compile_options(${target} PRIVATE -O0)
  endif()
  if(TILESTONE_LIBRARY_PCH)
    _tilestone_reuse_standard_headers(${target} "${hot}")
  endif()
  _tilestone_unite(${target} "${sources}" "${hot}" ${ARGN})
endfunction()

# With TILESTONE_UNITY the sources of a folder are compiled as one, in half of the time, because
# headers are read and templates instantiated only once. The unit is the folder, or the folders that
# are named together (UNITS), so that name clashes don't depend on the number of files: a name that
# is local to a file is unique in its unit. At -O3 g++ inlines less in large units: reading and
# writing .metadata took 1.3 and 1.8 times as long. So layers that are HOT are compiled by file there.
function(_tilestone_unite target sources hot)
  if(NOT TILESTONE_UNITY OR (hot AND CMAKE_BUILD_TYPE STREQUAL "Release"))
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS sources)
    get_filename_component(folder ${source} DIRECTORY)
    set(group "${folder}")
    if(NOT folder)
      set(folder .)
    endif()
    foreach(unit IN LISTS ARGN)
      separate_arguments(folders UNIX_COMMAND "${unit}")
      if(folder IN_LIST folders)
        list(JOIN folders "_" group)
      endif()
    endforeach()
    string(REPLACE "." "" group "${group}")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP "of_${group}")
  endforeach()
endfunction()

# Objects are not propagated through link interfaces, so this names the objects and the external
# libraries of each layer. TESTING adds the layers' test helpers.
function(_tilestone_link_layers target testing)
  _tilestone_closure(layers ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
  foreach(layer IN LISTS layers)
    set(parts tilestone_${layer})
    if(testing)
      list(APPEND parts tilestone_${layer}_testing)
    endif()
    foreach(part IN LISTS parts)
      get_target_property(type ${part} TYPE)
      if(type STREQUAL "OBJECT_LIBRARY")
        target_sources(${target} PRIVATE $<TARGET_OBJECTS:${part}>)
      endif()
    endforeach()
    get_property(links GLOBAL PROPERTY TILESTONE_LINK_${layer})
    target_link_libraries(${target} PRIVATE ${links})
  endforeach()
endfunction()

# Every test gets a time limit. Tests with the longest limit begin first, so that the machine is
# busy to the end. Tests with threads get the label that `ctest --preset tsan` picks, and are part
# of the target `threads_tests`, which builds only them.
function(_tilestone_test_properties test timeout threads target)
  if(NOT timeout)
    set(timeout 300)
  endif()
  if(TILESTONE_SANITIZE)
    math(EXPR timeout "${timeout} * 3")
  endif()
  set_tests_properties(${test} PROPERTIES TIMEOUT ${timeout} COST ${timeout})
  if(threads)
    set_tests_properties(${test} PROPERTIES LABELS threads)
    if(NOT TARGET threads_tests)
      add_custom_target(threads_tests)
    endif()
    add_dependencies(threads_tests ${target})
  endif()
endfunction()
