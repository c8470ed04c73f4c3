// What explain says is what runs: moves, collectives and results of calls beside those of their text.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <regex>
#include <sstream>

#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dispatch/explain.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

// A call on two tensors of these sizes, or on the first of them.
struct Subject {
  std::string op;
  Sizes first, second;
  std::function<Stack(const at::Tensor& a, const at::Tensor& b)> arguments;
};

struct Move {
  std::string from, to;
  bool operator==(const Move&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Move& move) {
  return out << move.from << " => " << move.to;
}

// What a call did, or what its explanation promises.
struct Account {
  std::vector<Move> moves;  // of inputs before the op, and of what it wrote back to where it lay
  std::map<std::string, int64_t> collectives;
  std::vector<std::string> results;
  std::string error;
};

std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

int64_t total(const std::map<std::string, int64_t>& counts) {
  int64_t sum = 0;
  for (const auto& [name, count] : counts) sum += count;
  return sum;
}

Account promised(const std::string& op, const Stack& stack) {
  Account account;
  std::string text;
  try {
    text = explain(op, stack);
  } catch (const c10::Error& error) {
    account.error = first_line(error.what_without_backtrace());
    return account;
  }
  static const std::regex step(R"((move|write back) (\S+): (.*) -> (.*): (\w+) over .*)");
  static const std::regex result(R"(result[ 0-9]*: (a list, each )?(.*))");
  std::istringstream lines(text);
  std::smatch match;
  std::string last_move;
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_match(line, match, result)) account.results.push_back(match[2]);
    if (!std::regex_match(line, match, step)) continue;
    if (match[5] != "slice" && match[5] != "to_partial") ++account.collectives[match[5]];
    const std::string move = match[1].str() + match[2].str();
    if (move == last_move) {
      account.moves.back().to = match[4];
    } else {
      account.moves.push_back({match[3], match[4]});
    }
    last_move = move;
  }
  return account;
}

Account done(const std::string& op, Stack stack) {
  const size_t dot = op.find('.');
  const auto handle = c10::Dispatcher::singleton().findSchemaOrThrow(op.substr(0, dot).c_str(),
                                                                     dot == op.npos ? "" : op.substr(dot + 1).c_str());
  Account account;
  CommDebugMode comm;
  const at::NoGradGuard no_grad;
  try {
    handle.callBoxed(stack);
  } catch (const c10::Error& error) {
    account.error = first_line(error.what_without_backtrace());
    return account;
  }
  for (const auto& move : comm.redistributions()) account.moves.push_back({to_string(move.from), to_string(move.to)});
  account.collectives = comm.counts();
  for (const c10::IValue& value : stack) {
    for (const at::Tensor& t : value.isTensorList() ? value.toTensorVector() : Tensors{value.toTensor()}) {
      account.results.push_back(to_string(DTensor(t).placements()));
    }
  }
  return account;
}

void expect_kept(const Subject& subject, const DeviceMesh& mesh, const Placements& p, const Placements& q) {
  // In-place ops change what they get: each look has tensors of its own.
  const auto arguments = [&] {
    return subject.arguments(place(iota(subject.first), mesh, p), place(iota(subject.second) + 1, mesh, q));
  };
  const Stack told = arguments();
  const Account promise = promised(subject.op, told);
  const Account fact = done(subject.op, arguments());
  const std::string where = subject.op + " of " + to_string(p) + " and " + to_string(q) + " on " + mesh.to_string();
  EXPECT_EQ(promise.error, fact.error) << where;
  // Only what is written into a tensor may find that it does not fit there.
  EXPECT_TRUE(fact.error.empty() || subject.op.substr(0, subject.op.find('.')).ends_with('_')) << where << fact.error;
  if (!fact.error.empty()) return;
  EXPECT_EQ(promise.moves, fact.moves) << where;
  // An exchange goes by whatever collective fits its pieces.
  if (promise.collectives.contains("exchange")) {
    EXPECT_EQ(total(promise.collectives), total(fact.collectives)) << where;
  } else {
    EXPECT_EQ(promise.collectives, fact.collectives) << where;
  }
  if (fact.results.empty()) return;  // an op that returns nothing has a rule with a result all the same
  EXPECT_EQ(promise.results, fact.results) << where;
}

Stack two_tensors(const at::Tensor& a, const at::Tensor& b) {
  return {a, b};
}
Stack with_scale(const at::Tensor& a, const at::Tensor& b) {
  return {a, b, 1};
}
Stack only_first(const at::Tensor& a, const at::Tensor&) {
  return {a};
}

std::vector<Subject> subjects() {
  return {
      {"aten::add.Tensor", {5, 3}, {5, 3}, with_scale},
      {"aten::add.Tensor", {5, 3}, {3}, with_scale},
      {"aten::mul.Tensor", {5, 3}, {5, 1}, two_tensors},
      {"aten::maximum", {4, 3}, {4, 3}, two_tensors},
      {"aten::mm", {5, 4}, {4, 3}, two_tensors},
      {"aten::cat",
       {5, 3},
       {2, 3},
       [](const auto& a, const auto& b) {
         return Stack{Tensors{a, b}, 0};
       }},
      {"aten::amax",
       {5, 3},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, c10::List<int64_t>({0}), false};
       }},
      {"aten::sum.dim_IntList",
       {5, 3},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, c10::List<int64_t>({0}), false, c10::IValue()};
       }},
      {"aten::sort",
       {5, 3},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, 0, false};
       }},
      {"aten::embedding",
       {5, 3},
       {1},
       [](const auto& a, const auto& b) {
         return Stack{a, b.to(at::kLong), -1, false, false};
       }},
      {"aten::view",
       {4, 6},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, c10::List<int64_t>({24})};
       }},
      // Written in place: what is written stays, or is brought back.
      {"aten::add_.Tensor", {5, 3}, {5, 3}, with_scale},
      {"aten::mul_.Tensor", {5, 3}, {3}, two_tensors},
      {"aten::exp_", {5, 3}, {1}, only_first},
      {"aten::zero_", {5, 3}, {1}, only_first},
      {"aten::clamp_min_.Tensor", {5, 3}, {5, 3}, two_tensors},
      {"aten::cumsum_",
       {5, 3},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, 0, c10::IValue()};
       }},
      // Broadcast into something smaller: refused.
      {"aten::add_.Tensor", {5, 1}, {5, 3}, with_scale},
      // Sizes change in place.
      {"aten::t_", {5, 3}, {1}, only_first},
      {"aten::squeeze_.dim",
       {1, 5, 3},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, 0};
       }},
      {"aten::unsqueeze_",
       {5, 3},
       {1},
       [](const auto& a, const auto&) {
         return Stack{a, 1};
       }},
      // Lists, element by element, with and without a tensor that all elements share.
      {"aten::_foreach_add.List",
       {5, 3},
       {5, 3},
       [](const auto& a, const auto& b) {
         return Stack{Tensors{a}, Tensors{b}, 1};
       }},
      {"aten::_foreach_mul_.List",
       {5, 3},
       {5, 3},
       [](const auto& a, const auto& b) {
         return Stack{Tensors{a}, Tensors{b}};
       }},
      {"aten::_foreach_exp_", {5, 3}, {1}, [](const auto& a, const auto&) { return Stack{Tensors{a}}; }},
      {"aten::_foreach_add.Tensor",
       {5, 3},
       {},
       [](const auto& a, const auto& b) {
         return Stack{Tensors{a}, b, 1};
       }},
      {"aten::_foreach_mul_.Tensor",
       {5, 3},
       {},
       [](const auto& a, const auto& b) {
         return Stack{Tensors{a}, b};
       }},
  };
}

TEST(ExplainTruth, EveryPlacementRunsAsItIsExplained) {
  for (const Sizes& shape : {Sizes{2}, Sizes{3}}) {
    on_mesh(shape, [](const DeviceMesh& mesh) {
      for (const Subject& subject : subjects()) {
        for (const Placements& p : all_placements(int64_t(subject.first.size()), 1, true)) {
          for (const Placements& q : all_placements(int64_t(subject.second.size()), 1, true)) {
            expect_kept(subject, mesh, p, q);
          }
        }
      }
    });
  }
}

TEST(ExplainTruth, TwoAxesRunAsTheyAreExplained) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    for (const Subject& subject : subjects()) {
      for (const Placements& p : all_placements(int64_t(subject.first.size()), 2, true)) {
        expect_kept(subject, mesh, p, Placements{Replicate(), Replicate()});
        expect_kept(subject, mesh, p, Placements{Partial(), Replicate()});
      }
    }
  });
}

// Found by the above: the shared tensor was replicated whatever the elements' plans said, and counted once per rank.
TEST(ForeachOps, ATensorThatElementsShareLiesAsTheirPlansSay) {
  const at::Tensor values = iota({5, 3}), number = at::full({}, 3.0, at::kDouble);
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Placements& p : all_placements(2, shape.size(), true)) {
        for (const Placements& q : all_placements(0, shape.size(), true)) {
          const Tensors a{place(values, mesh, p), place(values, mesh, Placements(shape.size(), Replicate()))};
          const at::Tensor b = place(number, mesh, q);
          for (const at::Tensor& sum : at::_foreach_add(a, b)) expect_close(full(sum), values + 3);
          for (const at::Tensor& product : at::_foreach_mul(a, b)) expect_close(full(product), values * 3);
          at::_foreach_add_(a, b);
          for (const at::Tensor& sum : a) expect_close(full(sum), values + 3);
        }
      }
    });
  }
}

}  // namespace
}  // namespace serried::testing
