// CPU kernels of sgr. Pairs are taken in tiles of about kTileWords words, which stay in cache from attention to score;
// nothing grows with the number of pairs. Compiled once per instruction set.
#include "sgr.h"

#include <cmath>

#include "gemm.h"
#include "rows.h"

namespace pcsr::PCSR_ISA {
namespace {

constexpr int64_t kTileWords = 96;
constexpr int64_t kTilePairs = 32;

template <typename T>
int64_t padded(int64_t columns) {
  return panels_of<T>(columns) * kPanel<T>;
}

template <typename T>
int64_t tile_words(const SgrArgs<T>& a) {
  return a.longest > kTileWords ? a.longest : kTileWords;
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

  Work(const SgrArgs<T>& a, Arena<T>& arena) {
    const int64_t words = tile_words(a), pairs = kTilePairs, r = padded<T>(a.region_count), s = padded<T>(a.nodes);
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

// x = l2(x + bias)
template <typename T>
void add_and_normalise(T* __restrict x, const T* __restrict bias, int64_t n) {
  T square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t k = 0; k < n; ++k) {
    x[k] += bias[k];
    square += x[k] * x[k];
  }
  const T scale = inverse_norm(square);
  for (int64_t k = 0; k < n; ++k) x[k] *= scale;
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
    add_and_normalise(w.whole + i * s, p.b_glo, s);
    std::memcpy(w.now + node * s, w.whole + i * s, s * sizeof(T));
    for (int64_t l = 0; l < n; ++l) add_and_normalise(w.local + (word + l) * s, p.b_loc, s);
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
  Work<T>(a, arena);
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
  Work<T> w(a, arena);
  const int64_t most = tile_words(a);
  for (int64_t first = begin; first < end;) {
    int64_t last = first, words = 0;
    for (; last < end && last - first < kTilePairs; ++last) {
      const int64_t c = a.caption_of(last), n = a.offsets[c + 1] - a.offsets[c];
      if (words + n > most) break;
      words += n;
    }
    score_tile(a, p, w, first, last);
    first = last;
  }
}

#define PCSR_INSTANTIATE(T)                                  \
  template int64_t sgr_packed_size<T>(const SgrArgs<T>&);    \
  template int64_t sgr_workspace_size<T>(const SgrArgs<T>&); \
  template void sgr_pack<T>(const SgrArgs<T>&, T*);          \
  template void sgr_forward<T>(const SgrArgs<T>&, const T*, T*, int64_t, int64_t);
PCSR_INSTANTIATE(float)
PCSR_INSTANTIATE(double)

}  // namespace pcsr::PCSR_ISA
