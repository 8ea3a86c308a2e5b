// Small kernels, each correct and with one deliberate bug at a time: what the CUDA-on-CPU checks must accept and catch.
#include <cuda_runtime.h>

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(T, name)                                   \
  extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(dynamic_shared)
#endif

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

enum ReverseBug { kReverseCorrect, kNoBarrierBeforeRead, kNoBarrierBeforeRewrite };

// One block per tile of 256 values, one thread per value: reverses the tile `rounds` times by way of shared memory.
template <ReverseBug bug>
__global__ void reverse_tile(const float* in, float* out, int rounds) {
  DYNAMIC_SHARED(float, tile);
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  float value = in[i];
  for (int round = 0; round < rounds; ++round) {
    if (bug != kNoBarrierBeforeRewrite) __syncthreads();
    tile[t] = value;
    if (bug != kNoBarrierBeforeRead) __syncthreads();
    value = tile[kThreads - 1 - t];
  }
  out[i] = value;
}

enum RotateBug { kRotateCorrect, kNoSyncwarp, kShuffleForSyncwarp, kBarrierForSome };

// One warp per 32 values, one lane per value: rotates them by one, within the warp.
template <RotateBug bug>
__global__ void rotate_warp(const float* in, float* out) {
  __shared__ float tile[kThreads];
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  tile[t] = in[i];
  // a shuffle makes the lanes meet but orders no memory
  if (bug == kShuffleForSyncwarp) __shfl_sync(~0u, t, 0);
  if (bug == kRotateCorrect) __syncwarp();
  if (bug == kBarrierForSome && t < 64) __syncthreads();
  out[i] = tile[(t & ~31) | ((t + 1) & 31)];
}

enum SumBug { kSumCorrect, kPlainAddInBlock, kPlainAddAcrossBlocks };

// One thread per value: adds up all values, per warp by shuffles, per block in shared memory, then across blocks.
template <SumBug bug>
__global__ void sum(const float* in, float* total, int n) {
  __shared__ float block_total;
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (threadIdx.x == 0) block_total = 0;
  __syncthreads();
  float value = i < n ? in[i] : 0;
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(~0u, value, distance);
  if (threadIdx.x % 32 == 0) {
    if (bug == kPlainAddInBlock) {
      block_total += value;
    } else {
      atomicAdd(&block_total, value);
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (bug == kPlainAddAcrossBlocks) {
    *total += block_total;
  } else {
    atomicAdd(total, block_total);
  }
}

enum LastBlockBug { kLastBlockCorrect, kNoFence };

// One thread per value: every block leaves its maximum behind, and the block that is done last takes the maximum of
// all.
template <LastBlockBug bug>
__global__ void max_by_last_block(const int* in, int* partial, unsigned* done, int* result) {
  __shared__ int warp_max[kWarps];
  __shared__ bool is_last;
  int value = in[blockIdx.x * kThreads + threadIdx.x];
  for (int bits = 16; bits > 0; bits /= 2) value = max(value, __shfl_xor_sync(~0u, value, bits));
  if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 0; w < kWarps; ++w) value = max(value, warp_max[w]);
    partial[blockIdx.x] = value;
    if (bug != kNoFence) __threadfence();
    is_last = atomicAdd(done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    for (unsigned b = 0; b < gridDim.x; ++b) value = max(value, partial[b]);
    *result = value;
  }
}

enum CopyBug { kCopyCorrect, kPastGlobal, kPastStaticShared, kPastDynamicShared, kPastLocal, kMisaligned };

// One thread per value: copies by way of global, static shared, dynamic shared and local memory.
template <CopyBug bug>
__global__ void copy(const float* in, float* out, int n) {
  __shared__ float fixed[kThreads];
  DYNAMIC_SHARED(float, dynamic);
  float local[4];
  const int t = threadIdx.x, i = blockIdx.x * kThreads + t;
  if (i > n || (i == n && bug != kPastGlobal)) return;
  const float value = i < n ? in[i] : 0;
  const int in_fixed = bug == kPastStaticShared ? t + 1 : t, in_dynamic = bug == kPastDynamicShared ? t + 1 : t;
  fixed[in_fixed] = value;
  dynamic[in_dynamic] = value;
  // the lanes past the end have returned and are not waited for
  __syncwarp();
  for (int k = 0; k < (bug == kPastLocal ? n : 4); ++k) local[k] = value;
  if (bug == kMisaligned) local[0] = reinterpret_cast<const float4*>(in + i % 2)->x;
  out[i] = (fixed[in_fixed] + dynamic[in_dynamic] + local[i % 4]) / 3;
}

enum CollectiveBug {
  kCollectiveCorrect,
  kNotInOwnMask,
  kDivergentMasks,
  kDifferentCollectives,
  kWarpAgainstBlock,
  kDivergentBarriers,
  kReturnBeforeBarrier,
  kUnknownSource
};

// One lane per value: out = in of the first lane of the half warp whose value is positive.
template <CollectiveBug bug>
__global__ void first_positive(const int* in, int* out) {
  const int t = threadIdx.x, lane = t % 32;
  unsigned mask = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (bug == kNotInOwnMask) mask = 0x0000ffffu;
  if (bug == kWarpAgainstBlock || (bug == kDivergentMasks && lane == 3)) mask = ~0u;
  if (bug == kReturnBeforeBarrier && t == 7) return;
  // only the lower half of each warp: the upper half must not be waited for
  if (lane < 16) __syncwarp(0x0000ffffu);
  if (bug == kDifferentCollectives && lane == 5) __syncwarp(mask);
  if (bug == kWarpAgainstBlock && lane == 9) __syncthreads();
  const unsigned votes = __ballot_sync(mask, in[t] > 0);
  const int source = bug == kUnknownSource ? 31 - lane : __ffs(votes) - 1;
  const int value = __shfl_sync(mask, in[t], source);
  if (bug == kDivergentBarriers && t % 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[t] = value;
}

// One thread: writes what shared memory holds before anyone wrote to it, then writes to it.
__global__ void uninitialised(int* out) {
  __shared__ int fixed;
  DYNAMIC_SHARED(int, dynamic);
  out[2 * blockIdx.x] = fixed;
  out[2 * blockIdx.x + 1] = dynamic[0];
  fixed = dynamic[0] = blockIdx.x;
}

// One thread per block: what CUDA's arithmetic, votes and atomics give on values that every implementation agrees on.
__global__ void intrinsics(float* f, int* i, unsigned long long* u, double* d) {
  f[0] = max(1.5f, 2.0) + min(__int_as_float(0x7fc00000), 3.0f) + __ldg(f + 1) + rsqrtf(4.0f) + __fdividef(1.0f, 4.0f);
  i[0] = __popc(0xf0u) + 10 * __ffs(8) + 1000 * __clz(1) + (__float_as_int(1.0f) == 0x3f800000 ? 100000 : 0);
  i[1] = atomicMax(i + 2, 7) + atomicMin(i + 3, -7) + atomicExch(i + 4, 9) + atomicCAS(i + 5, 5, 6);
  i[6] = atomicOr(i + 7, 12) + atomicAnd(i + 8, 6);
  atomicAdd(u, 1ull << 40);
  atomicAdd(d, 0.5);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(int blocks, int threads, size_t shared_bytes, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

// the last argument of each is the bug; 0 is the correct kernel

extern "C" cudaError_t run_reverse_tile(const float* in, float* out, int blocks, int rounds, int bug) {
  const size_t bytes = kThreads * sizeof(float);
  if (bug == kNoBarrierBeforeRead)
    return launch(blocks, kThreads, bytes, reverse_tile<kNoBarrierBeforeRead>, in, out, rounds);
  if (bug == kNoBarrierBeforeRewrite)
    return launch(blocks, kThreads, bytes, reverse_tile<kNoBarrierBeforeRewrite>, in, out, rounds);
  return launch(blocks, kThreads, bytes, reverse_tile<kReverseCorrect>, in, out, rounds);
}

extern "C" cudaError_t run_rotate_warp(const float* in, float* out, int blocks, int bug) {
  if (bug == kNoSyncwarp) return launch(blocks, kThreads, 0, rotate_warp<kNoSyncwarp>, in, out);
  if (bug == kShuffleForSyncwarp) return launch(blocks, kThreads, 0, rotate_warp<kShuffleForSyncwarp>, in, out);
  if (bug == kBarrierForSome) return launch(blocks, kThreads, 0, rotate_warp<kBarrierForSome>, in, out);
  return launch(blocks, kThreads, 0, rotate_warp<kRotateCorrect>, in, out);
}

extern "C" cudaError_t run_sum(const float* in, float* total, int n, int bug) {
  const int blocks = (n + kThreads - 1) / kThreads;
  cudaMemsetAsync(total, 0, sizeof(float), cudaStream_t());
  if (bug == kPlainAddInBlock) return launch(blocks, kThreads, 0, sum<kPlainAddInBlock>, in, total, n);
  if (bug == kPlainAddAcrossBlocks) return launch(blocks, kThreads, 0, sum<kPlainAddAcrossBlocks>, in, total, n);
  return launch(blocks, kThreads, 0, sum<kSumCorrect>, in, total, n);
}

extern "C" cudaError_t run_max_by_last_block(const int* in, int* partial, unsigned* done, int* result, int blocks,
                                             int bug) {
  cudaMemsetAsync(done, 0, sizeof(unsigned), cudaStream_t());
  if (bug == kNoFence) return launch(blocks, kThreads, 0, max_by_last_block<kNoFence>, in, partial, done, result);
  return launch(blocks, kThreads, 0, max_by_last_block<kLastBlockCorrect>, in, partial, done, result);
}

extern "C" cudaError_t run_copy(const float* in, float* out, int n, int bug) {
  const int blocks = n / kThreads + 1;
  const size_t bytes = kThreads * sizeof(float);
  if (bug == kPastGlobal) return launch(blocks, kThreads, bytes, copy<kPastGlobal>, in, out, n);
  if (bug == kPastStaticShared) return launch(blocks, kThreads, bytes, copy<kPastStaticShared>, in, out, n);
  if (bug == kPastDynamicShared) return launch(blocks, kThreads, bytes, copy<kPastDynamicShared>, in, out, n);
  if (bug == kPastLocal) return launch(blocks, kThreads, bytes, copy<kPastLocal>, in, out, n);
  if (bug == kMisaligned) return launch(blocks, kThreads, bytes, copy<kMisaligned>, in, out, n);
  return launch(blocks, kThreads, bytes, copy<kCopyCorrect>, in, out, n);
}

extern "C" cudaError_t run_first_positive(const int* in, int* out, int bug) {
  switch (bug) {
    case kNotInOwnMask:
      return launch(1, 64, 0, first_positive<kNotInOwnMask>, in, out);
    case kDivergentMasks:
      return launch(1, 64, 0, first_positive<kDivergentMasks>, in, out);
    case kDifferentCollectives:
      return launch(1, 64, 0, first_positive<kDifferentCollectives>, in, out);
    case kWarpAgainstBlock:
      return launch(1, 64, 0, first_positive<kWarpAgainstBlock>, in, out);
    case kDivergentBarriers:
      return launch(1, 64, 0, first_positive<kDivergentBarriers>, in, out);
    case kReturnBeforeBarrier:
      return launch(1, 64, 0, first_positive<kReturnBeforeBarrier>, in, out);
    case kUnknownSource:
      return launch(1, 64, 0, first_positive<kUnknownSource>, in, out);
    default:
      return launch(1, 64, 0, first_positive<kCollectiveCorrect>, in, out);
  }
}

extern "C" cudaError_t run_uninitialised(int* out, int blocks) {
  return launch(blocks, 1, sizeof(int), uninitialised, out);
}

extern "C" cudaError_t run_intrinsics(float* f, int* i, unsigned long long* u, double* d) {
  return launch(1, 1, 0, intrinsics, f, i, u, d);
}

// launches a harmless kernel with a configuration of the caller's choice
extern "C" cudaError_t run_configuration(int* out, int blocks, int threads, int shared_bytes, int allowed_bytes) {
  if (allowed_bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(uninitialised, cudaFuncAttributeMaxDynamicSharedMemorySize, allowed_bytes);
    if (error != cudaSuccess) return error;
  }
  return launch(blocks, threads, shared_bytes, uninitialised, out);
}

extern "C" const char* error_string(cudaError_t error) { return cudaGetErrorString(error); }
