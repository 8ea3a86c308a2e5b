// torch.ops.pcsr.tally: checks the tensors and runs the kernels of their device.
#include "bind.h"

#if PCSR_WITH_CPU
#include <atomic>

#include "../cpu/tally.h"
#endif
#if PCSR_WITH_CUDA
#include "../cuda/tally.h"
#endif
#include "../tally.h"

namespace pcsr {
namespace {

// the tensors stay alive as long as the pointers are in use
struct Tally {
  TallyArgs args;
  Tensor votes, ids, labels;
};

Tally checked(const Tensor& votes, const Tensor& ids, const Tensor& counts, const Tensor& n_max, const Tensor& argmax,
              const Tensor& n_second) {
  const ScalarType count = counts.scalar_type(), vote = votes.scalar_type();
  check(counts.dim() == 2 && counts.size(1) >= 1, "tally: counts must be [images, classes], got ", shape_of(counts));
  check(count == ScalarType::Byte || count == ScalarType::Short || count == ScalarType::Int,
        "tally: counts must be uint8, int16 or int32, got ", torch::headeronly::toString(count));
  const int64_t images = counts.size(0), classes = counts.size(1), batch = votes.dim() ? votes.size(0) : 0;
  check(classes <= INT32_MAX, "tally: at most 2^31 - 1 classes, got ", classes);
  if (vote == ScalarType::Long) {
    check_shape("tally", "labels", votes, {batch});
  } else {
    check(vote == ScalarType::Float || vote == ScalarType::Double,
          "tally: votes must be float32 or float64 logits, or int64 labels, got ", torch::headeronly::toString(vote));
    check_shape("tally", "logits", votes, {batch, classes});
  }
  check_type("tally", "ids", ids, ScalarType::Long);
  check_shape("tally", "ids", ids, {batch});
  check_type("tally", "n_max", n_max, count);
  check_type("tally", "n_second", n_second, count);
  check_type("tally", "argmax", argmax, ScalarType::Int);
  check_shape("tally", "n_max", n_max, {images});
  check_shape("tally", "n_second", n_second, {images});
  check_shape("tally", "argmax", argmax, {images});
  for (const Tensor* t : {&ids, &counts, &n_max, &argmax, &n_second}) check_device("tally", "every tensor", *t, votes);
  for (const Tensor* t : {&counts, &n_max, &argmax, &n_second}) {
    check(t->is_contiguous(),
          "tally: counts, n_max, argmax and n_second must be contiguous: they are updated in place");
  }

  Tally tally{{}, dense(votes), dense(ids), torch::stable::new_empty(votes, {batch}, ScalarType::Long)};
  tally.args = {tally.votes.data_ptr(),
                static_cast<const int64_t*>(tally.ids.data_ptr()),
                counts.data_ptr(),
                n_max.data_ptr(),
                static_cast<int32_t*>(argmax.data_ptr()),
                n_second.data_ptr(),
                static_cast<int64_t*>(tally.labels.data_ptr()),
                batch,
                classes,
                images,
                vote == ScalarType::Float    ? VoteType::float32
                : vote == ScalarType::Double ? VoteType::float64
                                             : VoteType::label,
                count == ScalarType::Byte    ? CountType::uint8
                : count == ScalarType::Short ? CountType::int16
                                             : CountType::int32};
  return tally;
}

[[noreturn]] void raise(uint64_t fault, const TallyArgs& args, int64_t id, int64_t label) {
  const uint64_t row = fault / 8;
  switch (fault % 8) {
    case kBadId:
      fail("tally: ids[", row, "] = ", id, " is out of range for ", args.images, " images");
    case kBadState:
      fail("tally: argmax of image ", id, " is not a class; start from a state of zeros");
    case kNanLogit:
      fail("tally: logits[", row, "] contain NaN; nothing was counted");
    case kBadLabel:
      fail("tally: labels[", row, "] = ", label, " is out of range for ", args.classes, " classes");
    default:
      fail("tally: the count of image ", id, ", class ", label, " would overflow ",
           args.count_type == CountType::uint8   ? "uint8"
           : args.count_type == CountType::int16 ? "int16"
                                                 : "int32",
           "; nothing was counted; use a wider type of counts");
  }
}

#if PCSR_WITH_CPU

void keep_first(std::atomic<uint64_t>& first, uint64_t fault) {
  uint64_t seen = first.load();
  while (fault < seen && !first.compare_exchange_weak(seen, fault)) {
  }
}

Tensor tally_on_cpu(const Tensor& votes, const Tensor& ids, const Tensor& counts, const Tensor& n_max,
                    const Tensor& argmax, const Tensor& n_second) {
  const Tally tally = checked(votes, ids, counts, n_max, argmax, n_second);
  const TallyArgs& args = tally.args;
  const auto label = PCSR_KERNEL(tally_label);
  const auto apply = PCSR_KERNEL(tally_apply);
  const auto undo = PCSR_KERNEL(tally_undo);
  std::atomic<uint64_t> fault{kNoFault};
  // waking a thread costs as much as about 64 k logits
  const int64_t grain = args.vote_type == VoteType::label ? 65536 : 1 + 65536 / args.classes;
  torch::stable::parallel_for(0, args.batch, grain,
                              [&](int64_t begin, int64_t end) { keep_first(fault, label(args, begin, end)); });
  if (fault == kNoFault) {
    // each thread owns a range of images, so a repeated id needs no atomics; few rows are not worth a second thread
    const int64_t share = args.batch < 2048 ? args.images : 1;
    torch::stable::parallel_for(0, args.images, share,
                                [&](int64_t begin, int64_t end) { keep_first(fault, apply(args, begin, end)); });
    if (fault != kNoFault) undo(args, 0, args.images);
  }
  if (fault != kNoFault) raise(fault, args, args.ids[fault / 8], args.labels[fault / 8]);
  return tally.labels;
}

#endif

#if PCSR_WITH_CUDA

Tensor tally_on_cuda(const Tensor& votes, const Tensor& ids, const Tensor& counts, const Tensor& n_max,
                     const Tensor& argmax, const Tensor& n_second) {
  const Tally tally = checked(votes, ids, counts, n_max, argmax, n_second);
  const TallyArgs& args = tally.args;
  check(args.batch < INT32_MAX, "tally: at most 2^31 - 2 rows a call, got ", args.batch);
  const DeviceOf device(votes);
  const cudaStream_t stream = stream_of(votes);
  const Tensor scratch = torch::stable::new_empty(votes, {2 * args.batch}, ScalarType::Int);
  const Tensor fault = torch::stable::new_empty(votes, {2}, ScalarType::Long);
  check_cuda("tally", tally_cuda(args, static_cast<int32_t*>(scratch.data_ptr()),
                                 static_cast<uint64_t*>(fault.data_ptr()), stream));

  // errors are raised here and now, at the price of waiting for the stream
  const auto fetch = [&](void* to, const void* from, size_t bytes) {
    check_cuda("tally", cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
    check_cuda("tally", cudaStreamSynchronize(stream));
  };
  uint64_t found[2];
  fetch(found, fault.data_ptr(), sizeof found);
  const uint64_t first = found[0] != kNoFault ? found[0] : found[1];
  if (first != kNoFault) {
    int64_t id, label;
    fetch(&id, args.ids + first / 8, sizeof id);
    fetch(&label, args.labels + first / 8, sizeof label);
    raise(first, args, id, label);
  }
  return tally.labels;
}

#endif

}  // namespace
}  // namespace pcsr

#if PCSR_WITH_CPU
PCSR_CPU_IMPL(m) { m.impl("tally", TORCH_BOX(&pcsr::tally_on_cpu)); }
#endif
#if PCSR_WITH_CUDA
PCSR_CUDA_IMPL(m) { m.impl("tally", TORCH_BOX(&pcsr::tally_on_cuda)); }
#endif
