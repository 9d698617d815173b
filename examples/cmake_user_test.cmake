# Installs TILESTONE_BUILD below WORK, builds the project SOURCE against it there, and runs it.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${TILESTONE_BUILD} --prefix ${WORK}/prefix)

# What must not be installed: private headers and the tests' helpers.
file(GLOB_RECURSE private ${WORK}/prefix/*_internal.h ${WORK}/prefix/*_testing.h)
if(private)
  message(FATAL_ERROR "private headers were installed: ${private}")
endif()

run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR}
    -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER}
    -DCMAKE_C_COMPILER=${C_COMPILER})
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/cmake_user ${WORK}/checkpoint)
run(${WORK}/prefix/bin/tilestone ls ${WORK}/checkpoint)
