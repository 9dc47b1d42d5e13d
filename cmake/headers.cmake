# SPDX-License-Identifier: Apache-2.0
# Target cuattn_headers: compiles every public header alone (F0 as C++17, F1 with nvcc), so that
# each includes what it uses. Not part of the default build; .ci/run builds it.
add_library(cuattn_headers OBJECT EXCLUDE_FROM_ALL)
target_include_directories(cuattn_headers PRIVATE include)
target_compile_options(cuattn_headers PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-std=c++17>)
# Once: what a header includes does not depend on the device.
set_target_properties(cuattn_headers PROPERTIES CUDA_ARCHITECTURES 90-virtual)

function(cuattn_header_alone header suffix)
  set(source ${PROJECT_BINARY_DIR}/headers/${header}${suffix})
  file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${header}\"\n" @ONLY)
  target_sources(cuattn_headers PRIVATE ${source})
endfunction()

file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR}/include
     include/*.h include/*.cuh)
foreach(header IN LISTS headers)
  if(header MATCHES "[.]h$")
    cuattn_header_alone(${header} .cpp)
  elseif(CUATTN_HAVE_CUDA AND NOT CUATTN_EMULATE)
    cuattn_header_alone(${header} .cu)
  endif()
endforeach()
