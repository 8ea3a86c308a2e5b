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

// columns in whole vectors: B is packed into panels of two, the last may be one
template <typename T>
static inline int64_t padded(int64_t columns) {
  return (columns + Simd<T>::kLanes - 1) / Simd<T>::kLanes * Simd<T>::kLanes;
}

// how many values pack writes
template <typename T>
static inline int64_t packed_size(int64_t depth, int64_t columns) {
  return depth * padded<T>(columns);
}

// where a vector of row k stands in panels of depth rows
template <typename T>
static inline int64_t packed_at(int64_t k, int64_t column, int64_t depth, int64_t columns) {
  const int64_t first = column / kPanel<T> * kPanel<T>;
  const int64_t width = columns - first > Simd<T>::kLanes ? kPanel<T> : Simd<T>::kLanes;
  return first * depth + k * width + column - first;
}

// B(k, n) = b[k * row_stride + n * column_stride] into [depth / kDepth][panel][kDepth][width], columns padded by zeros
template <typename T>
static inline void pack(const T* b, int64_t row_stride, int64_t column_stride, int64_t depth, int64_t columns,
                        T* __restrict out) {
  constexpr int64_t kStrip = 64 / sizeof(T);
  for (int64_t from = 0; from < depth; from += kDepth) {
    const int64_t rows = depth - from < kDepth ? depth - from : kDepth;
    for (int64_t first = 0; first < columns; first += kPanel<T>) {
      const int64_t left = columns - first, width = left > Simd<T>::kLanes ? kPanel<T> : Simd<T>::kLanes;
      const T* corner = b + from * row_stride + first * column_stride;
      if (column_stride == 1) {
        for (int64_t k = 0; k < rows; ++k) {
          for (int64_t n = 0; n < width; ++n) out[k * width + n] = n < left ? corner[k * row_stride + n] : 0;
        }
      } else {
        // a line of the cache at a time: columns that are a power of two apart push each other out of it
        for (int64_t top = 0; top < rows; top += kStrip) {
          const int64_t end = rows - top < kStrip ? rows : top + kStrip;
          for (int64_t n = 0; n < width; ++n) {
            const T* column = corner + n * column_stride;
            for (int64_t k = top; k < end; ++k) out[k * width + n] = n < left ? column[k * row_stride] : 0;
          }
        }
      }
      out += rows * width;
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

// the first count values of a vector that is not whole; apart, so that the sums of a block stay in registers
template <typename T>
static __attribute__((noinline, cold)) void copy_tail(const T* from, int64_t count, T* to) {
  for (int64_t n = 0; n < count; ++n) to[n] = from[n];
}

// count values and zeros; a vector if count is more
template <typename T>
static inline typename Simd<T>::Vector load_part(const T* from, int64_t count) {
  if (count >= Simd<T>::kLanes) [[likely]]
    return load(from);
  T some[Simd<T>::kLanes] = {};
  copy_tail(from, count, some);
  return load(some);
}

template <typename T>
static inline void store_part(T* to, int64_t count, typename Simd<T>::Vector v) {
  if (count >= Simd<T>::kLanes) [[likely]]
    return store(to, v);
  T some[Simd<T>::kLanes];
  store(some, v);
  copy_tail(some, count, to);
}

// the sum of kCount values, by halves
template <int kCount, typename T>
static inline T sum_of(const T* x) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    T half[kCount / 2];
    for (int l = 0; l < kCount / 2; ++l) half[l] = x[l] + x[l + kCount / 2];
    return sum_of<kCount / 2>(half);
  }
}

// sum over k of a(r, k) b(k, :) for kRows rows and kVectors vectors of columns; finish takes each vector
template <int kRows, int kVectors, typename T, typename Finish>
static inline void block(const T* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t b_stride, int64_t depth,
                         int64_t row, int64_t column, const Finish& finish) {
  constexpr int kLanes = Simd<T>::kLanes;
  typename Simd<T>::Vector sum[kRows][kVectors] = {};
  a += row * row_stride;
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    typename Simd<T>::Vector right[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) right[v] = load(b + k * b_stride + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const T x = a[r * row_stride + k * k_stride];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] += x * right[v];
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) finish(row + r, column + v * kLanes, sum[r][v]);
  }
}

// kVectors vectors of columns against all rows of A
template <int kVectors, typename T, typename Finish>
static inline void panel_product(int64_t rows, int64_t depth, const T* a, int64_t row_stride, int64_t k_stride,
                                 const T* b, int64_t b_stride, int64_t column, const Finish& finish) {
  int64_t row = 0;
  for (; row + kBlockRows <= rows; row += kBlockRows) {
    block<kBlockRows, kVectors>(a, row_stride, k_stride, b, b_stride, depth, row, column, finish);
  }
  switch (rows - row) {
    case 5:
      return block<5, kVectors>(a, row_stride, k_stride, b, b_stride, depth, row, column, finish);
    case 4:
      return block<4, kVectors>(a, row_stride, k_stride, b, b_stride, depth, row, column, finish);
    case 3:
      return block<3, kVectors>(a, row_stride, k_stride, b, b_stride, depth, row, column, finish);
    case 2:
      return block<2, kVectors>(a, row_stride, k_stride, b, b_stride, depth, row, column, finish);
    case 1:
      return block<1, kVectors>(a, row_stride, k_stride, b, b_stride, depth, row, column, finish);
    default:
      return;
  }
}

// A B with A(i, k) = a[i * row_stride + k * k_stride]; finish(row, column, sums) takes the results, a vector at a time.
// B has rows of b_stride, readable to whole vectors, or is packed in panels of depth rows if b_stride is 0.
template <typename T, typename Finish>
static inline void product(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t row_stride,
                           int64_t k_stride, const T* b, int64_t b_stride, const Finish& finish) {
  for (int64_t column = 0; column < columns; column += kPanel<T>) {
    const T* panel = b + (b_stride ? 1 : depth) * column;
    if (columns - column > Simd<T>::kLanes) {
      panel_product<2>(rows, depth, a, row_stride, k_stride, panel, b_stride ? b_stride : kPanel<T>, column, finish);
    } else {
      panel_product<1>(rows, depth, a, row_stride, k_stride, panel, b_stride ? b_stride : Simd<T>::kLanes, column,
                       finish);
    }
  }
}

// C = A B, or C += A B, with B packed; C row by row with its own stride
template <typename T>
static inline void gemm(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t row_stride, int64_t k_stride,
                        const T* packed, T* c, int64_t c_stride, bool add = false) {
  for (int64_t from = 0; from < depth; from += kDepth) {
    const int64_t some = depth - from < kDepth ? depth - from : kDepth;
    const bool fresh = from == 0 && !add;
    product(rows, columns, some, a + from * k_stride, row_stride, k_stride, packed + from * padded<T>(columns), 0,
            [=](int64_t row, int64_t column, typename Simd<T>::Vector sum) {
              T* to = c + row * c_stride + column;
              store_part(to, columns - column, fresh ? sum : sum + load_part(to, columns - column));
            });
  }
}

// sums[r * count + j] = a_r . b_j for kRows rows of a and all of b; rows are in whole vectors, padded by zeros
template <int kRows, typename T>
static inline void dot_rows(const T* a, const T* b, int64_t count, int64_t stride, T* sums) {
  constexpr int kTogether = 4;
  for (int64_t j = 0; j < count; j += kTogether) {
    const int64_t some = count - j < kTogether ? count - j : kTogether;
    typename Simd<T>::Vector sum[kRows][kTogether] = {};
    const T* row[kTogether];
    for (int q = 0; q < kTogether; ++q) row[q] = b + (j + (q < some ? q : 0)) * stride;
    for (int64_t k = 0; k < stride; k += Simd<T>::kLanes) {
#pragma GCC unroll 4
      for (int q = 0; q < kTogether; ++q) {
        const auto y = load(row[q] + k);
#pragma GCC unroll 3
        for (int r = 0; r < kRows; ++r) sum[r][q] += load(a + r * stride + k) * y;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int q = 0; q < some; ++q) {
        T lanes[Simd<T>::kLanes];
        store(lanes, sum[r][q]);
        sums[r * count + j + q] = sum_of<Simd<T>::kLanes>(lanes);
      }
    }
  }
}

// sums[i * count + j] = a_i . b_j for all rows of a and b
template <typename T>
static inline void dots(const T* a, int64_t rows, const T* b, int64_t count, int64_t stride, T* sums) {
  int64_t i = 0;
  for (; i + 3 <= rows; i += 3) dot_rows<3>(a + i * stride, b, count, stride, sums + i * count);
  for (; i < rows; ++i) dot_rows<1>(a + i * stride, b, count, stride, sums + i * count);
}

}  // namespace pcsr::PCSR_ISA
