// What every binding shares: argument checks with one clear message, allocation, and the stream of a CUDA tensor.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

// PCSR_CUDA: nvcc is there. PCSR_CUDA_ON_CPU: the tests run the CUDA kernels and their bindings on CPU tensors.
#if defined(PCSR_CUDA_ON_CPU)
#define PCSR_WITH_CPU 0
#define PCSR_WITH_CUDA 1
#define PCSR_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(pcsr_emulated, CPU, m)
#elif defined(PCSR_CUDA)
#define PCSR_WITH_CPU 1
#define PCSR_WITH_CUDA 1
#define PCSR_CUDA_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(pcsr, CUDA, m)
#else
#define PCSR_WITH_CPU 1
#define PCSR_WITH_CUDA 0
#endif
#define PCSR_CPU_IMPL(m) STABLE_TORCH_LIBRARY_IMPL(pcsr, CPU, m)

#if PCSR_WITH_CUDA
#include <cuda_runtime.h>
#endif

namespace pcsr {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// torch's own check macro prefixes the message with a file of the build machine
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

template <typename... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) fail(parts...);
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << "[";
  for (int64_t d = 0; d < t.dim(); ++d) text << (d ? ", " : "") << t.size(d);
  text << "]";
  return text.str();
}

inline void check_shape(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> want) {
  bool same = t.dim() == static_cast<int64_t>(want.size());
  std::ostringstream text;
  text << "[";
  int64_t d = 0;
  for (int64_t size : want) {
    same = same && t.size(d) == size;
    text << (d++ ? ", " : "") << size;
  }
  text << "]";
  check(same, op, ": ", name, " must have shape ", text.str(), ", got ", shape_of(t));
}

inline void check_type(const char* op, const char* name, const Tensor& t, ScalarType want) {
  check(t.scalar_type() == want, op, ": ", name, " must be ", torch::headeronly::toString(want), ", got ",
        torch::headeronly::toString(t.scalar_type()));
}

inline void check_device(const char* op, const char* name, const Tensor& t, const Tensor& like) {
  check(t.device() == like.device(), op, ": ", name, " must be on the same device as the first argument");
}

// calls f with a zero of the tensor's type, float or double
template <typename F>
void by_type(const Tensor& t, F f) {
  if (t.scalar_type() == ScalarType::Float) {
    f(float{});
  } else {
    f(double{});
  }
}

// a dispatcher call only where there is something to copy
inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// the gradient of a result, which is absent where nothing depends on it
inline MaybeTensor checked_grad(const char* op, const char* name, const MaybeTensor& grad, const Tensor& like,
                                std::initializer_list<int64_t> shape) {
  if (!grad) return std::nullopt;
  check_type(op, name, *grad, like.scalar_type());
  check_shape(op, name, *grad, shape);
  check_device(op, name, *grad, like);
  return dense(*grad);
}

#if PCSR_WITH_CUDA

inline cudaStream_t stream_of([[maybe_unused]] const Tensor& t) {
#if defined(PCSR_CUDA_ON_CPU)
  return nullptr;
#else
  return static_cast<cudaStream_t>(torch::stable::accelerator::getCurrentStream(t.get_device_index()).nativeHandle());
#endif
}

// kernels run on the tensor's device, whichever is current
class DeviceOf {
 public:
#if defined(PCSR_CUDA_ON_CPU)
  explicit DeviceOf(const Tensor&) {}
#else
  explicit DeviceOf(const Tensor& t) : guard_(t.get_device_index()) {}

 private:
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};

inline void check_cuda(const char* op, cudaError_t error) {
  check(error == cudaSuccess, op, ": CUDA error: ", cudaGetErrorString(error));
}

#endif

}  // namespace pcsr
