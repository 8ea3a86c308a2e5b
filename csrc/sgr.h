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

// one for each floating argument, in its shape; backward adds to them
template <typename T>
struct SgrGrads {
  T *regions, *words, *image_globals, *caption_globals;
  T *w_loc, *b_loc, *w_glo, *b_glo, *mix, *shift, *graph, *bias, *w_score, *b_score;
};

}  // namespace pcsr
