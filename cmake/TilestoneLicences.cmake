# The licences of the libraries that are inside a wheel.

# tilestone_install_licences(<folder>): installs them into it, one file for each library.
function(tilestone_install_licences folder)
  foreach(package IN LISTS tilestone_bundled_packages)
    set(file /usr/share/doc/${package}/copyright)
    if(NOT EXISTS ${file})
      message(FATAL_ERROR "${file} is missing. A wheel needs the licence of each library in it, "
                          "and takes it from the Debian package that the library is from.")
    endif()
    install(FILES ${file} DESTINATION ${folder} RENAME ${package}.txt)
  endforeach()
  file(GLOB nanobind_licence ${NB_DIR}/../nanobind-*.dist-info/licenses/LICENSE)
  install(FILES ${nanobind_licence} DESTINATION ${folder} RENAME nanobind.txt)
  # It contains robin_map, whose headers begin with their licence.
  file(READ ${NB_DIR}/ext/robin_map/include/tsl/robin_map.h text)
  string(FIND "${text}" "*/" end)
  string(SUBSTRING "${text}" 0 ${end} text)
  file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/licences/robin_map.txt "${text}*/\n")
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/licences/robin_map.txt DESTINATION ${folder})
endfunction()
