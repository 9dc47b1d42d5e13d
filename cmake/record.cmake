# SPDX-License-Identifier: Apache-2.0
# build.log, installed beside cuattnConfig.cmake: what ptxas said of every CUDA source, and the weak
# symbols of the per-ISA CPU objects. tests/house/test_ptxas.py and tests/house/test_package.py judge it,
# wherever the library was built. Included, this file adds the step after linking; as a script
# (-D OBJECTS=file -D NM=nm -D OUTPUT=file -P) it is that step.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  get_property(cuda_objects GLOBAL PROPERTY CUATTN_CUDA_OBJECTS)
  get_property(isa_objects GLOBAL PROPERTY CUATTN_ISA_OBJECTS)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/objects.cmake CONTENT
    "set(cuda_objects \"${cuda_objects}\")\nset(isa_objects \"${isa_objects}\")\n")
  add_custom_command(TARGET cuattn POST_BUILD VERBATIM
    COMMAND ${CMAKE_COMMAND} -D OBJECTS=${PROJECT_BINARY_DIR}/objects.cmake -D NM=${CMAKE_NM}
            -D OUTPUT=${PROJECT_BINARY_DIR}/build.log -P ${CMAKE_CURRENT_LIST_FILE})
  return()
endif()

include(${OBJECTS})
set(log "")
foreach(object IN LISTS cuda_objects)
  string(REGEX REPLACE "^.*[.]dir/([.]/)?|[.]o$" "" name ${object})  # cmake 4.4 writes ./
  file(READ ${object}.ptxas text)
  string(APPEND log "== cuda ${name}\n${text}")
endforeach()
foreach(object IN LISTS isa_objects)
  string(REGEX MATCH "cuattn_cpu_[a-z0-9]+" name ${object})
  execute_process(COMMAND ${NM} -C ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  list(JOIN weak "\n" weak)
  string(APPEND log "== isa ${name}\n${weak}\n")
endforeach()
file(WRITE ${OUTPUT} "${log}")
