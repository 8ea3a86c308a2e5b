// The CPU kernels of sgr.
#pragma once
#include "../sgr.h"
#include "isa.h"

namespace pcsr {

// how many values the packed weights and the workspace of a thread take, for forward or for backward
PCSR_DECLARE_KERNEL(template <typename T> int64_t, sgr_packed_size, const SgrArgs<T>& args, bool backward)
PCSR_DECLARE_KERNEL(template <typename T> int64_t, sgr_workspace_size, const SgrArgs<T>& args, bool backward)
// the weights in the layout of the products; once a call
PCSR_DECLARE_KERNEL(template <typename T> void, sgr_pack, const SgrArgs<T>& args, bool backward, T* packed)
// scores of pairs [begin, end), given in the order of their images
PCSR_DECLARE_KERNEL(template <typename T> void, sgr_forward, const SgrArgs<T>& args, const T* packed, T* workspace,
                    int64_t begin, int64_t end)
// adds the gradients of pairs [begin, end), given in the order of their images
PCSR_DECLARE_KERNEL(template <typename T> void, sgr_backward, const SgrArgs<T>& args, const SgrGrads<T>& grads,
                    const T* packed, T* workspace, int64_t begin, int64_t end)
// scores of pairs [begin, end) of the grid and, where most of a tile have a gradient, those gradients; left[p] is the
// gradient of the score of a pair that was not done
PCSR_DECLARE_KERNEL(template <typename T> void, sgr_mean, const SgrArgs<T>& args, const SgrGrads<T>& grads,
                    const SgrMean<T>& loss, const T* packed, T* workspace, int64_t begin, int64_t end, T* left)

}  // namespace pcsr
