# Installs TILESTONE_BUILD below WORK, moves the installation, and builds users against it: the
# project SOURCE in release, the same program without optimisation by pkg-config, and one with MPI.
# Runs each.

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ECHO STDOUT COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Configures a user's project; the further arguments go to CMake.
function(configure source build)
  execute_process(
    COMMAND ${CMAKE_COMMAND} -S ${source} -B ${build} -G ${GENERATOR}
            -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_COMPILER=${CXX_COMPILER} ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  message(STATUS "configured ${build}: ${result}\n${output}")
  set(result ${result} PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
endfunction()

function(configure_and_build source build)
  configure(${source} ${build} ${ARGN})
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "${source} was not configured")
  endif()
  run(${CMAKE_COMMAND} --build ${build})
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${TILESTONE_BUILD} --prefix ${WORK}/first)
file(RENAME ${WORK}/first ${WORK}/prefix)

# Private headers, test helpers and headers of plan/ and storage/ must not be installed.
set(include ${WORK}/prefix/include)
file(GLOB_RECURSE private ${include}/*_internal.h ${include}/*_testing.h ${include}/*/plan/*.h
     ${include}/*/storage/*.h)
if(private)
  message(FATAL_ERROR "private headers were installed: ${private}")
endif()

# Every installed header must compile alone, and tilestone.h must include all of them. A header with
# a source file of its own is not compiled here: it is the first include of that source, so the
# library's build has checked it.
set(compile ${CXX_COMPILER} -std=c++20 -fsyntax-only -Werror -Wall -Wextra -I${include} -x c++)
file(GLOB_RECURSE headers RELATIVE ${include} ${include}/tilestone/*.h)
list(LENGTH headers count)
if(count GREATER 27)
  message(FATAL_ERROR "${count} headers were installed: at most tilestone.h and 26 behind it")
endif()
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

configure_and_build(${SOURCE} ${WORK}/user -DCMAKE_BUILD_TYPE=Release)
run(${WORK}/user/cmake_user ${WORK}/checkpoint)
run(${WORK}/prefix/bin/tilestone ls ${WORK}/checkpoint)
execute_process(COMMAND readelf --dynamic ${WORK}/user/cmake_user
                OUTPUT_VARIABLE needed COMMAND_ERROR_IS_FATAL ANY)
if(needed MATCHES "libmpi")
  message(FATAL_ERROR "a program that did not ask for MPI needs it:\n${needed}")
endif()

# Without CMake, by the flags of tilestone.pc.
file(GLOB_RECURSE pc ${WORK}/prefix/*/tilestone.pc)
get_filename_component(pc_folder ${pc} DIRECTORY)
set(ENV{PKG_CONFIG_PATH} ${pc_folder})
execute_process(COMMAND pkg-config --cflags --libs tilestone OUTPUT_VARIABLE flags
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
separate_arguments(flags UNIX_COMMAND "${flags}")
run(${CXX_COMPILER} -std=c++20 ${SOURCE}/main.cc ${flags} -o ${WORK}/pkg_config_user)
run(${WORK}/pkg_config_user ${WORK}/checkpoint)

# The component `mpi`, and what is said if the package has no such component.
set(mpi_user "cmake_minimum_required(VERSION 3.25)\nproject(MpiUser LANGUAGES CXX)\n")
string(APPEND mpi_user "find_package(Tilestone REQUIRED COMPONENTS mpi)\n"
              "add_executable(mpi_user ${SOURCE}/../mpi_reshard.cc)\n"
              "target_link_libraries(mpi_user PRIVATE Tilestone::tilestone)\n")
file(WRITE ${WORK}/mpi_user/CMakeLists.txt "${mpi_user}")
if(HAVE_MPI)
  configure_and_build(${WORK}/mpi_user ${WORK}/mpi)
  run(${MPIEXEC} --oversubscribe --allow-run-as-root -n 2 ${WORK}/mpi/mpi_user save
      ${WORK}/mpi_checkpoint)
  string(REPLACE "COMPONENTS mpi" "COMPONENTS nonsense" mpi_user "${mpi_user}")
  file(WRITE ${WORK}/mpi_user/CMakeLists.txt "${mpi_user}")
endif()
configure(${WORK}/mpi_user ${WORK}/refused)
if(result EQUAL 0 OR NOT output MATCHES "without[ \n]+MPI|component[ \n]+nonsense")
  message(FATAL_ERROR "a component that is not there is not refused")
endif()

# A build without the libraries names all of their packages in one line, as README.md does.
set(disabled)
foreach(package PkgConfig fmt spdlog nlohmann_json CLI11)
  list(APPEND disabled -DCMAKE_DISABLE_FIND_PACKAGE_${package}=ON)
endforeach()
set(root ${SOURCE}/../..)
configure(${root} ${WORK}/without -DTILESTONE_TESTS=OFF ${disabled})
set(packages "pkg-config libfmt-dev libspdlog-dev libisal-dev libssl-dev libxxhash-dev zlib1g-dev libzstd-dev")
string(APPEND packages " nlohmann-json3-dev libcli11-dev")
if(result EQUAL 0 OR NOT output MATCHES "sudo apt-get install ${packages}\n"
   OR output MATCHES "Call Stack")
  message(FATAL_ERROR "not one line that names the packages")
endif()
file(READ ${root}/README.md readme)
if(NOT readme MATCHES "sudo apt-get install g\\+\\+ ${packages}\n")
  message(FATAL_ERROR "README.md does not name the packages that a build needs")
endif()
