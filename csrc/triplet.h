// The triplet op without torch: its arguments, and the hinge that CPU and CUDA share.
#pragma once
#include <cstdint>

#include "portable.h"

namespace pcsr {

// Rows of scores are images, columns captions, positives on the diagonal. Margin i is that of positive pair i: it
// stands in row i and in column i. Pairs that share an image or caption id are not each other's negatives.
template <typename T>
struct TripletArgs {
  const T* scores;             // [batch, batch]
  const T* margin;             // [1] or [batch]
  const int64_t* image_ids;    // [batch] or null
  const int64_t* caption_ids;  // [batch] or null
  int64_t batch;
  int64_t margin_stride;  // 0 or 1
  bool hardest;           // else the mean over all

  // written by forward, read by backward. hardest: the hardest negative of the row (column), -1 if its hinge is 0;
  // mean: how many hinges of the row (column) are not 0
  T* loss;          // [batch], row and column of each pair together
  int32_t* in_row;  // [batch]
  int32_t* in_col;  // [batch]

  // backward
  const T* grad_loss;  // [batch]
  T* grad_scores;      // [batch, batch]
};

// above 0 where score j of a negative comes closer than margin i to the score of positive pair i
template <typename T>
PCSR_INLINE T hinge_of(const TripletArgs<T>& a, int64_t pair, T score) {
  return (score - a.scores[pair * (a.batch + 1)]) + a.margin[pair * a.margin_stride];
}

// backward of the hardest negatives for pair i: its own score and its two negatives; every cell has one writer
template <typename T>
PCSR_INLINE void scatter_hardest(const TripletArgs<T>& a, int64_t i) {
  const T grad = a.grad_loss[i];
  const int64_t column = a.in_row[i], row = a.in_col[i];
  a.grad_scores[i * (a.batch + 1)] = -grad * static_cast<T>((column >= 0) + (row >= 0));
  // where row i and column j chose each other, the row writes for both
  if (column >= 0) {
    a.grad_scores[i * a.batch + column] = a.in_col[column] == i ? grad + a.grad_loss[column] : grad;
  }
  if (row >= 0 && a.in_row[row] != i) a.grad_scores[row * a.batch + i] = grad;
}

}  // namespace pcsr
