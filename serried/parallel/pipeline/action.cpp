// Actions as text, both ways.
#include "serried/parallel/pipeline/action.h"

#include <charconv>

namespace serried {
namespace {

using Kind = PipelineAction::Kind;

struct KindWords {
  Kind kind;
  std::string_view cell;
  std::string_view word;
};

// In the order of the enumerators.
constexpr KindWords kKindWords[] = {
    {Kind::F, "F", "F"},
    {Kind::B, "B", "B"},
    {Kind::I, "I", "I"},
    {Kind::W, "W", "W"},
    {Kind::unshard, "UNSHARD", "unshard"},
    {Kind::reshard, "RESHARD", "reshard"},
    {Kind::reduce, "REDUCE_GRAD", "reduce"},
};

const KindWords& words_of(Kind kind) {
  return kKindWords[size_t(kind)];
}

// The number at the beginning of `text`, which it is taken off; no sign and no blank may stand before it.
std::optional<int64_t> take_number(std::string_view& text) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return std::nullopt;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(size_t(end - text.data()));
  return number;
}

}  // namespace

bool has_microbatch(Kind kind) {
  return kind <= Kind::W;
}

std::string to_string(const PipelineAction& action) {
  std::string text = std::string(words_of(action.kind).word) + " s" + std::to_string(action.stage);
  if (has_microbatch(action.kind)) text += " m" + std::to_string(action.microbatch);
  return text;
}

std::string to_cell(const PipelineAction& action) {
  std::string text = std::to_string(action.stage) + std::string(words_of(action.kind).cell);
  if (has_microbatch(action.kind)) text += std::to_string(action.microbatch);
  return text;
}

std::optional<PipelineAction> parse_cell(std::string_view cell) {
  const std::optional<int64_t> stage = take_number(cell);
  if (!stage) return std::nullopt;
  for (const KindWords& words : kKindWords) {
    if (!cell.starts_with(words.cell)) continue;
    std::string_view rest = cell.substr(words.cell.size());
    if (!has_microbatch(words.kind)) {
      if (!rest.empty()) return std::nullopt;
      return PipelineAction{.kind = words.kind, .stage = *stage};
    }
    const std::optional<int64_t> microbatch = take_number(rest);
    if (!microbatch || !rest.empty()) return std::nullopt;
    return PipelineAction{.kind = words.kind, .stage = *stage, .microbatch = *microbatch};
  }
  return std::nullopt;
}

}  // namespace serried
