# SPDX-License-Identifier: Apache-2.0
# Sets `source_hash`, by which a record of a run names the sources it ran on: given, or asked of
# git, or "unknown". It changes with every edit, so only src/info.cpp is compiled with it.
set(source_hash "${CUATTN_SOURCE_HASH}")
if(source_hash STREQUAL "")
  set(hashed include cuda src bindings cpu cmake CMakeLists.txt pyproject.toml)
  execute_process(
    COMMAND git ls-files -s ${hashed}
    COMMAND git hash-object --stdin
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    OUTPUT_VARIABLE source_hash RESULTS_VARIABLE results
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(
    COMMAND git diff --quiet HEAD -- ${hashed}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    RESULT_VARIABLE changed ERROR_QUIET)
  if(NOT results STREQUAL "0;0")
    set(source_hash "unknown")
  elseif(NOT changed STREQUAL "0")
    string(APPEND source_hash "-changed")
  endif()
endif()
