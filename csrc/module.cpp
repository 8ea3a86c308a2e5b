// The Python module pcsr_fast._native: what is native and not a tensor op. How the package was built, and text.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "cpu/isa.h"
#include "text/tokenize.h"

namespace py = pybind11;

namespace {

using SpanArray = py::array_t<int64_t, py::array::c_style>;

// Bytes and where the captions stand in them, checked; holds on to both.
class Captions {
 public:
  Captions(const py::buffer& text, SpanArray spans) : text_(text.request()), spans_(std::move(spans)) {
    if (spans_.ndim() != 2 || spans_.shape(1) != 2) throw py::value_error("spans must be int64 [captions, 2]");
    const int64_t bytes = text_.size * text_.itemsize;
    for (int64_t n = 0; n < count(); ++n)
      if (begin()[n].begin < 0 || begin()[n].end < begin()[n].begin || begin()[n].end > bytes)
        throw py::value_error("span " + std::to_string(n) + " is outside the text of " + std::to_string(bytes) +
                              " bytes");
  }
  std::string_view text() const { return {static_cast<const char*>(text_.ptr), size_t(text_.size * text_.itemsize)}; }
  const pcsr::Span* begin() const { return reinterpret_cast<const pcsr::Span*>(spans_.data()); }
  int64_t count() const { return spans_.shape(0); }

 private:
  py::buffer_info text_;
  SpanArray spans_;
};

// an array that takes the vector over, without a copy
template <typename T>
py::array_t<T> to_array(std::vector<T>&& values) {
  auto* kept = new std::vector<T>(std::move(values));
  py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return py::array_t<T>(static_cast<py::ssize_t>(kept->size()), kept->data(), owner);
}

py::tuple to_arrays(pcsr::Encoded&& encoded) {
  return py::make_tuple(to_array(std::move(encoded.tokens)), to_array(std::move(encoded.offsets)));
}

void define_text(py::module_& m) {
  py::register_exception<pcsr::LineError>(m, "LineError", PyExc_ValueError);
  m.def("words", [](const std::string& caption) {
    pcsr::Tokenizer tokenizer;
    std::vector<std::string> words;
    for (std::string_view word : tokenizer.words(caption)) words.emplace_back(word);
    return words;
  });
  m.def("find_lines", [](const py::buffer& text, bool tabs) {
    const py::buffer_info info = text.request();
    std::vector<pcsr::Span> spans;
    {
      py::gil_scoped_release release;
      spans = pcsr::find_lines({static_cast<const char*>(info.ptr), size_t(info.size * info.itemsize)}, tabs);
    }
    SpanArray result({py::ssize_t(spans.size()), py::ssize_t(2)});
    std::copy(spans.begin(), spans.end(), reinterpret_cast<pcsr::Span*>(result.mutable_data()));
    return result;
  });
  m.def("parse_ids", [](const py::buffer& text, SpanArray spans, int64_t vocabulary) {
    const Captions captions(text, std::move(spans));
    pcsr::Encoded encoded;
    {
      py::gil_scoped_release release;
      encoded = pcsr::parse_ids(captions.text(), captions.begin(), captions.count(), vocabulary);
    }
    return to_arrays(std::move(encoded));
  });
  py::class_<pcsr::WordIds>(m, "WordIds")
      .def(py::init<const std::vector<std::string>&, const std::vector<int32_t>&>())
      .def("encode", [](const pcsr::WordIds& ids, const py::buffer& text, SpanArray spans, bool quoted) {
        const Captions captions(text, std::move(spans));
        pcsr::Encoded encoded;
        {
          py::gil_scoped_release release;
          encoded = ids.encode(captions.text(), captions.begin(), captions.count(), quoted);
        }
        return to_arrays(std::move(encoded));
      });
  py::class_<pcsr::WordCounts>(m, "WordCounts")
      .def(py::init<>())
      .def("add",
           [](pcsr::WordCounts& counts, const py::buffer& text, SpanArray spans, bool quoted) {
             const Captions captions(text, std::move(spans));
             py::gil_scoped_release release;
             counts.add(captions.text(), captions.begin(), captions.count(), quoted);
           })
      .def("at_least", &pcsr::WordCounts::at_least);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "How the package was built, which instruction set runs, and captions to token ids.";
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
  define_text(m);
}
