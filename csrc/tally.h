// The tally op without torch: its arguments, its faults and the update of the two largest counts.
#pragma once
#include <cstdint>

#include "portable.h"

namespace pcsr {

enum class VoteType { float32, float64, label };
enum class CountType { uint8, int16, int32 };

// counts, n_max and n_second hold CountType; argmax[i] is the lowest class that has n_max[i] counts
struct TallyArgs {
  const void* votes;   // [batch, classes] logits, or [batch] int64 labels
  const int64_t* ids;  // [batch]
  void* counts;        // [images, classes]
  void* n_max;         // [images]
  int32_t* argmax;     // [images]
  void* n_second;      // [images]
  int64_t* labels;     // [batch], written
  int64_t batch, classes, images;
  VoteType vote_type;
  CountType count_type;
};

// a fault is 8 * row + kind, so that the minimum over all rows is the first one; no fault is the largest value
enum TallyFault : uint64_t { kBadId, kBadState, kNanLogit, kBadLabel, kOverflow };
constexpr uint64_t kNoFault = ~uint64_t{0};
PCSR_INLINE uint64_t tally_fault(int64_t row, TallyFault kind) { return 8 * static_cast<uint64_t>(row) + kind; }

// what can be wrong with a row before anything is counted; label is -1 where the logits have a NaN
PCSR_INLINE uint64_t check_row(const TallyArgs& a, int64_t row, int64_t label) {
  const int64_t id = a.ids[row];
  if (id < 0 || id >= a.images) return tally_fault(row, kBadId);
  if (a.argmax[id] < 0 || a.argmax[id] >= a.classes) return tally_fault(row, kBadState);
  if (label < 0 || label >= a.classes) return tally_fault(row, a.vote_type == VoteType::label ? kBadLabel : kNanLogit);
  return kNoFault;
}

template <typename Count>
struct Top2 {
  Count n_max, n_second;
  int32_t argmax;
};

// folds in a class whose count is final; any order of the changed classes, also repeated, gives the same result
template <typename Count>
PCSR_INLINE void merge_class(Top2<Count>& top, int32_t label, Count count) {
  if (label == top.argmax) {
    top.n_max = count;
  } else if (count > top.n_max) {
    top.n_second = top.n_max;
    top.n_max = count;
    top.argmax = label;
  } else {
    if (count > top.n_second) top.n_second = count;
    if (count == top.n_max && label < top.argmax) top.argmax = label;
  }
}

}  // namespace pcsr
