// CPU kernels of sgr. Pairs are taken in tiles of about a hundred words, and the embedding in blocks, so that what is
// computed on the way from attention to score stays in cache; nothing grows with the number of pairs. Backward computes
// a tile again, keeps its nodes, and goes back through it. Compiled once per instruction set.
#include "sgr.h"

#include <cmath>

#include "gemm.h"
#include "rows.h"

namespace pcsr::PCSR_ISA {
namespace {

constexpr int64_t kTilePairs = 64;
constexpr int64_t kTileImages = 8;

// words of a tile; more for backward, because every tile of it reads and writes the gradients of all weights
template <typename T>
int64_t tile_words(const SgrArgs<T>& a, bool backward) {
  const int64_t usual = backward ? 384 : 96;
  return a.longest > usual ? a.longest : usual;
}

// hands out parts of one piece of memory, each from the start of a line of the cache; without memory it only counts
template <typename T>
class Arena {
 public:
  explicit Arena(T* memory) : memory_(memory) {
    const auto beyond = reinterpret_cast<uintptr_t>(memory) % kLine;
    if (beyond > 0) memory_ += (kLine - beyond) / sizeof(T);
  }
  T* take(int64_t count) {
    T* part = memory_ == nullptr ? nullptr : memory_ + used_;
    used_ += (count * sizeof(T) + kLine - 1) / kLine * kLine / sizeof(T);
    return part;
  }
  // with what may be lost at the start
  int64_t needed() const { return used_ + kLine / sizeof(T); }

 private:
  static constexpr int64_t kLine = 64;
  T* memory_;
  int64_t used_ = 0;
};

// weights in the layout of the products, of all steps; rows of biases are padded by zeros
template <typename T>
struct Packed {
  T *loc, *glo, *mix, *graph, *b_loc, *b_glo, *shift, *bias, *w_score;
  T *loc_back, *glo_back, *mix_back, *graph_back;  // for the gradients of inputs; backward only
  int64_t step;                                    // from one step's mix or graph to the next

  Packed(const SgrArgs<T>& a, bool backward, Arena<T>& arena) {
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
    if (!backward) return;
    loc_back = arena.take(packed_size<T>(a.nodes, a.dim));
    glo_back = arena.take(packed_size<T>(a.nodes, a.dim));
    mix_back = arena.take(a.steps * step);
    graph_back = arena.take(a.steps * step);
  }
};

template <typename T>
void copy_padded(const T* from, int64_t n, T* to) {
  for (int64_t k = 0; k < padded<T>(n); ++k) to[k] = k < n ? from[k] : 0;
}

// an image's regions in the layouts of the products
template <typename T>
struct Image {
  int64_t id = -1;
  T* across;  // packed [dim, region_count]
  T* along;   // packed [region_count, kDepth] for each block of dim
  T* gram;    // packed [region_count, region_count]
};

// captions of one image that follow each other, so that their words do too
struct Run {
  int64_t slot, row, rows, word;  // row: the first in the tile; word: the first among all
};

// all runs of one image
struct Group {
  int64_t slot, image, row, rows;
};

struct Tile {
  int64_t first, pairs, words, nodes, runs, groups;
  Run run[kTilePairs];
  Group group[kTileImages];
};

// the memory of one thread; rows of nodes and regions are padded to whole vectors
template <typename T>
struct Work {
  Image<T> images[kTileImages];
  int64_t slot = 0;  // of the last image
  T* product;        // [region_count, padded regions]
  T* norms;          // [padded regions]
  // of a tile's words
  T* raw;            // [words, padded regions], products of words and regions
  T* soft;           // [words, padded regions], attention
  T* weighted;       // [words, padded regions], attention x gram
  T* context_scale;  // [words], inverse norm
  T* difference;     // [words, kDepth], context - word in a block of dim, or its square
  T* local;          // [words, nodes]
  T* local_scale;    // [words], inverse norm
  // of its pairs
  T* region_scale;  // [pairs, padded regions], inverse norm over the words
  T* squares;       // [pairs, dim], (image - caption)^2
  T* whole;         // [pairs, nodes]
  T* whole_scale;   // [pairs], inverse norm
  T* heads;         // [pairs, nodes], the global nodes before the last step
  T* asked;         // [pairs, nodes], their queries
  T* gathered;      // [pairs, nodes], what their edges gather
  T* result;        // [pairs, nodes], after the last step
  T* scores;        // [pairs]
  // of its graphs, [words + pairs, nodes]; backward keeps those of every step
  T *states, *queries, *values, *edges;
  int64_t rows, cells, kept;
  // gradients
  T *d_top, *d_query, *d_node, *d_other, *d_value;  // [words + pairs, nodes]
  T* d_edges;                                       // [longest + 1, longest + 1]
  T* d_soft;                                        // [words, padded regions]
  T* d_block;                                       // [words, kDepth]
  T* d_whole;                                       // [pairs, dim]
  T* along;                                         // [words], gradient along the context
  T* scaled;                                        // [words, padded regions]
  T* outer;                                         // [region_count, padded regions]
  T* packed_rows;                                   // right operand of a weight's gradient

  Work(const SgrArgs<T>& a, bool backward, Arena<T>& arena) {
    const int64_t words = tile_words(a, backward), pairs = kTilePairs, longest = a.longest + 1;
    const int64_t r = padded<T>(a.region_count), s = padded<T>(a.nodes), blocks = (a.dim + kDepth - 1) / kDepth;
    for (Image<T>& image : images) {
      image.across = arena.take(packed_size<T>(a.dim, a.region_count));
      image.along = arena.take(blocks * packed_size<T>(a.region_count, kDepth));
      image.gram = arena.take(packed_size<T>(a.region_count, a.region_count));
    }
    product = arena.take(a.region_count * r);
    norms = arena.take(r);
    raw = arena.take(words * r);
    soft = arena.take(words * r);
    weighted = arena.take(words * r);
    context_scale = arena.take(words);
    difference = arena.take(words * kDepth);
    local = arena.take(words * s);
    local_scale = arena.take(words);
    region_scale = arena.take(pairs * r);
    squares = arena.take(pairs * a.dim);
    whole = arena.take(pairs * s);
    whole_scale = arena.take(pairs);
    heads = arena.take(pairs * s);
    asked = arena.take(pairs * s);
    gathered = arena.take(pairs * s);
    result = arena.take(pairs * s);
    scores = arena.take(pairs);
    rows = words + pairs;
    cells = backward ? rows * longest : longest * longest + rows;
    kept = backward ? a.steps : 0;
    states = arena.take((backward ? a.steps : 2) * rows * s);
    queries = arena.take((backward ? a.steps : 1) * rows * s);
    values = arena.take((backward ? a.steps : 1) * rows * s);
    edges = arena.take((backward ? a.steps : 1) * cells);
    if (!backward) return;
    d_top = arena.take(rows * s);
    d_query = arena.take(rows * s);
    d_node = arena.take(rows * s);
    d_other = arena.take(rows * s);
    d_value = arena.take(rows * s);
    d_edges = arena.take(longest * longest);
    d_soft = arena.take(words * r);
    d_block = arena.take(words * kDepth);
    d_whole = arena.take(pairs * a.dim);
    along = arena.take(words);
    scaled = arena.take(words * r);
    outer = arena.take(a.region_count * r);
    const int64_t wide = kDepth > s ? kDepth : s;
    packed_rows = arena.take(packed_size<T>(rows, wide > r ? wide : r) + packed_size<T>(pairs, a.dim));
  }

  // of step t
  T* state(int64_t t, int64_t s) const { return states + (kept ? t : t % 2) * rows * s; }
  T* query(int64_t t, int64_t s) const { return queries + (kept ? t : 0) * rows * s; }
  T* value(int64_t t, int64_t s) const { return values + (kept ? t : 0) * rows * s; }
  T* edge(int64_t t) const { return edges + (kept ? t : 0) * cells; }
};

template <typename T>
T inverse_norm(T square) {
  return square > 0 ? T{1} / (std::sqrt(square) + static_cast<T>(1e-8)) : T{0};
}

// out = l2(x + bias), and the scale
template <typename T>
T normalise(const T* __restrict x, const T* __restrict bias, T* __restrict out, int64_t n) {
  T square = 0;
#pragma omp simd reduction(+ : square)
  for (int64_t k = 0; k < n; ++k) {
    out[k] = x[k] + bias[k];
    square += out[k] * out[k];
  }
  const T scale = inverse_norm(square);
  for (int64_t k = 0; k < n; ++k) out[k] *= scale;
  return scale;
}

template <typename T>
void softmax(T* row, int64_t n) {
  T top = row[0];
#pragma omp simd reduction(max : top)
  for (int64_t k = 1; k < n; ++k) top = row[k] > top ? row[k] : top;
  const T scale = T{1} / exp_row(row, top, row, n);
  for (int64_t k = 0; k < n; ++k) row[k] *= scale;
}

// visit(first, count) for every block of the embedding
template <typename Visit>
void for_blocks(int64_t dim, const Visit& visit) {
  for (int64_t from = 0; from < dim; from += kDepth) visit(from, dim - from < kDepth ? dim - from : kDepth);
}

template <typename T>
const T* along_at(const SgrArgs<T>& a, const Image<T>& image, int64_t from) {
  return image.along + from / kDepth * packed_size<T>(a.region_count, kDepth);
}

template <typename T>
int64_t length_of(const SgrArgs<T>& a, int64_t pair) {
  const int64_t c = a.caption_of(pair);
  return a.offsets[c + 1] - a.offsets[c];
}

template <typename T>
void prepare(const SgrArgs<T>& a, const Work<T>& w, Image<T>& image) {
  const T* v = a.regions + image.id * a.region_count * a.dim;
  const int64_t r = padded<T>(a.region_count);
  pack(v, 1, a.dim, a.dim, a.region_count, image.across);
  for_blocks(a.dim, [&](int64_t from, int64_t some) {
    pack(v + from, a.dim, 1, a.region_count, some, const_cast<T*>(along_at(a, image, from)));
  });
  gemm(a.region_count, r, a.dim, v, a.dim, 1, image.across, w.product, r);
  pack(w.product, r, 1, a.region_count, a.region_count, image.gram);
}

// as many pairs from first on as fit a tile, their images prepared
template <typename T>
Tile next_tile(const SgrArgs<T>& a, Work<T>& w, int64_t most, int64_t first, int64_t end) {
  Tile tile = {first, 0, 0, 0, 0, 0, {}, {}};
  for (int64_t i = first; i < end && tile.pairs < kTilePairs; ++i) {
    const int64_t image = a.image_of(i), word = a.offsets[a.caption_of(i)], n = length_of(a, i);
    const bool other = tile.groups == 0 || image != tile.group[tile.groups - 1].image;
    if (tile.words + n > most || tile.groups + other > kTileImages) break;
    if (image != w.images[w.slot].id) {
      // pairs are sorted by image, so the slot taken is that of an earlier tile
      w.slot = (w.slot + 1) % kTileImages;
      w.images[w.slot].id = image;
      prepare(a, w, w.images[w.slot]);
    }
    if (other) tile.group[tile.groups++] = {w.slot, image, tile.words, 0};
    const Run* last = tile.run + tile.runs - 1;
    if (other || last->word + last->rows != word) tile.run[tile.runs++] = {w.slot, tile.words, 0, word};
    tile.run[tile.runs - 1].rows += n;
    tile.group[tile.groups - 1].rows += n;
    tile.words += n;
    ++tile.pairs;
  }
  tile.nodes = tile.words + tile.pairs;
  return tile;
}

// attention of the n words of one caption: rows become a softmax over the regions; w.norms keeps 9 / norm over the
// words
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

// attention of all words, and the norms of their contexts from the products of the regions
template <typename T>
void attend_tile(const SgrArgs<T>& a, Work<T>& w, const Tile& tile) {
  const int64_t r = padded<T>(a.region_count), d = a.dim;
  for (const Run* run = tile.run; run < tile.run + tile.runs; ++run) {
    gemm(run->rows, r, d, a.words + run->word * d, d, 1, w.images[run->slot].across, w.raw + run->row * r, r);
  }
  std::memcpy(w.soft, w.raw, tile.words * r * sizeof(T));
  for (int64_t i = 0, row = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i);
    attend(a, w, w.soft + row * r, n);
    for (int64_t k = 0; k < r; ++k) w.region_scale[i * r + k] = w.norms[k] / 9;
    row += n;
  }
  for (const Group* group = tile.group; group < tile.group + tile.groups; ++group) {
    gemm(group->rows, r, a.region_count, w.soft + group->row * r, r, 1, w.images[group->slot].gram,
         w.weighted + group->row * r, r);
  }
  for (int64_t l = 0; l < tile.words; ++l) {
    w.context_scale[l] = inverse_norm(dot(w.soft + l * r, w.weighted + l * r, r));
  }
}

// take(row, column, values) for context - word of all words in a block of the embedding, a vector at a time
template <typename T, typename Take>
void subtract_words(const SgrArgs<T>& a, const Work<T>& w, const Tile& tile, int64_t from, int64_t some,
                    const Take& take) {
  const int64_t r = padded<T>(a.region_count), d = a.dim;
  for (const Run* run = tile.run; run < tile.run + tile.runs; ++run) {
    const T* words = a.words + run->word * d + from;
    const T* scales = w.context_scale + run->row;
    product(run->rows, some, a.region_count, w.soft + run->row * r, r, 1, along_at(a, w.images[run->slot], from), 0,
            [=](int64_t row, int64_t column, typename Simd<T>::Vector sum) {
              take(run->row + row, column, sum * scales[row] - load_part(words + row * d + column, some - column));
            });
  }
}

// the nodes of every graph: l2(W_glo (image - caption)^2), then l2(W_loc (context - word)^2) of its words
template <typename T>
void make_nodes(const SgrArgs<T>& a, const Packed<T>& p, const Work<T>& w, const Tile& tile) {
  const int64_t s = padded<T>(a.nodes), d = a.dim;
  for_blocks(d, [&](int64_t from, int64_t some) {
    subtract_words(a, w, tile, from, some, [&](int64_t row, int64_t column, typename Simd<T>::Vector x) {
      store(w.difference + row * kDepth + column, x * x);
    });
    gemm(tile.words, s, some, w.difference, kDepth, 1, p.loc + from * s, w.local, s, from > 0);
  });
  for (int64_t i = 0; i < tile.pairs; ++i) {
    const T* __restrict image = a.image_globals + a.image_of(tile.first + i) * d;
    const T* __restrict caption = a.caption_globals + a.caption_of(tile.first + i) * d;
    T* __restrict out = w.squares + i * d;
    for (int64_t k = 0; k < d; ++k) out[k] = (image[k] - caption[k]) * (image[k] - caption[k]);
  }
  gemm(tile.pairs, s, d, w.squares, d, 1, p.glo, w.whole, s);
  T* node = w.state(0, s);
  for (int64_t i = 0, row = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i);
    w.whole_scale[i] = normalise(w.whole + i * s, p.b_glo, node, s);
    for (int64_t l = row; l < row + n; ++l) {
      node += s;
      w.local_scale[l] = normalise(w.local + l * s, p.b_loc, node, s);
    }
    node += s;
    row += n;
  }
}

// one step of reasoning for a graph of n nodes: relu(softmax(query now') value + bias)
template <typename T>
void reason(const T* query, const T* now, const T* value, const T* bias, int64_t n, int64_t s, T* edges, T* next) {
  using Vector = typename Simd<T>::Vector;
  dots(query, n, now, n, s, edges);
  for (int64_t x = 0; x < n; ++x) softmax(edges + x * n, n);
  product(n, s, n, edges, n, 1, value, s, [=](int64_t row, int64_t column, Vector sum) {
    const Vector x = sum + load(bias + column), zero = {};
    store(next + row * s + column, x > zero ? x : zero);
  });
}

// the same for one node, without bias and relu
template <typename T>
void gather(const T* mixed, const T* now, int64_t n, int64_t s, T* edges, T* out) {
  dots(mixed, 1, now, n, s, edges);
  softmax(edges, n);
  product(1, s, n, edges, n, 1, now, s,
          [=](int64_t, int64_t column, typename Simd<T>::Vector sum) { store(out + column, sum); });
}

template <typename T>
void add_to_rows(T* rows, int64_t count, const T* __restrict shift, int64_t s) {
  for (int64_t i = 0; i < count; ++i) {
    T* __restrict row = rows + i * s;
    for (int64_t k = 0; k < s; ++k) row[k] += shift[k];
  }
}

// all but the last step of reasoning
template <typename T>
void reason_tile(const SgrArgs<T>& a, const Packed<T>& p, const Work<T>& w, const Tile& tile) {
  const int64_t s = padded<T>(a.nodes);
  for (int64_t t = 0; t + 1 < a.steps; ++t) {
    const T* now = w.state(t, s);
    T *next = w.state(t + 1, s), *query = w.query(t, s), *value = w.value(t, s), *edges = w.edge(t);
    gemm(tile.nodes, s, a.nodes, now, s, 1, p.mix + t * p.step, query, s);
    gemm(tile.nodes, s, a.nodes, now, s, 1, p.graph + t * p.step, value, s);
    add_to_rows(query, tile.nodes, p.shift + t * s, s);
    for (int64_t i = 0, at = 0; i < tile.pairs; ++i) {
      const int64_t n = length_of(a, tile.first + i) + 1;
      reason(query + at, now + at, value + at, p.bias + t * s, n, s, edges, next + at);
      at += n * s;
      if (w.kept) edges += n * n;
    }
  }
}

// the last step, of which only the global nodes are wanted: relu(edges E graph' + bias) with the product by graph at
// the end; and the score
template <typename T>
void score(const SgrArgs<T>& a, const Packed<T>& p, const Work<T>& w, const Tile& tile) {
  const int64_t s = padded<T>(a.nodes), t = a.steps - 1;
  const T* now = w.state(t, s);
  for (int64_t i = 0, node = 0; i < tile.pairs; ++i) {
    std::memcpy(w.heads + i * s, now + node * s, s * sizeof(T));
    node += length_of(a, tile.first + i) + 1;
  }
  gemm(tile.pairs, s, a.nodes, w.heads, s, 1, p.mix + t * p.step, w.asked, s);
  add_to_rows(w.asked, tile.pairs, p.shift + t * s, s);
  for (int64_t i = 0, node = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i) + 1;
    gather(w.asked + i * s, now + node * s, n, s, w.edge(t) + node, w.gathered + i * s);
    node += n;
  }
  gemm(tile.pairs, s, a.nodes, w.gathered, s, 1, p.graph + t * p.step, w.result, s);
  for (int64_t i = 0; i < tile.pairs; ++i) {
    T* __restrict row = w.result + i * s;
    for (int64_t k = 0; k < s; ++k) {
      const T x = row[k] + p.bias[t * s + k];
      row[k] = x > 0 ? x : 0;
    }
    w.scores[i] = T{1} / (T{1} + std::exp(-(dot(row, p.w_score, s) + a.b_score[0])));
  }
}

template <typename T>
void forward_tile(const SgrArgs<T>& a, const Packed<T>& p, Work<T>& w, const Tile& tile) {
  attend_tile(a, w, tile);
  make_nodes(a, p, w, tile);
  reason_tile(a, p, w, tile);
  score(a, p, w, tile);
}

// gradient of x for y = x scale with scale = 1 / (|x| + eps), given that of y
template <typename T>
void backward_l2(const T* __restrict y, T scale, const T* __restrict grad, int64_t n, T* __restrict out) {
  const T along = dot(y, grad, n) / (1 - static_cast<T>(1e-8) * scale);
  for (int64_t k = 0; k < n; ++k) out[k] = scale * (grad[k] - along * y[k]);
}

// out = A B for the few rows of one graph; B and out have s columns, whole vectors
template <typename T>
void small_product(int64_t rows, int64_t depth, const T* a, int64_t row_stride, int64_t k_stride, const T* b, int64_t s,
                   T* out) {
  product(rows, s, depth, a, row_stride, k_stride, b, s,
          [=](int64_t row, int64_t column, typename Simd<T>::Vector sum) { store(out + row * s + column, sum); });
}

// c [rows, columns] += A B, A(i, k) = a[i + k * k_stride], B in panels of depth rows
template <typename T>
void add_product(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t k_stride, const T* panels, T* c,
                 int64_t c_stride) {
  product(rows, columns, depth, a, 1, k_stride, panels, 0,
          [=](int64_t row, int64_t column, typename Simd<T>::Vector sum) {
            T* to = c + row * c_stride + column;
            store_part(to, columns - column, sum + load_part(to, columns - column));
          });
}

// gradient [left, right] += sum over rows of left' right, the gradient of a weight
template <typename T>
void add_outer(const T* left, int64_t left_stride, int64_t left_columns, const T* right, int64_t right_stride,
               int64_t right_columns, int64_t rows, T* packed, T* gradient, int64_t stride) {
  pack(right, right_stride, 1, rows, right_columns, packed);
  gemm(left_columns, right_columns, rows, left, 1, left_stride, packed, gradient, stride, true);
}

template <typename T>
void add_columns(const T* rows, int64_t count, int64_t stride, int64_t n, T* __restrict sum) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = 0; k < n; ++k) sum[k] += rows[i * stride + k];
  }
}

// gradient of soft = softmax(9 l2(leaky relu(raw))) of one pair, in place; the norm is over the words of each region
template <typename T>
void backward_attend(const SgrArgs<T>& a, const Work<T>& w, int64_t pair, int64_t row, int64_t n) {
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

// back through the score and the last step, to the gradient of the nodes before it
template <typename T>
void backward_score(const SgrArgs<T>& a, const SgrGrads<T>& g, const Packed<T>& p, const Work<T>& w, const Tile& tile,
                    const T* grad_scores) {
  const int64_t s = padded<T>(a.nodes), m = a.nodes, t = a.steps - 1;
  for (int64_t i = 0; i < tile.pairs; ++i) {
    T* __restrict row = w.result + i * s;
    const T grad = grad_scores[i] * w.scores[i] * (1 - w.scores[i]);
    g.b_score[0] += grad;
    for (int64_t k = 0; k < m; ++k) g.w_score[k] += grad * row[k];
    for (int64_t k = 0; k < s; ++k) row[k] = row[k] > 0 ? grad * p.w_score[k] : 0;
  }
  // w.result is now the gradient before the relu
  const T* now = w.state(t, s);
  add_columns(w.result, tile.pairs, s, m, g.bias + t * m);
  add_outer(w.result, s, m, w.gathered, s, m, tile.pairs, w.packed_rows, g.graph + t * m * m, m);
  gemm(tile.pairs, s, m, w.result, s, 1, p.graph_back + t * p.step, w.d_top, s);
  for (int64_t i = 0, node = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i) + 1;
    const T* edge = w.edge(t) + node;
    dots(w.d_top + i * s, 1, now + node * s, n, s, w.d_edges);
    const T mean = dot(edge, w.d_edges, n);
    for (int64_t y = 0; y < n; ++y) {
      const T by_logit = edge[y] * (w.d_edges[y] - mean);
      w.d_edges[y] = by_logit;
      T* __restrict out = w.d_node + (node + y) * s;
      for (int64_t k = 0; k < s; ++k) out[k] = edge[y] * w.d_top[i * s + k] + by_logit * w.asked[i * s + k];
    }
    small_product(1, n, w.d_edges, n, 1, now + node * s, s, w.d_query + i * s);
    node += n;
  }
  add_columns(w.d_query, tile.pairs, s, m, g.shift + t * m);
  add_outer(w.heads, s, m, w.d_query, s, m, tile.pairs, w.packed_rows, g.mix + t * m * m, m);
  gemm(tile.pairs, s, m, w.d_query, s, 1, p.mix_back + t * p.step, w.d_top, s);
  for (int64_t i = 0, node = 0; i < tile.pairs; ++i) {
    for (int64_t k = 0; k < s; ++k) w.d_node[node * s + k] += w.d_top[i * s + k];
    node += length_of(a, tile.first + i) + 1;
  }
}

// back through step t of reasoning, from the gradient of the nodes after it to that of the nodes before
template <typename T>
void backward_reason(const SgrArgs<T>& a, const SgrGrads<T>& g, const Packed<T>& p, Work<T>& w, const Tile& tile,
                     int64_t t) {
  const int64_t s = padded<T>(a.nodes), m = a.nodes, nodes = tile.nodes;
  const T *now = w.state(t, s), *next = w.state(t + 1, s), *query = w.query(t, s), *value = w.value(t, s);
  for (int64_t k = 0; k < nodes * s; ++k) w.d_node[k] = next[k] > 0 ? w.d_node[k] : 0;
  add_columns(w.d_node, nodes, s, m, g.bias + t * m);
  const T* edge = w.edge(t);
  for (int64_t i = 0, at = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i) + 1;
    small_product(n, n, edge, 1, n, w.d_node + at, s, w.d_value + at);
    dots(w.d_node + at, n, value + at, n, s, w.d_edges);
    for (int64_t x = 0; x < n; ++x) {
      T* __restrict row = w.d_edges + x * n;
      const T* __restrict e = edge + x * n;
      const T mean = dot(e, row, n);
      for (int64_t y = 0; y < n; ++y) row[y] = e[y] * (row[y] - mean);
    }
    small_product(n, n, w.d_edges, n, 1, now + at, s, w.d_query + at);
    small_product(n, n, w.d_edges, 1, n, query + at, s, w.d_other + at);
    edge += n * n;
    at += n * s;
  }
  add_columns(w.d_query, nodes, s, m, g.shift + t * m);
  add_outer(now, s, m, w.d_query, s, m, nodes, w.packed_rows, g.mix + t * m * m, m);
  add_outer(w.d_value, s, m, now, s, m, nodes, w.packed_rows, g.graph + t * m * m, m);
  gemm(nodes, s, m, w.d_query, s, 1, p.mix_back + t * p.step, w.d_other, s, true);
  gemm(nodes, s, m, w.d_value, s, 1, p.graph_back + t * p.step, w.d_other, s, true);
  T* spare = w.d_node;
  w.d_node = w.d_other;
  w.d_other = spare;
}

// back from the nodes to w.local and w.whole, gradients of W_loc (context - word)^2 and W_glo (image - caption)^2, and
// through the second
template <typename T>
void backward_nodes(const SgrArgs<T>& a, const SgrGrads<T>& g, const Packed<T>& p, const Work<T>& w, const Tile& tile) {
  const int64_t s = padded<T>(a.nodes), d = a.dim, m = a.nodes;
  const T* state = w.state(0, s);
  for (int64_t i = 0, row = 0, at = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i);
    backward_l2(state + at, w.whole_scale[i], w.d_node + at, s, w.whole + i * s);
    at += s;
    for (int64_t l = row; l < row + n; ++l, at += s) {
      backward_l2(state + at, w.local_scale[l], w.d_node + at, s, w.local + l * s);
    }
    row += n;
  }
  add_columns(w.whole, tile.pairs, s, m, g.b_glo);
  add_columns(w.local, tile.words, s, m, g.b_loc);
  add_outer(w.whole, s, m, w.squares, d, d, tile.pairs, w.packed_rows, g.w_glo, d);
  gemm(tile.pairs, d, m, w.whole, s, 1, p.glo_back, w.d_whole, d);
  for (int64_t i = 0; i < tile.pairs; ++i) {
    const int64_t b = a.image_of(tile.first + i), c = a.caption_of(tile.first + i);
    for (int64_t k = 0; k < d; ++k) {
      const T grad = 2 * (a.image_globals[b * d + k] - a.caption_globals[c * d + k]) * w.d_whole[i * d + k];
      g.image_globals[b * d + k] += grad;
      g.caption_globals[c * d + k] -= grad;
    }
  }
}

// gradients of a block of the embedding, from that of W_loc (context - word)^2: of W_loc, and of words and regions as
// far as they do not act through attention. With x = soft regions and context y = scale x, the gradient of x is
// scale (dy - along y): what along needs, a sum over all blocks, is added to w.along and subtracted at the end.
template <typename T>
void backward_difference(const SgrArgs<T>& a, const SgrGrads<T>& g, const Packed<T>& p, const Work<T>& w,
                         const Tile& tile, int64_t from, int64_t some) {
  const int64_t r = padded<T>(a.region_count), s = padded<T>(a.nodes), d = a.dim, m = a.nodes, words = tile.words;
  subtract_words(a, w, tile, from, some, [&](int64_t row, int64_t column, typename Simd<T>::Vector x) {
    store(w.difference + row * kDepth + column, x);
    store(w.packed_rows + packed_at<T>(row, column, words, some), x * x);
  });
  add_product(m, some, words, w.local, s, w.packed_rows, g.w_loc + from, d);
  // block by block, the columns of the packed transpose follow each other
  gemm(words, padded<T>(some), m, w.local, s, 1, p.loc_back + from * m, w.d_block, kDepth);
  for (const Run* run = tile.run; run < tile.run + tile.runs; ++run) {
    for (int64_t l = 0; l < run->rows; ++l) {
      const int64_t row = run->row + l;
      const T* __restrict x = w.difference + row * kDepth;
      const T* __restrict word = a.words + (run->word + l) * d + from;
      T* __restrict grad = w.d_block + row * kDepth;
      T* __restrict d_word = g.words + (run->word + l) * d + from;
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < some; ++k) {
        grad[k] *= 2 * x[k];
        d_word[k] -= grad[k];
        sum += grad[k] * (x[k] + word[k]);
      }
      w.along[row] = from > 0 ? w.along[row] + sum : sum;
    }
  }
  for (const Group* group = tile.group; group < tile.group + tile.groups; ++group) {
    const T* d_block = w.d_block + group->row * kDepth;
    gemm(group->rows, r, some, d_block, kDepth, 1, w.images[group->slot].across + from * r, w.d_soft + group->row * r,
         r, from > 0);
    add_outer(w.scaled + group->row * r, r, a.region_count, d_block, kDepth, some, group->rows, w.packed_rows,
              g.regions + group->image * a.region_count * d + from, d);
  }
}

// gradients of words and regions through W_loc (context - word)^2 and the attention
template <typename T>
void backward_align(const SgrArgs<T>& a, const SgrGrads<T>& g, const Packed<T>& p, const Work<T>& w, const Tile& tile) {
  const int64_t r = padded<T>(a.region_count), d = a.dim, regions = a.region_count;
  for (int64_t l = 0; l < tile.words; ++l) {
    for (int64_t k = 0; k < r; ++k) w.scaled[l * r + k] = w.context_scale[l] * w.soft[l * r + k];
  }
  for_blocks(d, [&](int64_t from, int64_t some) { backward_difference(a, g, p, w, tile, from, some); });

  // what was left out along the contexts, scale along y = scale^2 along soft regions
  for (int64_t l = 0; l < tile.words; ++l) {
    const T scale = w.context_scale[l];
    const T along = scale * w.along[l] / (1 - static_cast<T>(1e-8) * scale);
    for (int64_t k = 0; k < r; ++k) {
      w.d_soft[l * r + k] = scale * (w.d_soft[l * r + k] - along * w.weighted[l * r + k]);
      w.scaled[l * r + k] *= -along;
    }
  }
  for (const Group* group = tile.group; group < tile.group + tile.groups; ++group) {
    // soft' scaled regions, the small product first
    const int64_t at = group->row * r;
    for (int64_t k = 0; k < regions * r; ++k) w.outer[k] = 0;
    add_outer(w.scaled + at, r, regions, w.soft + at, r, r, group->rows, w.packed_rows, w.outer, r);
    for_blocks(d, [&](int64_t from, int64_t some) {
      gemm(regions, some, regions, w.outer, r, 1, along_at(a, w.images[group->slot], from),
           g.regions + group->image * regions * d + from, d, true);
    });
  }

  // raw = words regions'
  for (int64_t i = 0, row = 0; i < tile.pairs; ++i) {
    const int64_t n = length_of(a, tile.first + i);
    backward_attend(a, w, i, row, n);
    row += n;
  }
  for_blocks(d, [&](int64_t from, int64_t some) {
    for (const Run* run = tile.run; run < tile.run + tile.runs; ++run) {
      const T* words = a.words + run->word * d + from;
      for (int64_t l = 0; l < run->rows; ++l) {
        std::memcpy(w.d_block + (run->row + l) * kDepth, words + l * d, some * sizeof(T));
      }
      gemm(run->rows, some, regions, w.d_soft + run->row * r, r, 1, along_at(a, w.images[run->slot], from),
           g.words + run->word * d + from, d, true);
    }
    for (const Group* group = tile.group; group < tile.group + tile.groups; ++group) {
      add_outer(w.d_soft + group->row * r, r, regions, w.d_block + group->row * kDepth, kDepth, some, group->rows,
                w.packed_rows, g.regions + group->image * regions * d + from, d);
    }
  });
}

// all of the way back, after forward_tile
template <typename T>
void backward_tile(const SgrArgs<T>& a, const SgrGrads<T>& g, const Packed<T>& p, Work<T>& w, const Tile& tile,
                   const T* grad_scores) {
  backward_score(a, g, p, w, tile, grad_scores);
  for (int64_t t = a.steps - 2; t >= 0; --t) backward_reason(a, g, p, w, tile, t);
  backward_nodes(a, g, p, w, tile);
  backward_align(a, g, p, w, tile);
}

// scores pairs [begin, end) tile by tile, and calls visit(weights, workspace, tile) after each
template <typename T, typename Visit>
void for_tiles(const SgrArgs<T>& a, bool backward, const T* packed, T* workspace, int64_t begin, int64_t end,
               const Visit& visit) {
  Arena<T> weights(const_cast<T*>(packed)), arena(workspace);
  const Packed<T> p(a, backward, weights);
  Work<T> w(a, backward, arena);
  while (begin < end) {
    const Tile tile = next_tile(a, w, tile_words(a, backward), begin, end);
    forward_tile(a, p, w, tile);
    visit(p, w, tile);
    begin += tile.pairs;
  }
}

}  // namespace

template <typename T>
int64_t sgr_packed_size(const SgrArgs<T>& a, bool backward) {
  Arena<T> arena(nullptr);
  Packed<T>(a, backward, arena);
  return arena.needed();
}

template <typename T>
int64_t sgr_workspace_size(const SgrArgs<T>& a, bool backward) {
  Arena<T> arena(nullptr);
  Work<T>(a, backward, arena);
  return arena.needed();
}

template <typename T>
void sgr_pack(const SgrArgs<T>& a, bool backward, T* packed) {
  Arena<T> arena(packed);
  const Packed<T> p(a, backward, arena);
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
  if (!backward) return;
  for_blocks(a.dim,
             [&](int64_t from, int64_t some) { pack(a.w_loc + from, a.dim, 1, n, some, p.loc_back + from * n); });
  pack(a.w_glo, a.dim, 1, n, a.dim, p.glo_back);
  for (int64_t t = 0; t < a.steps; ++t) {
    pack(a.mix + t * n * n, 1, n, n, n, p.mix_back + t * p.step);
    pack(a.graph + t * n * n, n, 1, n, n, p.graph_back + t * p.step);
  }
}

template <typename T>
void sgr_forward(const SgrArgs<T>& a, const T* packed, T* workspace, int64_t begin, int64_t end) {
  for_tiles(a, false, packed, workspace, begin, end, [&](const Packed<T>&, Work<T>& w, const Tile& tile) {
    std::memcpy(a.scores + tile.first, w.scores, tile.pairs * sizeof(T));
  });
}

template <typename T>
void sgr_backward(const SgrArgs<T>& a, const SgrGrads<T>& g, const T* packed, T* workspace, int64_t begin,
                  int64_t end) {
  for_tiles(a, true, packed, workspace, begin, end, [&](const Packed<T>& p, Work<T>& w, const Tile& tile) {
    backward_tile(a, g, p, w, tile, a.grad_scores + tile.first);
  });
}

template <typename T>
void sgr_mean(const SgrArgs<T>& a, const SgrGrads<T>& g, const SgrMean<T>& loss, const T* packed, T* workspace,
              int64_t begin, int64_t end, T* left) {
  for_tiles(a, true, packed, workspace, begin, end, [&](const Packed<T>& p, Work<T>& w, const Tile& tile) {
    T* grads = left + tile.first;
    int64_t active = 0;
    for (int64_t i = 0; i < tile.pairs; ++i) {
      const int64_t pair = tile.first + i;
      a.scores[pair] = w.scores[i];
      grads[i] = loss.gradient(w.scores[i], a.image_of(pair), a.caption_of(pair));
      active += grads[i] != 0;
    }
    // going back costs two thirds of doing a pair again with its gradient
    if (3 * active < 2 * tile.pairs) return;
    backward_tile(a, g, p, w, tile, grads);
    for (int64_t i = 0; i < tile.pairs; ++i) grads[i] = 0;
  });
}

#define PCSR_INSTANTIATE(T)                                                                                           \
  template int64_t sgr_packed_size<T>(const SgrArgs<T>&, bool);                                                       \
  template int64_t sgr_workspace_size<T>(const SgrArgs<T>&, bool);                                                    \
  template void sgr_pack<T>(const SgrArgs<T>&, bool, T*);                                                             \
  template void sgr_forward<T>(const SgrArgs<T>&, const T*, T*, int64_t, int64_t);                                    \
  template void sgr_backward<T>(const SgrArgs<T>&, const SgrGrads<T>&, const T*, T*, int64_t, int64_t);               \
  template void sgr_mean<T>(const SgrArgs<T>&, const SgrGrads<T>&, const SgrMean<T>&, const T*, T*, int64_t, int64_t, \
                            T*);
PCSR_INSTANTIATE(float)
PCSR_INSTANTIATE(double)

}  // namespace pcsr::PCSR_ISA
