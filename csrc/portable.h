// What lets one source serve every compiler: function qualifiers for CPU and CUDA.
#pragma once

// internal linkage on the CPU: each instruction set keeps its own copy, the linker cannot swap one for another
#if defined(__CUDACC__)
#define PCSR_INLINE __host__ __device__ inline
#else
#define PCSR_INLINE static inline
#endif
