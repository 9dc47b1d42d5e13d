# SPDX-License-Identifier: Apache-2.0
# Finds nvcc, turns CUDA on, and says how CUDA sources are compiled. Sets CUATTN_HAVE_CUDA and, for
# each kind of source (portable, each, sm90), the list CUATTN_ARCHS_<kind> and its text ("80,90,90-ptx")
# CUATTN_ARCHS_TEXT_<kind>. Next: cmake/instances.cmake.
#
# CUATTN_CUDA_ARCHS lists compute capabilities: `90` is machine code, and the largest one also gives
# PTX for later devices; `90-real` is machine code without PTX, `90-virtual` PTX alone. The sm90
# kernels (90a code, which runs on nothing else) are compiled when 90 is in the list.
set(CUATTN_HAVE_CUDA OFF)
foreach(kind IN ITEMS portable each sm90)
  set(CUATTN_ARCHS_${kind} "")
  set(CUATTN_ARCHS_TEXT_${kind} "")
endforeach()
string(TOUPPER "${CUATTN_CUDA}" cuda_wanted)
if(NOT cuda_wanted MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|1|0|YES|NO)$")
  message(FATAL_ERROR "CUATTN_CUDA must be AUTO, ON or OFF, got '${CUATTN_CUDA}'")
endif()
if(cuda_wanted MATCHES "^(OFF|FALSE|0|NO)$")
  return()
endif()

# The compiler: as told, then a toolkit of the machine, then the wheels of cuda-toolkit[nvcc,cccl].
set(nvcc_wheel "")
if(NOT CMAKE_CUDA_COMPILER)
  if(DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER $ENV{CUDACXX})
  else()
    find_program(nvcc_found nvcc NO_CACHE
      HINTS ${CUDAToolkit_ROOT} $ENV{CUDA_HOME} $ENV{CUDA_PATH}
      PATHS /usr/local/cuda
      PATH_SUFFIXES bin)
    if(NOT nvcc_found)
      find_package(Python QUIET COMPONENTS Interpreter)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u, pathlib as p
for d in getattr(u.find_spec('nvidia'), 'submodule_search_locations', None) or []:
    print(*p.Path(d).glob('cu13/bin/nvcc'))"
        OUTPUT_VARIABLE nvcc_found ERROR_QUIET)
      string(REGEX MATCH "[^\n]+" nvcc_found "${nvcc_found}")
      set(nvcc_wheel "${nvcc_found}")
    endif()
    if(nvcc_found)
      set(CMAKE_CUDA_COMPILER ${nvcc_found})
    endif()
  endif()
endif()
if(NOT CMAKE_CUDA_COMPILER)
  set(way_out "Set CUDACXX to nvcc (12.8 or later), or build for the CPU alone with "
              "CUATTN_CUDA=OFF (pip: -C cmake.define.CUATTN_CUDA=OFF).")
  string(CONCAT way_out ${way_out})
  if(cuda_wanted STREQUAL "AUTO")
    message(WARNING "cuattn is built WITHOUT CUDA (CPU only): no nvcc was found. ${way_out}")
    return()
  endif()
  message(FATAL_ERROR "CUATTN_CUDA=${CUATTN_CUDA}, but no nvcc was found. ${way_out}")
endif()
if(nvcc_wheel OR CMAKE_CUDA_COMPILER MATCHES "/nvidia/cu13/bin/nvcc$")
  # Note: nvcc.profile of the 13.0 and 13.1 wheels searches lib64/, the wheels ship lib/.
  cmake_path(GET CMAKE_CUDA_COMPILER PARENT_PATH nvcc_root)
  cmake_path(GET nvcc_root PARENT_PATH nvcc_root)
  string(APPEND CMAKE_CUDA_FLAGS " -L${nvcc_root}/lib")
endif()

# Architectures.
set(real "")
set(virtual "")
set(newest 0)
foreach(arch IN LISTS CUATTN_CUDA_ARCHS)
  if(NOT arch MATCHES "^([0-9]+)(-real|-virtual)?$")
    message(FATAL_ERROR "CUATTN_CUDA_ARCHS lists entries like 90, 90-real or 90-virtual, "
                        "got '${arch}'")
  endif()
  if("${CMAKE_MATCH_2}" STREQUAL "-virtual")
    list(APPEND virtual ${CMAKE_MATCH_1})
  else()
    list(APPEND real ${CMAKE_MATCH_1})
    if("${CMAKE_MATCH_2}" STREQUAL "" AND CMAKE_MATCH_1 GREATER newest)
      set(newest ${CMAKE_MATCH_1})
    endif()
  endif()
endforeach()
if(newest)
  list(APPEND virtual ${newest})
endif()
list(REMOVE_DUPLICATES real)
list(REMOVE_DUPLICATES virtual)
# Later devices run the newest PTX. Kernels of 9.0 wait for one another and form clusters, those of
# older PTX do not, and a launch knows only that there are both (kKernelsWait).
set(newest_real 0)
set(newest_virtual 0)
foreach(kind IN ITEMS real virtual)
  foreach(arch IN LISTS ${kind})
    if(arch GREATER newest_${kind})
      set(newest_${kind} ${arch})
    endif()
  endforeach()
endforeach()
if(virtual AND newest_virtual LESS 90 AND newest_real GREATER_EQUAL 90)
  message(FATAL_ERROR "CUATTN_CUDA_ARCHS='${CUATTN_CUDA_ARCHS}' has machine code of ${newest_real}, "
                      "but no PTX newer than ${newest_virtual} for later devices; add 90-virtual, or "
                      "list no PTX (80-real;90-real)")
endif()
list(TRANSFORM real APPEND "-real" OUTPUT_VARIABLE CUATTN_ARCHS_each)
list(TRANSFORM virtual APPEND "-virtual" OUTPUT_VARIABLE virtual_archs)
list(APPEND CUATTN_ARCHS_each ${virtual_archs})
# Below 10.0 the PTX of a portable source differs by its .target alone: that of the oldest is made, and
# of it the code of all. From 10.0 on the compiler writes other PTX, so those have their own.
set(CUATTN_ARCHS_portable "")
set(CUATTN_PORTABLE_CODE "")  # options of nvcc
set(from_one_ptx "")
set(sorted ${real} ${virtual})
list(SORT sorted COMPARE NATURAL)
list(GET sorted 0 oldest)
foreach(arch IN LISTS CUATTN_ARCHS_each)
  string(REGEX MATCH "^[0-9]+" number ${arch})
  if(arch MATCHES "-virtual")
    set(code compute)
  else()
    set(code sm)
  endif()
  if(number GREATER_EQUAL 100)
    list(APPEND CUATTN_PORTABLE_CODE
         "--generate-code=arch=compute_${number},code=[${code}_${number}]")
  elseif(code STREQUAL "sm")
    list(APPEND from_one_ptx sm_${number})
  else()
    list(APPEND from_one_ptx compute_${oldest})
    set(arch ${oldest}-virtual)
  endif()
  list(APPEND CUATTN_ARCHS_portable ${arch})
endforeach()
list(REMOVE_DUPLICATES from_one_ptx)
list(REMOVE_DUPLICATES CUATTN_ARCHS_portable)
if(from_one_ptx)
  list(JOIN from_one_ptx "," from_one_ptx)
  list(APPEND CUATTN_PORTABLE_CODE
       "--generate-code=arch=compute_${oldest},code=[${from_one_ptx}]")
endif()
if("90" IN_LIST real)
  set(CUATTN_ARCHS_sm90 "90a-real")
endif()
foreach(kind IN ITEMS portable each sm90)
  string(REPLACE "-real" "" text "${CUATTN_ARCHS_${kind}}")
  string(REPLACE "-virtual" "-ptx" text "${text}")
  list(JOIN text "," CUATTN_ARCHS_TEXT_${kind})
endforeach()
set(CUATTN_ARCHS_TEXT ${CUATTN_ARCHS_TEXT_each} ${CUATTN_ARCHS_TEXT_sm90})
list(JOIN CUATTN_ARCHS_TEXT "," CUATTN_ARCHS_TEXT)

set(CMAKE_CUDA_ARCHITECTURES ${CUATTN_ARCHS_each})
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's flag
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "cuattn needs nvcc 12.8 or later, found ${CMAKE_CUDA_COMPILER_VERSION} "
                      "(${CMAKE_CUDA_COMPILER})")
endif()
# The launcher keeps what ptxas says (registers, spills, warnings) for tests/house/test_ptxas.py. It
# runs the launcher that the user has set, such as ccache, and that one runs nvcc.
list(PREPEND CMAKE_CUDA_COMPILER_LAUNCHER ${PROJECT_SOURCE_DIR}/cmake/nvcc_log.sh)
set(nvcc_flags "SHELL:-lineinfo --compress-mode=size -Xptxas=-v -Xcompiler=-Wall")
add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:${nvcc_flags}>)
if(CUATTN_WATCHDOG)
  add_compile_definitions($<$<COMPILE_LANGUAGE:CUDA>:CUATTN_WATCHDOG>)
endif()
set(CUATTN_HAVE_CUDA ON)

# Objects of libcuattn compiled for one kind of device: hand-written sources and instances.
function(cuattn_cuda_library kind)
  get_property(instances GLOBAL PROPERTY CUATTN_INSTANCES_${kind})
  set(sources ${ARGN} ${instances})
  if(NOT sources OR NOT CUATTN_ARCHS_${kind})
    return()
  endif()
  add_library(cuattn_cuda_${kind} OBJECT ${sources})
  target_link_libraries(cuattn_cuda_${kind} PRIVATE cuattn_private)
  if(kind STREQUAL "portable")
    set_target_properties(cuattn_cuda_portable PROPERTIES CUDA_ARCHITECTURES OFF)
    target_compile_options(cuattn_cuda_portable PRIVATE ${CUATTN_PORTABLE_CODE})
    target_compile_definitions(cuattn_cuda_portable PRIVATE CUATTN_ONE_PTX)
  else()
    set_target_properties(cuattn_cuda_${kind} PROPERTIES
      CUDA_ARCHITECTURES "${CUATTN_ARCHS_${kind}}")
  endif()
  target_sources(cuattn PRIVATE $<TARGET_OBJECTS:cuattn_cuda_${kind}>)
  set_property(GLOBAL APPEND PROPERTY CUATTN_CUDA_OBJECTS $<TARGET_OBJECTS:cuattn_cuda_${kind}>)
endfunction()
