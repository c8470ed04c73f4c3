// Deriving rows: each factor cut in turn, then each way to feed Partial values through.
#include "serried/spmd/rows.h"

#include <algorithm>
#include <optional>

namespace serried::spmd {

namespace {

/// Linear tensors that are Partial together: one, or all of a list.
using Unit = std::vector<size_t>;

/// What one term of the sum offers.
struct Term {
  std::vector<Unit> linear;
  std::vector<size_t> tensors;
  bool absent = true;  // left out by the call, so it adds nothing
};

std::vector<Term> terms_of(const Bound& bound) {
  std::vector<Term> terms(bound.num_terms);
  // A slot that is neither optional nor filled is a number of another overload (add.Scalar): it adds, and is not
  // linear.
  for (const SlotPattern& slot : bound.rule.inputs) {
    if (!slot.optional && !slot.list) terms[slot.term].absent = false;
  }
  int last_slot = -1;
  for (size_t i = 0; i < bound.inputs.size(); ++i) {
    const BoundTensor& input = bound.inputs[i];
    Term& term = terms[input.term];
    term.absent = false;
    term.tensors.push_back(i);
    if (!input.linear) continue;
    if (input.slot != last_slot) term.linear.emplace_back();
    term.linear.back().push_back(i);
    last_slot = input.slot;
  }
  std::erase_if(terms, [](const Term& term) { return term.absent; });
  return terms;
}

bool is_picked(const Rule& rule, char letter) {
  for (const FixupPattern& fixup : rule.fixups) {
    if (fixup.name == "pick" && fixup.letters.find(letter) != fixup.letters.npos) return true;
  }
  return false;
}

class RowMaker {
 public:
  explicit RowMaker(const Bound& bound) : bound_(bound), terms_(terms_of(bound)) {}

  std::vector<Row> run() {
    rows_.push_back(replicated());
    for (size_t f = 0; f < bound_.factors.size(); ++f) {
      const Factor& factor = bound_.factors[f];
      if (!factor.can_cut || factor.size < 1) continue;
      if (std::optional<Row> row = cut(int16_t(f))) rows_.push_back(std::move(*row));
    }
    if (partial_passes()) {
      for (const ReduceKind kind : kinds()) add_partial(kind, 0, replicated());
    }
    return std::move(rows_);
  }

 private:
  Row replicated() const {
    Row row;
    row.inputs.resize(bound_.inputs.size());
    row.outputs.resize(bound_.outputs.size());
    return row;
  }

  /// Where `factor` is cut in `tensor`: Replicate where the tensor does not have it, none where a size it needs is not
  /// known.
  std::optional<Placement> shard_of(const BoundTensor& tensor, int16_t factor) const {
    for (size_t d = 0; d < tensor.dims.size(); ++d) {
      int64_t before = 1;
      for (const int16_t id : tensor.dims[d]) {
        if (id == factor) return before == 1 ? Shard(int64_t(d)) : StridedShard(int64_t(d), before);
        if (bound_.factors[size_t(id)].size < 0) break;
        before *= bound_.factors[size_t(id)].size;
      }
    }
    if (tensor.position(factor) == -1) return Replicate();
    return std::nullopt;
  }

  std::optional<Row> cut(int16_t factor) const {
    Row row = replicated();
    row.factor = factor;
    bool has_input = false;
    for (size_t i = 0; i < row.inputs.size(); ++i) {
      const std::optional<Placement> placement = shard_of(bound_.inputs[i], factor);
      if (!placement) return std::nullopt;
      row.inputs[i] = *placement;
      has_input = has_input || placement->is_shard();
    }
    if (!has_input) return std::nullopt;
    size_t num_gone = 0;
    const bool picked = is_picked(bound_.rule, bound_.factors[size_t(factor)].letter);
    const ReduceKind reduction = picked ? ReduceKind::sum : bound_.rule.reduction;
    for (size_t o = 0; o < row.outputs.size(); ++o) {
      const std::optional<Placement> placement = shard_of(bound_.outputs[o], factor);
      if (!placement) return std::nullopt;
      num_gone += size_t(placement->is_replicate());
      row.outputs[o] = placement->is_replicate() ? Partial(reduction) : *placement;
    }
    if (num_gone == 0) return row;
    if (bound_.rule.moves && !picked) return std::nullopt;
    if (!make_terms_partial(row, reduction, num_gone)) return std::nullopt;
    return row;
  }

  /// A sum that is Partial takes terms without the cut factor as Partial too, or every rank would add them.
  bool make_terms_partial(Row& row, ReduceKind reduction, size_t num_gone) const {
    for (const Term& term : terms_) {
      const bool has_factor =
          std::any_of(term.tensors.begin(), term.tensors.end(), [&](size_t i) { return row.inputs[i].is_shard(); });
      if (has_factor) continue;
      if (reduction != ReduceKind::sum || term.linear.empty() || num_gone != row.outputs.size()) return false;
      for (const size_t i : term.linear.front()) row.inputs[i] = Partial(reduction);
    }
    return true;
  }

  bool partial_passes() const {
    for (const Term& term : terms_) {
      if (term.linear.empty()) return false;
    }
    for (const BoundTensor& output : bound_.outputs) {
      if (!output.linear) return false;
    }
    return !terms_.empty() && !bound_.outputs.empty();
  }

  std::vector<ReduceKind> kinds() const {
    if (bound_.rule.moves) {
      return {ReduceKind::sum, ReduceKind::avg, ReduceKind::max, ReduceKind::min, ReduceKind::product};
    }
    const ReduceKind reduction = bound_.rule.reduction;
    if (reduction == ReduceKind::sum || reduction == ReduceKind::avg) return {ReduceKind::sum, ReduceKind::avg};
    return {reduction};
  }

  /// Every choice of one unit per term, from term `t` on.
  void add_partial(ReduceKind kind, size_t t, const Row& row) {
    if (t == terms_.size()) {
      rows_.push_back(row);
      std::fill(rows_.back().outputs.begin(), rows_.back().outputs.end(), Partial(kind));
      return;
    }
    for (const Unit& unit : terms_[t].linear) {
      Row chosen = row;
      for (const size_t i : unit) chosen.inputs[i] = Partial(kind);
      add_partial(kind, t + 1, chosen);
    }
  }

  const Bound& bound_;
  std::vector<Term> terms_;
  std::vector<Row> rows_;
};

}  // namespace

std::vector<Row> rows(const Bound& bound) {
  return RowMaker(bound).run();
}

std::string to_string(const Row& row) {
  std::string text;
  for (const Placement& placement : row.inputs) text.append(to_string(placement)).append(" ");
  text += "->";
  for (const Placement& placement : row.outputs) text.append(" ").append(to_string(placement));
  return text;
}

}  // namespace serried::spmd
