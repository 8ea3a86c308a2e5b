// The CPU kernels of triplet, over chunks of rows that one thread at a time owns.
#pragma once
#include "../triplet.h"
#include "isa.h"

namespace pcsr {

// members of each group of equal ids: the few masked cells of a row are found without comparing all
struct Groups {
  const int32_t* members;  // [batch], indices sorted by id; null without ids
  const int32_t* begin;    // [batch], where the group of an index begins among them
  const int32_t* end;      // [batch]
};

template <typename T>
struct TripletWork {
  Groups images, captions;
  T* positive;  // [batch], the diagonal of scores
  T* margin;    // [batch]
  T* grad;      // [batch], backward only
  // one for each chunk of rows
  T* row;           // [chunks, batch], the row at hand with -inf in place of what is not a negative
  T* col_value;     // [chunks, batch], hardest: the largest score so far; mean: the sum of hinges
  int32_t* col_in;  // [chunks, batch], hardest: its row; mean: the number of hinges
};

// loss and in_row of rows [begin, end), and what they add to the columns; false if a score is NaN
PCSR_DECLARE_KERNEL(template <typename T> bool, triplet_rows, const TripletArgs<T>& args, const TripletWork<T>& work,
                    int64_t chunk, int64_t begin, int64_t end)
// adds the columns of all chunks to loss, and in_col
PCSR_DECLARE_KERNEL(template <typename T> void, triplet_columns, const TripletArgs<T>& args, const TripletWork<T>& work,
                    int64_t chunks)
// gradient of rows [begin, end) for the mean over all negatives
PCSR_DECLARE_KERNEL(template <typename T> void, triplet_backward, const TripletArgs<T>& args,
                    const TripletWork<T>& work, int64_t chunk, int64_t begin, int64_t end)

}  // namespace pcsr
