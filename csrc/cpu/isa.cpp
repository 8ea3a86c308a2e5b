// Detects the instruction set once and honours PCSR_CPU.
#include "isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace pcsr {
namespace {

Isa best_isa() {
#if defined(PCSR_X86_KERNELS)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return Isa::avx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::avx2;
#endif
  return Isa::generic;
}

Isa chosen_isa() {
  const Isa best = best_isa();
  const char* wish = std::getenv("PCSR_CPU");
  if (wish == nullptr || *wish == '\0') return best;
  for (Isa isa : {Isa::generic, Isa::avx2, Isa::avx512}) {
    if (std::string(wish) != isa_name(isa)) continue;
    if (isa <= best) return isa;
    throw std::runtime_error("PCSR_CPU=" + std::string(wish) + ": not available here; the best is " + isa_name(best));
  }
  throw std::runtime_error("PCSR_CPU=" + std::string(wish) + ": unknown; use generic, avx2 or avx512");
}

}  // namespace

Isa cpu_isa() {
  static const Isa isa = chosen_isa();
  return isa;
}

const char* isa_name(Isa isa) { return isa == Isa::avx512 ? "avx512" : isa == Isa::avx2 ? "avx2" : "generic"; }

}  // namespace pcsr
