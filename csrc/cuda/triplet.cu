// CUDA kernels of triplet: rows and columns are reduced by different blocks of one launch, without atomics on indices.
#include "reduce.h"
#include "triplet.h"

namespace pcsr {
namespace {

template <typename T>
__device__ bool is_negative(const TripletArgs<T>& a, int64_t i, int64_t j) {
  return i != j && (a.image_ids == nullptr || a.image_ids[i] != a.image_ids[j]) &&
         (a.caption_ids == nullptr || a.caption_ids[i] != a.caption_ids[j]);
}

// what is known of the negatives of one positive pair; hardest: the largest score and its index, mean: sum and number
template <typename T, bool kHardest>
struct Part {
  T value;
  int32_t in;
  bool nan;

  __device__ void clear() {
    value = 0;
    in = kHardest ? -1 : 0;
    nan = false;
  }

  __device__ void visit(const TripletArgs<T>& a, int64_t pair, int64_t other, T score, bool negative) {
    nan |= score != score;
    if (!negative) return;
    if constexpr (kHardest) {
      if (in < 0 || score > value) {
        value = score;
        in = static_cast<int32_t>(other);
      }
    } else {
      const T hinge = hinge_of(a, pair, score);
      value += hinge > 0 ? hinge : 0;
      in += hinge > 0;
    }
  }

  __device__ void merge(T other_value, int32_t other_in, bool other_nan) {
    nan |= other_nan;
    if constexpr (kHardest) {
      if (other_in >= 0 && (in < 0 || other_value > value || (other_value == value && other_in < in))) {
        value = other_value;
        in = other_in;
      }
    } else {
      value += other_value;
      in += other_in;
    }
  }

  // 0 + row + column is the same sum in either order
  __device__ void finish(const TripletArgs<T>& a, int64_t pair, int32_t* index) const {
    T hinge = 0;
    if constexpr (kHardest) {
      if (in >= 0) hinge = hinge_of(a, pair, value);
      index[pair] = hinge > 0 ? in : -1;
    } else {
      hinge = value / static_cast<T>(a.batch);
      index[pair] = in;
    }
    if (hinge < 0) hinge = 0;
    if (nan) hinge = static_cast<T>(NAN);
    atomicAdd(a.loss + pair, hinge);
  }
};

// one warp per row in the first blocks; then one block per 32 columns, a thread for every eighth row of a column
template <typename T, bool kHardest>
__global__ void reduce_negatives(TripletArgs<T> a, int64_t row_blocks) {
  __shared__ Part<T, kHardest> parts[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Part<T, kHardest> part;
  part.clear();
  if (blockIdx.x < row_blocks) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
    if (i >= a.batch) return;
    for (int64_t j = lane; j < a.batch; j += kWarp)
      part.visit(a, i, j, a.scores[i * a.batch + j], is_negative(a, i, j));
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      const T value = __shfl_xor_sync(~0u, part.value, distance);
      const int32_t in = __shfl_xor_sync(~0u, part.in, distance);
      const int nan = __shfl_xor_sync(~0u, static_cast<int>(part.nan), distance);
      part.merge(value, in, nan != 0);
    }
    if (lane == 0) part.finish(a, i, a.in_row);
    return;
  }
  const int64_t j = (blockIdx.x - row_blocks) * kWarp + lane;
  if (j < a.batch) {
    for (int64_t i = warp; i < a.batch; i += kWarps)
      part.visit(a, j, i, a.scores[i * a.batch + j], is_negative(a, i, j));
  }
  parts[warp][lane] = part;
  __syncthreads();
  if (warp == 0 && j < a.batch) {
    for (int w = 1; w < kWarps; ++w) part.merge(parts[w][lane].value, parts[w][lane].in, parts[w][lane].nan);
    part.finish(a, j, a.in_col);
  }
}

// one block
template <typename T>
__global__ void sum_losses(TripletArgs<T> a) {
  __shared__ T sums[kWarps];
  T sum = 0;
  for (int64_t i = threadIdx.x; i < a.batch; i += kThreads) sum += a.loss[i];
  block_sum(sum, sums, a.total, T{1});
}

// one thread per pair, on zeros
template <typename T>
__global__ void backward_hardest(TripletArgs<T> a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < a.batch) scatter_hardest(a, i);
}

// one thread per cell
template <typename T>
__global__ void backward_mean(TripletArgs<T> a) {
  const int64_t cell = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (cell >= a.batch * a.batch) return;
  const int64_t i = cell / a.batch, j = cell % a.batch;
  const T scale = T{1} / static_cast<T>(a.batch);
  T grad = 0;
  if (i == j) {
    grad = -pair_grad(a, i) * static_cast<T>(a.in_row[i] + a.in_col[i]);
  } else if (is_negative(a, i, j)) {
    const T score = a.scores[cell];
    grad = (hinge_of(a, i, score) > 0 ? pair_grad(a, i) : 0) + (hinge_of(a, j, score) > 0 ? pair_grad(a, j) : 0);
  }
  a.grad_scores[cell] = scale * grad;
}

}  // namespace

template <typename T>
cudaError_t triplet_cuda(const TripletArgs<T>& a, cudaStream_t stream) {
  Launch launch{stream, cudaMemsetAsync(a.loss, 0, a.batch * sizeof(T), stream)};
  const int64_t row_blocks = (a.batch + kWarps - 1) / kWarps, column_blocks = (a.batch + kWarp - 1) / kWarp;
  const auto kernel = a.hardest ? reduce_negatives<T, true> : reduce_negatives<T, false>;
  if (a.batch > 0) launch(kernel, (row_blocks + column_blocks) * kThreads, a, row_blocks);
  launch(sum_losses<T>, kThreads, a);
  return launch.error;
}

template <typename T>
cudaError_t triplet_backward_cuda(const TripletArgs<T>& a, cudaStream_t stream) {
  Launch launch{stream, cudaSuccess};
  if (a.batch == 0) return launch.error;
  if (a.hardest) {
    launch.error = cudaMemsetAsync(a.grad_scores, 0, a.batch * a.batch * sizeof(T), stream);
    launch(backward_hardest<T>, a.batch, a);
  } else {
    launch(backward_mean<T>, a.batch * a.batch, a);
  }
  return launch.error;
}

template cudaError_t triplet_cuda<float>(const TripletArgs<float>&, cudaStream_t);
template cudaError_t triplet_cuda<double>(const TripletArgs<double>&, cudaStream_t);
template cudaError_t triplet_backward_cuda<float>(const TripletArgs<float>&, cudaStream_t);
template cudaError_t triplet_backward_cuda<double>(const TripletArgs<double>&, cudaStream_t);

}  // namespace pcsr
