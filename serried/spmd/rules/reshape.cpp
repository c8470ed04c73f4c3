// Common refinement of two shapes: the factors that both are made of, written as a rule.
#include "serried/spmd/rules/reshape.h"

#include <functional>
#include <numeric>

#include "serried/spmd/rules/letters.h"

namespace serried::spmd::detail {
namespace {

int64_t product(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
}

struct Piece {
  std::string letter;
  int64_t size;
};
using Pieces = std::vector<Piece>;

std::string dim_text(const Pieces& pieces, bool with_sizes) {
  if (pieces.empty()) return "1";
  if (pieces.size() == 1) return pieces[0].letter;
  std::string text;
  for (const Piece& piece : pieces) {
    text += piece.letter;
    if (with_sizes) text += c10::str("=", piece.size, " ");
  }
  if (with_sizes) text.pop_back();
  return c10::str("(", text, ")");
}

// Dims of both shapes with the same product, which no shorter run from the left has.
struct Run {
  c10::IntArrayRef from;
  c10::IntArrayRef to;
};

// Splits a run into factors that nest; false where the cuts of the two shapes fall between each other, as in
// [4, 6] -> [6, 4].
bool refine(const Run& run, Letters& letters, std::vector<Pieces>& from, std::vector<Pieces>& to) {
  from.assign(run.from.size(), {});
  to.assign(run.to.size(), {});
  size_t i = 0;
  size_t j = 0;
  int64_t left = run.from[0];
  int64_t right = run.to[0];
  while (true) {
    while (left == 1 && ++i < run.from.size()) left = run.from[i];
    while (right == 1 && ++j < run.to.size()) right = run.to[j];
    if (i >= run.from.size() || j >= run.to.size()) return true;
    const int64_t common = std::gcd(left, right);
    if (common != left && common != right) return false;
    const Piece piece{letters.cut(), common};
    from[i].push_back(piece);
    to[j].push_back(piece);
    left /= common;
    right /= common;
  }
}

void append_run(const Run& run, Letters& letters, Dims& from, Dims& to) {
  std::vector<Pieces> left;
  std::vector<Pieces> right;
  Letters tried = letters;
  if (refine(run, tried, left, right)) {
    letters = tried;
    for (const Pieces& pieces : left) from.push_back(dim_text(pieces, true));
    for (const Pieces& pieces : right) to.push_back(dim_text(pieces, false));
    return;
  }
  for (size_t d = 0; d < run.from.size(); ++d) from.push_back(letters.whole());
  for (size_t d = 0; d < run.to.size(); ++d) to.push_back(letters.whole());
}

// Without elements no order says which dims belong together: those that agree from either end are kept.
void append_empty(c10::IntArrayRef from, c10::IntArrayRef to, Letters& letters, Dims& left, Dims& right) {
  size_t front = 0;
  const size_t shorter = std::min(from.size(), to.size());
  while (front < shorter && from[front] == to[front]) ++front;
  size_t back = 0;
  while (back < shorter - front && from[from.size() - 1 - back] == to[to.size() - 1 - back]) ++back;
  const auto keep = [&](int64_t size) {
    const std::string letter = size == 1 ? "1" : size == 0 ? letters.whole() : letters.cut();
    left.push_back(letter);
    right.push_back(letter);
  };
  for (size_t d = 0; d < front; ++d) keep(from[d]);
  for (size_t d = front; d + back < from.size(); ++d) left.push_back(letters.whole());
  for (size_t d = front; d + back < to.size(); ++d) right.push_back(letters.whole());
  for (size_t d = from.size() - back; d < from.size(); ++d) keep(from[d]);
}

void append_runs(c10::IntArrayRef from, c10::IntArrayRef to, Letters& letters, Dims& left, Dims& right) {
  size_t i = 0;
  size_t j = 0;
  while (i < from.size() || j < to.size()) {
    if (i < from.size() && from[i] == 1) {
      left.push_back("1");
      ++i;
      continue;
    }
    if (j < to.size() && to[j] == 1) {
      right.push_back("1");
      ++j;
      continue;
    }
    const size_t first_i = i;
    const size_t first_j = j;
    int64_t left_product = from[i++];
    int64_t right_product = to[j++];
    while (left_product != right_product) {
      if (left_product < right_product) {
        left_product *= from[i++];
      } else {
        right_product *= to[j++];
      }
    }
    append_run({from.slice(first_i, i - first_i), to.slice(first_j, j - first_j)}, letters, left, right);
  }
}

}  // namespace

std::string reshape_rule(c10::IntArrayRef from, c10::IntArrayRef to) {
  Letters letters;
  Dims left;
  Dims right;
  if (product(from) == 0) {
    append_empty(from, to, letters, left, right);
  } else {
    append_runs(from, to, letters, left, right);
  }
  return letters.finish(letters.slot(left) + " => " + letters.slot(right) + "; size");
}

std::optional<Sizes> resolve_sizes(int64_t numel, c10::IntArrayRef asked) {
  Sizes sizes(asked.begin(), asked.end());
  int64_t known = 1;
  int64_t* unknown = nullptr;
  for (int64_t& size : sizes) {
    if (size != -1) {
      known *= size;
    } else if (unknown != nullptr) {
      return std::nullopt;
    } else {
      unknown = &size;
    }
  }
  if (unknown != nullptr) {
    if (known == 0 || numel % known != 0) return std::nullopt;
    *unknown = numel / known;
    known *= *unknown;
  }
  if (known != numel) return std::nullopt;
  return sizes;
}

}  // namespace serried::spmd::detail
