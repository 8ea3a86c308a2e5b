// The launchers of gce's CUDA kernels.
#pragma once
#include <cuda_runtime.h>

#include "../gce.h"

namespace pcsr {

// a NaN among the logits of a row makes its loss and the means NaN
template <typename T>
cudaError_t gce_cuda(const GceArgs<T>& args, cudaStream_t stream);
template <typename T>
cudaError_t gce_backward_cuda(const GceArgs<T>& args, cudaStream_t stream);

}  // namespace pcsr
