// A strict reader of JSON, for the few values of a manifest. With it, the example needs nothing but TensorRT and CUDA; a service
// would use its own library.

#pragma once

#include <cctype>
#include <charconv>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace json {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Kind { null, flag, number, text, list, object };

struct Value {
  Kind kind = Kind::null;
  std::string text;  // of a text; also of a flag or number as written, because a float would round a large integer
  std::vector<std::string> names;
  std::vector<Value> items;  // of a list, or the values of an object's names

  const Value &get(const std::string &name, Kind wanted) const {
    for (size_t i = 0; i < names.size(); i++)
      if (names[i] == name) {
        if (items[i].kind != wanted) throw Error("has another type of \"" + name + "\" than format version 1");
        return items[i];
      }
    throw Error("has no \"" + name + "\"");
  }
  int64_t integer(const std::string &name, int64_t least, int64_t most) const {
    return get(name, Kind::number).as_integer(name, least, most);
  }
  int64_t as_integer(const std::string &name, int64_t least, int64_t most) const {
    int64_t found = 0;
    const char *end = text.data() + text.size();
    const auto read = std::from_chars(text.data(), end, found);
    if (kind != Kind::number || read.ec != std::errc() || read.ptr != end || found < least || found > most)
      throw Error("has another \"" + name + "\" than an integer from " + std::to_string(least) + " to " + std::to_string(most));
    return found;
  }
};

class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  Value whole() {
    Value found = value(0);
    if (next() != '\0' || at_ != text_.size()) fail();
    return found;
  }

 private:
  static constexpr int DEEPEST = 32;  // a damaged file must not overflow the stack

  [[noreturn]] void fail() const { throw Error("is not JSON at byte " + std::to_string(at_)); }
  char here() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char next() {
    while (here() == ' ' || here() == '\n' || here() == '\r' || here() == '\t') at_++;
    return here();
  }
  void take(std::string_view wanted) {
    if (text_.substr(at_, wanted.size()) != wanted) fail();
    at_ += wanted.size();
  }
  bool more(char end) {  // after an item: whether another one follows
    const bool comma = next() == ',';
    take(comma ? std::string_view(",") : std::string_view(&end, 1));
    return comma;
  }

  Value value(int depth) {
    if (depth > DEEPEST) fail();
    switch (next()) {
      case '{': return object(depth);
      case '[': return list(depth);
      case '"': return {Kind::text, string(), {}, {}};
      case 't': return word("true", Kind::flag);
      case 'f': return word("false", Kind::flag);
      case 'n': return word("null", Kind::null);
      default: return number();
    }
  }
  Value word(const char *name, Kind kind) {
    take(name);
    return {kind, name, {}, {}};
  }
  Value list(int depth) {
    Value found{Kind::list, {}, {}, {}};
    take("[");
    if (next() == ']') return at_++, found;
    do found.items.push_back(value(depth + 1));
    while (more(']'));
    return found;
  }
  Value object(int depth) {
    Value found{Kind::object, {}, {}, {}};
    take("{");
    if (next() == '}') return at_++, found;
    do {
      next();
      found.names.push_back(string());
      for (size_t i = 0; i + 1 < found.names.size(); i++)
        if (found.names[i] == found.names.back()) throw Error("has \"" + found.names[i] + "\" twice");
      next();
      take(":");
      found.items.push_back(value(depth + 1));
    } while (more('}'));
    return found;
  }
  Value number() {
    const size_t first = at_;
    const auto digits = [&] {
      if (!std::isdigit(static_cast<unsigned char>(here()))) fail();
      while (std::isdigit(static_cast<unsigned char>(here()))) at_++;
    };
    if (here() == '-') at_++;
    if (here() == '0') at_++; else digits();
    if (here() == '.') at_++, digits();
    if (here() == 'e' || here() == 'E') {
      at_++;
      if (here() == '+' || here() == '-') at_++;
      digits();
    }
    return {Kind::number, std::string(text_.substr(first, at_ - first)), {}, {}};
  }
  std::string string() {
    static constexpr std::string_view ESCAPED = "\"\\/bfnrt", MEANT = "\"\\/\b\f\n\r\t";
    std::string found;
    take("\"");
    for (; here() != '"'; at_++) {
      if (static_cast<unsigned char>(here()) < ' ') fail();  // also at the end of the file
      if (here() != '\\') {
        found += here();
        continue;
      }
      at_++;
      if (here() == 'u') {  // kept as written: only the model's name may have such an escape, and it is not read
        for (int i = 1; i <= 4; i++)
          if (at_ + i >= text_.size() || !std::isxdigit(static_cast<unsigned char>(text_[at_ + i]))) fail();
        found += "\\u";
        continue;
      }
      const size_t which = ESCAPED.find(here());
      if (which == std::string_view::npos) fail();
      found += MEANT[which];
    }
    at_++;
    return found;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace json
