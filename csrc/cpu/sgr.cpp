// CPU kernels of sgr. Pairs are taken in tiles of about kTileWords words, which stay in cache from attention to score;
// nothing grows with the number of pairs. Compiled once per instruction set.
#include "sgr.h"

#include <cmath>

#include "gemm.h"
#include "rows.h"

namespace pcsr::PCSR_ISA {
namespace {

constexpr int64_t kTileWords = 96;
// larger, because every tile of backward reads and writes the gradients of all weights
constexpr int64_t kBackTileWords = 192;
constexpr int64_t kTilePairs = 32;

template <typename T>
int64_t padded(int64_t columns) {
  return panels_of<T>(columns) * kPanel<T>;
}

template <typename T>
int64_t tile_words(const SgrArgs<T>& a, int64_t usual) {
  return a.longest > usual ? a.longest : usual;
}

// hands out parts of one piece of memory; without memory it only counts
template <typename T>
class Arena {
 public:
  explicit Arena(T* memory) : memory_(memory) {}
  T* take(int64_t count) {
    T* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count + kPanel<T> - 1) / kPanel<T> * kPanel<T>;
    return part;
  }
  int64_t used() const { return used_; }

 private:
  T* memory_;
  int64_t used_ = 0;
};

// weights as gemm wants them; graph and mix of all steps
template <typename T>
struct Packed {
  T *loc, *glo, *mix, *graph;
  T *b_loc, *b_glo, *shift, *bias, *w_score;  // padded by zeros
  int64_t step;                               // from one step's mix or graph to the next

  Packed(const SgrArgs<T>& a, Arena<T>& arena) {
    const int64_t width = padded<T>(a.nodes);
    step = packed_size<T>(a.nodes, a.nodes);
    loc = arena.take(packed_size<T>(a.dim, a.nodes));
    glo = arena.take(packed_size<T>(a.dim, a.nodes));
    mix = arena.take(a.steps * step);
    graph = arena.take(a.steps * step);
    b_loc = arena.take(width);
    b_glo = arena.take(width);
    shift = arena.take(a.steps * width);
    bias = arena.take(a.steps * width);
    w_score = arena.take(width);
  }
};

template <typename T>
void copy_padded(const T* from, int64_t n, T* to) {
  for (int64_t k = 0; k < padded<T>(n); ++k) to[k] = k < n ? from[k] : 0;
}

template <typename T>
struct Work {
  // of the image at hand
  T* regions_t;  // packed [dim, region_count]
  T* regions;    // packed [region_count, kDepth] for each block of dim
  T* gram;       // packed [region_count, region_count]
  T* product;    // [region_count, padded regions]
  int64_t image = -1;
  // of the tile; rows of node buffers are padded to whole panels
  T* attention;   // [words, padded regions]
  T* weighted;    // [words, padded regions]
  T* inverse;     // [words], of the context's norm
  T* context;     // [words, kDepth]
  T* difference;  // [words or pairs, dim]
  T* local;       // [words, nodes]
  T* whole;       // [pairs, nodes]
  T* now;         // [words + pairs, nodes]
  T* next;        // [words + pairs, nodes]
  T* mixed;       // [words + pairs, nodes]
  T* moved;       // [words + pairs, nodes]
  T* edges;       // [longest + 1]
  T* norms;       // [padded regions]

  Work(const SgrArgs<T>& a, int64_t words, Arena<T>& arena) {
    const int64_t pairs = kTilePairs, r = padded<T>(a.region_count), s = padded<T>(a.nodes);
    const int64_t blocks = (a.dim + kDepth - 1) / kDepth;
    regions_t = arena.take(packed_size<T>(a.dim, a.region_count));
    regions = arena.take(blocks * packed_size<T>(a.region_count, kDepth));
    gram = arena.take(packed_size<T>(a.region_count, a.region_count));
    product = arena.take(a.region_count * r);
    attention = arena.take(words * r);
    weighted = arena.take(words * r);
    inverse = arena.take(words);
    context = arena.take(words * kDepth);
    difference = arena.take((words > pairs ? words : pairs) * a.dim);
    local = arena.take(words * s);
    whole = arena.take(pairs * s);
    now = arena.take((words + pairs) * s);
    next = arena.take((words + pairs) * s);
    mixed = arena.take((words + pairs) * s);
    moved = arena.take((words + pairs) * s);
    edges = arena.take(kBlockRows * (a.longest + 1));
    norms = arena.take(r);
  }
};

template <typename T>
T inverse_norm(T square) {
  return square > 0 ? T{1} / (std::sqrt(square) + static_cast<T>(1e-8)) : T{0};
}

// x = l2(x + bias), and the scale
template <typename T>
T normalise(T* __restrict x, const T* __restrict bias, int64_t n) {
  T square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t k = 0; k < n; ++k) {
    x[k] += bias[k];
    square += x[k] * x[k];
  }
  const T scale = inverse_norm(square);
  for (int64_t k = 0; k < n; ++k) x[k] *= scale;
  return scale;
}

template <typename T>
void softmax(T* row, int64_t n) {
  T top = row[0];
  for (int64_t k = 1; k < n; ++k) top = row[k] > top ? row[k] : top;
  const T scale = T{1} / exp_row(row, top, row, n);
  for (int64_t k = 0; k < n; ++k) row[k] *= scale;
}

template <typename T>
void prepare_image(const SgrArgs<T>& a, Work<T>& w, int64_t image) {
  if (w.image == image) return;
  w.image = image;
  const T* v = a.regions + image * a.region_count * a.dim;
  const int64_t r = padded<T>(a.region_count);
  pack(v, 1, a.dim, a.dim, a.region_count, w.regions_t);
  for (int64_t from = 0, block = 0; from < a.dim; from += kDepth, ++block) {
    const int64_t some = a.dim - from < kDepth ? a.dim - from : kDepth;
    pack(v + from, a.dim, 1, a.region_count, some, w.regions + block * packed_size<T>(a.region_count, kDepth));
  }
  gemm(a.region_count, r, a.dim, v, a.dim, 1, w.regions_t, w.product, r);
  pack(w.product, r, 1, a.region_count, a.region_count, w.gram);
}

// attention of n words with the image at hand: rows become softmax over regions
template <typename T>
void attend(const SgrArgs<T>& a, const Work<T>& w, T* __restrict attention, int64_t n) {
  const int64_t r = padded<T>(a.region_count);
  T* __restrict norms = w.norms;
  for (int64_t k = 0; k < r; ++k) norms[k] = 0;
  for (int64_t l = 0; l < n; ++l) {
    T* __restrict row = attention + l * r;
    for (int64_t k = 0; k < r; ++k) {
      row[k] = row[k] > 0 ? row[k] : static_cast<T>(0.1) * row[k];
      norms[k] += row[k] * row[k];
    }
  }
  for (int64_t k = 0; k < r; ++k) norms[k] = 9 * inverse_norm(norms[k]);
  for (int64_t l = 0; l < n; ++l) {
    T* __restrict row = attention + l * r;
    for (int64_t k = 0; k < r; ++k) row[k] *= norms[k];
    // logits are at most 9
    const T scale = T{1} / exp_row(row, T{9}, row, a.region_count);
    for (int64_t k = 0; k < a.region_count; ++k) row[k] *= scale;
    for (int64_t k = a.region_count; k < r; ++k) row[k] = 0;
  }
}

// (context - word)^2 of n words with the image at hand, a block of the embedding at a time
template <typename T>
void align(const SgrArgs<T>& a, const Work<T>& w, const T* words, int64_t n, T* difference) {
  const int64_t r = padded<T>(a.region_count), d = a.dim;
  gemm(n, r, d, words, d, 1, w.regions_t, w.attention, r);
  attend(a, w, w.attention, n);
  // the norm of a context, from the products of the regions
  gemm(n, r, a.region_count, w.attention, r, 1, w.gram, w.weighted, r);
  for (int64_t l = 0; l < n; ++l) w.inverse[l] = inverse_norm(dot(w.attention + l * r, w.weighted + l * r, r));
  for (int64_t from = 0, block = 0; from < d; from += kDepth, ++block) {
    const int64_t some = d - from < kDepth ? d - from : kDepth;
    const T* regions = w.regions + block * packed_size<T>(a.region_count, kDepth);
    gemm(n, some, a.region_count, w.attention, r, 1, regions, w.context, kDepth);
    for (int64_t l = 0; l < n; ++l) {
      const T* __restrict word = words + l * d + from;
      const T* __restrict context = w.context + l * kDepth;
      T* __restrict out = difference + l * d + from;
      const T scale = w.inverse[l];
      for (int64_t k = 0; k < some; ++k) {
        const T x = context[k] * scale - word[k];
        out[k] = x * x;
      }
    }
  }
}

// one step of reasoning for rows nodes of a graph of n: relu(softmax(mixed now') moved + bias)
template <typename T>
void reason(const T* mixed, const T* now, const T* moved, const T* bias, int64_t rows, int64_t n, int64_t s, T* edges,
            T* next) {
  constexpr int kLanes = Simd<T>::kLanes;
  for (int64_t first = 0; first < rows; first += kBlockRows) {
    const int64_t some = rows - first < kBlockRows ? rows - first : kBlockRows;
    for (int64_t x = 0; x < some; ++x) {
      dots(mixed + (first + x) * s, now, s, n, s, edges + x * n);
      softmax(edges + x * n, n);
    }
    const auto finish = [=](int64_t row, int64_t column, typename Simd<T>::Vector left,
                            typename Simd<T>::Vector right) {
      const typename Simd<T>::Vector zero = {};
      left += load(bias + column);
      right += load(bias + column + kLanes);
      store(next + (first + row) * s + column, left > zero ? left : zero);
      store(next + (first + row) * s + column + kLanes, right > zero ? right : zero);
    };
    for (int64_t column = 0; column < s; column += kPanel<T>) {
      panel_product(some, n, edges, n, 1, moved + column, s, column, finish);
    }
  }
}

// the same for one node, without bias and relu
template <typename T>
void gather(const T* mixed, const T* now, int64_t n, int64_t s, T* edges, T* out) {
  constexpr int kLanes = Simd<T>::kLanes;
  dots(mixed, now, s, n, s, edges);
  softmax(edges, n);
  for (int64_t column = 0; column < s; column += kPanel<T>) {
    const auto finish = [=](int64_t, int64_t at, typename Simd<T>::Vector left, typename Simd<T>::Vector right) {
      store(out + at, left);
      store(out + at + kLanes, right);
    };
    panel_product(1, n, edges, n, 1, now + column, s, column, finish);
  }
}

template <typename T>
void add_to_rows(T* rows, int64_t count, const T* __restrict shift, int64_t s) {
  for (int64_t i = 0; i < count; ++i) {
    T* __restrict row = rows + i * s;
    for (int64_t k = 0; k < s; ++k) row[k] += shift[k];
  }
}

// pairs [first, last) in one tile; their words fit the workspace
template <typename T>
void score_tile(const SgrArgs<T>& a, const Packed<T>& p, Work<T>& w, int64_t first, int64_t last) {
  const int64_t s = padded<T>(a.nodes), d = a.dim, pairs = last - first;

  // W_loc (context - word)^2 of every word
  int64_t words = 0;
  for (int64_t i = first; i < last; ++i) {
    const int64_t c = a.caption_of(i), n = a.offsets[c + 1] - a.offsets[c];
    prepare_image(a, w, a.image_of(i));
    align(a, w, a.words + a.offsets[c] * d, n, w.difference + words * d);
    words += n;
  }
  gemm(words, s, d, w.difference, d, 1, p.loc, w.local, s);

  // W_glo (image - caption)^2 of every pair
  for (int64_t i = 0; i < pairs; ++i) {
    const T* __restrict image = a.image_globals + a.image_of(first + i) * d;
    const T* __restrict caption = a.caption_globals + a.caption_of(first + i) * d;
    T* __restrict out = w.difference + i * d;
    for (int64_t k = 0; k < d; ++k) out[k] = (image[k] - caption[k]) * (image[k] - caption[k]);
  }
  gemm(pairs, s, d, w.difference, d, 1, p.glo, w.whole, s);

  // the graph of a pair: its global node, then its words
  int64_t word = 0, node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t c = a.caption_of(first + i), n = a.offsets[c + 1] - a.offsets[c];
    normalise(w.whole + i * s, p.b_glo, s);
    std::memcpy(w.now + node * s, w.whole + i * s, s * sizeof(T));
    for (int64_t l = 0; l < n; ++l) normalise(w.local + (word + l) * s, p.b_loc, s);
    std::memcpy(w.now + (node + 1) * s, w.local + word * s, n * s * sizeof(T));
    word += n;
    node += n + 1;
  }
  const int64_t nodes = node;

  for (int64_t t = 0; t + 1 < a.steps; ++t) {
    gemm(nodes, s, a.nodes, w.now, s, 1, p.mix + t * p.step, w.mixed, s);
    gemm(nodes, s, a.nodes, w.now, s, 1, p.graph + t * p.step, w.moved, s);
    add_to_rows(w.mixed, nodes, p.shift + t * s, s);
    node = 0;
    for (int64_t i = first; i < last; ++i) {
      const int64_t c = a.caption_of(i), n = a.offsets[c + 1] - a.offsets[c] + 1;
      const int64_t at = node * s;
      reason(w.mixed + at, w.now + at, w.moved + at, p.bias + t * s, n, n, s, w.edges, w.next + at);
      node += n;
    }
    T* before = w.now;
    w.now = w.next;
    w.next = before;
  }

  // in the last step only the global nodes are wanted; relu(edges E graph' + bias) with the product by graph at the end
  const int64_t t = a.steps - 1;
  node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t c = a.caption_of(first + i);
    std::memcpy(w.whole + i * s, w.now + node * s, s * sizeof(T));
    node += a.offsets[c + 1] - a.offsets[c] + 1;
  }
  gemm(pairs, s, a.nodes, w.whole, s, 1, p.mix + t * p.step, w.mixed, s);
  add_to_rows(w.mixed, pairs, p.shift + t * s, s);
  node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t c = a.caption_of(first + i), n = a.offsets[c + 1] - a.offsets[c] + 1;
    gather(w.mixed + i * s, w.now + node * s, n, s, w.edges, w.whole + i * s);
    node += n;
  }
  gemm(pairs, s, a.nodes, w.whole, s, 1, p.graph + t * p.step, w.moved, s);
  for (int64_t i = 0; i < pairs; ++i) {
    T* __restrict row = w.moved + i * s;
    for (int64_t k = 0; k < s; ++k) {
      const T x = row[k] + p.bias[t * s + k];
      row[k] = x > 0 ? x : 0;
    }
    a.scores[first + i] = T{1} / (T{1} + std::exp(-(dot(row, p.w_score, s) + a.b_score[0])));
  }
}

// the weights of forward, and their transposes
template <typename T>
struct BackPacked : Packed<T> {
  T *loc_back, *glo_back, *mix_back, *graph_back;

  BackPacked(const SgrArgs<T>& a, Arena<T>& arena) : Packed<T>(a, arena) {
    loc_back = arena.take(packed_size<T>(a.nodes, a.dim));
    glo_back = arena.take(packed_size<T>(a.nodes, a.dim));
    mix_back = arena.take(a.steps * this->step);
    graph_back = arena.take(a.steps * this->step);
  }
};

// what forward computes on the way, kept for one tile, and gradients; rows of node buffers are padded to whole panels
template <typename T>
struct BackWork : Work<T> {
  T* raw;                                           // [words, padded regions], products of words and regions
  T* soft;                                          // [words, padded regions], attention
  T* region_scale;                                  // [pairs, padded regions], inverse norm over the words
  T* aligned;                                       // [words, dim], normalised context
  T* context_scale;                                 // [words]
  T* local_scale;                                   // [words]
  T* whole_scale;                                   // [pairs]
  T* squares;                                       // [pairs, dim]
  T* states;                                        // [steps, words + pairs, nodes], the nodes before each step
  T* queries;                                       // [steps, words + pairs, nodes]
  T* values;                                        // [steps, words + pairs, nodes]
  T* weights;                                       // [steps, (words + pairs) (longest + 1)], edges
  T* top;                                           // [pairs, nodes], what the last step gathered
  T *d_top, *d_query, *d_node, *d_other, *d_value;  // [words + pairs, nodes]
  T* d_edges;                                       // [longest + 1, longest + 1] at most (words + pairs) (longest + 1)
  T* d_dim;                                         // [words or pairs, dim]
  T* d_soft;                                        // [words, padded regions]
  T* packed_rows;                                   // of the right operand of a weight's gradient
  T* packed_words;                                  // packed [longest, dim]
  int64_t rows, cells;

  BackWork(const SgrArgs<T>& a, int64_t words, Arena<T>& arena) : Work<T>(a, words, arena) {
    const int64_t pairs = kTilePairs, r = padded<T>(a.region_count), s = padded<T>(a.nodes);
    const int64_t most = words > pairs ? words : pairs;
    rows = words + pairs;
    cells = rows * (a.longest + 1);
    raw = arena.take(words * r);
    soft = arena.take(words * r);
    region_scale = arena.take(pairs * r);
    aligned = arena.take(words * a.dim);
    context_scale = arena.take(words);
    local_scale = arena.take(words);
    whole_scale = arena.take(pairs);
    squares = arena.take(pairs * a.dim);
    states = arena.take(a.steps * rows * s);
    queries = arena.take(a.steps * rows * s);
    values = arena.take(a.steps * rows * s);
    weights = arena.take(a.steps * cells);
    top = arena.take(pairs * s);
    d_top = arena.take(rows * s);
    d_query = arena.take(rows * s);
    d_node = arena.take(rows * s);
    d_other = arena.take(rows * s);
    d_value = arena.take(rows * s);
    d_edges = arena.take(cells);
    d_dim = arena.take(most * a.dim);
    d_soft = arena.take(words * r);
    packed_rows = arena.take(packed_size<T>(rows, a.dim > a.nodes ? a.dim : a.nodes));
  }
};

// gradient of y = x scale with scale = 1 / (|x| + eps), in place
template <typename T>
void backward_l2(const T* __restrict y, T scale, T* __restrict grad, int64_t n) {
  const T along = dot(y, grad, n) / (1 - static_cast<T>(1e-8) * scale);
  for (int64_t k = 0; k < n; ++k) grad[k] = scale * (grad[k] - along * y[k]);
}

// out rows = or += A B for the few rows of one graph; B and out have s columns, whole panels
template <typename T>
void small_product(int64_t rows, int64_t depth, const T* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t s,
                   T* out, bool add) {
  constexpr int kLanes = Simd<T>::kLanes;
  const auto finish = [=](int64_t row, int64_t column, typename Simd<T>::Vector left, typename Simd<T>::Vector right) {
    T* to = out + row * s + column;
    store(to, add ? left + load(to) : left);
    store(to + kLanes, add ? right + load(to + kLanes) : right);
  };
  for (int64_t column = 0; column < s; column += kPanel<T>) {
    panel_product(rows, depth, a, row_stride, k_stride, b + column, s, column, finish);
  }
}

// gradient [left, right] += sum over rows of left' right, the gradient of a weight
template <typename T>
void add_outer(const T* left, int64_t left_stride, int64_t left_columns, const T* right, int64_t right_stride,
               int64_t right_columns, int64_t rows, T* packed, T* gradient) {
  pack(right, right_stride, 1, rows, right_columns, packed);
  gemm(left_columns, right_columns, rows, left, 1, left_stride, packed, gradient, right_columns, true);
}

template <typename T>
void add_columns(const T* rows, int64_t count, int64_t stride, int64_t n, T* __restrict sum) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < n; ++k) sum[k] += rows[i * stride + k];
  }
}

// attention, context and difference of one pair's words, kept for backward
template <typename T>
void align_kept(const SgrArgs<T>& a, BackWork<T>& w, int64_t pair, const T* words, int64_t row, int64_t n) {
  const int64_t r = padded<T>(a.region_count), d = a.dim;
  T* raw = w.raw + row * r;
  T* soft = w.soft + row * r;
  T* scale = w.region_scale + pair * r;
  gemm(n, r, d, words, d, 1, w.regions_t, raw, r);
  std::memcpy(soft, raw, n * r * sizeof(T));
  attend(a, w, soft, n);
  for (int64_t k = 0; k < r; ++k) scale[k] = w.norms[k] / 9;
  for (int64_t from = 0, block = 0; from < d; from += kDepth, ++block) {
    const int64_t some = d - from < kDepth ? d - from : kDepth;
    const T* regions = w.regions + block * packed_size<T>(a.region_count, kDepth);
    gemm(n, some, a.region_count, soft, r, 1, regions, w.aligned + row * d + from, d);
  }
  for (int64_t l = 0; l < n; ++l) {
    const T* __restrict word = words + l * d;
    T* __restrict context = w.aligned + (row + l) * d;
    T* __restrict out = w.difference + (row + l) * d;
    const T inverse = inverse_norm(dot(context, context, d));
    w.context_scale[row + l] = inverse;
    for (int64_t k = 0; k < d; ++k) {
      context[k] *= inverse;
      out[k] = (context[k] - word[k]) * (context[k] - word[k]);
    }
  }
}

// gradient of soft = softmax(9 l2(leaky relu(raw))) of one pair, in place; the norm is over the words of each region
template <typename T>
void backward_attend(const SgrArgs<T>& a, const BackWork<T>& w, int64_t pair, int64_t row, int64_t n) {
  const int64_t r = padded<T>(a.region_count);
  T* __restrict along = w.norms;
  const T* __restrict scale = w.region_scale + pair * r;
  for (int64_t k = 0; k < r; ++k) along[k] = 0;
  for (int64_t l = row; l < row + n; ++l) {
    T* __restrict grad = w.d_soft + l * r;
    const T* __restrict p = w.soft + l * r;
    const T* __restrict x = w.raw + l * r;
    const T mean = dot(p, grad, r);
    for (int64_t k = 0; k < r; ++k) {
      grad[k] = 9 * p[k] * (grad[k] - mean);
      along[k] += grad[k] * scale[k] * (x[k] > 0 ? x[k] : static_cast<T>(0.1) * x[k]);
    }
  }
  for (int64_t k = 0; k < r; ++k) along[k] /= 1 - static_cast<T>(1e-8) * scale[k];
  for (int64_t l = row; l < row + n; ++l) {
    T* __restrict grad = w.d_soft + l * r;
    const T* __restrict x = w.raw + l * r;
    for (int64_t k = 0; k < r; ++k) {
      const T slope = x[k] > 0 ? T{1} : static_cast<T>(0.1);
      grad[k] = slope * scale[k] * (grad[k] - along[k] * scale[k] * slope * x[k]);
    }
  }
}

// gradients of the words and regions of pairs [from, to) of a tile, all of one image, from that of the squared
// differences in w.d_dim; row is that of their first word
template <typename T>
void backward_align(const SgrArgs<T>& a, const SgrGrads<T>& g, BackWork<T>& w, int64_t first, int64_t from, int64_t to,
                    int64_t row) {
  const int64_t r = padded<T>(a.region_count), d = a.dim, regions = a.region_count, image = a.image_of(first + from);
  T* d_regions = g.regions + image * regions * d;
  prepare_image(a, w, image);
  // calls visit(place among all words, place in the tile) for every word
  const auto each_word = [&](const auto& visit) {
    int64_t at = row;
    for (int64_t i = from; i < to; ++i) {
      const int64_t c = a.caption_of(first + i);
      for (int64_t l = a.offsets[c]; l < a.offsets[c + 1]; ++l) visit(l * d, at++ * d);
    }
    return at - row;
  };
  const int64_t n = each_word([&](int64_t word, int64_t at) {
    const T* __restrict context = w.aligned + at;
    const T* __restrict given = a.words + word;
    T* __restrict grad = w.d_dim + at;
    T* __restrict d_word = g.words + word;
    for (int64_t k = 0; k < d; ++k) {
      grad[k] *= 2 * (context[k] - given[k]);
      d_word[k] -= grad[k];
    }
    backward_l2(context, w.context_scale[at / d], grad, d);
  });
  // context = soft regions
  T* d_dim = w.d_dim + row * d;
  T* d_soft = w.d_soft + row * r;
  gemm(n, r, d, d_dim, d, 1, w.regions_t, d_soft, r);
  add_outer(w.soft + row * r, r, regions, d_dim, d, d, n, w.packed_rows, d_regions);
  for (int64_t i = from, at = row; i < to; ++i) {
    const int64_t c = a.caption_of(first + i), length = a.offsets[c + 1] - a.offsets[c];
    backward_attend(a, w, i, at, length);
    at += length;
  }
  // raw = words regions'
  each_word([&](int64_t word, int64_t at) { std::memcpy(w.d_dim + at, a.words + word, d * sizeof(T)); });
  add_outer(d_soft, r, regions, d_dim, d, d, n, w.packed_rows, d_regions);
  for (int64_t start = 0, block = 0; start < d; start += kDepth, ++block) {
    const int64_t some = d - start < kDepth ? d - start : kDepth;
    const T* packed = w.regions + block * packed_size<T>(regions, kDepth);
    gemm(n, some, regions, d_soft, r, 1, packed, d_dim + start, d);
  }
  each_word([&](int64_t word, int64_t at) {
    const T* __restrict grad = w.d_dim + at;
    T* __restrict d_word = g.words + word;
    for (int64_t k = 0; k < d; ++k) d_word[k] += grad[k];
  });
}

// recomputes the pairs [first, last) and adds their gradients
template <typename T>
void backward_tile(const SgrArgs<T>& a, const SgrGrads<T>& g, const BackPacked<T>& p, BackWork<T>& w, int64_t first,
                   int64_t last) {
  const int64_t s = padded<T>(a.nodes), d = a.dim, pairs = last - first, m = a.nodes, square = m * m;
  const auto length = [&](int64_t i) {
    const int64_t c = a.caption_of(first + i);
    return a.offsets[c + 1] - a.offsets[c];
  };

  int64_t words = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    prepare_image(a, w, a.image_of(first + i));
    align_kept(a, w, i, a.words + a.offsets[a.caption_of(first + i)] * d, words, length(i));
    words += length(i);
    const T* __restrict image = a.image_globals + a.image_of(first + i) * d;
    const T* __restrict caption = a.caption_globals + a.caption_of(first + i) * d;
    T* __restrict out = w.squares + i * d;
    for (int64_t k = 0; k < d; ++k) out[k] = (image[k] - caption[k]) * (image[k] - caption[k]);
  }
  gemm(words, s, d, w.difference, d, 1, p.loc, w.local, s);
  gemm(pairs, s, d, w.squares, d, 1, p.glo, w.whole, s);
  int64_t word = 0, node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t n = length(i);
    w.whole_scale[i] = normalise(w.whole + i * s, p.b_glo, s);
    std::memcpy(w.states + node * s, w.whole + i * s, s * sizeof(T));
    for (int64_t l = 0; l < n; ++l) w.local_scale[word + l] = normalise(w.local + (word + l) * s, p.b_loc, s);
    std::memcpy(w.states + (node + 1) * s, w.local + word * s, n * s * sizeof(T));
    word += n;
    node += n + 1;
  }
  const int64_t nodes = node, stride = w.rows * s, t_last = a.steps - 1;

  for (int64_t t = 0; t < t_last; ++t) {
    T* now = w.states + t * stride;
    T* query = w.queries + t * stride;
    T* value = w.values + t * stride;
    gemm(nodes, s, m, now, s, 1, p.mix + t * p.step, query, s);
    gemm(nodes, s, m, now, s, 1, p.graph + t * p.step, value, s);
    add_to_rows(query, nodes, p.shift + t * s, s);
    T* edges = w.weights + t * w.cells;
    node = 0;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t n = length(i) + 1;
      T* next = now + stride + node * s;
      for (int64_t x = 0; x < n; ++x) {
        dots(query + (node + x) * s, now + node * s, s, n, s, edges + x * n);
        softmax(edges + x * n, n);
        std::memcpy(next + x * s, p.bias + t * s, s * sizeof(T));
      }
      small_product(n, n, edges, n, 1, value + node * s, s, next, true);
      for (int64_t k = 0; k < n * s; ++k) next[k] = next[k] > 0 ? next[k] : 0;
      edges += n * n;
      node += n;
    }
  }

  // the last step and the score
  T* now = w.states + t_last * stride;
  T* edges = w.weights + t_last * w.cells;
  node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    std::memcpy(w.whole + i * s, now + node * s, s * sizeof(T));
    node += length(i) + 1;
  }
  gemm(pairs, s, m, w.whole, s, 1, p.mix + t_last * p.step, w.mixed, s);
  add_to_rows(w.mixed, pairs, p.shift + t_last * s, s);
  node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    gather(w.mixed + i * s, now + node * s, length(i) + 1, s, edges + node, w.top + i * s);
    node += length(i) + 1;
  }
  gemm(pairs, s, m, w.top, s, 1, p.graph + t_last * p.step, w.moved, s);
  for (int64_t i = 0; i < pairs; ++i) {
    T* __restrict row = w.moved + i * s;
    T z = a.b_score[0];
    for (int64_t k = 0; k < s; ++k) {
      row[k] += p.bias[t_last * s + k];
      z += row[k] > 0 ? row[k] * p.w_score[k] : 0;
    }
    const T score = T{1} / (T{1} + std::exp(-z)), grad = a.grad_scores[first + i] * score * (1 - score);
    g.b_score[0] += grad;
    for (int64_t k = 0; k < m; ++k) g.w_score[k] += row[k] > 0 ? grad * row[k] : 0;
    for (int64_t k = 0; k < s; ++k) row[k] = row[k] > 0 ? grad * p.w_score[k] : 0;
  }

  // back through the last step; w.moved is the gradient before its relu
  add_columns(w.moved, pairs, s, m, g.bias + t_last * m);
  add_outer(w.moved, s, m, w.top, s, m, pairs, w.packed_rows, g.graph + t_last * square);
  gemm(pairs, s, m, w.moved, s, 1, p.graph_back + t_last * p.step, w.d_top, s);
  node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t n = length(i) + 1;
    const T* edge = edges + node;
    dots(w.d_top + i * s, now + node * s, s, n, s, w.d_edges);
    const T mean = dot(edge, w.d_edges, n);
    for (int64_t y = 0; y < n; ++y) {
      const T by_logit = edge[y] * (w.d_edges[y] - mean);
      w.d_edges[y] = by_logit;
      T* __restrict out = w.d_node + (node + y) * s;
      for (int64_t k = 0; k < s; ++k) out[k] = edge[y] * w.d_top[i * s + k] + by_logit * w.mixed[i * s + k];
    }
    small_product(1, n, w.d_edges, n, 1, now + node * s, s, w.d_query + i * s, false);
    node += n;
  }
  add_columns(w.d_query, pairs, s, m, g.shift + t_last * m);
  add_outer(w.whole, s, m, w.d_query, s, m, pairs, w.packed_rows, g.mix + t_last * square);
  gemm(pairs, s, m, w.d_query, s, 1, p.mix_back + t_last * p.step, w.d_top, s);
  node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    for (int64_t k = 0; k < s; ++k) w.d_node[node * s + k] += w.d_top[i * s + k];
    node += length(i) + 1;
  }

  for (int64_t t = t_last - 1; t >= 0; --t) {
    now = w.states + t * stride;
    const T* next = now + stride;
    const T* query = w.queries + t * stride;
    const T* value = w.values + t * stride;
    for (int64_t k = 0; k < nodes * s; ++k) w.d_node[k] = next[k] > 0 ? w.d_node[k] : 0;
    add_columns(w.d_node, nodes, s, m, g.bias + t * m);
    const T* edge = w.weights + t * w.cells;
    node = 0;
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t n = length(i) + 1, at = node * s;
      small_product(n, n, edge, 1, n, w.d_node + at, s, w.d_value + at, false);
      for (int64_t x = 0; x < n; ++x) {
        T* __restrict row = w.d_edges + x * n;
        const T* __restrict e = edge + x * n;
        dots(w.d_node + at + x * s, value + at, s, n, s, row);
        const T mean = dot(e, row, n);
        for (int64_t y = 0; y < n; ++y) row[y] = e[y] * (row[y] - mean);
      }
      small_product(n, n, w.d_edges, n, 1, now + at, s, w.d_query + at, false);
      small_product(n, n, w.d_edges, 1, n, query + at, s, w.d_other + at, false);
      edge += n * n;
      node += n;
    }
    add_columns(w.d_query, nodes, s, m, g.shift + t * m);
    add_outer(now, s, m, w.d_query, s, m, nodes, w.packed_rows, g.mix + t * square);
    add_outer(w.d_value, s, m, now, s, m, nodes, w.packed_rows, g.graph + t * square);
    gemm(nodes, s, m, w.d_query, s, 1, p.mix_back + t * p.step, w.d_other, s, true);
    gemm(nodes, s, m, w.d_value, s, 1, p.graph_back + t * p.step, w.d_other, s, true);
    T* spare = w.d_node;
    w.d_node = w.d_other;
    w.d_other = spare;
  }

  // the nodes: squared differences through W_loc and W_glo
  word = node = 0;
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t n = length(i);
    std::memcpy(w.whole + i * s, w.d_node + node * s, s * sizeof(T));
    backward_l2(w.states + node * s, w.whole_scale[i], w.whole + i * s, s);
    std::memcpy(w.local + word * s, w.d_node + (node + 1) * s, n * s * sizeof(T));
    for (int64_t l = 0; l < n; ++l) {
      backward_l2(w.states + (node + 1 + l) * s, w.local_scale[word + l], w.local + (word + l) * s, s);
    }
    word += n;
    node += n + 1;
  }
  add_columns(w.whole, pairs, s, m, g.b_glo);
  add_columns(w.local, words, s, m, g.b_loc);
  add_outer(w.whole, s, m, w.squares, d, d, pairs, w.packed_rows, g.w_glo);
  add_outer(w.local, s, m, w.difference, d, d, words, w.packed_rows, g.w_loc);
  gemm(pairs, d, m, w.whole, s, 1, p.glo_back, w.d_dim, d);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t b = a.image_of(first + i), c = a.caption_of(first + i);
    for (int64_t k = 0; k < d; ++k) {
      const T grad = 2 * (a.image_globals[b * d + k] - a.caption_globals[c * d + k]) * w.d_dim[i * d + k];
      g.image_globals[b * d + k] += grad;
      g.caption_globals[c * d + k] -= grad;
    }
  }
  gemm(words, d, m, w.local, s, 1, p.loc_back, w.d_dim, d);
  word = 0;
  for (int64_t from = 0, to = 0; from < pairs; from = to) {
    int64_t n = 0;
    for (; to < pairs && a.image_of(first + to) == a.image_of(first + from); ++to) n += length(to);
    backward_align(a, g, w, first, from, to, word);
    word += n;
  }
}

// calls visit(first, last) for tiles of pairs with at most that many words
template <typename T, typename Visit>
void for_tiles(const SgrArgs<T>& a, int64_t most, int64_t begin, int64_t end, const Visit& visit) {
  for (int64_t first = begin; first < end;) {
    int64_t last = first, words = 0;
    for (; last < end && last - first < kTilePairs; ++last) {
      const int64_t c = a.caption_of(last), n = a.offsets[c + 1] - a.offsets[c];
      if (words + n > most) break;
      words += n;
    }
    visit(first, last);
    first = last;
  }
}

}  // namespace

template <typename T>
int64_t sgr_packed_size(const SgrArgs<T>& a) {
  Arena<T> arena(nullptr);
  Packed<T>(a, arena);
  return arena.used();
}

template <typename T>
int64_t sgr_workspace_size(const SgrArgs<T>& a) {
  Arena<T> arena(nullptr);
  Work<T>(a, tile_words(a, kTileWords), arena);
  return arena.used();
}

template <typename T>
void sgr_pack(const SgrArgs<T>& a, T* packed) {
  Arena<T> arena(packed);
  const Packed<T> p(a, arena);
  const int64_t n = a.nodes, s = padded<T>(n);
  pack(a.w_loc, 1, a.dim, a.dim, n, p.loc);
  pack(a.w_glo, 1, a.dim, a.dim, n, p.glo);
  for (int64_t t = 0; t < a.steps; ++t) {
    pack(a.mix + t * n * n, n, 1, n, n, p.mix + t * p.step);
    pack(a.graph + t * n * n, 1, n, n, n, p.graph + t * p.step);
    copy_padded(a.shift + t * n, n, p.shift + t * s);
    copy_padded(a.bias + t * n, n, p.bias + t * s);
  }
  copy_padded(a.b_loc, n, p.b_loc);
  copy_padded(a.b_glo, n, p.b_glo);
  copy_padded(a.w_score, n, p.w_score);
}

template <typename T>
void sgr_forward(const SgrArgs<T>& a, const T* packed, T* workspace, int64_t begin, int64_t end) {
  Arena<T> weights(const_cast<T*>(packed)), arena(workspace);
  const Packed<T> p(a, weights);
  const int64_t words = tile_words(a, kTileWords);
  Work<T> w(a, words, arena);
  for_tiles(a, words, begin, end, [&](int64_t first, int64_t last) { score_tile(a, p, w, first, last); });
}

template <typename T>
int64_t sgr_backward_packed_size(const SgrArgs<T>& a) {
  Arena<T> arena(nullptr);
  BackPacked<T>(a, arena);
  return arena.used();
}

template <typename T>
int64_t sgr_backward_workspace_size(const SgrArgs<T>& a) {
  Arena<T> arena(nullptr);
  BackWork<T>(a, tile_words(a, kBackTileWords), arena);
  return arena.used();
}

template <typename T>
void sgr_backward_pack(const SgrArgs<T>& a, T* packed) {
  sgr_pack(a, packed);
  Arena<T> arena(packed);
  const BackPacked<T> p(a, arena);
  const int64_t n = a.nodes;
  pack(a.w_loc, a.dim, 1, n, a.dim, p.loc_back);
  pack(a.w_glo, a.dim, 1, n, a.dim, p.glo_back);
  for (int64_t t = 0; t < a.steps; ++t) {
    pack(a.mix + t * n * n, 1, n, n, n, p.mix_back + t * p.step);
    pack(a.graph + t * n * n, n, 1, n, n, p.graph_back + t * p.step);
  }
}

template <typename T>
void sgr_backward(const SgrArgs<T>& a, const SgrGrads<T>& g, const T* packed, T* workspace, int64_t begin,
                  int64_t end) {
  Arena<T> weights(const_cast<T*>(packed)), arena(workspace);
  const BackPacked<T> p(a, weights);
  const int64_t words = tile_words(a, kBackTileWords);
  BackWork<T> w(a, words, arena);
  for_tiles(a, words, begin, end, [&](int64_t first, int64_t last) { backward_tile(a, g, p, w, first, last); });
}

#define PCSR_INSTANTIATE(T)                                                        \
  template int64_t sgr_packed_size<T>(const SgrArgs<T>&);                          \
  template int64_t sgr_workspace_size<T>(const SgrArgs<T>&);                       \
  template void sgr_pack<T>(const SgrArgs<T>&, T*);                                \
  template void sgr_forward<T>(const SgrArgs<T>&, const T*, T*, int64_t, int64_t); \
  template int64_t sgr_backward_packed_size<T>(const SgrArgs<T>&);                 \
  template int64_t sgr_backward_workspace_size<T>(const SgrArgs<T>&);              \
  template void sgr_backward_pack<T>(const SgrArgs<T>&, T*);                       \
  template void sgr_backward<T>(const SgrArgs<T>&, const SgrGrads<T>&, const T*, T*, int64_t, int64_t);
PCSR_INSTANTIATE(float)
PCSR_INSTANTIATE(double)

}  // namespace pcsr::PCSR_ISA
