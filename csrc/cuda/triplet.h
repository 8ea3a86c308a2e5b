// The launchers of triplet's CUDA kernels.
#pragma once
#include <cuda_runtime.h>

#include "../triplet.h"

namespace pcsr {

// a NaN among the scores makes the loss of its row and column NaN
template <typename T>
cudaError_t triplet_cuda(const TripletArgs<T>& args, cudaStream_t stream);
template <typename T>
cudaError_t triplet_backward_cuda(const TripletArgs<T>& args, cudaStream_t stream);

}  // namespace pcsr
