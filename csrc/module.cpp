// The Python module pcsr_fast._native: what is native and not a tensor op. So far, how the package was built.
#include <pybind11/pybind11.h>

#include <string>

#include "cpu/isa.h"

namespace py = pybind11;

PYBIND11_MODULE(_native, m) {
  m.doc() = "How the package was built, and which instruction set runs.";
  m.def("build_info", [] {
    py::dict info;
    info["compiler"] = PCSR_BUILD_COMPILER;
    info["instruction_sets"] = PCSR_BUILD_ISAS;
    info["cuda"] = PCSR_BUILD_CUDA;
    info["cuda_archs"] = PCSR_BUILD_CUDA_ARCHS;
    info["torch"] = PCSR_BUILD_TORCH;
    return info;
  });
  m.def("cpu_isa", [] { return std::string(pcsr::isa_name(pcsr::cpu_isa())); });
}
