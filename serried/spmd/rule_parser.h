// The parser of the rule notation, usable at compile time. Included by rule.h only.
#pragma once

namespace serried::spmd {

namespace detail {

/// Recursive descent over one text; the first error stays.
class RuleParser {
 public:
  constexpr RuleParser(std::string_view text, Rule& rule) : text_(text), rule_(rule) {}

  constexpr ParseError run() {
    rule_ = {};
    rule_.text = text_;
    if (!has_arrow()) return {"expected an arrow \"->\" or \"=>\"", last_word()};
    terms() && arrow() && outputs() && fixups() && check_outputs() && check_fixups();
    return error_;
  }

 private:
  static constexpr bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
  static constexpr bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
  static constexpr bool is_letter(char c) { return is_lower(c) || is_upper(c); }
  static constexpr bool is_digit(char c) { return c >= '0' && c <= '9'; }
  static constexpr bool is_name(char c) { return is_letter(c) || is_digit(c) || c == '_'; }

  constexpr bool fail(const char* what, size_t position) {
    if (error_.what == nullptr) error_ = {what, position};
    return false;
  }
  constexpr bool fail(const char* what) { return fail(what, at_); }

  constexpr char peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  constexpr bool starts(std::string_view what) const { return text_.substr(at_).starts_with(what); }
  constexpr bool take(std::string_view what) {
    if (!starts(what)) return false;
    at_ += what.size();
    return true;
  }
  constexpr void skip_spaces() {
    while (peek() == ' ') ++at_;
  }
  constexpr std::string_view name() {
    const size_t begin = at_;
    while (is_name(peek())) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  constexpr bool has_arrow() const {
    const std::string_view body = text_.substr(0, text_.find(';'));
    return body.find("->") != body.npos || body.find("=>") != body.npos;
  }
  // Where an arrow was probably forgotten: before the last word of the signature.
  constexpr size_t last_word() const {
    size_t end = text_.substr(0, text_.find(';')).size();
    while (end > 0 && text_[end - 1] == ' ') --end;
    size_t begin = end;
    while (begin > 0 && text_[begin - 1] != ' ' && text_[begin - 1] != ',') --begin;
    return begin == 0 ? end : begin;
  }

  constexpr bool terms() {
    uint8_t term = 0;
    while (true) {
      SlotPattern pattern;
      if (!slot(pattern)) return false;
      pattern.term = term;
      if (!rule_.inputs.push(pattern)) return fail("more than 20 input slots");
      if (peek() == ',') {
        ++at_;
      } else if (peek() == '+') {
        ++at_;
        ++term;
      } else {
        break;
      }
    }
    rule_.num_terms = uint8_t(term + 1);
    return true;
  }

  constexpr bool arrow() {
    if (take("=>")) {
      rule_.moves = true;
      return true;
    }
    if (!take("->")) return fail("expected \",\", \"+\" or an arrow after a slot");
    const size_t begin = at_;
    const std::string_view word = name();
    if (word == "max") return reduce(ReduceKind::max);
    if (word == "min") return reduce(ReduceKind::min);
    if (word == "prod") return reduce(ReduceKind::product);
    if (word == "avg") return reduce(ReduceKind::avg);
    at_ = begin;  // no reduction but letters of the first output
    return true;
  }
  constexpr bool reduce(ReduceKind kind) {
    rule_.reduction = kind;
    return true;
  }

  constexpr bool outputs() {
    while (true) {
      skip_spaces();
      const size_t begin = at_;
      SlotPattern pattern;
      if (!slot(pattern)) return false;
      if (pattern.optional) return fail("an output cannot be optional", begin);
      if (!rule_.outputs.push(pattern)) return fail("more than 10 outputs");
      if (peek() != ',') break;
      ++at_;
    }
    if (peek() == '+') return fail("a sum of terms stands left of the arrow only");
    if (starts("->") || starts("=>")) return fail("a second arrow");
    if (at_ < text_.size() && peek() != ';') return fail("expected \",\" or \";\" after an output");
    return true;
  }

  constexpr bool fixups() {
    while (take(";")) {
      skip_spaces();
      FixupPattern pattern;
      pattern.name = name();
      if (pattern.name.empty()) return fail("expected the name of a fix-up after \";\"");
      skip_spaces();
      const size_t begin = at_;
      size_t end = at_;
      while (is_letter(peek()) || peek() == ' ') {
        if (peek() != ' ') end = at_ + 1;
        ++at_;
      }
      pattern.letters = text_.substr(begin, end - begin);
      if (at_ < text_.size() && peek() != ';') return fail("a fix-up takes letters of the rule");
      if (!rule_.fixups.push(pattern)) return fail("more than 4 fix-ups");
    }
    return true;
  }

  // slot := ["!"] ( dims | "[" ["!"] dims "]" ) ["?"]
  constexpr bool slot(SlotPattern& pattern) {
    skip_spaces();
    if (take("!")) pattern.linear = false;
    skip_spaces();
    if (take("[")) {
      pattern.list = true;
      skip_spaces();
      if (take("!")) pattern.linear = false;
    }
    if (!dims(pattern)) return false;
    if (pattern.list && !take("]")) return fail("expected \"]\"");
    skip_spaces();
    if (take("?")) pattern.optional = true;
    skip_spaces();
    if (is_letter(peek()) || peek() == '.' || peek() == '1' || peek() == '(')
      return fail("a dim after the end of a slot");
    return known_mark();
  }
  constexpr bool known_mark() {
    const char c = peek();
    if (c == '\0' || c == ',' || c == '+' || c == ';' || starts("->") || starts("=>")) return true;
    if (c == '!') return fail("\"!\" stands in front of a slot");
    if (c == '@') return fail("\"@\" follows a letter or 1");
    if (c == '=') return fail("a size follows a letter: a=6");
    if (c == ']') return fail("\"]\" without \"[\"");
    if (c == ')') return fail("\")\" without \"(\"");
    if (c == '[') return fail("\"[\" stands in front of a slot");
    if (c == '?') return fail("a second \"?\"");
    return fail("unknown mark");
  }

  constexpr bool dims(SlotPattern& pattern) {
    while (true) {
      skip_spaces();
      const size_t begin = at_;
      DimPattern dim;
      if (take("...")) {
        dim.mark = DimPattern::Mark::ellipsis;
        if (has_ellipsis(pattern)) return fail("a second \"...\" in one slot", begin);
      } else if (take("(")) {
        if (!compound(dim)) return false;
      } else if (peek() == '1') {
        ++at_;
        dim.mark = DimPattern::Mark::one;
      } else if (is_letter(peek())) {
        dim.mark = is_upper(peek()) ? DimPattern::Mark::whole : DimPattern::Mark::factor;
        if (!letter()) return false;
        dim.letters = text_.substr(begin, 1);
      } else {
        return true;
      }
      if (repeats(pattern, dim)) return fail("a letter stands twice in one slot", begin);
      if (peek() == '@' && !argument(dim)) return false;
      if (!pattern.dims.push(dim)) return fail("more than 8 dims in one slot", begin);
    }
  }

  constexpr bool compound(DimPattern& dim) {
    const size_t begin = at_;
    dim.mark = DimPattern::Mark::compound;
    while (!take(")")) {
      skip_spaces();
      if (peek() == '\0') return fail("expected \")\"", begin - 1);
      if (!is_lower(peek())) return fail("\"( )\" takes lower-case letters");
      if (text_.substr(begin, at_ - begin).find(peek()) != text_.npos) return fail("a letter stands twice in one slot");
      if (!letter()) return false;
      skip_spaces();
    }
    dim.letters = text_.substr(begin, at_ - 1 - begin);
    if (dim.letters.empty()) return fail("\"( )\" takes lower-case letters", begin);
    return true;
  }

  // letter := a ["=" number]
  constexpr bool letter() {
    LetterSize given{peek(), 0};
    ++at_;
    if (peek() != '=' || peek(1) == '>') return true;
    ++at_;
    if (!is_digit(peek())) return fail("expected a size after \"=\"");
    const size_t begin = at_;
    while (is_digit(peek())) {
      if (at_ - begin == 12) return fail("a size of more than 12 digits", begin);
      given.size = given.size * 10 + (peek() - '0');
      ++at_;
    }
    for (const LetterSize& other : rule_.sizes) {
      if (other.letter == given.letter && other.size != given.size) return fail("a second size of one letter");
    }
    if (!rule_.sizes.push(given)) return fail("more than 16 sizes");
    return true;
  }

  constexpr bool argument(DimPattern& dim) {
    if (dim.mark == DimPattern::Mark::ellipsis || dim.mark == DimPattern::Mark::compound) {
      return fail("\"@\" follows a letter or 1");
    }
    ++at_;
    const size_t begin = at_;
    if (take("*")) {
      dim.at = text_.substr(begin, 1);
      return true;
    }
    dim.at = name();
    if (dim.at.empty()) return fail("expected the name of an argument after \"@\"");
    return true;
  }

  static constexpr bool has_ellipsis(const SlotPattern& pattern) {
    for (const DimPattern& dim : pattern.dims) {
      if (dim.mark == DimPattern::Mark::ellipsis) return true;
    }
    return false;
  }
  // Upper-case letters may repeat: they are never cut, and square matrices have two dims of one size.
  static constexpr bool repeats(const SlotPattern& pattern, const DimPattern& dim) {
    for (const char c : dim.letters) {
      if (is_lower(c) && mentions(pattern, c)) return true;
    }
    return false;
  }
  static constexpr bool mentions(const SlotPattern& pattern, char letter) {
    for (const DimPattern& dim : pattern.dims) {
      if (dim.letters.find(letter) != dim.letters.npos) return true;
    }
    return false;
  }

  constexpr bool check_outputs() {
    bool given = false;
    for (const SlotPattern& input : rule_.inputs) given = given || has_ellipsis(input);
    for (const SlotPattern& output : rule_.outputs) {
      if (!given && has_ellipsis(output)) return fail("\"...\" in an output, but in no input", text_.rfind("..."));
    }
    return true;
  }
  constexpr bool check_fixups() {
    for (const FixupPattern& fixup : rule_.fixups) {
      if (fixup.name == "pick" && fixup.letters.empty()) {
        return fail("pick takes the letter that indices choose from: pick v", text_.size());
      }
      for (const char c : fixup.letters) {
        if (c == ' ') continue;
        bool found = false;
        for (const SlotPattern& input : rule_.inputs) found = found || mentions(input, c);
        if (!found)
          return fail("a fix-up names a letter that no input has", size_t(fixup.letters.data() - text_.data()));
      }
    }
    return true;
  }

  std::string_view text_;
  Rule& rule_;
  size_t at_ = 0;
  ParseError error_;
};

}  // namespace detail

constexpr ParseError parse(std::string_view text, Rule& rule) {
  return detail::RuleParser(text, rule).run();
}

}  // namespace serried::spmd
