// CPU kernels of gce: a row of both sides while it is in cache; compiled once per instruction set.
#include "gce.h"

#include "rows.h"

namespace pcsr::PCSR_ISA {

template <typename T>
bool gce_rows(const GceArgs<T>& a, T* sums, T* __restrict row, int64_t begin, int64_t end) {
  for (int64_t k = 0; k < 2 * a.classes; ++k) sums[k] = 0;
  for (int64_t i = begin; i < end; ++i) {
    for (int s = 0; s < 2; ++s) {
      const GceSide<T>& side = a.side[s];
      const T* logits = side.logits + i * a.classes;
      const int64_t label = row_argmax(logits, a.classes);
      if (label < 0) return false;
      const T sum = exp_row(logits, logits[label], row, a.classes);
      if (side.mean != nullptr) {
        const T scale = T{1} / sum;
        T* __restrict mean = sums + s * a.classes;
        for (int64_t k = 0; k < a.classes; ++k) mean[k] += scale * row[k];
      }
      side.labels[i] = label;
      side.log_sum[i] = std::log(sum);
    }
    for (int s = 0; s < 2; ++s) {
      a.side[s].loss[i] = gce_loss(log_p_of(a, s, i, a.side[1 - s].labels[i]), a.gamma);
    }
  }
  return true;
}

template <typename T>
void gce_backward(const GceArgs<T>& a, int64_t begin, int64_t end) {
  const T scale = T{1} / static_cast<T>(a.batch);
  for (int64_t i = begin; i < end; ++i) {
    for (int s = 0; s < 2; ++s) {
      const GceSide<T>& side = a.side[s];
      if (side.grad_logits == nullptr) continue;
      const T* __restrict logits = side.logits + i * a.classes;
      const T* __restrict grad_mean = side.grad_mean;
      T* __restrict p = side.grad_logits + i * a.classes;
      const int64_t target = a.side[1 - s].labels[i];
      const T inverse = T{1} / exp_row(logits, logits[side.labels[i]], p, a.classes);
      const T grad = gce_slope(a, s, i);
      // p holds the exponentials, which inverse turns into the softmax
      if (grad_mean == nullptr) {
        for (int64_t k = 0; k < a.classes; ++k) p[k] *= grad * inverse;
      } else {
        const T common = grad - scale * dot(p, grad_mean, a.classes) * inverse;
        for (int64_t k = 0; k < a.classes; ++k) p[k] *= (common + scale * grad_mean[k]) * inverse;
      }
      p[target] -= grad;
    }
  }
}

#define PCSR_INSTANTIATE(T)                                               \
  template bool gce_rows<T>(const GceArgs<T>&, T*, T*, int64_t, int64_t); \
  template void gce_backward<T>(const GceArgs<T>&, int64_t, int64_t);
PCSR_INSTANTIATE(float)
PCSR_INSTANTIATE(double)

}  // namespace pcsr::PCSR_ISA
