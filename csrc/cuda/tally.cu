// CUDA kernels of tally: label the rows, link those of one image into a list, let the list's head add its counts and
// settle the two largest. An image has one writer, so counts of one byte need no atomics.
#include "reduce.h"
#include "tally.h"

namespace pcsr {
namespace {

// a row in a list of rows, told apart from a class by its sign
__device__ int32_t link_to(int64_t row) { return static_cast<int32_t>(-1 - row); }
__device__ bool is_link(int32_t value) { return value < 0; }
__device__ int64_t row_of(int32_t link) { return -1 - static_cast<int64_t>(link); }

__device__ void keep_first(uint64_t* first, uint64_t fault) {
  if (fault != kNoFault) {
    atomicMin(reinterpret_cast<unsigned long long*>(first), static_cast<unsigned long long>(fault));
  }
}

// one warp per row
template <typename Logit>
__global__ void label_logits(TallyArgs a, uint64_t* fault) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= a.batch) return;
  const RowMax<Logit> top = row_max(static_cast<const Logit*>(a.votes) + row * a.classes, a.classes);
  if (lane == 0) {
    a.labels[row] = top.nan ? -1 : top.at;
    keep_first(fault, check_row(a, row, a.labels[row]));
  }
}

// one thread per row, here and below
__global__ void copy_labels(TallyArgs a, uint64_t* fault) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= a.batch) return;
  a.labels[row] = static_cast<const int64_t*>(a.votes)[row];
  keep_first(fault, check_row(a, row, a.labels[row]));
}

// argmax of an image leads to the last row that came, next[row] to the one before, and the first row keeps the class
__global__ void link_rows(TallyArgs a, int32_t* next, const uint64_t* fault) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= a.batch || fault[0] != kNoFault) return;
  next[row] = atomicExch(a.argmax + a.ids[row], link_to(row));
}

template <typename Count>
__device__ Count* count_of(const TallyArgs& a, int64_t row) {
  return static_cast<Count*>(a.counts) + a.ids[row] * a.classes + a.labels[row];
}

// heads remember that they are: settle_images overwrites argmax. Counts wrap around, so that they can be taken back.
template <typename Count>
__global__ void add_counts(TallyArgs a, const int32_t* next, int32_t* head, Count largest, uint64_t* fault) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= a.batch || fault[0] != kNoFault) return;
  head[row] = a.argmax[a.ids[row]] == link_to(row);
  if (!head[row]) return;
  for (int32_t link = link_to(row); is_link(link); link = next[row_of(link)]) {
    Count* count = count_of<Count>(a, row_of(link));
    if (*count == largest) keep_first(fault + 1, tally_fault(row_of(link), kOverflow));
    *count = static_cast<Count>(static_cast<uint32_t>(*count) + 1u);
  }
}

template <typename Count>
__global__ void settle_images(TallyArgs a, const int32_t* next, const int32_t* head, const uint64_t* fault) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= a.batch || fault[0] != kNoFault || !head[row]) return;
  const int64_t id = a.ids[row];
  int32_t argmax = link_to(row);
  while (is_link(argmax)) argmax = next[row_of(argmax)];
  Top2<Count> top{static_cast<Count*>(a.n_max)[id], static_cast<Count*>(a.n_second)[id], argmax};
  const bool overflow = fault[1] != kNoFault;
  for (int32_t link = link_to(row); is_link(link); link = next[row_of(link)]) {
    Count* count = count_of<Count>(a, row_of(link));
    if (overflow) {
      *count = static_cast<Count>(static_cast<uint32_t>(*count) - 1u);
    } else {
      merge_class(top, static_cast<int32_t>(a.labels[row_of(link)]), *count);
    }
  }
  static_cast<Count*>(a.n_max)[id] = top.n_max;
  static_cast<Count*>(a.n_second)[id] = top.n_second;
  a.argmax[id] = top.argmax;
}

template <typename Count>
void count_rows(Launch& launch, const TallyArgs& a, int32_t* next, int32_t* head, Count largest, uint64_t* fault) {
  launch(add_counts<Count>, a.batch, a, next, head, largest, fault);
  launch(settle_images<Count>, a.batch, a, next, head, fault);
}

}  // namespace

cudaError_t tally_cuda(const TallyArgs& a, int32_t* scratch, uint64_t* fault, cudaStream_t stream) {
  int32_t* next = scratch;
  int32_t* head = scratch + a.batch;
  Launch launch{stream, cudaMemsetAsync(fault, 0xff, 2 * sizeof *fault, stream)};
  if (a.batch == 0) return launch.error;
  switch (a.vote_type) {
    case VoteType::float32:
      launch(label_logits<float>, a.batch * kWarp, a, fault);
      break;
    case VoteType::float64:
      launch(label_logits<double>, a.batch * kWarp, a, fault);
      break;
    case VoteType::label:
      launch(copy_labels, a.batch, a, fault);
      break;
  }
  launch(link_rows, a.batch, a, next, fault);
  switch (a.count_type) {
    case CountType::uint8:
      count_rows<uint8_t>(launch, a, next, head, UINT8_MAX, fault);
      break;
    case CountType::int16:
      count_rows<int16_t>(launch, a, next, head, INT16_MAX, fault);
      break;
    case CountType::int32:
      count_rows<int32_t>(launch, a, next, head, INT32_MAX, fault);
      break;
  }
  return launch.error;
}

}  // namespace pcsr
