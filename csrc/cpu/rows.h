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

// index of the first maximum of a row, or -1 if it has a NaN; independent lanes let the compiler use vectors without
// -ffast-math
template <typename T>
static inline int64_t row_argmax(const T* row, int64_t n) {
  constexpr int kLanes = 128 / sizeof(T);
  T best[kLanes];
  Flag<T> nan[kLanes] = {};
  const int64_t whole = n - n % kLanes;
  for (int l = 0; l < kLanes; ++l) best[l] = -std::numeric_limits<T>::infinity();
  for (int64_t j = 0; j < whole; j += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const T x = row[j + l];
      nan[l] |= x != x;
      best[l] = x > best[l] ? x : best[l];
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) {
      nan[l] |= nan[l + half];
      best[l] = best[l + half] > best[l] ? best[l + half] : best[l];
    }
  }
  T top = best[0];
  bool any_nan = nan[0] != 0;
  for (int64_t j = whole; j < n; ++j) {
    any_nan |= row[j] != row[j];
    top = row[j] > top ? row[j] : top;
  }
  if (any_nan) return -1;
  int64_t at = 0;
  for (; at < whole; at += kLanes) {
    Flag<T> hit = 0;
    for (int l = 0; l < kLanes; ++l) hit |= row[at + l] == top;
    if (hit) break;
  }
  while (row[at] != top) ++at;
  return at;
}

// e^x for x <= 0, error below 2 ulp; unlike std::exp it vectorises
static inline float exp_negative(float x) {
  // x = n ln 2 + r; adding 1.5 * 2^23 rounds to the nearest integer
  const float clamped = x < -88.0f ? -88.0f : x;
  const float n = (clamped * 1.44269504f + 12582912.0f) - 12582912.0f;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < -87.0f ? 0.0f : p * power;
}

static inline double exp_negative(double x) { return std::exp(x); }

// out[k] = e^(row[k] - shift), and their sum
template <typename T>
static inline T exp_row(const T* __restrict row, T shift, T* __restrict out, int64_t n) {
  constexpr int kLanes = 128 / sizeof(T);
  T sum[kLanes] = {};
  for (int64_t k = 0; k < n; ++k) out[k] = exp_negative(row[k] - shift);
  const int64_t whole = n - n % kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    for (int l = 0; l < kLanes; ++l) sum[l] += out[k + l];
  }
  for (int64_t k = whole; k < n; ++k) sum[0] += out[k];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  }
  return sum[0];
}

template <typename T>
static inline T dot(const T* __restrict a, const T* __restrict b, int64_t n) {
  constexpr int kLanes = 128 / sizeof(T);
  T sum[kLanes] = {};
  const int64_t whole = n - n % kLanes;
  for (int64_t k = 0; k < whole; k += kLanes) {
    for (int l = 0; l < kLanes; ++l) sum[l] += a[k + l] * b[k + l];
  }
  for (int64_t k = whole; k < n; ++k) sum[0] += a[k] * b[k];
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) sum[l] += sum[l + half];
  }
  return sum[0];
}

}  // namespace pcsr::PCSR_ISA
