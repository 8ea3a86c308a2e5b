// The CPU kernels of triplet, each over rows that one thread owns.
#pragma once
#include "../triplet.h"
#include "isa.h"

namespace pcsr {

// Members of each group of equal ids, so that the few masked cells of a row are found without comparing all.
struct Groups {
  const int32_t* order;  // [batch], indices sorted by id
  const int32_t* begin;  // [batch], where the group of index i starts in order
  const int32_t* end;    // [batch]
};

template <typename T>
struct TripletWork {
  Groups images, captions;  // order is null without ids
  // one part for each chunk of rows
  T* row;                // [chunks, batch], the row at hand
  T* col_value;          // [chunks, batch], hardest: the largest score; mean: the sum of hinges
  int32_t* col_in;       // [chunks, batch], hardest: its row; mean: the number of hinges
  int64_t rows_a_chunk;  // rows [chunk * rows_a_chunk, ...)
};

// rows of a chunk: loss and in_row complete, columns in the chunk's work; false if a score is NaN
PCSR_DECLARE_KERNEL(bool, triplet_rows, const TripletArgs<float>& args, const TripletWork<float>& work, int64_t chunk)
PCSR_DECLARE_KERNEL(bool, triplet_rows, const TripletArgs<double>& args, const TripletWork<double>& work, int64_t chunk)
// adds the columns of all chunks to loss and writes in_col
PCSR_DECLARE_KERNEL(void, triplet_columns, const TripletArgs<float>& args, const TripletWork<float>& work,
                    int64_t chunks)
PCSR_DECLARE_KERNEL(void, triplet_columns, const TripletArgs<double>& args, const TripletWork<double>& work,
                    int64_t chunks)
// gradient of rows [begin, end); for hardest only zeros, and scatter_hardest does the rest
PCSR_DECLARE_KERNEL(void, triplet_backward, const TripletArgs<float>& args, const TripletWork<float>& work,
                    int64_t begin, int64_t end, int64_t chunk)
PCSR_DECLARE_KERNEL(void, triplet_backward, const TripletArgs<double>& args, const TripletWork<double>& work,
                    int64_t begin, int64_t end, int64_t chunk)

}  // namespace pcsr
