// Loops over a row that the compiler turns into vectors of the instruction set it compiles for. Functions are static:
// each instruction set keeps its own copy.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace pcsr::PCSR_ISA {

// as wide as T: lanes of one width vectorise
template <typename T>
using Flag = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// index of the first maximum of a row, or -1 if it has a NaN; the second pass costs less than one wrong guess of a
// branch
template <typename T>
static inline int64_t row_argmax(const T* row, int64_t n) {
  T top = -std::numeric_limits<T>::infinity();
  Flag<T> nan = 0;
#pragma omp simd reduction(max : top) reduction(| : nan)
  for (int64_t k = 0; k < n; ++k) {
    nan |= row[k] != row[k];
    top = row[k] > top ? row[k] : top;
  }
  Flag<T> at = static_cast<Flag<T>>(n);
#pragma omp simd reduction(min : at)
  for (Flag<T> k = 0; k < static_cast<Flag<T>>(n); ++k) {
    const Flag<T> here = row[k] == top ? k : static_cast<Flag<T>>(n);
    at = here < at ? here : at;
  }
  return nan ? -1 : at;
}

// e^x for x <= 0, absolute error below 1e-7, and 1e-38 below -87; unlike std::exp it vectorises
static inline float exp_negative(float x) {
  // 2^t with t = n + f; adding 1.5 * 2^23 rounds t to n, whose bits then stand in the lowest places
  const float t = (x < -87.0f ? -87.0f : x) * 1.44269504f;
  const float shifted = t + 12582912.0f;
  const float f = t - (shifted - 12582912.0f);
  float p = 1.5353362e-4f;
  p = p * f + 1.3398874e-3f;
  p = p * f + 9.6184373e-3f;
  p = p * f + 5.5503324e-2f;
  p = p * f + 2.4022648e-1f;
  p = p * f + 6.9314720e-1f;
  p = p * f + 1.0f;
  return std::bit_cast<float>(std::bit_cast<int32_t>(p) + (std::bit_cast<int32_t>(shifted) << 23));
}

static inline double exp_negative(double x) { return std::exp(x); }

// out[k] = e^(row[k] - shift), and their sum; out may be row
template <typename T>
static inline T exp_row(const T* row, T shift, T* out, int64_t n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < n; ++k) {
    out[k] = exp_negative(row[k] - shift);
    sum += out[k];
  }
  return sum;
}

template <typename T>
static inline T dot(const T* __restrict a, const T* __restrict b, int64_t n) {
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < n; ++k) sum += a[k] * b[k];
  return sum;
}

}  // namespace pcsr::PCSR_ISA
