// The launcher of tally's CUDA kernels.
#pragma once
#include <cuda_runtime.h>

#include "../tally.h"

namespace pcsr {

// all pointers on the device; scratch is [2 * batch], fault is [2]: the first fault of a row before anything was
// written, and the first overflow; with either the state is as it was
cudaError_t tally_cuda(const TallyArgs& args, int32_t* scratch, uint64_t* fault, cudaStream_t stream);

}  // namespace pcsr
