// Placements as text and the checks that hold for every list of them.
#include "serried/mesh/placement.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <ostream>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried {
namespace {

constexpr std::array<std::string_view, 8> kReduceNames = {"sum", "avg", "min", "max", "product", "band", "bor", "bxor"};

std::optional<ReduceKind> find_reduce(std::string_view name) {
  for (size_t i = 0; i < kReduceNames.size(); ++i) {
    if (kReduceNames[i] == name) return ReduceKind(i);
  }
  return std::nullopt;
}

std::string all_reduce_names() {
  return c10::Join(" ", kReduceNames);
}

// Takes a number off the front.
bool take(std::string_view& text, int64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc()) return false;
  text.remove_prefix(size_t(end - text.data()));
  return true;
}

std::optional<Placement> parse_shard(std::string_view text) {
  int64_t dim = 0;
  int64_t split = 1;
  if (!take(text, dim)) return std::nullopt;
  if (text.empty()) return Shard(dim);
  if (text == "~") return BalancedShard(dim);
  if (text.front() != '/') return std::nullopt;
  text.remove_prefix(1);
  if (!take(text, split) || !text.empty() || split < 2) return std::nullopt;
  return StridedShard(dim, split);
}

std::optional<Placement> parse_partial(std::string_view text) {
  if (text.empty()) return Partial(ReduceKind::sum);
  if (text.size() < 2 || text.front() != '(' || text.back() != ')') return std::nullopt;
  const auto kind = find_reduce(text.substr(1, text.size() - 2));
  if (!kind) return std::nullopt;
  return Partial(*kind);
}

std::optional<Placement> parse_word(std::string_view word) {
  std::optional<Placement> placement;
  if (word == "R") placement = Replicate();
  if (word.starts_with('S')) placement = parse_shard(word.substr(1));
  if (word.starts_with('P')) placement = parse_partial(word.substr(1));
  // One text per placement: "S00", "P(sum)" and dims that do not fit are refused, so that texts can be compared.
  if (placement && to_string(*placement) != word) return std::nullopt;
  return placement;
}

[[noreturn]] void raise_unknown_word(std::string_view text, size_t index, size_t begin, std::string_view word) {
  const std::string marked =
      c10::str("\n  ", text, "\n  ", std::string(begin, ' '), std::string(std::max<size_t>(word.size(), 1), '^'));
  const std::string what = word.empty() ? c10::str("placement ", index + 1, " is empty")
                                        : c10::str("placement ", index + 1, " is \"", word, "\", which is none");
  raise<c10::ValueError>(
      {"parse_placements", what + marked,
       "separate by one space: R, S0 (cut along dim 0), S0/2 (strided), S0~ (balanced), P (sum), P(max); in the "
       "brackets one of avg min max product band bor bxor"});
}

void check_count(std::string_view where, const Placements& placements, int64_t mesh_ndim) {
  if (int64_t(placements.size()) == mesh_ndim) return;
  raise<c10::ValueError>({where,
                          c10::str("placements \"", to_string(placements), "\" are ", placements.size(),
                                   ", but the mesh has ", mesh_ndim, mesh_ndim == 1 ? " axis" : " axes"),
                          "pass one placement per mesh axis, R for those that hold the whole"});
}

int64_t checked_dim(std::string_view where, const Placements& placements, size_t index, int64_t tensor_ndim) {
  const int64_t dim = placements[index].dim();
  if (dim >= -tensor_ndim && dim < tensor_ndim) return dim < 0 ? dim + tensor_ndim : dim;
  raise<c10::IndexError>({where,
                          c10::str("placements \"", to_string(placements), "\" cut dim ", dim, ", but the tensor has ",
                                   tensor_ndim, tensor_ndim == 1 ? " dim" : " dims"),
                          tensor_ndim == 0 ? std::string("use R or P for a tensor without dims")
                                           : c10::str("cut a dim in ", -tensor_ndim, "..", tensor_ndim - 1)});
}

void check_split(std::string_view where, const Placement& placement) {
  if (placement.split_factor() >= 1 || placement.is_balanced()) return;
  raise<c10::ValueError>(
      {where,
       c10::str("StridedShard(", placement.dim(), ", ", placement.split_factor(), ") cuts in less than one piece"),
       "pass a split factor of 1 or more"});
}

bool is_linear(ReduceKind kind) {
  return kind == ReduceKind::sum || kind == ReduceKind::avg;
}

void check_partials(std::string_view where, const Placements& placements) {
  const Placement* first = nullptr;
  for (const Placement& placement : placements) {
    if (!placement.is_partial()) continue;
    if (first == nullptr) first = &placement;
    if (*first == placement || (is_linear(first->reduce()) && is_linear(placement.reduce()))) continue;
    raise<c10::ValueError>(
        {where,
         c10::str("placements \"", to_string(placements), "\" mix the reductions ", to_string(first->reduce()), " and ",
                  to_string(placement.reduce()), ", whose order would change the value"),
         "redistribute one of them to R first; only sum and avg mix"});
  }
}

}  // namespace

std::string_view to_string(ReduceKind kind) {
  return kReduceNames.at(size_t(kind));
}

Placement Partial(std::string_view kind) {
  if (const auto known = find_reduce(kind)) return Partial(*known);
  raise<c10::ValueError>(
      {"Partial", c10::str("unknown reduction \"", kind, "\""), "pass one of " + all_reduce_names()});
}

std::string to_string(const Placement& placement) {
  if (placement.is_replicate()) return "R";
  if (placement.is_partial(ReduceKind::sum)) return "P";
  if (placement.is_partial()) return c10::str("P(", to_string(placement.reduce()), ")");
  const std::string text = c10::str("S", placement.dim());
  if (placement.is_balanced()) return text + "~";
  return placement.is_strided() ? c10::str(text, "/", placement.split_factor()) : text;
}

std::string to_string(const Placements& placements) {
  std::string text;
  for (const Placement& placement : placements) {
    if (!text.empty()) text += ' ';
    text += to_string(placement);
  }
  return text;
}

Placements parse_placements(std::string_view text) {
  Placements placements;
  if (text.empty()) return placements;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const std::string_view word = text.substr(begin, end - begin);
    const auto placement = parse_word(word);
    if (!placement) raise_unknown_word(text, placements.size(), begin, word);
    placements.push_back(*placement);
    begin = end + 1;
  }
  return placements;
}

std::ostream& operator<<(std::ostream& out, const Placement& placement) {
  return out << to_string(placement);
}

std::ostream& operator<<(std::ostream& out, const Placements& placements) {
  return out << to_string(placements);
}

Placements checked_placements(std::string_view where, Placements placements, int64_t tensor_ndim, int64_t mesh_ndim) {
  check_count(where, placements, mesh_ndim);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard()) continue;
    check_split(where, placements[i]);
    checked_dim(where, placements, i, tensor_ndim);
  }
  check_partials(where, placements);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_shard()) continue;
    placements[i] = placements[i].along(checked_dim(where, placements, i, tensor_ndim));
  }
  return placements;
}

Placements without_partial(Placements placements) {
  for (Placement& placement : placements) {
    if (placement.is_partial()) placement = Replicate();
  }
  return placements;
}

}  // namespace serried
