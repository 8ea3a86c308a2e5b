// The sgr op without torch: its arguments.
#pragma once
#include <cstdint>

namespace pcsr {

template <typename T>
struct SgrArgs {
  const T* regions;          // [images, region_count, dim]
  const T* words;            // [offsets[captions], dim]
  const int64_t* offsets;    // [captions + 1]
  const T* image_globals;    // [images, dim]
  const T* caption_globals;  // [captions, dim]
  const T* w_loc;            // [nodes, dim]
  const T* b_loc;            // [nodes]
  const T* w_glo;            // [nodes, dim]
  const T* b_glo;            // [nodes]
  // each step: edges = softmax((E mix + shift) E'), E = relu(edges E graph' + bias)
  const T* mix;      // [steps, nodes, nodes]
  const T* shift;    // [steps, nodes]
  const T* graph;    // [steps, nodes, nodes]
  const T* bias;     // [steps, nodes]
  const T* w_score;  // [nodes]
  const T* b_score;  // [1]
  // (image, caption), or null: pair p is image p / captions with caption p % captions
  const int64_t* pairs;  // [pair_count, 2]
  int64_t images, region_count, dim, captions, nodes, steps, pair_count;
  int64_t longest;  // words of the longest caption
  T* scores;        // [pair_count], written by forward

  const T* grad_scores;  // [pair_count]

  int64_t image_of(int64_t pair) const { return pairs ? pairs[2 * pair] : pair / captions; }
  int64_t caption_of(int64_t pair) const { return pairs ? pairs[2 * pair + 1] : pair % captions; }
};

// the triplet loss with the mean of all negatives: what its gradient at a score depends on, besides that score
template <typename T>
struct SgrMean {
  const T* positive;           // [images], scores of the pairs (i, i)
  const T* margin;             // [images]
  const int64_t* image_ids;    // [images] or null; pairs that share one are not each other's negatives
  const int64_t* caption_ids;  // [images] or null
  int64_t images;

  bool is_negative(int64_t image, int64_t caption) const {
    return image != caption && !(image_ids && image_ids[image] == image_ids[caption]) &&
           !(caption_ids && caption_ids[image] == caption_ids[caption]);
  }
  // the hinge of a negative with one of its positives
  T hinge(T score, int64_t of) const {
    const T x = (score - positive[of]) + margin[of];
    return x > 0 ? x : 0;
  }
  T gradient(T score, int64_t image, int64_t caption) const {
    if (!is_negative(image, caption)) return 0;
    return static_cast<T>((hinge(score, image) > 0) + (hinge(score, caption) > 0)) / static_cast<T>(images);
  }
};

// one for each floating argument, in its shape; backward adds to them
template <typename T>
struct SgrGrads {
  T *regions, *words, *image_globals, *caption_globals;
  T *w_loc, *b_loc, *w_glo, *b_glo, *mix, *shift, *graph, *bias, *w_score, *b_score;
};

}  // namespace pcsr
