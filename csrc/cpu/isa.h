// Which instruction set runs: kernels are compiled once per set, each in a namespace of its name, and picked at run
// time.
#pragma once

namespace pcsr {

enum class Isa { generic, avx2, avx512 };

// the best set of this CPU that was compiled, or the one that PCSR_CPU names; throws if that one cannot run
Isa cpu_isa();
const char* isa_name(Isa isa);

}  // namespace pcsr

#if defined(PCSR_X86_KERNELS)
#define PCSR_DECLARE_KERNEL(result, name, ...) \
  namespace generic {                          \
  result name(__VA_ARGS__);                    \
  }                                            \
  namespace avx2 {                             \
  result name(__VA_ARGS__);                    \
  }                                            \
  namespace avx512 {                           \
  result name(__VA_ARGS__);                    \
  }
#define PCSR_KERNEL(name)                              \
  (pcsr::cpu_isa() == pcsr::Isa::avx512 ? avx512::name \
   : pcsr::cpu_isa() == pcsr::Isa::avx2 ? avx2::name   \
                                        : generic::name)
#else
#define PCSR_DECLARE_KERNEL(result, name, ...) \
  namespace generic {                          \
  result name(__VA_ARGS__);                    \
  }
#define PCSR_KERNEL(name) (generic::name)
#endif
