// torch.ops.pcsr.sgr: checks the tensors and runs the CPU kernels; on CUDA the kernels are Triton's.
#include "../sgr.h"

#include "bind.h"

#if PCSR_WITH_CPU

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <tuple>
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

// the floating arguments in the order of the schema, dense, and what else the kernels point to
struct Inputs {
  std::vector<Tensor> floats;
  Tensor offsets;
  MaybeTensor pairs;

  int64_t captions() const { return offsets.size(0) - 1; }
  int64_t count() const { return pairs ? pairs->size(0) : floats[0].size(0) * captions(); }
  const int64_t* starts() const { return static_cast<const int64_t*>(offsets.data_ptr()); }

  template <typename T>
  SgrArgs<T> args() const {
    const auto at = [&](int i) { return static_cast<const T*>(floats[i].data_ptr()); };
    SgrArgs<T> a = {};
    a.regions = at(0);
    a.words = at(1);
    a.offsets = starts();
    a.image_globals = at(2);
    a.caption_globals = at(3);
    a.w_loc = at(4);
    a.b_loc = at(5);
    a.w_glo = at(6);
    a.b_glo = at(7);
    a.mix = at(8);
    a.shift = at(9);
    a.graph = at(10);
    a.bias = at(11);
    a.w_score = at(12);
    a.b_score = at(13);
    a.pairs = pairs ? static_cast<const int64_t*>(pairs->data_ptr()) : nullptr;
    a.images = floats[0].size(0);
    a.region_count = floats[0].size(1);
    a.dim = floats[0].size(2);
    a.captions = captions();
    a.steps = floats[8].size(0);
    a.nodes = floats[8].size(1);
    a.pair_count = count();
    for (int64_t c = 0; c < a.captions; ++c) a.longest = std::max(a.longest, a.offsets[c + 1] - a.offsets[c]);
    return a;
  }
};

Inputs checked(const Tensor& regions, const Tensor& words, const Tensor& offsets, const Tensor& image_globals,
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
  const int64_t images = regions.size(0), count = regions.size(1), dim = regions.size(2);
  const int64_t captions = offsets.size(0) - 1, steps = mix.size(0), nodes = mix.size(1);
  struct Expected {
    const char* name;
    const Tensor& tensor;
    std::initializer_list<int64_t> shape;
  };
  const Expected all[] = {{"regions", regions, {images, count, dim}},
                          {"words", words, {words.size(0), dim}},
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
  Inputs in{{}, dense(offsets), std::nullopt};
  for (const Expected& e : all) {
    check_type("sgr", e.name, e.tensor, type);
    check_shape("sgr", e.name, e.tensor, e.shape);
    in.floats.push_back(dense(e.tensor));
  }
  check_offsets(in.starts(), captions, words.size(0));
  if (pairs) {
    check_type("sgr", "pairs", *pairs, ScalarType::Long);
    check_shape("sgr", "pairs", *pairs, {pairs->dim() ? pairs->size(0) : 0, 2});
    in.pairs = dense(*pairs);
    check_pairs(static_cast<const int64_t*>(in.pairs->data_ptr()), pairs->size(0), images, captions);
  }
  by_type(regions, [&]<typename T>(T) {
    for (const Expected& e : all) {
      const Tensor& t = in.floats[&e - all];
      check(!has_nan(static_cast<const T*>(t.data_ptr()), t.numel()), "sgr: ", e.name, " contain NaN");
    }
  });
  return in;
}

// scores of all pairs on torch's threads, each taking the next part when it is done with one
template <typename T>
void forward(const SgrArgs<T>& args) {
  const auto score = PCSR_KERNEL(sgr_forward<T>);
  const std::unique_ptr<T[]> packed(new T[PCSR_KERNEL(sgr_packed_size<T>)(args, false)]);
  PCSR_KERNEL(sgr_pack<T>)(args, false, packed.get());
  const int64_t workspace = PCSR_KERNEL(sgr_workspace_size<T>)(args, false), threads = torch::stable::get_num_threads();
  // an image's captions, or a share that keeps all threads busy to the end
  const int64_t part = args.pairs ? std::max<int64_t>(8, args.pair_count / (8 * threads)) : args.captions;
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<T[]> work(new T[workspace]);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t from; (from = next.fetch_add(part)) < args.pair_count;) {
        score(args, packed.get(), work.get(), from, std::min(args.pair_count, from + part));
      }
    }
  });
}

// where each thread's share of the sorted pairs begins: an image belongs to one thread, so its gradients do too
std::vector<int64_t> shares(const std::vector<int64_t>& pairs, int64_t threads) {
  const int64_t count = static_cast<int64_t>(pairs.size()) / 2;
  std::vector<int64_t> begins = {0};
  for (int64_t t = 1; t < threads; ++t) {
    int64_t at = std::max(begins.back(), count * t / threads);
    while (at > 0 && at < count && pairs[2 * at] == pairs[2 * (at - 1)]) ++at;
    begins.push_back(at);
  }
  begins.push_back(count);
  return begins;
}

// each thread adds the gradients of its share of the pairs, which are sorted by image, by
// add(grads, packed, workspace, begin, end); the sum is the same for a given number of threads
template <typename T, typename Add>
void add_gradients(const SgrArgs<T>& args, const std::vector<int64_t>& begins, const std::vector<Tensor>& grads,
                   const Add& add) {
  const std::unique_ptr<T[]> packed(new T[PCSR_KERNEL(sgr_packed_size<T>)(args, true)]);
  PCSR_KERNEL(sgr_pack<T>)(args, true, packed.get());
  const int64_t workspace = PCSR_KERNEL(sgr_workspace_size<T>)(args, true);
  const int64_t threads = static_cast<int64_t>(begins.size()) - 1;
  // regions and image_globals have one writer for each image; of the others each thread but the first has its own
  std::vector<std::vector<std::unique_ptr<T[]>>> own(threads);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (begins[t] == begins[t + 1]) continue;
      T* to[14];
      for (int i = 0; i < 14; ++i) {
        to[i] = static_cast<T*>(grads[i].data_ptr());
        if (t == 0 || i == 0 || i == 2) continue;
        own[t].emplace_back(new T[grads[i].numel()]());
        to[i] = own[t].back().get();
      }
      const SgrGrads<T> g = {to[0], to[1], to[2], to[3],  to[4],  to[5],  to[6],
                             to[7], to[8], to[9], to[10], to[11], to[12], to[13]};
      const std::unique_ptr<T[]> work(new T[workspace]);
      add(g, packed.get(), work.get(), begins[t], begins[t + 1]);
    }
  });
  for (int64_t t = 1; t < threads; ++t) {
    if (own[t].empty()) continue;
    for (int i = 0, part = 0; i < 14; ++i) {
      if (i == 0 || i == 2) continue;
      const T* from = own[t][part++].get();
      T* to = static_cast<T*>(grads[i].data_ptr());
      for (int64_t k = 0; k < grads[i].numel(); ++k) to[k] += from[k];
    }
  }
}

// adds the gradients of the pairs whose score has one, all[p] for pair p
template <typename T>
void backward(SgrArgs<T> args, const T* all, const std::vector<Tensor>& grads) {
  std::vector<int64_t> listed;
  std::vector<T> given;
  for (int64_t p = 0; p < args.pair_count; ++p) {
    if (all[p] == 0) continue;
    listed.push_back(args.image_of(p));
    listed.push_back(args.caption_of(p));
    given.push_back(all[p]);
  }
  args.pair_count = static_cast<int64_t>(given.size());
  const Sorted sorted(listed.data(), args.pair_count);
  std::vector<T> in_order(args.pair_count);
  for (int64_t p = 0; p < args.pair_count; ++p) in_order[p] = given[sorted.order[p]];
  args.pairs = sorted.pairs.data();
  args.grad_scores = in_order.data();
  const auto add = PCSR_KERNEL(sgr_backward<T>);
  add_gradients(args, shares(sorted.pairs, torch::stable::get_num_threads()), grads,
                [&](const SgrGrads<T>& g, const T* packed, T* work, int64_t begin, int64_t end) {
                  add(args, g, packed, work, begin, end);
                });
}

Tensor sgr_on_cpu(const Tensor& regions, const Tensor& words, const Tensor& offsets, const Tensor& image_globals,
                  const Tensor& caption_globals, const Tensor& w_loc, const Tensor& b_loc, const Tensor& w_glo,
                  const Tensor& b_glo, const Tensor& mix, const Tensor& shift, const Tensor& graph, const Tensor& bias,
                  const Tensor& w_score, const Tensor& b_score, const MaybeTensor& pairs) {
  const Inputs in = checked(regions, words, offsets, image_globals, caption_globals, w_loc, b_loc, w_glo, b_glo, mix,
                            shift, graph, bias, w_score, b_score, pairs);
  const Tensor scores = torch::stable::new_empty(regions, {in.count()});
  by_type(regions, [&]<typename T>(T) {
    SgrArgs<T> args = in.args<T>();
    args.scores = static_cast<T*>(scores.data_ptr());
    if (!pairs) return forward(args);
    const Sorted sorted(args.pairs, args.pair_count);
    std::vector<T> found(args.pair_count);
    args.pairs = sorted.pairs.data();
    args.scores = found.data();
    forward(args);
    for (int64_t p = 0; p < args.pair_count; ++p) static_cast<T*>(scores.data_ptr())[sorted.order[p]] = found[p];
  });
  return scores;
}

using Grads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                         Tensor, Tensor>;

// only the pairs whose score has a gradient
Grads sgr_backward_on_cpu(const Tensor& grad_scores, const Tensor& regions, const Tensor& words, const Tensor& offsets,
                          const Tensor& image_globals, const Tensor& caption_globals, const Tensor& w_loc,
                          const Tensor& b_loc, const Tensor& w_glo, const Tensor& b_glo, const Tensor& mix,
                          const Tensor& shift, const Tensor& graph, const Tensor& bias, const Tensor& w_score,
                          const Tensor& b_score, const MaybeTensor& pairs) {
  const Inputs in = checked(regions, words, offsets, image_globals, caption_globals, w_loc, b_loc, w_glo, b_glo, mix,
                            shift, graph, bias, w_score, b_score, pairs);
  check_type("sgr", "grad_scores", grad_scores, regions.scalar_type());
  check_shape("sgr", "grad_scores", grad_scores, {in.count()});
  const Tensor upstream = dense(grad_scores);
  std::vector<Tensor> grads;
  for (const Tensor& t : in.floats) grads.push_back(torch::stable::new_zeros(t, t.sizes()));
  by_type(regions, [&]<typename T>(T) { backward(in.args<T>(), static_cast<const T*>(upstream.data_ptr()), grads); });
  return {grads[0], grads[1], grads[2], grads[3],  grads[4],  grads[5],  grads[6],
          grads[7], grads[8], grads[9], grads[10], grads[11], grads[12], grads[13]};
}

// loss = triplet(sgr(...), margin, "mean"), and its gradients, in one pass over the grid where most scores have one
template <typename T>
T mean_loss(SgrArgs<T> args, SgrMean<T> loss, const std::vector<Tensor>& grads) {
  const int64_t images = args.images, threads = torch::stable::get_num_threads();
  std::vector<int64_t> own(2 * images);
  for (int64_t i = 0; i < images; ++i) own[2 * i] = own[2 * i + 1] = i;
  std::vector<T> positive(images), scores(images * images), left(images * images);
  SgrArgs<T> diagonal = args;
  diagonal.pairs = own.data();
  diagonal.pair_count = images;
  diagonal.scores = positive.data();
  forward(diagonal);
  loss.positive = positive.data();

  args.scores = scores.data();
  std::vector<int64_t> begins;
  for (int64_t t = 0; t <= threads; ++t) begins.push_back(images * t / threads * images);
  const auto run = PCSR_KERNEL(sgr_mean<T>);
  add_gradients(args, begins, grads, [&](const SgrGrads<T>& g, const T* packed, T* work, int64_t begin, int64_t end) {
    run(args, g, loss, packed, work, begin, end, left.data());
  });

  T total = 0;
  std::vector<int64_t> hinges(images);
  for (int64_t i = 0; i < images; ++i) {
    for (int64_t j = 0; j < images; ++j) {
      if (!loss.is_negative(i, j)) continue;
      for (const int64_t of : {i, j}) {
        const T cost = loss.hinge(scores[i * images + j], of);
        total += cost;
        hinges[of] += cost > 0;
      }
    }
  }
  for (int64_t i = 0; i < images; ++i) {
    left[i * images + i] = -static_cast<T>(hinges[i]) / static_cast<T>(images);
  }
  backward(args, left.data(), grads);
  return total / static_cast<T>(images);
}

using LossAndGrads = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                                Tensor, Tensor, Tensor, Tensor>;

LossAndGrads sgr_mean_on_cpu(const Tensor& regions, const Tensor& words, const Tensor& offsets,
                             const Tensor& image_globals, const Tensor& caption_globals, const Tensor& w_loc,
                             const Tensor& b_loc, const Tensor& w_glo, const Tensor& b_glo, const Tensor& mix,
                             const Tensor& shift, const Tensor& graph, const Tensor& bias, const Tensor& w_score,
                             const Tensor& b_score, const Tensor& margin, const MaybeTensor& image_ids,
                             const MaybeTensor& caption_ids) {
  const Inputs in = checked(regions, words, offsets, image_globals, caption_globals, w_loc, b_loc, w_glo, b_glo, mix,
                            shift, graph, bias, w_score, b_score, std::nullopt);
  const int64_t images = regions.size(0);
  check(in.captions() == images, "sgr_mean: ", images, " images, but ", in.captions(), " captions: pair i is image i ",
        "with caption i");
  check_type("sgr_mean", "margin", margin, regions.scalar_type());
  check_shape("sgr_mean", "margin", margin, {images});
  const Tensor margins = dense(margin);
  MaybeTensor ids[2];
  for (const auto& [name, given, kept] :
       {std::tuple{"image_ids", &image_ids, &ids[0]}, std::tuple{"caption_ids", &caption_ids, &ids[1]}}) {
    if (!*given) continue;
    check_type("sgr_mean", name, **given, ScalarType::Long);
    check_shape("sgr_mean", name, **given, {images});
    *kept = dense(**given);
  }
  std::vector<Tensor> grads;
  for (const Tensor& t : in.floats) grads.push_back(torch::stable::new_zeros(t, t.sizes()));
  const Tensor loss = torch::stable::new_empty(regions, {});
  by_type(regions, [&]<typename T>(T) {
    const T* values = static_cast<const T*>(margins.data_ptr());
    check(!has_nan(values, images), "sgr_mean: margin is NaN");
    const auto at = [&](int i) { return ids[i] ? static_cast<const int64_t*>(ids[i]->data_ptr()) : nullptr; };
    const SgrMean<T> rule = {nullptr, values, at(0), at(1), images};
    *static_cast<T*>(loss.data_ptr()) = mean_loss(in.args<T>(), rule, grads);
  });
  return {loss,     grads[0], grads[1], grads[2],  grads[3],  grads[4],  grads[5], grads[6],
          grads[7], grads[8], grads[9], grads[10], grads[11], grads[12], grads[13]};
}

}  // namespace
}  // namespace pcsr

PCSR_CPU_IMPL(m) {
  m.impl("sgr_mean", TORCH_BOX(&pcsr::sgr_mean_on_cpu));
  m.impl("sgr", TORCH_BOX(&pcsr::sgr_on_cpu));
  m.impl("sgr_backward", TORCH_BOX(&pcsr::sgr_backward_on_cpu));
}

#endif
