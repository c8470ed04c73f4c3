// Rules of attention on CPU: batch and heads may be cut, and queries too where no mask depends on their position.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

std::string replaced(std::string text, char letter, const std::string& by) {
  for (size_t at = text.find(letter); at != text.npos; at = text.find(letter, at + by.size())) {
    text.replace(at, 1, by);
  }
  return text;
}

// A causal mask counts from the first query of the call, so a cut of the queries would shift it. Where keys have fewer
// heads (h) than queries (q), each serves a group of these in a row: a cut of the keys' heads parts no group.
std::string marked(const Call& call, size_t query, std::string text) {
  if (call.flag("is_causal")) text = replaced(text, 'l', "L");
  const int64_t heads = call.tensor(query).sizes.at(1);
  const int64_t shared = call.tensor(query + 1).sizes.at(1);
  if (heads == shared) return replaced(replaced(text, 'q', "h"), 'm', "h");
  const TensorArg* mask = call.tensor("attn_mask");
  const bool groups = shared > 0 && heads % shared == 0 && (mask == nullptr || mask->dim() == 4);
  if (!groups) return replaced(replaced(replaced(text, 'q', "H"), 'h', "H"), 'm', "H");
  const std::string grouped = c10::str("(h=", shared, " g=", heads / shared, ")");
  const bool mask_has_heads = mask != nullptr && mask->sizes.at(1) != 1;
  return replaced(replaced(text, 'm', mask_has_heads ? grouped : "1"), 'q', grouped);
}

std::string flash(const Call& call) {
  return marked(call, 0, "!bqlE, !bhSE, !bhSE, !bmlS? -> bqlE, bql");
}

std::string flash_backward(const Call& call) {
  return marked(call, 1, "bqlE, !bqlE, !bhSE, !bhSE, !bqlE, !bql, !bmlS? -> bqlE, bhSE, bhSE") + "; dense";
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
