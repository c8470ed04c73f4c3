// All built-in rule tables in one list.
#include "serried/spmd/registry.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {

const std::vector<RuleTable>& rule_tables() {
  static const std::vector<RuleTable> tables = {
      pointwise_rules(), contraction_rules(), linalg_rules(), norm_rules(), attention_rules(), conv_rules(),
      pooling_rules(),   loss_rules(),        optim_rules(),  view_rules(), reduction_rules(), index_rules(),
      shape_rules(),     sort_rules(),        like_rules(),   fft_rules(),
  };
  return tables;
}

}  // namespace serried::spmd
