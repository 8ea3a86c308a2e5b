// torch.ops.pcsr.triplet and triplet_backward: check the tensors and run the kernels of their device.
#include "../triplet.h"

#include <tuple>

#include "bind.h"

#if PCSR_WITH_CPU
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <vector>

#include "../cpu/triplet.h"
#endif
#if PCSR_WITH_CUDA
#include "../cuda/triplet.h"
#endif

namespace pcsr {
namespace {

// total [], loss [batch], in_row [batch] and in_col [batch]
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

const int64_t* ids_of(const MaybeTensor& ids) { return ids ? static_cast<const int64_t*>(ids->data_ptr()) : nullptr; }

// dense copies where needed; alive as long as the pointers are in use
struct Inputs {
  Tensor scores, margin;
  MaybeTensor image_ids, caption_ids;
  bool hardest;

  int64_t batch() const { return scores.size(0); }

  template <typename T>
  TripletArgs<T> args() const {
    TripletArgs<T> a = {};
    a.scores = static_cast<const T*>(scores.data_ptr());
    a.margin = static_cast<const T*>(margin.data_ptr());
    a.image_ids = ids_of(image_ids);
    a.caption_ids = ids_of(caption_ids);
    a.batch = batch();
    a.margin_stride = margin.size(0) == 1 ? 0 : 1;
    a.hardest = hardest;
    return a;
  }
};

Inputs checked(const Tensor& scores, const Tensor& margin, const MaybeTensor& image_ids, const MaybeTensor& caption_ids,
               bool hardest) {
  check(scores.dim() == 2 && scores.size(0) == scores.size(1), "triplet: scores must be square, got ",
        shape_of(scores));
  const ScalarType type = scores.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::Double, "triplet: scores must be float32 or float64, got ",
        torch::headeronly::toString(type));
  const int64_t batch = scores.size(0);
  check(batch < INT32_MAX, "triplet: at most 2^31 - 2 pairs, got ", batch);
  check_type("triplet", "margin", margin, type);
  check(margin.dim() == 1 && (margin.size(0) == 1 || margin.size(0) == batch),
        "triplet: margin must have shape [1] or [", batch, "], got ", shape_of(margin));
  check_device("triplet", "margin", margin, scores);
  Inputs in{dense(scores), dense(margin), std::nullopt, std::nullopt, hardest};
  for (const auto& [name, ids, kept] :
       {std::tuple{"image_ids", &image_ids, &in.image_ids}, std::tuple{"caption_ids", &caption_ids, &in.caption_ids}}) {
    if (!ids->has_value()) continue;
    check_type("triplet", name, **ids, ScalarType::Long);
    check_shape("triplet", name, **ids, {batch});
    check_device("triplet", name, **ids, scores);
    *kept = dense(**ids);
  }
  return in;
}

template <typename Run>
Outputs forward(const Inputs& in, Run run) {
  const Tensor total = torch::stable::new_empty(in.scores, {});
  const Tensor loss = torch::stable::new_empty(in.scores, {in.batch()});
  const Tensor in_row = torch::stable::new_empty(in.scores, {in.batch()}, ScalarType::Int);
  const Tensor in_col = torch::stable::new_empty(in.scores, {in.batch()}, ScalarType::Int);
  by_type(in.scores, [&]<typename T>(T) {
    TripletArgs<T> args = in.args<T>();
    args.total = static_cast<T*>(total.data_ptr());
    args.loss = static_cast<T*>(loss.data_ptr());
    args.in_row = static_cast<int32_t*>(in_row.data_ptr());
    args.in_col = static_cast<int32_t*>(in_col.data_ptr());
    run(args);
  });
  return {total, loss, in_row, in_col};
}

template <typename Run>
Tensor backward(const MaybeTensor& grad_total, const MaybeTensor& grad_loss, const Inputs& in, const Tensor& in_row,
                const Tensor& in_col, Run run) {
  const MaybeTensor total = checked_grad("triplet", "grad_total", grad_total, in.scores, {});
  const MaybeTensor loss = checked_grad("triplet", "grad_loss", grad_loss, in.scores, {in.batch()});
  for (const Tensor* t : {&in_row, &in_col}) {
    check_type("triplet", "in_row and in_col", *t, ScalarType::Int);
    check_shape("triplet", "in_row and in_col", *t, {in.batch()});
    check_device("triplet", "in_row and in_col", *t, in.scores);
  }
  const Tensor row = dense(in_row), col = dense(in_col);
  const Tensor grad_scores = torch::stable::new_empty(in.scores, {in.batch(), in.batch()});
  by_type(in.scores, [&]<typename T>(T) {
    TripletArgs<T> args = in.args<T>();
    args.grad_total = total ? static_cast<const T*>(total->data_ptr()) : nullptr;
    args.grad_loss = loss ? static_cast<const T*>(loss->data_ptr()) : nullptr;
    args.in_row = static_cast<int32_t*>(row.data_ptr());
    args.in_col = static_cast<int32_t*>(col.data_ptr());
    args.grad_scores = static_cast<T*>(grad_scores.data_ptr());
    run(args);
  });
  return grad_scores;
}

#if PCSR_WITH_CPU

// owns what Groups points to
struct GroupStore {
  std::vector<int32_t> members, begin, end;

  Groups find(const int64_t* ids, int64_t n) {
    if (ids == nullptr) return {nullptr, nullptr, nullptr};
    members.resize(n);
    begin.resize(n);
    end.resize(n);
    std::iota(members.begin(), members.end(), 0);
    std::sort(members.begin(), members.end(), [&](int32_t a, int32_t b) { return ids[a] < ids[b]; });
    for (int64_t from = 0, to = 0; from < n; from = to) {
      while (to < n && ids[members[to]] == ids[members[from]]) ++to;
      for (int64_t m = from; m < to; ++m) {
        begin[members[m]] = static_cast<int32_t>(from);
        end[members[m]] = static_cast<int32_t>(to);
      }
    }
    return {members.data(), begin.data(), end.data()};
  }
};

// chunks of rows, each with its own part of the work; O(batch) memory
template <typename T>
class Chunks {
 public:
  explicit Chunks(const TripletArgs<T>& a) {
    // waking a thread costs as much as about 64 k scores
    const int64_t worth = a.batch * a.batch / 65536 + 1;
    count_ = std::min<int64_t>(worth, torch::stable::get_num_threads());
    rows_ = (a.batch + count_ - 1) / count_;
    values_ = std::make_unique<T[]>((3 + 2 * count_) * a.batch);
    indices_ = std::make_unique<int32_t[]>(count_ * a.batch);
    work.images = images_.find(a.image_ids, a.batch);
    work.captions = captions_.find(a.caption_ids, a.batch);
    work.positive = values_.get();
    work.margin = work.positive + a.batch;
    work.grad = work.margin + a.batch;
    work.row = work.grad + a.batch;
    work.col_value = work.row + count_ * a.batch;
    work.col_in = indices_.get();
    for (int64_t i = 0; i < a.batch; ++i) {
      work.positive[i] = a.scores[i * (a.batch + 1)];
      work.margin[i] = a.margin[i * a.margin_stride];
      work.grad[i] = pair_grad(a, i);
    }
  }

  // f(chunk, first row, last row) for all chunks, on torch's threads
  template <typename F>
  void each(int64_t batch, F f) const {
    torch::stable::parallel_for(0, count_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) f(c, std::min(batch, c * rows_), std::min(batch, (c + 1) * rows_));
    });
  }

  int64_t count() const { return count_; }

  TripletWork<T> work;

 private:
  int64_t count_, rows_;
  std::unique_ptr<T[]> values_;
  std::unique_ptr<int32_t[]> indices_;
  GroupStore images_, captions_;
};

Outputs triplet_on_cpu(const Tensor& scores, const Tensor& margin, const MaybeTensor& image_ids,
                       const MaybeTensor& caption_ids, bool hardest) {
  const Inputs in = checked(scores, margin, image_ids, caption_ids, hardest);
  return forward(in, [&]<typename T>(const TripletArgs<T>& args) {
    const Chunks<T> chunks(args);
    for (int64_t i = 0; i < args.batch; ++i) {
      check(!std::isnan(chunks.work.margin[i]), "triplet: margin[", i, "] is NaN");
    }
    const auto rows = PCSR_KERNEL(triplet_rows<T>);
    const auto columns = PCSR_KERNEL(triplet_columns<T>);
    std::atomic<bool> fine{true};
    chunks.each(args.batch, [&](int64_t chunk, int64_t begin, int64_t end) {
      if (!rows(args, chunks.work, chunk, begin, end)) fine = false;
    });
    check(fine, "triplet: scores contain NaN");
    columns(args, chunks.work, chunks.count());
    *args.total = static_cast<T>(std::accumulate(args.loss, args.loss + args.batch, 0.0));
  });
}

Tensor triplet_backward_on_cpu(const MaybeTensor& grad_total, const MaybeTensor& grad_loss, const Tensor& scores,
                               const Tensor& margin, const MaybeTensor& image_ids, const MaybeTensor& caption_ids,
                               const Tensor& in_row, const Tensor& in_col, bool hardest) {
  const Inputs in = checked(scores, margin, image_ids, caption_ids, hardest);
  return backward(grad_total, grad_loss, in, in_row, in_col, [&]<typename T>(const TripletArgs<T>& args) {
    if (hardest) {
      for (int64_t i = 0; i < args.batch; ++i) {
        check(args.in_row[i] < args.batch && args.in_col[i] < args.batch, "triplet: in_row or in_col is out of range");
      }
      std::fill_n(args.grad_scores, args.batch * args.batch, T{0});
      for (int64_t i = 0; i < args.batch; ++i) scatter_hardest(args, i);
      return;
    }
    const Chunks<T> chunks(args);
    const auto rows = PCSR_KERNEL(triplet_backward<T>);
    chunks.each(args.batch,
                [&](int64_t chunk, int64_t begin, int64_t end) { rows(args, chunks.work, chunk, begin, end); });
  });
}

#endif

#if PCSR_WITH_CUDA

Outputs triplet_on_cuda(const Tensor& scores, const Tensor& margin, const MaybeTensor& image_ids,
                        const MaybeTensor& caption_ids, bool hardest) {
  const Inputs in = checked(scores, margin, image_ids, caption_ids, hardest);
  const DeviceOf device(scores);
  return forward(in, [&]<typename T>(const TripletArgs<T>& args) {
    check_cuda("triplet", triplet_cuda<T>(args, stream_of(scores)));
  });
}

Tensor triplet_backward_on_cuda(const MaybeTensor& grad_total, const MaybeTensor& grad_loss, const Tensor& scores,
                                const Tensor& margin, const MaybeTensor& image_ids, const MaybeTensor& caption_ids,
                                const Tensor& in_row, const Tensor& in_col, bool hardest) {
  const Inputs in = checked(scores, margin, image_ids, caption_ids, hardest);
  const DeviceOf device(scores);
  return backward(grad_total, grad_loss, in, in_row, in_col, [&]<typename T>(const TripletArgs<T>& args) {
    check_cuda("triplet", triplet_backward_cuda<T>(args, stream_of(scores)));
  });
}

#endif

}  // namespace
}  // namespace pcsr

#if PCSR_WITH_CPU
PCSR_CPU_IMPL(m) {
  m.impl("triplet", TORCH_BOX(&pcsr::triplet_on_cpu));
  m.impl("triplet_backward", TORCH_BOX(&pcsr::triplet_backward_on_cpu));
}
#endif
#if PCSR_WITH_CUDA
PCSR_CUDA_IMPL(m) {
  m.impl("triplet", TORCH_BOX(&pcsr::triplet_on_cuda));
  m.impl("triplet_backward", TORCH_BOX(&pcsr::triplet_backward_on_cuda));
}
#endif
