// CPU kernels of triplet: one pass over the scores, columns kept beside the row; compiled once per instruction set.
#include "triplet.h"

#include <limits>

#include "rows.h"

namespace pcsr::PCSR_ISA {
namespace {

constexpr int kLanes = 32;

template <typename T>
constexpr T kNothing = -std::numeric_limits<T>::infinity();

template <typename T>
void mask_group(const Groups& groups, int64_t i, T* row) {
  if (groups.members == nullptr) return;
  for (int32_t m = groups.begin[i]; m < groups.end[i]; ++m) row[groups.members[m]] = kNothing<T>;
}

// copies row i with -inf in place of what is not a negative; false if it has a NaN
template <typename T>
bool load_row(const TripletArgs<T>& a, const TripletWork<T>& w, int64_t i, T* __restrict row) {
  const T* __restrict scores = a.scores + i * a.batch;
  Flag<T> nan = 0;
  for (int64_t j = 0; j < a.batch; ++j) {
    nan |= scores[j] != scores[j];
    row[j] = scores[j];
  }
  row[i] = kNothing<T>;
  mask_group(w.images, i, row);
  mask_group(w.captions, i, row);
  return nan == 0;
}

// the largest score of the row, while each column keeps its own
template <typename T>
T scan_hardest(const T* __restrict row, T* __restrict col_value, int32_t* __restrict col_in, int64_t n, int32_t i) {
  T best[kLanes];
  for (int l = 0; l < kLanes; ++l) best[l] = kNothing<T>;
  const int64_t whole = n - n % kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const T s = row[j + l];
      best[l] = s > best[l] ? s : best[l];
      col_in[j + l] = s > col_value[j + l] ? i : col_in[j + l];
      col_value[j + l] = s > col_value[j + l] ? s : col_value[j + l];
    }
  }
  for (int64_t j = whole; j < n; ++j) {
    const T s = row[j];
    best[0] = s > best[0] ? s : best[0];
    col_in[j] = s > col_value[j] ? i : col_in[j];
    col_value[j] = s > col_value[j] ? s : col_value[j];
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) best[l] = best[l + half] > best[l] ? best[l + half] : best[l];
  }
  return best[0];
}

template <typename T>
struct Sum {
  T value;
  int32_t count;
};

// the sum of the row's hinges, while each column adds its own
template <typename T>
Sum<T> scan_mean(const TripletWork<T>& w, const T* __restrict row, T* __restrict col_value, int32_t* __restrict col_in,
                 int64_t n, int64_t i) {
  const T* __restrict positive = w.positive;
  const T* __restrict margin = w.margin;
  const T own_positive = positive[i], own_margin = margin[i];
  T sum[kLanes] = {};
  Flag<T> count[kLanes] = {};
  const auto add = [&](int64_t j, int l) {
    const T in_row = (row[j] - own_positive) + own_margin;
    const T in_col = (row[j] - positive[j]) + margin[j];
    sum[l] += in_row > 0 ? in_row : 0;
    count[l] += in_row > 0;
    col_value[j] += in_col > 0 ? in_col : 0;
    col_in[j] += in_col > 0;
  };
  const int64_t whole = n - n % kLanes;
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) add(j + l, l);
  }
  for (int64_t j = whole; j < n; ++j) add(j, static_cast<int>(j - whole));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) {
      sum[l] += sum[l + half];
      count[l] += count[l + half];
    }
  }
  return {sum[0], static_cast<int32_t>(count[0])};
}

}  // namespace

template <typename T>
bool triplet_rows(const TripletArgs<T>& a, const TripletWork<T>& w, int64_t chunk, int64_t begin, int64_t end) {
  T* row = w.row + chunk * a.batch;
  T* col_value = w.col_value + chunk * a.batch;
  int32_t* col_in = w.col_in + chunk * a.batch;
  for (int64_t j = 0; j < a.batch; ++j) {
    col_value[j] = a.hardest ? kNothing<T> : 0;
    col_in[j] = a.hardest ? -1 : 0;
  }
  for (int64_t i = begin; i < end; ++i) {
    if (!load_row(a, w, i, row)) return false;
    if (!a.hardest) {
      const Sum<T> sum = scan_mean(w, row, col_value, col_in, a.batch, i);
      a.loss[i] = sum.value / static_cast<T>(a.batch);
      a.in_row[i] = sum.count;
      continue;
    }
    const T best = scan_hardest(row, col_value, col_in, a.batch, static_cast<int32_t>(i));
    const T hinge = hinge_of(a, i, best);
    a.loss[i] = 0;
    a.in_row[i] = -1;
    if (hinge > 0) {
      int32_t at = 0;
      while (row[at] != best) ++at;
      a.loss[i] = hinge;
      a.in_row[i] = at;
    }
  }
  return true;
}

template <typename T>
void triplet_columns(const TripletArgs<T>& a, const TripletWork<T>& w, int64_t chunks) {
  for (int64_t j = 0; j < a.batch; ++j) {
    T value = w.col_value[j];
    int32_t in = w.col_in[j];
    for (int64_t c = 1; c < chunks; ++c) {
      const T other = w.col_value[c * a.batch + j];
      const int32_t other_in = w.col_in[c * a.batch + j];
      if (!a.hardest) {
        value += other;
        in += other_in;
      } else if (other > value) {
        value = other;
        in = other_in;
      }
    }
    const T hinge = a.hardest ? hinge_of(a, j, value) : value / static_cast<T>(a.batch);
    a.loss[j] += hinge > 0 ? hinge : 0;
    a.in_col[j] = a.hardest && !(hinge > 0) ? -1 : in;
  }
}

template <typename T>
void triplet_backward(const TripletArgs<T>& a, const TripletWork<T>& w, int64_t chunk, int64_t begin, int64_t end) {
  T* __restrict row = w.row + chunk * a.batch;
  const T* __restrict positive = w.positive;
  const T* __restrict margin = w.margin;
  const T* __restrict pair_grads = w.grad;
  const T scale = T{1} / static_cast<T>(a.batch);
  for (int64_t i = begin; i < end; ++i) {
    load_row(a, w, i, row);
    const T own_positive = positive[i], own_margin = margin[i], own_grad = pair_grads[i];
    T* __restrict grad = a.grad_scores + i * a.batch;
    for (int64_t j = 0; j < a.batch; ++j) {
      const T in_row = (row[j] - own_positive) + own_margin;
      const T in_col = (row[j] - positive[j]) + margin[j];
      grad[j] = scale * ((in_row > 0 ? own_grad : 0) + (in_col > 0 ? pair_grads[j] : 0));
    }
    grad[i] = -scale * own_grad * static_cast<T>(a.in_row[i] + a.in_col[i]);
  }
}

#define PCSR_INSTANTIATE(T)                                                                               \
  template bool triplet_rows<T>(const TripletArgs<T>&, const TripletWork<T>&, int64_t, int64_t, int64_t); \
  template void triplet_columns<T>(const TripletArgs<T>&, const TripletWork<T>&, int64_t);                \
  template void triplet_backward<T>(const TripletArgs<T>&, const TripletWork<T>&, int64_t, int64_t, int64_t);
PCSR_INSTANTIATE(float)
PCSR_INSTANTIATE(double)

}  // namespace pcsr::PCSR_ISA
