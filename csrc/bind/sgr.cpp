// torch.ops.pcsr.sgr: checks the tensors and runs the CPU kernels; on CUDA the kernels are Triton's.
#include "../sgr.h"

#include "bind.h"

#if PCSR_WITH_CPU

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <vector>

#include "../cpu/sgr.h"

namespace pcsr {
namespace {

void check_offsets(const int64_t* offsets, int64_t captions, int64_t words) {
  check(offsets[0] == 0, "sgr: offsets must start with 0, got ", offsets[0]);
  for (int64_t c = 0; c < captions; ++c) {
    check(offsets[c] < offsets[c + 1], "sgr: caption ", c, " has no words: offsets ", offsets[c], " and ",
          offsets[c + 1]);
  }
  check(offsets[captions] == words, "sgr: offsets end with ", offsets[captions], ", but there are ", words, " words");
}

void check_pairs(const int64_t* pairs, int64_t count, int64_t images, int64_t captions) {
  for (int64_t p = 0; p < count; ++p) {
    check(pairs[2 * p] >= 0 && pairs[2 * p] < images, "sgr: pairs[", p, ", 0] = ", pairs[2 * p],
          " is out of range for ", images, " images");
    check(pairs[2 * p + 1] >= 0 && pairs[2 * p + 1] < captions, "sgr: pairs[", p, ", 1] = ", pairs[2 * p + 1],
          " is out of range for ", captions, " captions");
  }
}

template <typename T>
bool has_nan(const T* x, int64_t n) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) found += x[i] != x[i];
  return found > 0;
}

// pairs in the order of their images, so that what belongs to an image is prepared once
struct Sorted {
  std::vector<int64_t> order, pairs;

  Sorted(const int64_t* given, int64_t count) : order(count), pairs(2 * count) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return given[2 * a] < given[2 * b]; });
    for (int64_t p = 0; p < count; ++p) {
      pairs[2 * p] = given[2 * order[p]];
      pairs[2 * p + 1] = given[2 * order[p] + 1];
    }
  }
};

// scores of all pairs on torch's threads, each taking the next part when it is done with one
template <typename T>
void run(const SgrArgs<T>& args) {
  const auto forward = PCSR_KERNEL(sgr_forward<T>);
  const std::unique_ptr<T[]> packed(new T[PCSR_KERNEL(sgr_packed_size<T>)(args)]);
  PCSR_KERNEL(sgr_pack<T>)(args, packed.get());
  const int64_t workspace = PCSR_KERNEL(sgr_workspace_size<T>)(args), threads = torch::stable::get_num_threads();
  // an image's captions, or a share that keeps all threads busy to the end
  const int64_t part = args.pairs ? std::max<int64_t>(8, args.pair_count / (8 * threads)) : args.captions;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> work(new T[workspace]);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t from; (from = next.fetch_add(part)) < args.pair_count;) {
        forward(args, packed.get(), work.get(), from, std::min(args.pair_count, from + part));
      }
    }
  });
}

Tensor sgr_on_cpu(const Tensor& regions, const Tensor& words, const Tensor& offsets, const Tensor& image_globals,
                  const Tensor& caption_globals, const Tensor& w_loc, const Tensor& b_loc, const Tensor& w_glo,
                  const Tensor& b_glo, const Tensor& mix, const Tensor& shift, const Tensor& graph, const Tensor& bias,
                  const Tensor& w_score, const Tensor& b_score, const MaybeTensor& pairs) {
  const ScalarType type = regions.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::Double, "sgr: regions must be float32 or float64, got ",
        torch::headeronly::toString(type));
  check(regions.dim() == 3 && regions.numel() > 0, "sgr: regions must be [images, regions, dim] and not empty, got ",
        shape_of(regions));
  check(offsets.dim() == 1 && offsets.size(0) >= 2, "sgr: offsets must be [captions + 1], got ", shape_of(offsets));
  check(mix.dim() == 3 && mix.size(0) >= 1, "sgr: mix must be [steps, nodes, nodes], got ", shape_of(mix));
  check(words.dim() == 2, "sgr: words must be [words, dim], got ", shape_of(words));
  check_type("sgr", "offsets", offsets, ScalarType::Long);
  const int64_t images = regions.size(0), dim = regions.size(2), captions = offsets.size(0) - 1;
  const int64_t steps = mix.size(0), nodes = mix.size(1);
  struct Expected {
    const char* name;
    const Tensor& tensor;
    std::initializer_list<int64_t> shape;
  };
  const Expected all[] = {{"words", words, {words.size(0), dim}},
                          {"image_globals", image_globals, {images, dim}},
                          {"caption_globals", caption_globals, {captions, dim}},
                          {"w_loc", w_loc, {nodes, dim}},
                          {"b_loc", b_loc, {nodes}},
                          {"w_glo", w_glo, {nodes, dim}},
                          {"b_glo", b_glo, {nodes}},
                          {"mix", mix, {steps, nodes, nodes}},
                          {"shift", shift, {steps, nodes}},
                          {"graph", graph, {steps, nodes, nodes}},
                          {"bias", bias, {steps, nodes}},
                          {"w_score", w_score, {nodes}},
                          {"b_score", b_score, {1}}};
  std::vector<Tensor> kept = {dense(regions)};
  for (const Expected& e : all) {
    check_type("sgr", e.name, e.tensor, type);
    check_shape("sgr", e.name, e.tensor, e.shape);
    kept.push_back(dense(e.tensor));
  }
  const Tensor own_offsets = dense(offsets);
  const int64_t* starts = static_cast<const int64_t*>(own_offsets.data_ptr());
  check_offsets(starts, captions, words.size(0));

  MaybeTensor own_pairs;
  if (pairs) {
    check_type("sgr", "pairs", *pairs, ScalarType::Long);
    check_shape("sgr", "pairs", *pairs, {pairs->dim() ? pairs->size(0) : 0, 2});
    own_pairs = dense(*pairs);
    check_pairs(static_cast<const int64_t*>(own_pairs->data_ptr()), pairs->size(0), images, captions);
  }
  const int64_t count = pairs ? pairs->size(0) : images * captions;
  const Tensor scores = torch::stable::new_empty(regions, {count});

  by_type(regions, [&]<typename T>(T) {
    for (size_t i = 0; i < kept.size(); ++i) {
      check(!has_nan(static_cast<const T*>(kept[i].data_ptr()), kept[i].numel()),
            "sgr: ", i == 0 ? "regions" : all[i - 1].name, " contain NaN");
    }
    const auto at = [&](int i) { return static_cast<const T*>(kept[i].data_ptr()); };
    SgrArgs<T> args = {at(0),   at(1),  starts,          at(2),  at(3),
                       at(4),   at(5),  at(6),           at(7),  at(8),
                       at(9),   at(10), at(11),          at(12), at(13),
                       nullptr, images, regions.size(1), dim,    captions,
                       nodes,   steps,  count,           0,      static_cast<T*>(scores.data_ptr())};
    for (int64_t c = 0; c < captions; ++c) args.longest = std::max(args.longest, starts[c + 1] - starts[c]);
    if (!pairs) return run(args);
    const Sorted sorted(static_cast<const int64_t*>(own_pairs->data_ptr()), count);
    std::vector<T> found(count);
    args.pairs = sorted.pairs.data();
    args.scores = found.data();
    run(args);
    for (int64_t p = 0; p < count; ++p) static_cast<T*>(scores.data_ptr())[sorted.order[p]] = found[p];
  });
  return scores;
}

}  // namespace
}  // namespace pcsr

PCSR_CPU_IMPL(m) { m.impl("sgr", TORCH_BOX(&pcsr::sgr_on_cpu)); }

#endif
