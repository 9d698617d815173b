# Run by `cmake --install`. Copies tilestone/tilestone.h, and all headers that it includes directly
# or indirectly, from tilestone_source to tilestone_include (absolute or relative to the prefix).

if(NOT IS_ABSOLUTE "${tilestone_include}")
  set(tilestone_include "${CMAKE_INSTALL_PREFIX}/${tilestone_include}")
endif()

set(pending tilestone/tilestone.h)
set(found ${pending})
while(pending)
  list(POP_FRONT pending header)
  file(STRINGS "${tilestone_source}/${header}" lines REGEX "^[ \t]*#[ \t]*include[ \t]+\"")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^[^\"]*\"([^\"]+)\".*$" "\\1" included "${line}")
    if(NOT included IN_LIST found)
      list(APPEND found "${included}")
      list(APPEND pending "${included}")
    endif()
  endforeach()
  get_filename_component(folder "${header}" DIRECTORY)
  file(INSTALL "${tilestone_source}/${header}" DESTINATION "${tilestone_include}/${folder}")
endwhile()
