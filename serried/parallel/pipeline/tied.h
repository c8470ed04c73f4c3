// Weights that several stages share: equal values, and the sum of all their gradients.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/pipeline/table.h"
#include "serried/parallel/pipeline/tied_copies.h"

namespace serried {

/// A parameter of a stage, by its name there.
struct PipelineParameter {
  int64_t stage = 0;
  std::string name = {};

  bool operator==(const PipelineParameter&) const = default;
};

/// Two parameters that are one: the first one's value counts.
///     .tied = {{{0, "tokens.weight"}, {3, "head.weight"}}}
using PipelineTie = std::pair<PipelineParameter, PipelineParameter>;

namespace detail {

class StageRun;

/// The ties of a pipeline as one rank sees them. Parameters that are tied in a row form one set, of which the one in
/// the earliest stage is the first.
class TiedWeights {
 public:
  /// All ranks of the group make it together: ValueError on all of them where names, sizes or layouts do not fit.
  TiedWeights(Group group, const PipelineTable& table, std::vector<StageRun>& stages,
              const std::vector<PipelineTie>& ties);

  /// Before a step: what gradients are there stays out of the sum.
  void put_aside();
  /// After its last backward: every owner of a set has the sum of the step's gradients, and what was put aside.
  void sum_gradients();

 private:
  struct Owner {
    PipelineParameter of = {};
    int rank = 0;
    at::Tensor parameter = {};  // on its rank
    bool is_shared = false;     // the same tensor as one before it, on the same rank
    at::Tensor aside = {};
  };
  using Set = std::vector<Owner>;

  void find_sets(const PipelineTable& table, const std::vector<PipelineTie>& ties);
  std::string find_own(Set& set, std::vector<StageRun>& stages) const;
  void agree(std::vector<StageRun>& stages);
  void share_values() const;
  at::Tensor receive_value(const Owner& owner, int peer, int tag) const;
  at::Tensor collected(const Set& set, int tag) const;
  void hand_out(Set& set, const at::Tensor& sum, int tag) const;
  void give(Owner& owner, const at::Tensor& sum) const;

  const Group group_;
  int first_tag_ = 0;
  std::vector<Set> sets_;
  TiedCopies copies_;
};

}  // namespace detail

}  // namespace serried
