// The CPU kernels of tally, each over a part of the batch that one thread owns.
#pragma once
#include "../tally.h"
#include "isa.h"

namespace pcsr {

// labels of rows [begin, end); returns the first fault among them
PCSR_DECLARE_KERNEL(uint64_t, tally_label, const TallyArgs& args, int64_t begin, int64_t end)
// counts the rows of images [begin, end); returns the first overflow
PCSR_DECLARE_KERNEL(uint64_t, tally_add, const TallyArgs& args, int64_t begin, int64_t end)
// brings n_max, argmax and n_second of images [begin, end) up to date
PCSR_DECLARE_KERNEL(void, tally_settle, const TallyArgs& args, int64_t begin, int64_t end)
// takes the counts of images [begin, end) back
PCSR_DECLARE_KERNEL(void, tally_undo, const TallyArgs& args, int64_t begin, int64_t end)

}  // namespace pcsr
