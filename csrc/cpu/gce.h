// The CPU kernels of gce, over rows that one thread owns.
#pragma once
#include "../gce.h"
#include "isa.h"

namespace pcsr {

// rows [begin, end): loss, labels and log_sum, and if means are wanted the sum of their softmax [2, classes]; row is
// scratch [classes]; false if a logit is NaN
PCSR_DECLARE_KERNEL(template <typename T> bool, gce_rows, const GceArgs<T>& args, T* sums, T* row, int64_t begin,
                    int64_t end)
// gradients of rows [begin, end)
PCSR_DECLARE_KERNEL(template <typename T> void, gce_backward, const GceArgs<T>& args, int64_t begin, int64_t end)

}  // namespace pcsr
