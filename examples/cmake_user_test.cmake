# Installs TILESTONE_BUILD below WORK, builds the project SOURCE against that installation, and runs
# the built program.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${TILESTONE_BUILD} --prefix ${WORK}/prefix)

# Private headers, test helpers and headers of plan/ must not be installed. The exceptions are the
# two plan headers that callers use without a save: the access check and the distribution of shards.
set(include ${WORK}/prefix/include)
file(GLOB_RECURSE private ${include}/*_internal.h ${include}/*_testing.h ${include}/*/plan/*.h)
list(FILTER private EXCLUDE REGEX "/plan/(access|distribution)\\.h$")
if(private)
  message(FATAL_ERROR "private headers were installed: ${private}")
endif()

# Every installed header must compile alone, and tilestone.h must include all of them. A header with
# a source file of its own is not compiled here: it is the first include of that source, so the
# library's build has checked it.
set(compile ${CXX_COMPILER} -std=c++20 -fsyntax-only -Werror -Wall -Wextra -I${include} -x c++)
file(GLOB_RECURSE headers RELATIVE ${include} ${include}/tilestone/*.h)
foreach(header IN LISTS headers)
  string(REGEX REPLACE "h$" "cc" own "${SOURCE}/../../${header}")
  if(EXISTS "${own}")
    continue()
  endif()
  file(WRITE ${WORK}/alone.cc "#include <${header}>\n")
  execute_process(COMMAND ${compile} ${WORK}/alone.cc COMMAND_ERROR_IS_FATAL ANY)
endforeach()
execute_process(COMMAND ${CXX_COMPILER} -std=c++20 -I${include} -MM -x c++
                        ${include}/tilestone/tilestone.h
                OUTPUT_VARIABLE reached COMMAND_ERROR_IS_FATAL ANY)
foreach(header IN LISTS headers)
  string(FIND "${reached}" "${include}/${header}" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "${header} is installed, but tilestone.h does not include it")
  endif()
endforeach()

run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
    -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    -DCMAKE_C_COMPILER=${C_COMPILER})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/cmake_user ${WORK}/checkpoint)
run(${WORK}/prefix/bin/tilestone ls ${WORK}/checkpoint)
