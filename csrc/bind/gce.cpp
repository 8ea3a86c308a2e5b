// torch.ops.pcsr.gce and gce_backward: check the tensors and run the kernels of their device.
#include "../gce.h"

#include <tuple>

#include "bind.h"

#if PCSR_WITH_CPU
#include <algorithm>
#include <atomic>
#include <vector>

#include "../cpu/gce.h"
#endif
#if PCSR_WITH_CUDA
#include "../cuda/gce.h"
#endif

namespace pcsr {
namespace {

// total [], loss [2, batch], mean [2, classes], labels [2, batch] and log_sum [2, batch]; first the image side, then
// the text side
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Grads = std::tuple<Tensor, Tensor>;

struct Logits {
  Tensor side[2];

  int64_t batch() const { return side[0].size(0); }
  int64_t classes() const { return side[0].size(1); }
};

Logits checked(const Tensor& image, const Tensor& text, double gamma) {
  const ScalarType type = image.scalar_type();
  check(type == ScalarType::Float || type == ScalarType::Double, "gce: logits must be float32 or float64, got ",
        torch::headeronly::toString(type));
  check(image.dim() == 2 && image.size(0) >= 1 && image.size(1) >= 1,
        "gce: image logits must be [batch, classes] and not empty, got ", shape_of(image));
  check(image.size(1) < INT32_MAX, "gce: at most 2^31 - 2 classes, got ", image.size(1));
  check_type("gce", "text logits", text, type);
  check_shape("gce", "text logits", text, {image.size(0), image.size(1)});
  check_device("gce", "text logits", text, image);
  check(gamma >= 0 && gamma <= 1, "gce: gamma must be in [0, 1], got ", gamma);
  return {{dense(image), dense(text)}};
}

// row s of a tensor [2, n]
template <typename T>
T* row_of(const Tensor& t, int s) {
  return static_cast<T*>(t.data_ptr()) + s * t.size(1);
}

template <typename Run>
Outputs forward(const Logits& logits, double gamma, bool means, Run run) {
  const Tensor& like = logits.side[0];
  const Tensor total = torch::stable::new_empty(like, {});
  const Tensor loss = torch::stable::new_empty(like, {2, logits.batch()});
  const Tensor mean = torch::stable::new_empty(like, {2, means ? logits.classes() : 0});
  const Tensor labels = torch::stable::new_empty(like, {2, logits.batch()}, ScalarType::Long);
  const Tensor log_sum = torch::stable::new_empty(like, {2, logits.batch()});
  by_type(like, [&]<typename T>(T) {
    GceArgs<T> args = {{}, logits.batch(), logits.classes(), static_cast<T>(gamma)};
    args.total = static_cast<T*>(total.data_ptr());
    for (int s = 0; s < 2; ++s) {
      GceSide<T>& side = args.side[s];
      side.logits = static_cast<const T*>(logits.side[s].data_ptr());
      side.loss = row_of<T>(loss, s);
      side.mean = means ? row_of<T>(mean, s) : nullptr;
      side.labels = row_of<int64_t>(labels, s);
      side.log_sum = row_of<T>(log_sum, s);
    }
    run(args);
  });
  return {total, loss, mean, labels, log_sum};
}

// means that were not wanted have none
bool has_rows(const MaybeTensor& mean) { return mean && mean->numel() > 0; }

// a gradient that is not wanted comes back without rows
template <typename Run>
Grads backward(const Logits& logits, const MaybeTensor& grad_total, const MaybeTensor& grad_loss,
               const MaybeTensor& grad_mean, const Tensor& labels, const Tensor& log_sum, double gamma,
               const bool wanted[2], Run run) {
  const Tensor& like = logits.side[0];
  const MaybeTensor total = checked_grad("gce", "grad_total", grad_total, like, {});
  const MaybeTensor loss = checked_grad("gce", "grad_loss", grad_loss, like, {2, logits.batch()});
  const MaybeTensor mean =
      checked_grad("gce", "grad_mean", has_rows(grad_mean) ? grad_mean : std::nullopt, like, {2, logits.classes()});
  check_type("gce", "labels", labels, ScalarType::Long);
  check_type("gce", "log_sum", log_sum, like.scalar_type());
  check_shape("gce", "labels", labels, {2, logits.batch()});
  check_shape("gce", "log_sum", log_sum, {2, logits.batch()});
  for (const Tensor* t : {&labels, &log_sum}) check_device("gce", "every tensor", *t, like);
  const Tensor own_labels = dense(labels), sums = dense(log_sum);
  const Tensor grads[2] = {torch::stable::new_empty(like, {wanted[0] ? logits.batch() : 0, logits.classes()}),
                           torch::stable::new_empty(like, {wanted[1] ? logits.batch() : 0, logits.classes()})};
  by_type(like, [&]<typename T>(T) {
    GceArgs<T> args = {{}, logits.batch(), logits.classes(), static_cast<T>(gamma)};
    args.grad_total = total ? static_cast<const T*>(total->data_ptr()) : nullptr;
    for (int s = 0; s < 2; ++s) {
      GceSide<T>& side = args.side[s];
      side.logits = static_cast<const T*>(logits.side[s].data_ptr());
      side.labels = row_of<int64_t>(own_labels, s);
      side.log_sum = row_of<T>(sums, s);
      side.grad_loss = loss ? row_of<T>(*loss, s) : nullptr;
      side.grad_mean = mean ? row_of<T>(*mean, s) : nullptr;
      side.grad_logits = wanted[s] ? static_cast<T*>(grads[s].data_ptr()) : nullptr;
    }
    run(args);
  });
  return {grads[0], grads[1]};
}

#if PCSR_WITH_CPU

// rows for one thread at a time: waking one costs as much as about 64 k exponentials
template <typename T>
int64_t rows_a_chunk(const GceArgs<T>& args) {
  const int64_t threads = torch::stable::get_num_threads();
  return std::max<int64_t>((args.batch + threads - 1) / threads, 1 + 32768 / args.classes);
}

Outputs gce_on_cpu(const Tensor& image_logits, const Tensor& text_logits, double gamma, bool means) {
  return forward(checked(image_logits, text_logits, gamma), gamma, means, [&]<typename T>(const GceArgs<T>& args) {
    const auto rows = PCSR_KERNEL(gce_rows<T>);
    const int64_t share = rows_a_chunk(args), chunks = (args.batch + share - 1) / share, width = 2 * args.classes;
    std::vector<T> sums(chunks * width), scratch(chunks * args.classes);
    std::atomic<bool> fine{true};
    torch::stable::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const int64_t last = std::min(args.batch, (c + 1) * share);
        if (!rows(args, &sums[c * width], &scratch[c * args.classes], c * share, last)) fine = false;
      }
    });
    check(fine, "gce: logits contain NaN");
    for (int64_t k = 0; means && k < width; ++k) {
      T sum = 0;
      for (int64_t c = 0; c < chunks; ++c) sum += sums[c * width + k];
      args.side[k / args.classes].mean[k % args.classes] = sum / static_cast<T>(args.batch);
    }
    double total = 0;
    for (int64_t i = 0; i < args.batch; ++i) total += args.side[0].loss[i] + args.side[1].loss[i];
    *args.total = static_cast<T>(total / static_cast<double>(args.batch));
  });
}

Grads gce_backward_on_cpu(const MaybeTensor& grad_total, const MaybeTensor& grad_loss, const MaybeTensor& grad_mean,
                          const Tensor& image_logits, const Tensor& text_logits, const Tensor& labels,
                          const Tensor& log_sum, double gamma, bool want_image, bool want_text) {
  const bool wanted[2] = {want_image, want_text};
  const auto run = [&]<typename T>(const GceArgs<T>& args) {
    for (const GceSide<T>& side : args.side) {
      const bool fine = std::all_of(side.labels, side.labels + args.batch,
                                    [&](int64_t label) { return label >= 0 && label < args.classes; });
      check(fine, "gce: labels out of range");
    }
    const auto rows = PCSR_KERNEL(gce_backward<T>);
    torch::stable::parallel_for(0, args.batch, rows_a_chunk(args),
                                [&](int64_t begin, int64_t end) { rows(args, begin, end); });
  };
  const Logits logits = checked(image_logits, text_logits, gamma);
  return backward(logits, grad_total, grad_loss, grad_mean, labels, log_sum, gamma, wanted, run);
}

#endif

#if PCSR_WITH_CUDA

Outputs gce_on_cuda(const Tensor& image_logits, const Tensor& text_logits, double gamma, bool means) {
  const Logits logits = checked(image_logits, text_logits, gamma);
  const DeviceOf device(image_logits);
  return forward(logits, gamma, means, [&]<typename T>(const GceArgs<T>& args) {
    check_cuda("gce", gce_cuda<T>(args, stream_of(image_logits)));
  });
}

Grads gce_backward_on_cuda(const MaybeTensor& grad_total, const MaybeTensor& grad_loss, const MaybeTensor& grad_mean,
                           const Tensor& image_logits, const Tensor& text_logits, const Tensor& labels,
                           const Tensor& log_sum, double gamma, bool want_image, bool want_text) {
  const bool wanted[2] = {want_image, want_text};
  const Logits logits = checked(image_logits, text_logits, gamma);
  const DeviceOf device(image_logits);
  return backward(logits, grad_total, grad_loss, grad_mean, labels, log_sum, gamma, wanted,
                  [&]<typename T>(const GceArgs<T>& args) {
                    check_cuda("gce", gce_backward_cuda<T>(args, stream_of(image_logits)));
                  });
}

#endif

}  // namespace
}  // namespace pcsr

#if PCSR_WITH_CPU
PCSR_CPU_IMPL(m) {
  m.impl("gce", TORCH_BOX(&pcsr::gce_on_cpu));
  m.impl("gce_backward", TORCH_BOX(&pcsr::gce_backward_on_cpu));
}
#endif
#if PCSR_WITH_CUDA
PCSR_CUDA_IMPL(m) {
  m.impl("gce", TORCH_BOX(&pcsr::gce_on_cuda));
  m.impl("gce_backward", TORCH_BOX(&pcsr::gce_backward_on_cuda));
}
#endif
