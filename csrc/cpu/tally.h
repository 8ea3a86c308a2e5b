// The CPU kernels of tally, each over a part of the batch that one thread owns.
#pragma once
#include "../tally.h"
#include "isa.h"

namespace pcsr {

// labels of rows [begin, end); returns the first fault among them
PCSR_DECLARE_KERNEL(uint64_t, tally_label, const TallyArgs& args, int64_t begin, int64_t end)
// counts the rows of images [begin, end) and keeps their two largest; returns the first overflow
PCSR_DECLARE_KERNEL(uint64_t, tally_apply, const TallyArgs& args, int64_t begin, int64_t end)
// after an overflow: takes the counts of images [begin, end) back
PCSR_DECLARE_KERNEL(void, tally_undo, const TallyArgs& args, int64_t begin, int64_t end)

}  // namespace pcsr
