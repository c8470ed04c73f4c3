// The notation of sharding rules, parsed: "mk, kn -> mn". docs/rules.md explains it.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "serried/mesh/placement.h"

namespace serried::spmd {

/// A small array that works at compile time.
template <class T, size_t Capacity>
struct Few {
  std::array<T, Capacity> items{};
  size_t count = 0;

  constexpr bool push(const T& item) {
    if (count == Capacity) return false;
    items[count++] = item;
    return true;
  }
  constexpr size_t size() const { return count; }
  constexpr bool empty() const { return count == 0; }
  constexpr const T& operator[](size_t i) const { return items[i]; }
  constexpr T& operator[](size_t i) { return items[i]; }
  constexpr const T* begin() const { return items.data(); }
  constexpr const T* end() const { return items.data() + count; }
};

/// One dim, or a run of dims, of a slot.
struct DimPattern {
  enum class Mark : uint8_t {
    factor,    // a: may be cut
    whole,     // A: whole on every rank
    ellipsis,  // ...: all remaining dims, matched from the right
    one,       // 1: size 1
    compound,  // (ab): one dim made of several factors, only the leading one can be cut
  };
  Mark mark = Mark::factor;
  std::string_view letters;  // "a", "A", "ab"; as written, so with sizes and spaces: "a=6 b"
  std::string_view at;       // a@dim: the schema argument that says where it sits; empty: in the order written
};

/// One tensor argument or result.
struct SlotPattern {
  Few<DimPattern, 8> dims;
  uint8_t term = 0;       // slots of one product share it; sums have several
  bool linear = true;     // no "!"
  bool optional = false;  // "?"
  bool list = false;      // "[ ]": a TensorList, each tensor the same way
};

/// How the local call must differ from the global one; see fixups.h.
struct FixupPattern {
  std::string_view name;
  std::string_view letters;  // "v" of "pick v"
};

/// A size that the text gives: "a=6".
struct LetterSize {
  char letter = 0;
  int64_t size = 0;
};

/// A whole rule. Holds views into `text`.
struct Rule {
  std::string_view text;
  Few<SlotPattern, 20> inputs;
  Few<SlotPattern, 10> outputs;
  Few<FixupPattern, 4> fixups;
  Few<LetterSize, 16> sizes;
  uint8_t num_terms = 1;
  bool moves = false;                      // "=>": elements are only moved, so every kind of Partial passes
  ReduceKind reduction = ReduceKind::sum;  // what a factor that vanishes leaves behind
  constexpr bool has(std::string_view fixup) const {
    for (const FixupPattern& f : fixups) {
      if (f.name == fixup) return true;
    }
    return false;
  }
};

/// What is wrong with a text, and where.
struct ParseError {
  const char* what = nullptr;  // null: nothing
  size_t position = 0;
};

/// Parses at compile time or run time; `rule.text` views `text`, which must outlive it.
constexpr ParseError parse(std::string_view text, Rule& rule);

/// Parses a text given at run time and keeps a copy of it for ever. ValueError that shows the text with the position
/// marked:
///     [register_sharding] rule for mylib::rope: expected an arrow "->" or "=>"
///       mk, kn mn
///              ^
Rule parse_or_raise(std::string_view where, std::string_view op, std::string_view text);

/// A built-in rule: a malformed text does not compile.
struct RuleText {
  const char* text;
  consteval RuleText(const char* given) : text(given) {
    Rule rule;
    const ParseError error = parse(given, rule);
    if (error.what != nullptr) throw error.what;  // not a constant expression: the compiler shows this line
  }
};

}  // namespace serried::spmd

#include "serried/spmd/rule_parser.h"
