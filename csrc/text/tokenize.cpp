// Captions to words: the rules of NLTK's NLTKWordTokenizer, one function each, in its order.
//
// A rule reads the text and writes it anew with spaces where words part. Rules that cannot apply, because the caption
// holds none of their characters, are skipped: most captions are letters, spaces and a final full stop.
#include "tokenize.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

namespace pcsr {
namespace {

constexpr int32_t kStart = 1, kEnd = 2, kUnknown = 3;

// what a caption holds, and so which rules may apply
enum Holds : uint32_t {
  kDot = 1,
  kApostrophe = 2,
  kQuote = 4,
  kBacktick = 8,
  kComma = 16,
  kSymbol = 32,
  kDash = 64,
  // nn, mm or tt, as in every contraction without an apostrophe
  kTwin = 128,
  kNonAscii = 256,
};

constexpr std::array<uint16_t, 256> make_holds() {
  std::array<uint16_t, 256> table{};
  auto mark = [&](const char* characters, uint16_t what) {
    for (; *characters; ++characters) table[static_cast<unsigned char>(*characters)] = what;
  };
  mark(".", kDot);
  mark("'", kApostrophe);
  mark("\"", kQuote);
  mark("`", kBacktick);
  mark(":,", kComma);
  mark(";@#$%&?!*[](){}<>", kSymbol);
  mark("-", kDash);
  for (int c = 128; c < 256; ++c) table[c] = kNonAscii;
  return table;
}
constexpr std::array<uint16_t, 256> kHolds = make_holds();

// a set of bytes; letters beyond ASCII are in it by their first byte
struct Bytes {
  std::array<bool, 256> in{};
  constexpr explicit Bytes(std::string_view bytes) {
    for (char c : bytes) in[static_cast<unsigned char>(c)] = true;
  }
  constexpr bool has(char c) const { return in[static_cast<unsigned char>(c)]; }
};

struct CodePoint {
  uint32_t value;
  int bytes;
};

// never reads past the end; a byte that begins no character stands for itself
CodePoint decode(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
  const uint32_t first = byte(0);
  const int bytes = first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (bytes == 1 || at + bytes > text.size()) return {first, 1};
  uint32_t value = first & (0x7F >> bytes);
  for (int i = 1; i < bytes; ++i) value = value << 6 | (byte(i) & 0x3F);
  if (value > 0x10FFFF) return {first, 1};
  return {value, bytes};
}

CodePoint decode_before(std::string_view text, size_t at) {
  size_t begin = at - 1;
  while (begin > 0 && at - begin < 4 && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) --begin;
  return decode(text, begin);
}

void append(std::string& out, uint32_t value) {
  if (value < 0x80) {
    out += static_cast<char>(value);
  } else if (value < 0x800) {
    out += static_cast<char>(0xC0 | value >> 6);
    out += static_cast<char>(0x80 | (value & 0x3F));
  } else if (value < 0x10000) {
    out += static_cast<char>(0xE0 | value >> 12);
    out += static_cast<char>(0x80 | (value >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (value & 0x3F));
  } else {
    out += static_cast<char>(0xF0 | value >> 18);
    out += static_cast<char>(0x80 | (value >> 12 & 0x3F));
    out += static_cast<char>(0x80 | (value >> 6 & 0x3F));
    out += static_cast<char>(0x80 | (value & 0x3F));
  }
}

// \w of Python's re
bool is_word(uint32_t c) { return c == '_' || Py_UNICODE_ISALNUM(c); }

// \w of the regex package, with which NLTK compiles its rules on quotes; the category is asked for only by an
// apostrophe beside a rare character
bool is_regex_word(uint32_t c) {
  if (c < 128) return is_word(c);
  if (Py_UNICODE_ISALPHA(c) || Py_UNICODE_ISDECIMAL(c) || c == 0x200C || c == 0x200D) return true;
  if ((c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) || (c >= 0x1F150 && c <= 0x1F169) ||
      (c >= 0x1F170 && c <= 0x1F189))
    return true;
  pybind11::gil_scoped_acquire gil;
  auto character = pybind11::reinterpret_steal<pybind11::str>(PyUnicode_FromOrdinal(static_cast<int>(c)));
  if (!character) throw pybind11::error_already_set();
  auto category = pybind11::module_::import("unicodedata").attr("category")(character).cast<std::string>();
  return category[0] == 'M' || category == "Nl" || category == "Pc";
}

// \s of the regex package; Python's own also has the four separators 0x1C to 0x1F
bool is_regex_space(uint32_t c) { return Py_UNICODE_ISSPACE(c) && !(c >= 0x1C && c <= 0x1F); }

bool all_space(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = decode(text, i);
    if (!is_regex_space(c.value)) return false;
    i += c.bytes;
  }
  return true;
}

bool starts_with(std::string_view text, size_t at, std::string_view part) {
  return text.compare(at, part.size(), part) == 0;
}

// Puts spaces around whatever begins with one of `first` and is `length(text, i)` bytes long; 0 is nothing.
template <typename Length>
void pad(std::string_view text, std::string& out, const Bytes& first, Length length) {
  size_t done = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (!first.has(text[i])) continue;
    const size_t n = length(text, i);
    if (n == 0) continue;
    out.append(text, done, i - done);
    out += ' ';
    out.append(text, i, n);
    out += ' ';
    done = i + n;
    i = done - 1;
  }
  out.append(text, done);
}

size_t one_byte(std::string_view, size_t) { return 1; }

// length of a run of one character
size_t run(std::string_view text, size_t i) {
  const size_t end = text.find_first_not_of(text[i], i);
  return (end == std::string_view::npos ? text.size() : end) - i;
}

constexpr Bytes kOpening("`\xC2\xE2");
size_t opening_quotes(std::string_view text, size_t i) {
  if (text[i] == '`') return run(text, i);
  if (starts_with(text, i, "«")) return 2;
  return starts_with(text, i, "“") || starts_with(text, i, "‘") || starts_with(text, i, "„") ? 3 : 0;
}

constexpr Bytes kClosing("\xC2\xE2");
size_t closing_quotes(std::string_view text, size_t i) {
  if (starts_with(text, i, "»")) return 2;
  return starts_with(text, i, "”") || starts_with(text, i, "’") ? 3 : 0;
}

size_t dots(std::string_view text, size_t i) {
  const size_t n = run(text, i);
  return n >= 2 ? n : 0;
}

constexpr Bytes kSymbols(";@#$%&\xE2");
size_t symbols_and_dashes(std::string_view text, size_t i) {
  if (text[i] != '\xE2') return 1;
  // U+2012 to U+2015
  return starts_with(text, i, "‒") || starts_with(text, i, "–") || starts_with(text, i, "—") ||
                 starts_with(text, i, "―")
             ? 3
             : 0;
}

// " or '' behind a space or an opening bracket
void quotes_behind_opening(std::string_view text, std::string& out) {
  static constexpr Bytes kQuotes("\"'"), kBefore(" ([{<");
  size_t done = 0;
  for (size_t i = 1; i < text.size(); ++i) {
    if (!kQuotes.has(text[i]) || !kBefore.has(text[i - 1])) continue;
    const size_t quote = text[i] == '"' ? 1 : starts_with(text, i, "''") ? 2 : 0;
    if (quote == 0) continue;
    out.append(text, done, i - done);
    out += " `` ";
    done = i + quote;
    i = done - 1;
  }
  out.append(text, done);
}

// whether 're, 've, ... stand here, with no letter behind
bool is_clitic(std::string_view text, size_t i) {
  // ſ is an s where case is ignored
  for (std::string_view clitic : {"re", "ve", "ll", "m", "t", "s", "ſ", "d", "n"}) {
    if (!starts_with(text, i, clitic)) continue;
    const size_t end = i + clitic.size();
    if (end == text.size() || !is_regex_word(decode(text, end).value)) return true;
  }
  return false;
}

// an apostrophe that opens a word and is no clitic
void opening_apostrophes(std::string_view text, std::string& out) {
  size_t done = 0;
  for (size_t i = 0; (i = text.find('\'', i)) != std::string_view::npos && ++i < text.size();) {
    if (i > 1 && is_regex_word(decode_before(text, i - 1).value)) continue;
    if (!is_regex_word(decode(text, i).value) || is_clitic(text, i)) continue;
    out.append(text, done, i - done);
    out += ' ';
    done = i;
  }
  out.append(text, done);
}

// the final full stop, with closing brackets and quotes behind it; `spaces` lets spaces and » ” ’ be among those
void final_stop(std::string_view text, std::string& out, bool spaces) {
  const size_t dot = text.rfind('.');
  auto no_stop = [&] { out += text; };
  if (dot == std::string_view::npos || dot == 0 || text[dot - 1] == '.') return no_stop();
  static constexpr Bytes kBehind("])}>\"'");
  size_t end = dot + 1;
  while (end < text.size()) {
    if (kBehind.has(text[end]) || (spaces && text[end] == ' ')) {
      ++end;
    } else if (const size_t quote = spaces ? closing_quotes(text, end) : 0) {
      end += quote;
    } else {
      break;
    }
  }
  if (!all_space(text.substr(end))) return no_stop();
  out.append(text, 0, dot);
  out += spaces ? " . " : " .";
  out.append(text, dot + 1, end - dot - 1);
  out += ' ';
}

constexpr Bytes kCommas(":,");

// a colon or comma before anything but a digit, which it takes along
void commas(std::string_view text, std::string& out) {
  size_t done = 0;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (!kCommas.has(text[i]) || Py_UNICODE_ISDECIMAL(decode(text, i + 1).value)) continue;
    out.append(text, done, i - done);
    out += ' ';
    out += text[i];
    out += ' ';
    done = ++i;
  }
  out.append(text, done);
}

// a colon or comma at the end, or before a final line feed
void final_comma(std::string_view text, std::string& out) {
  size_t end = text.size();
  if (end > 1 && text[end - 1] == '\n' && kCommas.has(text[end - 2])) --end;
  if (end == 0 || !kCommas.has(text[end - 1])) {
    out += text;
    return;
  }
  out.append(text, 0, end - 1);
  out += ' ';
  out += text[end - 1];
  out += ' ';
  out.append(text, end);
}

// an apostrophe before a space, behind anything but an apostrophe; a character belongs to one match at most
void apostrophes_before_space(std::string_view text, std::string& out) {
  size_t done = 0;
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    if (text[i] != '\'' || text[i + 1] != ' ' || text[i - 1] == '\'') continue;
    out.append(text, done, i - done);
    out += " ' ";
    done = i + 2;
    i = done;
  }
  out.append(text, done);
}

void replace_all(std::string_view text, std::string& out, std::string_view what, std::string_view by) {
  size_t done = 0;
  for (size_t at; (at = text.find(what, done)) != std::string_view::npos; done = at + what.size()) {
    out.append(text, done, at - done);
    out += by;
  }
  out.append(text, done);
}

void one_space(std::string_view text, std::string& out) {
  bool before = false;
  size_t done = 0;
  for (size_t i = 0; i < text.size();) {
    // most characters: no space of any kind
    if (text[i] > ' ' && text[i] < '\x7F') {
      before = false;
      ++i;
      continue;
    }
    const CodePoint c = decode(text, i);
    const bool space = is_regex_space(c.value);
    if (space) {
      out.append(text, done, i - done);
      if (!before) out += ' ';
      done = i + c.bytes;
    }
    before = space;
    i += c.bytes;
  }
  out.append(text, done);
}

// 's, 'll, n't, ... with a space behind, at the end of a word
void endings(std::string_view text, std::string& out, std::initializer_list<std::string_view> parts) {
  size_t done = 0;
  for (size_t i = 0; (i = text.find('\'', i)) != std::string_view::npos; ++i) {
    for (std::string_view part : parts) {
      const size_t at = part.find('\'');
      if (i <= done + at || !starts_with(text, i - at, part)) continue;
      const size_t begin = i - at;
      if (text[begin - 1] == '\'' || text[begin - 1] == ' ') continue;
      out.append(text, done, begin - done);
      out += ' ';
      out += part;
      done = begin + part.size();
      i = done - 1;
      break;
    }
  }
  out.append(text, done);
}

// A contraction, and how long the first of its two words is.
struct Contraction {
  std::string_view whole;
  size_t first;
  enum { kWord, kBeforeSpace, kBehindSpace } where = kWord;
};

constexpr Contraction kContractions[] = {
    {"cannot", 3},
    {"d'ye", 1},
    {"gimme", 3},
    {"gonna", 3},
    {"gotta", 3},
    {"lemme", 3},
    {"more'n", 4},
    {"wanna", 3, Contraction::kBeforeSpace},
    {"'tis", 2, Contraction::kBehindSpace},
    {"'twas", 2, Contraction::kBehindSpace},
};

// the end of the part if it stands here, else 0; case is ignored, so that i is also ı and s is also ſ
size_t match(std::string_view text, size_t at, std::string_view part) {
  for (char c : part) {
    if (at < text.size() && text[at] == c)
      ++at;
    else if ((c == 'i' && starts_with(text, at, "ı")) || (c == 's' && starts_with(text, at, "ſ")))
      at += 2;
    else
      return 0;
  }
  return at;
}

// whether a contraction stands at i, from `middle` on its second part, up to `end`
bool is_contraction(std::string_view text, size_t i, const Contraction& word, size_t& middle, size_t& end) {
  middle = match(text, i, word.whole.substr(0, word.first));
  end = middle ? match(text, middle, word.whole.substr(word.first)) : 0;
  if (!end) return false;
  if (word.where == Contraction::kBehindSpace ? i == 0 || text[i - 1] != ' '
                                              : i > 0 && is_word(decode_before(text, i).value))
    return false;
  if (word.where == Contraction::kBeforeSpace) return end < text.size() && Py_UNICODE_ISSPACE(decode(text, end).value);
  return end == text.size() || !is_word(decode(text, end).value);
}

void split_contraction(std::string_view text, std::string& out, const Contraction& word) {
  size_t done = 0, middle = 0, end = 0;
  for (size_t i = 0; (i = text.find(word.whole[0], i)) != std::string_view::npos; ++i) {
    if (!is_contraction(text, i, word, middle, end)) continue;
    out.append(text, done, i - done);
    out += ' ';
    out.append(text, i, middle - i);
    out += ' ';
    out.append(text, middle, end - middle);
    out += ' ';
    done = end;
    i = end - 1;
  }
  out.append(text, done);
}

// Lower-case as str.lower; returns what the text holds.
uint32_t lower(std::string_view caption, std::string& out) {
  uint32_t holds = 0;
  out.resize(caption.size());
  char before = 0;
  for (size_t i = 0; i < caption.size(); ++i) {
    char c = caption[i];
    if (c >= 'A' && c <= 'Z') c += 'a' - 'A';
    holds |= kHolds[static_cast<unsigned char>(c)];
    if (c == before && (c == 'n' || c == 'm' || c == 't')) holds |= kTwin;
    out[i] = before = c;
  }
  if (!(holds & kNonAscii)) return holds;
  // a final sigma depends on its neighbours: left to Python
  if (caption.find("Σ") != std::string_view::npos) {
    pybind11::gil_scoped_acquire gil;
    auto text = pybind11::reinterpret_steal<pybind11::object>(
        PyUnicode_DecodeUTF8(caption.data(), static_cast<Py_ssize_t>(caption.size()), "replace"));
    if (!text) throw pybind11::error_already_set();
    out = text.attr("lower")().cast<std::string>();
    return holds;
  }
  out.clear();
  for (size_t i = 0; i < caption.size();) {
    const CodePoint c = decode(caption, i);
    // the one character whose lower case is two
    if (c.value == 0x130)
      out += "i\xCC\x87";
    else if (c.value < 0x80)
      out += static_cast<char>(c.value >= 'A' && c.value <= 'Z' ? c.value + 32 : c.value);
    else if (c.bytes == 1)
      out += caption[i];
    else
      append(out, Py_UNICODE_TOLOWER(c.value));
    i += c.bytes;
  }
  // K (U+212A) becomes a k and Å (U+212B) an å: what the text holds is not changed by it
  return holds;
}

}  // namespace

template <typename Rule>
void Tokenizer::apply(Rule rule) {
  out_.clear();
  rule(std::string_view(text_), out_);
  text_.swap(out_);
}

const std::vector<std::string_view>& Tokenizer::words(std::string_view caption) {
  using View = std::string_view;
  using Out = std::string;
  const uint32_t holds = lower(caption, text_);
  auto any = [holds](uint32_t what) { return (holds & what) != 0; };
  auto pads = [this](const Bytes& first, auto length) {
    apply([&](View text, Out& out) { pad(text, out, first, length); });
  };
  auto replaces = [this](View what, View by) { apply([&](View text, Out& out) { replace_all(text, out, what, by); }); };
  static constexpr Bytes kDots("."), kMarks("?!"), kBrackets("*[](){}<>");

  if (any(kBacktick | kNonAscii)) pads(kOpening, opening_quotes);
  if (any(kQuote) && text_[0] == '"') text_.replace(0, 1, "``");
  if (any(kQuote | kBacktick)) replaces("``", " `` ");
  if (any(kQuote | kApostrophe)) apply(quotes_behind_opening);
  if (any(kApostrophe)) apply(opening_apostrophes);

  if (any(kDot)) apply([](View text, Out& out) { final_stop(text, out, true); });
  if (any(kComma)) apply(commas);
  if (any(kComma)) apply(final_comma);
  if (any(kDot) && text_.find("..") != Out::npos) pads(kDots, dots);
  if (any(kSymbol | kNonAscii)) pads(kSymbols, symbols_and_dashes);
  if (any(kDot)) apply([](View text, Out& out) { final_stop(text, out, false); });
  if (any(kSymbol)) pads(kMarks, one_byte);
  if (any(kApostrophe)) apply(apostrophes_before_space);
  if (any(kSymbol)) pads(kBrackets, one_byte);
  if (any(kDash)) replaces("--", " -- ");

  if (any(kNonAscii)) pads(kClosing, closing_quotes);
  if (any(kApostrophe)) replaces("''", " '' ");
  if (any(kQuote)) replaces("\"", " '' ");
  const bool odd = any(kNonAscii) && (text_.find("ı") != Out::npos || text_.find("ſ") != Out::npos);
  auto may_stand = [&](const Contraction& word) { return odd || text_.find(word.whole) != Out::npos; };
  const bool contraction = (odd || any(kApostrophe | kTwin)) && std::ranges::any_of(kContractions, may_stand);
  if (contraction || any(kApostrophe)) {
    text_.insert(0, 1, ' ');
    text_ += ' ';
    apply(one_space);
  }
  if (any(kApostrophe)) {
    apply([](View text, Out& out) { endings(text, out, {"'s ", "'m ", "'d ", "' "}); });
    apply([](View text, Out& out) { endings(text, out, {"'ll ", "'re ", "'ve ", "n't "}); });
  }
  if (contraction)
    for (const Contraction& word : kContractions)
      if (may_stand(word)) apply([&](View text, Out& out) { split_contraction(text, out, word); });

  words_.clear();
  const View text = text_;
  size_t begin = 0;
  auto word_ends = [&](size_t end) {
    if (end > begin) words_.push_back(text.substr(begin, end - begin));
  };
  for (size_t i = 0; i < text.size();) {
    const auto byte = static_cast<unsigned char>(text[i]);
    // most characters: letters and digits
    if (byte > ' ' && byte < 0x80) {
      ++i;
      continue;
    }
    const CodePoint c = decode(text, i);
    if (Py_UNICODE_ISSPACE(c.value)) {
      word_ends(i);
      begin = i + c.bytes;
    }
    i += c.bytes;
  }
  word_ends(text.size());
  return words_;
}

std::string_view unquote(std::string_view column, std::string& buffer) {
  if (column.size() < 2 || column.front() != '"' || column.back() != '"') return column;
  buffer.clear();
  for (size_t i = 1; i + 1 < column.size(); ++i) {
    buffer += column[i];
    if (column[i] != '"') continue;
    // a quote inside must be doubled
    if (++i + 1 >= column.size() || column[i] != '"') return column;
  }
  return buffer;
}

WordIds::WordIds(const std::vector<std::string>& words, const std::vector<int32_t>& ids) : words_(words) {
  ids_.reserve(words.size());
  for (size_t i = 0; i < words_.size(); ++i) ids_.emplace(words_[i], ids[i]);
}

Encoded WordIds::encode(std::string_view text, const Span* spans, int64_t count, bool quoted) const {
  Encoded result;
  result.offsets.reserve(count + 1);
  result.offsets.push_back(0);
  // about five characters a word; grows where that is too little
  int64_t characters = 0;
  for (int64_t n = 0; n < count; ++n) characters += spans[n].end - spans[n].begin;
  result.tokens.reserve(characters / 5 + 2 * count);
  Tokenizer tokenizer;
  std::string buffer;
  for (int64_t n = 0; n < count; ++n) {
    std::string_view caption = text.substr(spans[n].begin, spans[n].end - spans[n].begin);
    result.tokens.push_back(kStart);
    for (std::string_view word : tokenizer.words(quoted ? unquote(caption, buffer) : caption)) {
      const auto found = ids_.find(word);
      result.tokens.push_back(found == ids_.end() ? kUnknown : found->second);
    }
    result.tokens.push_back(kEnd);
    result.offsets.push_back(static_cast<int64_t>(result.tokens.size()));
  }
  return result;
}

namespace {

// the beginning of a text, for messages; never half a character
std::string shorten(std::string_view text) {
  size_t end = std::min<size_t>(text.size(), 40);
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return std::string(text.substr(0, end));
}

}  // namespace

Encoded parse_ids(std::string_view text, const Span* spans, int64_t count, int64_t vocabulary) {
  Encoded result;
  result.offsets.reserve(count + 1);
  result.offsets.push_back(0);
  auto trim = [](std::string_view part) {
    const size_t begin = part.find_first_not_of(" \t");
    return begin == std::string_view::npos ? part.substr(0, 0)
                                           : part.substr(begin, part.find_last_not_of(" \t") + 1 - begin);
  };
  for (int64_t n = 0; n < count; ++n) {
    std::string_view line = text.substr(spans[n].begin, spans[n].end - spans[n].begin);
    if (line.size() >= 2 && line.front() == '[' && line.back() == ']') line = trim(line.substr(1, line.size() - 2));
    if (line.empty()) result.tokens.insert(result.tokens.end(), {kStart, kEnd});
    for (size_t begin = 0; !line.empty() && begin <= line.size();) {
      const size_t end = std::min(line.find(',', begin), line.size());
      const std::string_view part = trim(line.substr(begin, end - begin));
      int64_t id = -1;
      const auto [rest, error] = std::from_chars(part.data(), part.data() + part.size(), id);
      if (error != std::errc() || rest != part.data() + part.size())
        throw LineError(n + 1, "'" + shorten(part) + "' is not an id; expected 12,5,7");
      if (id < 0 || id >= vocabulary)
        throw LineError(n + 1, "id " + std::to_string(id) + " is outside the vocabulary of " +
                                   std::to_string(vocabulary) + " words");
      result.tokens.push_back(static_cast<int32_t>(id));
      begin = end + 1;
    }
    result.offsets.push_back(static_cast<int64_t>(result.tokens.size()));
  }
  return result;
}

void WordCounts::add(std::string_view text, const Span* spans, int64_t count, bool quoted) {
  Tokenizer tokenizer;
  std::string buffer;
  for (int64_t n = 0; n < count; ++n) {
    std::string_view caption = text.substr(spans[n].begin, spans[n].end - spans[n].begin);
    for (std::string_view word : tokenizer.words(quoted ? unquote(caption, buffer) : caption)) {
      auto found = index_.find(word);
      if (found == index_.end()) {
        found = index_.emplace(word, static_cast<int64_t>(counts_.size())).first;
        counts_.push_back(0);
      }
      ++counts_[found->second];
    }
  }
}

std::vector<std::string> WordCounts::at_least(int64_t threshold) const {
  std::vector<std::string_view> order(counts_.size());
  for (const auto& [word, index] : index_) order[index] = word;
  std::vector<std::string> kept;
  for (size_t i = 0; i < order.size(); ++i)
    if (counts_[i] >= threshold) kept.emplace_back(order[i]);
  return kept;
}

namespace {

// position of the first byte that is no UTF-8, or npos
size_t find_broken(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    // eight ASCII bytes at a time
    uint64_t eight;
    if (i + 8 <= text.size() && (std::memcpy(&eight, text.data() + i, 8), !(eight & 0x8080808080808080u))) {
      i += 8;
      continue;
    }
    const auto first = static_cast<unsigned char>(text[i]);
    if (first < 0x80) {
      ++i;
      continue;
    }
    const CodePoint c = decode(text, i);
    if (c.bytes == 1) return i;
    for (int k = 1; k < c.bytes; ++k)
      if ((static_cast<unsigned char>(text[i + k]) & 0xC0) != 0x80) return i;
    constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
    if (c.value < kLeast[c.bytes] || (c.value >= 0xD800 && c.value < 0xE000)) return i;
    i += c.bytes;
  }
  return std::string_view::npos;
}

}  // namespace

std::vector<Span> find_lines(std::string_view text, bool tabs) {
  std::vector<Span> spans;
  size_t begin = text.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const auto number = static_cast<int64_t>(spans.size()) + 1;
    const std::string_view line = text.substr(begin, end - begin);
    if (const size_t at = find_broken(line); at != std::string_view::npos)
      throw LineError(number, "byte " + std::to_string(at + 1) + " is not UTF-8; convert the file to UTF-8");
    size_t from = 0, to = line.size();
    if (tabs) {
      const size_t tab = line.find('\t');
      if (tab == std::string_view::npos) throw LineError(number, "no tab; expected: id <tab> caption");
      from = tab + 1;
      to = std::min(line.find('\t', from), line.size());
    }
    static constexpr Bytes kSpace(" \t\r\v\f");
    while (from < to && kSpace.has(line[from])) ++from;
    while (from < to && kSpace.has(line[to - 1])) --to;
    spans.push_back({static_cast<int64_t>(begin + from), static_cast<int64_t>(begin + to)});
    begin = end + 1;
  }
  return spans;
}

}  // namespace pcsr
