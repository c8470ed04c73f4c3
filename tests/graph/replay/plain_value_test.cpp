// Values that are no tensors decide which graph is replayed: those in arguments, and variables that are watched.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <map>
#include <optional>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/fake_group.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using graph::plain_text;
using testing::fake_group;
using testing::sibling;

/// Calls `step` until it replays, and once more; the result of the replay.
template <class Step, class... Args>
at::Tensor replay(Step& step, const Args&... args) {
  const int64_t replays = step.replays();
  for (int i = 0; i < 5 && step.replays() == replays; ++i) step(args...);
  EXPECT_GT(step.replays(), replays);
  return step(args...);
}

const at::Tensor& one_pair() {
  static const at::Tensor tensor = torch::ones({2});
  return tensor;
}

TEST(PlainText, TellsNumbersApartThatDifferInTheLastDigit) {
  EXPECT_EQ(plain_text(0.1), "0.1");
  EXPECT_NE(plain_text(0.1), plain_text(std::nextafter(0.1, 1.0)));
  EXPECT_NE(plain_text(0.1f), plain_text(std::nextafter(0.1f, 1.0f)));
  EXPECT_EQ(plain_text(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(plain_text(std::numeric_limits<int64_t>::min()), "-9223372036854775808");
}

TEST(PlainText, TellsListsOfTextApart) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(plain_text(Words{"a", "b"}), "[\"a\", \"b\"]");
  EXPECT_NE(plain_text(Words{"a, b"}), plain_text(Words{"a", "b"}));
  EXPECT_NE(plain_text(Words{"a\", \"b"}), plain_text(Words{"a", "b"}));
  EXPECT_NE(plain_text(Words{}), plain_text(Words{""}));
  EXPECT_NE(plain_text(std::vector<Words>{{"a"}, {"b"}}), plain_text(std::vector<Words>{{"a\"], [\"b"}}));
}

TEST(PlainText, TellsScalarsOfOtherTypesApart) {
  EXPECT_EQ(plain_text(at::Scalar(2)), "2");
  EXPECT_EQ(plain_text(at::Scalar(2.0)), "2.0");
  EXPECT_EQ(plain_text(at::Scalar(0.5)), "0.5");
  EXPECT_EQ(plain_text(at::Scalar(1e300)), "1e+300");
  EXPECT_EQ(plain_text(at::Scalar(std::numeric_limits<double>::infinity())), "inf");
  EXPECT_EQ(plain_text(at::Scalar(true)), "true");
}

TEST(PlainText, NamesGroupsMeshesAndPlacements) {
  const Group group = fake_group(1, 8);
  EXPECT_EQ(plain_text(group), group->getGroupName() + ", rank 1/8");
  EXPECT_EQ(plain_text(Group()), "none");
  const DeviceMesh mesh = init_device_mesh("cpu", {8}, {"tp"}, {.group = group});
  const DeviceMesh again = init_device_mesh("cpu", {8}, {"tp"}, {.group = group});
  EXPECT_EQ(plain_text(mesh), plain_text(DeviceMesh(mesh)));
  EXPECT_NE(plain_text(mesh), plain_text(again));
  EXPECT_EQ(plain_text(Placements{Shard(0), Partial()}), "[" + to_string(Shard(0)) + ", " + to_string(Partial()) + "]");
  EXPECT_EQ(plain_text(at::kBFloat16), "BFloat16");
  EXPECT_EQ(plain_text(std::string("mean")), plain_text("mean"));
}

TEST(CapturedArguments, ValuesInContainersCount) {
  auto step = capture([](const at::Tensor& x, const std::vector<double>& scales) { return x * scales[0] + scales[1]; });
  EXPECT_TRUE(at::equal(replay(step, one_pair(), std::vector{2.0, 1.0}), one_pair() * 3));
  EXPECT_TRUE(at::equal(replay(step, one_pair(), std::vector{2.0, 3.0}), one_pair() * 5));
  EXPECT_EQ(step.last_recapture_reason(), "argument value 2 was 1 and is 3");
}

TEST(CapturedArguments, ATensorInAnotherPlaceCounts) {
  using Maybe = std::optional<at::Tensor>;
  auto step = capture([](const Maybe& a, const Maybe& b) { return a ? *a * 2 : *b * 3; });
  EXPECT_TRUE(at::equal(replay(step, Maybe(one_pair()), Maybe()), one_pair() * 2));
  EXPECT_TRUE(at::equal(replay(step, Maybe(), Maybe(one_pair())), one_pair() * 3));
  auto by_name =
      capture([](const std::map<std::string, at::Tensor>& m) { return m.count("a") ? m.at("a") * 2 : m.at("b") * 3; });
  EXPECT_TRUE(at::equal(replay(by_name, std::map<std::string, at::Tensor>{{"a", one_pair()}}), one_pair() * 2));
  EXPECT_TRUE(at::equal(replay(by_name, std::map<std::string, at::Tensor>{{"b", one_pair()}}), one_pair() * 3));
}

TEST(CapturedArguments, TextAndFlagsMayBeGiven) {
  auto step = capture([](const at::Tensor& x, const std::string& mode, const std::vector<bool>& flags) {
    return mode == "double" && flags[0] ? x * 2 : x;
  });
  EXPECT_TRUE(at::equal(replay(step, one_pair(), "double", std::vector{true}), one_pair() * 2));
  EXPECT_TRUE(at::equal(replay(step, one_pair(), "double", std::vector{false}), one_pair()));
  EXPECT_TRUE(at::equal(replay(step, one_pair(), "none", std::vector{true}), one_pair()));
}

TEST(CapturedArguments, AnotherGroupIsAnotherGraph) {
  run_ranks(2, [](const Group& world) {
    const Group other = sibling(world, "threads");
    auto step = capture([](const at::Tensor& x, const Group& group) { return all_reduce(x, group); });
    EXPECT_TRUE(at::equal(replay(step, one_pair(), world), one_pair() * 2));
    EXPECT_TRUE(at::equal(replay(step, one_pair(), other), one_pair() * 2));
    EXPECT_EQ(step.captures(), 2);
    EXPECT_EQ(step.graph().nodes()[0].group_name(), other->getGroupName());
    EXPECT_EQ(step.last_recapture_reason(),
              "argument value 0 was " + plain_text(world) + " and is " + plain_text(other));
    replay(step, one_pair(), world);
    EXPECT_EQ(step.captures(), 2);
  });
}

TEST(CapturedArguments, MeshAndPlacementsMayBeGiven) {
  run_ranks(2, [](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = world});
    auto step = capture([](const at::Tensor& x, const DeviceMesh& on, const Placements& placements) {
      return distribute_tensor(x, on, placements).to_local();
    });
    EXPECT_EQ(replay(step, torch::ones({3, 2}), mesh, Placements{Shard(1)}).sizes(), at::IntArrayRef({3, 1}));
    EXPECT_EQ(replay(step, torch::ones({3, 2}), mesh, Placements{Replicate()}).sizes(), at::IntArrayRef({3, 2}));
  });
}

TEST(WatchedVariables, AnotherNumberIsAnotherGraphAndTheOldOneStays) {
  double scale = 0.5;
  auto step = capture([&](const at::Tensor& x) { return x * scale; }, {.watch = {{"scale", scale}}});
  EXPECT_TRUE(at::equal(replay(step, one_pair()), one_pair() * 0.5));
  scale = 0.25;
  EXPECT_TRUE(at::equal(step(one_pair()), one_pair() * 0.25));
  EXPECT_EQ(step.last_recapture_reason(), "scale was 0.5 and is 0.25");
  EXPECT_TRUE(at::equal(replay(step, one_pair()), one_pair() * 0.25));
  scale = 0.5;
  const int64_t replays = step.replays();
  EXPECT_TRUE(at::equal(step(one_pair()), one_pair() * 0.5));
  EXPECT_EQ(step.replays(), replays + 1);
  EXPECT_EQ(step.captures(), 2);
}

TEST(WatchedVariables, AGroupInTheVariableOfAnotherIsNoticedWhileTheOldOneLives) {
  run_ranks(3, [](const Group& world) {
    const Group other = sibling(world, "threads");
    Group group = world;
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group); }, {.watch = {{"group", group}}});
    replay(step, one_pair());
    group = other;
    EXPECT_TRUE(at::equal(replay(step, one_pair()), one_pair() * 3));
    EXPECT_EQ(step.graph().nodes()[0].group_name(), other->getGroupName());
    EXPECT_EQ(step.last_recapture_reason(), "group was " + plain_text(world) + " and is " + plain_text(other));
  });
}

struct Factor : torch::nn::Module {
  explicit Factor(double value) : value(value) {}
  double value;
};

// The allocator gives the memory of the old one to the new one.
TEST(WatchedVariables, AnotherObjectAtTheSameAddressIsAnotherOne) {
  for (const bool in_one_block : {true, false}) {
    const auto make = [&](double value) {
      return in_one_block ? std::make_shared<Factor>(value) : std::shared_ptr<Factor>(new Factor(value));
    };
    std::vector<std::shared_ptr<Factor>> factors = {make(1)};
    std::shared_ptr<Factor>& factor = factors[0];
    for (const bool in_list : {false, true}) {
      CaptureOptions options;
      if (in_list) options.watch.emplace_back("factors", factors);
      if (!in_list) options.watch.emplace_back("factor", factor);
      auto step = capture([&](const at::Tensor& x) { return x * factor->value; }, std::move(options));
      for (int i = 0; i < 20; ++i) {
        if (i % 5 == 0) factor.reset();
        if (i % 5 == 0) factor = make(i + 1);
        EXPECT_TRUE(at::equal(step(one_pair()), one_pair() * factor->value)) << i;
      }
    }
  }
}

TEST(WatchedVariables, ListsOfTextAreToldApart) {
  std::vector<std::string> words = {"a, b"};
  auto step = capture([&](const at::Tensor& x) { return x * double(words.size()); }, {.watch = {{"words", words}}});
  EXPECT_TRUE(at::equal(replay(step, one_pair()), one_pair()));
  words = {"a", "b"};
  EXPECT_TRUE(at::equal(step(one_pair()), one_pair() * 2));
}

TEST(WatchedVariables, SchedulersReachStockSgdThroughThem) {
  std::vector<at::Tensor> weights;
  for (const bool captured : {false, true}) {
    at::Tensor weight = torch::ones({2}, at::requires_grad());
    torch::optim::SGD optimizer({weight}, torch::optim::SGDOptions(0.5));
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/4, /*gamma=*/0.5);
    const auto& options = static_cast<const torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    const auto eager = [&](const at::Tensor& x) {
      optimizer.zero_grad();
      (weight * x).square().sum().backward();
      optimizer.step();
    };
    auto step = capture(eager, {.watch = {{"lr", options.lr()}}});
    for (int i = 0; i < 16; ++i) {
      const at::Tensor x = torch::full({2}, 0.1f * i);
      if (captured) {
        step(x);
      } else {
        eager(x);
      }
      scheduler.step();
    }
    EXPECT_EQ(step.replays() > 0, captured);
    weights.push_back(weight.detach());
  }
  EXPECT_TRUE(at::equal(weights[0], weights[1]));
}

TEST(WatchedVariables, AreListedAmongTheGuards) {
  const int depth = 3;
  auto step = capture([&](const at::Tensor& x) { return x * depth; }, {.watch = {{"depth", depth}}});
  replay(step, one_pair());
  bool found = false;
  for (const graph::Guard& guard : step.guards()) found |= guard.name == "depth" && guard.expected == "3";
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace serried
