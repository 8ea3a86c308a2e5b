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
  T* mean;          // [classes], of the softmax over the batch
  int64_t* labels;  // [batch], argmax of the logits, ties: the lowest class
  T* log_sum;       // [batch], log of the sum of e^(logit - largest): precise also for large logits

  const T* grad_loss;  // [batch]
  const T* grad_mean;  // [classes]
  T* grad_logits;      // [batch, classes], written by backward; null if not wanted
};

template <typename T>
struct GceArgs {
  GceSide<T> side[2];  // image, text
  int64_t batch, classes;
  T gamma;  // 0 is cross entropy
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

// minus its derivative by log p
template <typename T>
PCSR_INLINE T gce_slope(T log_p, T gamma) {
  return std::exp(gamma * log_p);
}

}  // namespace pcsr
