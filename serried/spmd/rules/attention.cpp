// Rules of attention on CPU: batch and heads may be cut, and queries too where no mask depends on their position.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

// A causal mask counts from the first query of the call, so a cut of the queries would shift it. Where keys have fewer
// heads than queries, a cut of the heads would part a group.
std::string marked(const Call& call, size_t query, std::string text) {
  const bool same_heads = call.tensor(query).sizes.at(1) == call.tensor(query + 1).sizes.at(1);
  for (char& c : text) {
    if (c == 'l' && call.flag("is_causal")) c = 'L';
    if (c == 'h' && !same_heads) c = 'H';
  }
  return text;
}

std::string flash(const Call& call) {
  return marked(call, 0, "!bhlE, !bhSE, !bhSE, !bhlS? -> bhlE, bhl");
}

std::string flash_backward(const Call& call) {
  return marked(call, 1, "bhlE, !bhlE, !bhSE, !bhSE, !bhlE, !bhl, !bhlS? -> bhlE, bhSE, bhSE") + "; dense";
}

}  // namespace

RuleTable attention_rules() {
  return {
      "attention",
      {
          {"_scaled_dot_product_flash_attention_for_cpu", flash},
          {"_scaled_dot_product_flash_attention_for_cpu_backward", flash_backward},
      },
  };
}

}  // namespace serried::spmd
