// SPDX-License-Identifier: Apache-2.0
// What sources throw that know fail.h alone.
#include "cuattn/error.h"

namespace cuattn {

template void throw_error<InvalidArgument>(const MessagePart*, size_t);
template void throw_error<NotImplemented>(const MessagePart*, size_t);
template void throw_error<UnsupportedDevice>(const MessagePart*, size_t);
template void throw_error<CudaError>(const MessagePart*, size_t);
template void throw_error<OutOfMemory>(const MessagePart*, size_t);
template void throw_error<OutOfBlocks>(const MessagePart*, size_t);
template void throw_error<InternalError>(const MessagePart*, size_t);

}  // namespace cuattn
