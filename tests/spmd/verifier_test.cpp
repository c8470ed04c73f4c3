// Every row of every built-in rule, on calls from the conformance vectors, against the op on whole tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "serried/spmd/registry.h"
#include "tests/support/rule_verifier.h"
#include "tests/support/sample_call.h"
#include "tests/support/vectors.h"

namespace serried::testing {
namespace {

using torch::jit::Stack;

constexpr size_t kCasesPerOverload = 8;
constexpr int64_t kMostElements = 20000;
constexpr int kPairsPerCase = 40;
constexpr size_t kEntriesPerPart = 30;  // of a family: so a test runner can spread the work

// Doubles leave no doubt whether a difference is rounding.
at::Tensor widened(const at::Tensor& x) {
  if (!x.defined() || x.unsafeGetTensorImpl()->is_wrapped_number()) return x;
  if (x.scalar_type() == at::kFloat) return x.to(at::kDouble);
  return x.scalar_type() == at::kComplexFloat ? x.to(at::kComplexDouble) : x;
}

Stack widened(const Stack& stack) {
  Stack result;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      result.emplace_back(widened(value.toTensor()));
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(widened(tensor));
      result.emplace_back(list);
    } else {
      result.push_back(value);
    }
  }
  return result;
}

bool runs(const c10::OperatorHandle& op, const Stack& arguments) {
  try {
    Stack stack;
    for (const c10::IValue& value : arguments) stack.push_back(value.deepcopy());
    op.callBoxed(stack);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

struct Sample {
  Stack arguments;
  spmd::Rule rule;
  size_t num_rows = 0;
};

int64_t num_elements(const spmd::Call& call) {
  int64_t total = 0;
  for (const spmd::TensorArg& tensor : call.tensors()) total += tensor.numel();
  return total;
}

// Calls that have a rule, those with most rows first and each rule text before any comes again.
std::vector<Sample> samples_of(const VectorFile& file) {
  std::map<std::string, std::vector<Sample>> by_rule;
  std::set<std::string> seen;
  for (const VectorCase& recorded : file.cases) {
    Sample sample{widened(recorded.arguments), {}, 0};
    if (!runs(file.op, sample.arguments)) sample.arguments = recorded.arguments;
    const SampleCall described(file.op.schema(), sample.arguments);
    const spmd::Call call = described.call();
    if (call.tensors().empty() || num_elements(call) > kMostElements) continue;
    const std::optional<spmd::Rule> rule = spmd::find_rule(call);
    if (!rule || rule->has("random")) continue;
    sample.rule = *rule;
    const std::vector<spmd::Row> rows = spmd::rows(spmd::bind(*rule, call));
    sample.num_rows = rows.size();
    std::string signature(rule->text);
    for (const spmd::Row& row : rows) signature += ";" + to_string(row);
    if (seen.insert(signature).second) by_rule[std::string(rule->text)].push_back(std::move(sample));
  }
  std::vector<Sample> chosen;
  for (auto& [text, samples] : by_rule) {
    std::stable_sort(samples.begin(), samples.end(),
                     [](const Sample& a, const Sample& b) { return a.num_rows > b.num_rows; });
  }
  for (size_t turn = 0; chosen.size() < kCasesPerOverload; ++turn) {
    const size_t before = chosen.size();
    for (auto& [text, samples] : by_rule) {
      if (turn < samples.size()) chosen.push_back(std::move(samples[turn]));
    }
    if (chosen.size() == before) break;
  }
  return chosen;
}

// The table that serves an op; "tagged": none does, but the op says that it is pointwise.
std::string family_of(const c10::FunctionSchema& schema) {
  const std::string name = schema.name().substr(schema.name().find("::") + 2);
  for (const std::string& key : {name, spmd::base_name(schema)}) {
    for (const spmd::RuleTable& table : spmd::rule_tables()) {
      for (const spmd::RuleEntry& entry : table.entries) {
        if (entry.name == key || entry.name == key + "." + schema.overload_name()) return std::string(table.family);
      }
    }
  }
  return "tagged";
}

bool is_verifiable(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  if (schema.name().rfind("aten::_foreach_", 0) == 0) return false;  // element by element: the base op's rule
  if (op.hasTag(at::Tag::nondeterministic_seeded)) return false;
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.is_out()) return false;
  }
  return true;
}

// "aten.add.Tensor"
c10::OperatorHandle handle_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  const std::string overload = name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(5, dot - 5)).c_str(),
                                                        overload == "default" ? "" : overload.c_str());
}

const std::map<std::string, std::vector<std::string>>& overloads_by_family() {
  static const auto families = [] {
    std::map<std::string, std::vector<std::string>> map;
    for (const std::string& name : vector_names()) {
      const c10::OperatorHandle op = handle_of(name);
      if (is_verifiable(op)) map[family_of(op.schema())].push_back(name);
    }
    return map;
  }();
  return families;
}

struct Part {
  std::string family;
  size_t index = 0;
  size_t count = 1;
  friend void PrintTo(const Part& part, std::ostream* out) { *out << part.family << " part " << part.index; }
};

std::vector<Part> parts() {
  std::vector<Part> result;
  const auto add = [&](const std::string& family, size_t count) {
    for (size_t index = 0; index < count; ++index) result.push_back({family, index, count});
  };
  for (const spmd::RuleTable& table : spmd::rule_tables()) {
    add(std::string(table.family), 1 + table.entries.size() / kEntriesPerPart);
  }
  add("tagged", 4);
  return result;
}

class Verifier : public ::testing::TestWithParam<Part> {};

TEST_P(Verifier, EveryRowGivesWhatTheWholeOpGives) {
  torch::manual_seed(7);
  Verdict total;
  int overloads = 0;
  const auto found = overloads_by_family().find(GetParam().family);
  const std::vector<std::string> names =
      found == overloads_by_family().end() ? std::vector<std::string>() : found->second;
  for (size_t k = GetParam().index; k < names.size(); k += GetParam().count) {
    const VectorFile file = load_vectors(names[k]);
    ++overloads;
    int pairs = kPairsPerCase;
    for (const Sample& sample : samples_of(file)) {
      SCOPED_TRACE(names[k] + " " + std::string(sample.rule.text));
      total.add(verify_rule(file.op, sample.arguments, sample.rule, {.max_pairs = pairs}));
      pairs /= 2;
    }
  }
  std::printf("%s: %d overloads, %d calls, %d rows, %d pairs, %d rows without a fitting sample\n",
              GetParam().family.c_str(), overloads, total.rules, total.rows, total.pairs, total.unchecked);
  for (const std::string& wrong : total.wrong) ADD_FAILURE() << wrong;
}

INSTANTIATE_TEST_SUITE_P(Rules, Verifier, ::testing::ValuesIn(parts()),
                         [](const auto& info) { return info.param.family + "_" + std::to_string(info.param.index); });

}  // namespace
}  // namespace serried::testing
