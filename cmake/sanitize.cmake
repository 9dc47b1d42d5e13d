# SPDX-License-Identifier: Apache-2.0
# A build under a sanitizer (.ci/sanitize) is run once, so most of it is not optimised, which would take
# longer than it saves and hides some faults. What computes is: the kernels, and the references of tests/cpp.
# Half the time of the rest goes into headers of the standard library, which are compiled once.
file(GLOB computes cpu/*.cpp tests/cpp/paged.cpp tests/cpp/problem.cpp tests/cpp/reference.cpp)
list(FILTER computes EXCLUDE REGEX "cpu/(backend|backward_units|cgroup|flash_units|parallel)[.]cpp$")
set(places TARGET_DIRECTORY cuattn)
if(CUATTN_TESTS)
  list(APPEND places cuattn_tests)
endif()
set_property(SOURCE ${computes} ${places} APPEND PROPERTY COMPILE_OPTIONS -O1)
set_property(SOURCE ${computes} ${places} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
foreach(target IN ITEMS cuattn cuattn_tests)
  if(TARGET ${target})
    target_compile_options(${target} PRIVATE SHELL:-O0)
    target_precompile_headers(${target} PRIVATE <algorithm> <cmath> <cstdint> <cstring> <functional>
      <memory> <mutex> <optional> <sstream> <stdexcept> <string> <utility> <vector>)
  endif()
endforeach()
