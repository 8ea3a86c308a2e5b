// The gce op without torch: its arguments, and the loss of one row that CPU and CUDA share.
#pragma once
#include <cmath>
#include <cstdint>

#include "portable.h"

namespace pcsr {

// one modality: the image side's target is the text side's label and the other way round
template <typename T>
struct GceSide {
  const T* logits;  // [batch, classes]

  // written by forward, read by backward
  T* loss;          // [batch]
  T* mean;          // [classes], of the softmax over the batch; null if not wanted
  int64_t* labels;  // [batch], argmax of the logits, ties: the lowest class
  T* log_sum;       // [batch], log of the sum of e^(logit - largest): precise also for large logits

  const T* grad_loss;  // [batch], null is zero
  const T* grad_mean;  // [classes], null is zero
  T* grad_logits;      // [batch, classes], written by backward; null if not wanted
};

template <typename T>
struct GceArgs {
  GceSide<T> side[2];  // image, text
  int64_t batch, classes;
  T gamma;              // 0 is cross entropy
  T* total;             // [1], mean over the batch of both losses together, written by forward
  const T* grad_total;  // [1], null is zero
};

// log of the softmax at a class
template <typename T>
PCSR_INLINE T log_p_of(const GceArgs<T>& a, int side, int64_t row, int64_t at) {
  const T* logits = a.side[side].logits + row * a.classes;
  return (logits[at] - logits[a.side[side].labels[row]]) - a.side[side].log_sum[row];
}

// (1 - p^gamma) / gamma of the target's probability
template <typename T>
PCSR_INLINE T gce_loss(T log_p, T gamma) {
  return gamma == 0 ? -log_p : -std::expm1(gamma * log_p) / gamma;
}

// gradient by minus the logit of a row's target
template <typename T>
PCSR_INLINE T gce_slope(const GceArgs<T>& a, int side, int64_t row) {
  T grad = a.side[side].grad_loss ? a.side[side].grad_loss[row] : 0;
  if (a.grad_total) grad += a.grad_total[0] / static_cast<T>(a.batch);
  return grad * std::exp(a.gamma * log_p_of(a, side, row, a.side[1 - side].labels[row]));
}

}  // namespace pcsr
