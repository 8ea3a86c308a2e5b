// Captions to words, and words to ids: text in, arrays out. All text is UTF-8.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace pcsr {

// what is wrong with a line of a file, lines counted from 1
struct LineError : std::runtime_error {
  LineError(int64_t line, const std::string& what) : std::runtime_error("line " + std::to_string(line) + ": " + what) {}
};

// where a caption stands in a text
struct Span {
  int64_t begin, end;
};

// Spans of the lines, without surrounding white space; with tabs, of the second column of each line.
std::vector<Span> find_lines(std::string_view text, bool tabs);

// Takes captions apart: lower-case as Python's str.lower, words as NLTK's NLTKWordTokenizer.
class Tokenizer {
 public:
  // views hold until the next call
  const std::vector<std::string_view>& words(std::string_view caption);

 private:
  template <typename Rule>
  void apply(Rule rule);

  std::string text_, out_;
  std::vector<std::string_view> words_;
};

// The caption of a column that csv quoted: "a ""big"" dog". Anything else, a stray quote too, is returned as it is.
std::string_view unquote(std::string_view column, std::string& buffer);

// All captions back to back.
struct Encoded {
  std::vector<int32_t> tokens;
  std::vector<int64_t> offsets;
};

class WordIds {
 public:
  WordIds(const std::vector<std::string>& words, const std::vector<int32_t>& ids);
  Encoded encode(std::string_view text, const Span* spans, int64_t count, bool quoted) const;

 private:
  std::vector<std::string> words_;
  std::unordered_map<std::string_view, int32_t> ids_;
};

// Captions that are ids already, divided by commas.
Encoded parse_ids(std::string_view text, const Span* spans, int64_t count, int64_t vocabulary);

// How often each word occurs, in the order of first appearance.
class WordCounts {
 public:
  void add(std::string_view text, const Span* spans, int64_t count, bool quoted);
  std::vector<std::string> at_least(int64_t threshold) const;

 private:
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  std::unordered_map<std::string, int64_t, Hash, std::equal_to<>> index_;
  std::vector<int64_t> counts_;
};

}  // namespace pcsr
