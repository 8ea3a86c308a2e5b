// The triplet op without torch: its arguments, and what CPU and CUDA share of the hinge and its gradient.
#pragma once
#include <cstdint>

#include "portable.h"

namespace pcsr {

// Rows of scores are images, columns captions, positives on the diagonal. Margin i is that of positive pair i: it
// counts in row i and in column i. Pairs that share an image or caption id are not each other's negatives.
template <typename T>
struct TripletArgs {
  const T* scores;             // [batch, batch]
  const T* margin;             // [batch], or [1] with margin_stride 0
  const int64_t* image_ids;    // [batch] or null
  const int64_t* caption_ids;  // [batch] or null
  int64_t batch, margin_stride;
  bool hardest;  // else the mean over all negatives

  // written by forward, read by backward. in_row and in_col are, if hardest, the hardest negative of the row and of the
  // column, -1 where its hinge is 0; else the number of hinges in the row and in the column that are not 0
  T* total;         // [1], the sum of loss
  T* loss;          // [batch], of row and column together
  int32_t* in_row;  // [batch]
  int32_t* in_col;  // [batch]

  const T* grad_total;  // [1], null is zero
  const T* grad_loss;   // [batch], null is zero
  T* grad_scores;       // [batch, batch], written by backward
};

// above 0 where a negative comes closer than the margin to the score of a positive pair
template <typename T>
PCSR_INLINE T hinge_of(const TripletArgs<T>& a, int64_t pair, T score) {
  return (score - a.scores[pair * (a.batch + 1)]) + a.margin[pair * a.margin_stride];
}

// gradient by the loss of a pair
template <typename T>
PCSR_INLINE T pair_grad(const TripletArgs<T>& a, int64_t pair) {
  return (a.grad_total ? a.grad_total[0] : 0) + (a.grad_loss ? a.grad_loss[pair] : 0);
}

// gradient of the hardest negatives of pair i on zeros: its own score and two others; every cell has one writer
template <typename T>
PCSR_INLINE void scatter_hardest(const TripletArgs<T>& a, int64_t i) {
  const T grad = pair_grad(a, i);
  const int64_t column = a.in_row[i], row = a.in_col[i];
  a.grad_scores[i * (a.batch + 1)] = -grad * static_cast<T>((column >= 0) + (row >= 0));
  // where row i and column j chose each other, the row writes for both
  if (column >= 0) {
    a.grad_scores[i * a.batch + column] = a.in_col[column] == i ? grad + pair_grad(a, column) : grad;
  }
  if (row >= 0 && a.in_row[row] != i) a.grad_scores[row * a.batch + i] = grad;
}

}  // namespace pcsr
