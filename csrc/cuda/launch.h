// How every CUDA kernel is launched: in blocks of kThreads on one stream, stopping at the first error.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace pcsr {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

struct Launch {
  cudaStream_t stream;
  cudaError_t error;

  // kernel with at least this many threads
  template <typename... Params, typename... Args>
  void operator()(void (*kernel)(Params...), int64_t threads, Args... args) {
    if (error != cudaSuccess) return;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads));
    config.blockDim = dim3(kThreads);
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  }
};

}  // namespace pcsr
