// CPU kernels of tally: label every row, add the counts, then settle the two largest; compiled once per instruction
// set.
#include "tally.h"

#include <limits>
#include <type_traits>

#include "rows.h"

namespace pcsr::PCSR_ISA {
namespace {

// rows between asking for a cache line and using it
constexpr int64_t kAhead = 16;

template <typename Vote>
uint64_t label_rows(const TallyArgs& a, int64_t begin, int64_t end) {
  const Vote* votes = static_cast<const Vote*>(a.votes);
  for (int64_t b = begin; b < end; ++b) {
    // the state is spread over more memory than any cache holds
    if (b + kAhead < end) __builtin_prefetch(a.argmax + a.ids[b + kAhead]);
    if constexpr (std::is_same_v<Vote, int64_t>) {
      a.labels[b] = votes[b];
    } else {
      a.labels[b] = row_argmax(votes + b * a.classes, a.classes);
    }
    const uint64_t fault = check_row(a, b, a.labels[b]);
    if (fault != kNoFault) return fault;
  }
  return kNoFault;
}

template <typename Count>
Count* count_of(const TallyArgs& a, int64_t row) {
  return static_cast<Count*>(a.counts) + a.ids[row] * a.classes + a.labels[row];
}

template <typename Count>
uint64_t apply(const TallyArgs& a, int64_t begin, int64_t end) {
  Count* n_max = static_cast<Count*>(a.n_max);
  Count* n_second = static_cast<Count*>(a.n_second);
  const auto mine = [&](int64_t row) { return a.ids[row] >= begin && a.ids[row] < end; };
  uint64_t fault = kNoFault;
  for (int64_t b = 0; b < a.batch; ++b) {
    if (b + kAhead < a.batch && mine(b + kAhead)) {
      __builtin_prefetch(count_of<Count>(a, b + kAhead), 1);
      __builtin_prefetch(n_max + a.ids[b + kAhead], 1);
      __builtin_prefetch(n_second + a.ids[b + kAhead], 1);
    }
    if (!mine(b)) continue;
    const int64_t i = a.ids[b];
    Count* count = count_of<Count>(a, b);
    if (*count == std::numeric_limits<Count>::max() && fault == kNoFault) fault = tally_fault(b, kOverflow);
    // wraps around, so that undo restores it
    *count = static_cast<Count>(static_cast<std::make_unsigned_t<Count>>(*count) + 1u);
    Top2<Count> top{n_max[i], n_second[i], a.argmax[i]};
    merge_class(top, static_cast<int32_t>(a.labels[b]), *count);
    n_max[i] = top.n_max;
    n_second[i] = top.n_second;
    a.argmax[i] = top.argmax;
  }
  return fault;
}

template <typename Count>
void undo(const TallyArgs& a, int64_t begin, int64_t end) {
  const auto mine = [&](int64_t row) { return a.ids[row] >= begin && a.ids[row] < end; };
  for (int64_t b = 0; b < a.batch; ++b) {
    if (!mine(b)) continue;
    Count* count = count_of<Count>(a, b);
    *count = static_cast<Count>(static_cast<std::make_unsigned_t<Count>>(*count) - 1u);
  }
  for (int64_t b = 0; b < a.batch; ++b) {
    if (!mine(b)) continue;
    const int64_t i = a.ids[b];
    const Count* counts = static_cast<const Count*>(a.counts) + i * a.classes;
    Top2<Count> top{counts[0], 0, 0};
    for (int64_t k = 1; k < a.classes; ++k) merge_class(top, static_cast<int32_t>(k), counts[k]);
    static_cast<Count*>(a.n_max)[i] = top.n_max;
    static_cast<Count*>(a.n_second)[i] = top.n_second;
    a.argmax[i] = top.argmax;
  }
}

}  // namespace

#define PCSR_BY_COUNT(function, ...)                                            \
  (args.count_type == CountType::uint8   ? function<uint8_t>(args, __VA_ARGS__) \
   : args.count_type == CountType::int16 ? function<int16_t>(args, __VA_ARGS__) \
                                         : function<int32_t>(args, __VA_ARGS__))

uint64_t tally_label(const TallyArgs& args, int64_t begin, int64_t end) {
  switch (args.vote_type) {
    case VoteType::float32:
      return label_rows<float>(args, begin, end);
    case VoteType::float64:
      return label_rows<double>(args, begin, end);
    default:
      return label_rows<int64_t>(args, begin, end);
  }
}

uint64_t tally_apply(const TallyArgs& args, int64_t begin, int64_t end) { return PCSR_BY_COUNT(apply, begin, end); }

void tally_undo(const TallyArgs& args, int64_t begin, int64_t end) { PCSR_BY_COUNT(undo, begin, end); }

}  // namespace pcsr::PCSR_ISA
