// SPDX-License-Identifier: Apache-2.0
// The border of the C ABI: what is thrown inside becomes a status code, and its text the last error
// of the calling thread.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "cuattn/c_api.h"
#include "cuattn/error.h"
#include "cuattn/tensor.h"

namespace cuattn {

// What cuattn_last_error() returns on this thread.
std::string& last_error();

inline cuattn_status failed(cuattn_status status, const char* message) {
  last_error() = message;
  return status;
}

// Runs `body`; no exception leaves the library.
template <class Body>
cuattn_status guarded(Body&& body) noexcept {
  try {
    body();
    return CUATTN_OK;
  } catch (const InvalidArgument& e) {
    return failed(CUATTN_INVALID_ARGUMENT, e.what());
  } catch (const NotImplemented& e) {
    return failed(CUATTN_NOT_IMPLEMENTED, e.what());
  } catch (const UnsupportedDevice& e) {
    return failed(CUATTN_UNSUPPORTED_DEVICE, e.what());
  } catch (const CudaError& e) {
    return failed(CUATTN_CUDA_ERROR, e.what());
  } catch (const OutOfMemory& e) {
    return failed(CUATTN_OUT_OF_MEMORY, e.what());
  } catch (const OutOfBlocks& e) {
    return failed(CUATTN_OUT_OF_BLOCKS, e.what());
  } catch (const std::bad_alloc&) {
    return failed(CUATTN_OUT_OF_MEMORY, "cuattn: the host is out of memory");
  } catch (const std::exception& e) {
    return failed(CUATTN_INTERNAL_ERROR, e.what());
  }
}

// A required array; `what` names it in the refusal.
inline TensorView view_of(const char* function, const char* argument, const DLTensor* tensor) {
  CUATTN_REQUIRE(tensor != nullptr, function, ": ", argument,
                 " must be an array, got NULL; pass a DLTensor");
  return TensorView(*tensor);
}

}  // namespace cuattn
