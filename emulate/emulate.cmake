# SPDX-License-Identifier: Apache-2.0
# CUATTN_EMULATE=ON: the CUDA sources are compiled as C++ and run on the CPU (docs/emulator.md). In
# the place of cmake/cuda.cmake: no nvcc, no toolkit, one device of compute capability 8.0. For
# tests alone: a wheel never has it.
if(SKBUILD)
  message(FATAL_ERROR "CUATTN_EMULATE is for tests, a wheel cannot have it")
endif()
find_package(Python REQUIRED COMPONENTS Interpreter)
set(CUATTN_HAVE_CUDA ON)
foreach(kind IN ITEMS portable each)
  set(CUATTN_ARCHS_${kind} 80-real)
  set(CUATTN_ARCHS_TEXT_${kind} 80)
endforeach()
set(CUATTN_ARCHS_sm90 "")
set(CUATTN_ARCHS_TEXT_sm90 "")
set(CUATTN_ARCHS_TEXT 80)
# The head dims whose instances are compiled; a smaller head runs padded, as ever.
set(CUATTN_EMULATE_HEAD_DIMS "64;128;256;512;1024" CACHE STRING "Head dims of the emulated kernels")
list(JOIN CUATTN_EMULATE_HEAD_DIMS "|" CUATTN_EMULATE_HEAD_DIMS_REGEX)

# Translated as CMake configures, which it does again when a source has changed.
set(emulated_dir ${PROJECT_BINARY_DIR}/emulated)
file(GLOB_RECURSE emulated_sources CONFIGURE_DEPENDS cuda/* include/cuattn/device/*)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${emulated_sources}
                                                               emulate/translate.py)
execute_process(
  COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/emulate/translate.py ${PROJECT_SOURCE_DIR}
          ${emulated_dir} cuda include/cuattn/device
  COMMAND_ERROR_IS_FATAL ANY)

# In the place of the function of this name in cmake/cuda.cmake, which is called for each kind: the
# first call brings the instances of both kinds, each its hand-written sources.
function(cuattn_cuda_library kind)
  set(sources ${ARGN})
  list(REMOVE_ITEM sources cuda/attention/cublas.cu cuda/attention/sm90/functor.cu)
  if(NOT sources)
    return()
  endif()
  list(TRANSFORM sources REPLACE "(.+)" "${emulated_dir}/\\1.cpp")
  if(TARGET cuattn_emulated)
    target_sources(cuattn_emulated PRIVATE ${sources})
    return()
  endif()
  get_property(instances GLOBAL PROPERTY CUATTN_INSTANCES_portable)
  get_property(more GLOBAL PROPERTY CUATTN_INSTANCES_each)
  list(APPEND instances ${more})
  # An instance holds nothing to translate: it includes a kernel and names its launchers. Most of its
  # time goes into headers, so those of a kernel share a translation unit.
  set_source_files_properties(${instances} PROPERTIES LANGUAGE CXX)
  foreach(instance IN LISTS instances)
    cmake_path(GET instance FILENAME name)
    string(REGEX MATCH "^[a-z]+_[a-z0-9]+" kernel ${name})
    set_source_files_properties(${instance} PROPERTIES UNITY_GROUP ${kernel})
  endforeach()
  add_library(cuattn_emulator OBJECT emulate/block.cpp emulate/runtime.cpp)
  add_library(cuattn_emulated OBJECT ${sources} ${instances})
  set_target_properties(cuattn_emulated PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # A vector load from an address that the device refuses traps; the CPU would take it.
  target_compile_options(cuattn_emulated PRIVATE
    -w -fsanitize=alignment -fsanitize-undefined-trap-on-error)
  foreach(target IN ITEMS cuattn_emulator cuattn_emulated)
    target_include_directories(${target} BEFORE PRIVATE
      ${PROJECT_SOURCE_DIR}/emulate/include ${emulated_dir} ${emulated_dir}/include)
    target_link_libraries(${target} PRIVATE cuattn_private)
    target_compile_definitions(${target} PRIVATE __CUDA_ARCH__=800 __CUDA_ARCH_LIST__=800)
    target_compile_options(${target} PRIVATE
      -include cuda_runtime.h -march=native -O1 -ffp-contract=off -fno-strict-aliasing -Wno-unknown-pragmas -Wno-psabi)
    target_sources(cuattn PRIVATE $<TARGET_OBJECTS:${target}>)
  endforeach()
  target_compile_options(cuattn_emulator PRIVATE -O2)  # two files, that every kernel runs through
endfunction()

# The build folder is a place to import cuattn from: the Python files join cuattn/_core.
file(GLOB modules RELATIVE ${PROJECT_SOURCE_DIR}/python/cuattn CONFIGURE_DEPENDS python/cuattn/*)
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/cuattn)
foreach(module IN LISTS modules)
  file(CREATE_LINK ${PROJECT_SOURCE_DIR}/python/cuattn/${module}
       ${PROJECT_BINARY_DIR}/cuattn/${module} SYMBOLIC)
endforeach()
