// Matrix products of the size of a tile, C = A B with B packed into panels; static, so that each instruction set keeps
// its own.
#pragma once
#include <cstdint>
#include <cstring>

namespace pcsr::PCSR_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <typename T>
struct Simd {
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  typedef T Vector __attribute__((vector_size(kVectorBytes)));
};

// a micro-kernel keeps kBlockRows x kPanel results in registers
constexpr int kBlockRows = 6;
template <typename T>
constexpr int kPanel = 2 * Simd<T>::kLanes;
// rows of a panel at a time: a panel of them fits the first cache beside the rows of A
constexpr int64_t kDepth = 256;

template <typename T>
static inline int64_t panels_of(int64_t columns) {
  return (columns + kPanel<T> - 1) / kPanel<T>;
}

// how many values pack writes
template <typename T>
static inline int64_t packed_size(int64_t depth, int64_t columns) {
  return depth * panels_of<T>(columns) * kPanel<T>;
}

// B(k, n) = b[k * row_stride + n * column_stride] into [depth / kDepth][panel][kDepth][kPanel], columns padded by zeros
template <typename T>
static inline void pack(const T* b, int64_t row_stride, int64_t column_stride, int64_t depth, int64_t columns,
                        T* __restrict out) {
  for (int64_t from = 0; from < depth; from += kDepth) {
    const int64_t rows = depth - from < kDepth ? depth - from : kDepth;
    for (int64_t first = 0; first < columns; first += kPanel<T>) {
      const int64_t width = columns - first < kPanel<T> ? columns - first : kPanel<T>;
      for (int64_t k = 0; k < rows; ++k, out += kPanel<T>) {
        const T* row = b + (from + k) * row_stride + first * column_stride;
        for (int64_t n = 0; n < width; ++n) out[n] = row[n * column_stride];
        for (int64_t n = width; n < kPanel<T>; ++n) out[n] = 0;
      }
    }
  }
}

template <typename T>
static inline typename Simd<T>::Vector load(const T* from) {
  typename Simd<T>::Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename T>
static inline void store(T* to, typename Simd<T>::Vector v) {
  std::memcpy(to, &v, sizeof v);
}

// count values and zeros; count may be any number
template <typename T>
static inline typename Simd<T>::Vector load_part(const T* from, int64_t count) {
  if (count >= Simd<T>::kLanes) return load(from);
  T some[Simd<T>::kLanes] = {};
  for (int64_t n = 0; n < count; ++n) some[n] = from[n];
  return load(some);
}

// to[0 .. count) += the values of left and right
template <typename T>
static inline void add_part(T* to, int64_t count, typename Simd<T>::Vector left, typename Simd<T>::Vector right) {
  constexpr int kLanes = Simd<T>::kLanes;
  if (count >= kPanel<T>) {
    store(to, load(to) + left);
    store(to + kLanes, load(to + kLanes) + right);
    return;
  }
  T both[kPanel<T>];
  store(both, left);
  store(both + kLanes, right);
  for (int64_t n = 0; n < count; ++n) to[n] += both[n];
}

// sum over k of a(r, k) panel(k, :) for kRows rows
template <int kRows, typename T>
static inline __attribute__((always_inline)) void accumulate(const T* a, int64_t row_stride, int64_t k_stride,
                                                             const T* panel, int64_t panel_stride, int64_t depth,
                                                             typename Simd<T>::Vector (&sum)[kRows][2]) {
  constexpr int kLanes = Simd<T>::kLanes;
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = typename Simd<T>::Vector{};
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    const auto left = load(panel + k * panel_stride), right = load(panel + k * panel_stride + kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const T x = a[r * row_stride + k * k_stride];
      sum[r][0] += x * left;
      sum[r][1] += x * right;
    }
  }
}

// kRows rows from row on; calls finish for each
template <int kRows, typename T, typename Finish>
static inline void block(const T* a, int64_t row_stride, int64_t k_stride, const T* panel, int64_t panel_stride,
                         int64_t depth, int64_t row, int64_t column, const Finish& finish) {
  typename Simd<T>::Vector sum[kRows][2];
  accumulate<kRows>(a + row * row_stride, row_stride, k_stride, panel, panel_stride, depth, sum);
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) finish(row + r, column, sum[r][0], sum[r][1]);
}

// kPanel columns against all rows of A; finish(row, column, left, right) takes the results of a row
template <typename T, typename Finish>
static inline void panel_product(int64_t rows, int64_t depth, const T* a, int64_t row_stride, int64_t k_stride,
                                 const T* panel, int64_t panel_stride, int64_t column, const Finish& finish) {
  int64_t row = 0;
  for (; row + kBlockRows <= rows; row += kBlockRows) {
    block<kBlockRows>(a, row_stride, k_stride, panel, panel_stride, depth, row, column, finish);
  }
  switch (rows - row) {
    case 5:
      return block<5>(a, row_stride, k_stride, panel, panel_stride, depth, row, column, finish);
    case 4:
      return block<4>(a, row_stride, k_stride, panel, panel_stride, depth, row, column, finish);
    case 3:
      return block<3>(a, row_stride, k_stride, panel, panel_stride, depth, row, column, finish);
    case 2:
      return block<2>(a, row_stride, k_stride, panel, panel_stride, depth, row, column, finish);
    case 1:
      return block<1>(a, row_stride, k_stride, panel, panel_stride, depth, row, column, finish);
    default:
      return;
  }
}

// C = A B, or C += A B; A(i, k) = a[i * row_stride + k * k_stride], C row by row with its own stride
template <typename T>
static inline void gemm(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t row_stride, int64_t k_stride,
                        const T* packed, T* c, int64_t c_stride, bool add = false) {
  constexpr int kLanes = Simd<T>::kLanes;
  for (int64_t from = 0; from < depth; from += kDepth) {
    const int64_t some = depth - from < kDepth ? depth - from : kDepth;
    const bool fresh = from == 0 && !add;
    const auto finish = [=](int64_t row, int64_t column, typename Simd<T>::Vector left,
                            typename Simd<T>::Vector right) {
      T* to = c + row * c_stride + column;
      if (!fresh) return add_part(to, columns - column, left, right);
      if (column + kPanel<T> <= columns) {
        store(to, left);
        store(to + kLanes, right);
        return;
      }
      T both[kPanel<T>];
      store(both, left);
      store(both + kLanes, right);
      for (int64_t n = 0; n < columns - column; ++n) to[n] = both[n];
    };
    for (int64_t column = 0; column < columns; column += kPanel<T>, packed += some * kPanel<T>) {
      panel_product(rows, some, a + from * k_stride, row_stride, k_stride, packed, kPanel<T>, column, finish);
    }
  }
}

// sums[j] = a . b_j for count rows of b; n is a multiple of kPanel
template <typename T>
static inline void dots(const T* a, const T* b, int64_t b_stride, int64_t count, int64_t n, T* sums) {
  constexpr int kLanes = Simd<T>::kLanes, kTogether = 4;
  for (int64_t j = 0; j < count; j += kTogether) {
    const int64_t some = count - j < kTogether ? count - j : kTogether;
    typename Simd<T>::Vector sum[kTogether] = {};
    const T* row[kTogether];
    for (int q = 0; q < kTogether; ++q) row[q] = b + (j + (q < some ? q : 0)) * b_stride;
    for (int64_t k = 0; k < n; k += kLanes) {
      const auto x = load(a + k);
#pragma GCC unroll 4
      for (int q = 0; q < kTogether; ++q) sum[q] += x * load(row[q] + k);
    }
    for (int q = 0; q < some; ++q) {
      T total = 0;
      for (int l = 0; l < kLanes; ++l) total += sum[q][l];
      sums[j + q] = total;
    }
  }
}

}  // namespace pcsr::PCSR_ISA
