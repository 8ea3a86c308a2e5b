// CUDA kernels of gce: one warp per row for the losses and the gradients, one block per 32 classes for the means.
#include "gce.h"
#include "reduce.h"

namespace pcsr {
namespace {

// one warp per row of both sides
template <typename T>
__global__ void reduce_rows(GceArgs<T> a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (i >= a.batch) return;
  for (int s = 0; s < 2; ++s) {
    const T* logits = a.side[s].logits + i * a.classes;
    const RowMax<T> top = row_max(logits, a.classes);
    T sum = 0;
    for (int64_t k = lane; k < a.classes; k += kWarp) sum += exp(logits[k] - top.value);
    sum = warp_sum(sum);
    if (lane == 0) {
      a.side[s].labels[i] = top.at;
      a.side[s].log_sum[i] = top.nan ? static_cast<T>(NAN) : log(sum);
    }
  }
  if (lane == 0) {
    for (int s = 0; s < 2; ++s) a.side[s].loss[i] = gce_loss(log_p_of(a, s, i, a.side[1 - s].labels[i]), a.gamma);
  }
}

// one block per 32 classes of a side, a thread for every eighth row of a class
template <typename T>
__global__ void average_columns(GceArgs<T> a, int64_t blocks_a_side) {
  __shared__ T sums[kWarps][kWarp];
  const int s = static_cast<int>(blockIdx.x / blocks_a_side);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t k = (blockIdx.x % blocks_a_side) * kWarp + lane;
  T sum = 0;
  if (k < a.classes) {
    for (int64_t i = warp; i < a.batch; i += kWarps) sum += exp(log_p_of(a, s, i, k));
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && k < a.classes) {
    for (int w = 1; w < kWarps; ++w) sum += sums[w][lane];
    a.side[s].mean[k] = sum / static_cast<T>(a.batch);
  }
}

// one block
template <typename T>
__global__ void average_losses(GceArgs<T> a) {
  __shared__ T sums[kWarps];
  T sum = 0;
  for (int64_t i = threadIdx.x; i < a.batch; i += kThreads) sum += a.side[0].loss[i] + a.side[1].loss[i];
  block_sum(sum, sums, a.total, T{1} / static_cast<T>(a.batch));
}

// one warp per row of a side
template <typename T>
__global__ void backward_rows(GceArgs<T> a) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= 2 * a.batch) return;
  const int s = row >= a.batch;
  const GceSide<T>& side = a.side[s];
  if (side.grad_logits == nullptr) return;
  const int64_t i = row - s * a.batch;
  const T scale = T{1} / static_cast<T>(a.batch);
  const int64_t target = a.side[1 - s].labels[i];
  T product = 0;
  for (int64_t k = lane; k < a.classes; k += kWarp)
    product += exp(log_p_of(a, s, i, k)) * (side.grad_mean ? side.grad_mean[k] : 0);
  const T grad = gce_slope(a, s, i);
  const T common = grad - scale * warp_sum(product);
  for (int64_t k = lane; k < a.classes; k += kWarp) {
    const T p = exp(log_p_of(a, s, i, k));
    const T by_mean = side.grad_mean ? scale * side.grad_mean[k] : 0;
    side.grad_logits[i * a.classes + k] = p * (common + by_mean) - (k == target ? grad : 0);
  }
}

}  // namespace

template <typename T>
cudaError_t gce_cuda(const GceArgs<T>& a, cudaStream_t stream) {
  Launch launch{stream, cudaSuccess};
  const int64_t blocks_a_side = (a.classes + kWarp - 1) / kWarp;
  launch(reduce_rows<T>, a.batch * kWarp, a);
  if (a.side[0].mean != nullptr) launch(average_columns<T>, 2 * blocks_a_side * kThreads, a, blocks_a_side);
  launch(average_losses<T>, kThreads, a);
  return launch.error;
}

template <typename T>
cudaError_t gce_backward_cuda(const GceArgs<T>& a, cudaStream_t stream) {
  Launch launch{stream, cudaSuccess};
  launch(backward_rows<T>, 2 * a.batch * kWarp, a);
  return launch.error;
}

template cudaError_t gce_cuda<float>(const GceArgs<float>&, cudaStream_t);
template cudaError_t gce_cuda<double>(const GceArgs<double>&, cudaStream_t);
template cudaError_t gce_backward_cuda<float>(const GceArgs<float>&, cudaStream_t);
template cudaError_t gce_backward_cuda<double>(const GceArgs<double>&, cudaStream_t);

}  // namespace pcsr
