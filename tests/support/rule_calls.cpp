// Finds the rule of a call and tries it.
#include "tests/support/rule_calls.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/spmd/registry.h"
#include "tests/support/rule_verifier.h"
#include "tests/support/sample_call.h"

namespace serried::testing {

c10::OperatorHandle aten_op(const std::string& name) {
  const size_t dot = name.find('.');
  const std::string overload = dot == std::string::npos ? "" : name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(), overload.c_str());
}

at::Tensor numbers(const Sizes& sizes) {
  return at::randn(sizes, at::kDouble);
}

std::string rule_of(const std::string& op, const torch::jit::Stack& arguments) {
  const SampleCall sample(aten_op(op).schema(), arguments);
  const auto rule = spmd::find_rule(sample.call());
  return rule ? std::string(rule->text) : "none";
}

void expect_right(const std::string& op, const torch::jit::Stack& arguments) {
  torch::manual_seed(3);
  const SampleCall sample(aten_op(op).schema(), arguments);
  const auto rule = spmd::find_rule(sample.call());
  ASSERT_TRUE(rule) << op;
  const Verdict verdict = verify_rule(aten_op(op), sample.arguments, *rule, {.max_pairs = 20});
  for (const std::string& wrong : verdict.wrong) ADD_FAILURE() << wrong;
}

}  // namespace serried::testing
