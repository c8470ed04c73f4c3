// One rule, well formed or not: the second must not compile.
#include "serried/spmd/rule.h"

#ifdef good_rule
constexpr serried::spmd::RuleText kRule = "mk, kn -> mn";
#else
constexpr serried::spmd::RuleText kRule = "mk, kn mn";
#endif

int main() {
  return kRule.text == nullptr;
}
