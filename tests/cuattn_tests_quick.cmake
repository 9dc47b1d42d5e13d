# SPDX-License-Identifier: Apache-2.0
# tests/faces/test_cpp.py has this read in the project of tests/cpp where no GPU is found: headers of
# the standard library are compiled once.
function(cuattn_tests_quick)
  set(headers "")
  foreach(name IN ITEMS algorithm cmath cstdint cstring functional iostream memory mutex sstream
                        stdexcept string thread utility vector)
    list(APPEND headers "$<$<COMPILE_LANGUAGE:CXX>:<${name}$<ANGLE-R>>")
  endforeach()
  target_precompile_headers(cuattn_tests PRIVATE ${headers})
endfunction()
cmake_language(DEFER CALL cuattn_tests_quick)
