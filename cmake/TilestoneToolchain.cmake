# Compiler, linker and warnings. All settings apply to Tilestone's own targets only, except the
# sanitizers, which the whole program must share.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
if(PROJECT_IS_TOP_LEVEL)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
endif()

find_program(TILESTONE_CCACHE ccache)
mark_as_advanced(TILESTONE_CCACHE)
if(TILESTONE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${TILESTONE_CCACHE})
endif()

find_program(TILESTONE_FAST_LINKER NAMES ld.mold ld.lld)
mark_as_advanced(TILESTONE_FAST_LINKER)
if(PROJECT_IS_TOP_LEVEL AND TILESTONE_FAST_LINKER)
  get_filename_component(tilestone_linker ${TILESTONE_FAST_LINKER} EXT)
  string(SUBSTRING ${tilestone_linker} 1 -1 tilestone_linker)
  add_link_options(-fuse-ld=${tilestone_linker})
endif()

if(TILESTONE_SANITIZE)
  add_compile_options(-fsanitize=${TILESTONE_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${TILESTONE_SANITIZE})
  if(TILESTONE_SANITIZE MATCHES "undefined" AND TILESTONE_SANITIZE MATCHES "address")
    # Both make compilation slow and find nothing that AddressSanitizer doesn't find.
    add_compile_options(-fno-sanitize=null,object-size)
  endif()
endif()
if(TILESTONE_LIBFUZZER)
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# g++'s warnings from data flow depend on what it inlines, and are often wrong.
set(tilestone_guesses
    array-bounds
    dangling-pointer
    format-overflow
    format-truncation
    free-nonheap-object
    nonnull
    stringop-overflow
    stringop-overread
    stringop-truncation
    uninitialized
    use-after-free)

# Warnings for our own code. -Wconversion without -Wsign-conversion reports a value that may lose
# bits, but not an index that changes sign. -Wrestrict is off, because g++ 12 reports std::string's
# own operator+ (GCC bug 105651). So is -Wmaybe-uninitialized, because g++ 12 reports a std::optional
# or std::variant that is moved (GCC bug 80635). Clang reports libstdc++'s use of
# get_temporary_buffer in std::stable_sort as if it were ours, so only g++ reports deprecations.
function(tilestone_warnings target)
  target_compile_options(
    ${target}
    PRIVATE -Wall
            -Wextra
            -Wpedantic
            -Wshadow
            -Wnon-virtual-dtor
            -Woverloaded-virtual
            -Wold-style-cast
            -Wcast-qual
            -Wcast-align
            -Wconversion
            -Wno-sign-conversion
            -Wformat=2
            -Wimplicit-fallthrough
            -Wextra-semi
            -Wno-missing-field-initializers
            $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>
            $<$<CXX_COMPILER_ID:Clang>:-Wno-deprecated-declarations>
            $<$<CXX_COMPILER_ID:GNU>:-Wduplicated-cond>
            $<$<CXX_COMPILER_ID:GNU>:-Wlogical-op>
            $<$<BOOL:${TILESTONE_WERROR}>:-Werror>)
  if(TILESTONE_UNITY)
    # In a unity build g++ treats names that are local to a file as visible elsewhere. The warning is
    # an error in builds by file.
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endif()
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  if(NOT TILESTONE_UNITY)
    # Errors in the unity build of `make test` only, where they are the same for everybody.
    _tilestone_guesses_are_no_errors(${target})
  endif()
endfunction()

function(_tilestone_guesses_are_no_errors target)
  foreach(guess IN LISTS tilestone_guesses)
    target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-error=${guess}>)
  endforeach()
endfunction()

# For the code of tests, in addition to tilestone_warnings(). In sanitized code g++'s warnings from
# data flow are wrong more often. There no warning of the libraries is an error, and of the tests'
# warnings only those from data flow are not.
function(tilestone_test_warnings target)
  if(TILESTONE_TEST_WERROR AND NOT TILESTONE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
    _tilestone_guesses_are_no_errors(${target})
  endif()
endfunction()
