// What the lanes of a warp know together; every lane gets the result.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"

namespace pcsr {

template <typename T>
__device__ T warp_sum(T x) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// *total = scale * the sum of x over the block, in a fixed order; sums is shared memory
template <typename T>
__device__ void block_sum(T x, T (&sums)[kWarps], T* total, T scale) {
  x = warp_sum(x);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kWarps; ++w) x += sums[w];
    *total = scale * x;
  }
}

template <typename T>
struct RowMax {
  T value;
  int32_t at;  // the first place of the maximum
  bool nan;    // one of the row is NaN
};

// maximum of a row [n], one warp per row
template <typename T>
__device__ RowMax<T> row_max(const T* row, int64_t n) {
  const int32_t none = static_cast<int32_t>(n);
  T best = 0;
  int32_t at = none;
  bool nan = false;
  for (int64_t k = threadIdx.x % kWarp; k < n; k += kWarp) {
    const T x = row[k];
    nan |= x != x;
    if (at == none || x > best) {
      best = x;
      at = static_cast<int32_t>(k);
    }
  }
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(~0u, best, distance);
    const int32_t other_at = __shfl_xor_sync(~0u, at, distance);
    if (other_at < none && (at == none || other > best || (other == best && other_at < at))) {
      best = other;
      at = other_at;
    }
  }
  return {best, at, __any_sync(~0u, nan) != 0};
}

}  // namespace pcsr
