// Generators of the user's that a captured function draws from, and others that take their place.
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/observed_programs.h"

namespace serried {
namespace {

using testing::numbers_of;
using testing::Observations;
using testing::refusal_of_program;

/// Draws from a generator in each call; `change(generator, call)` happens before.
template <class Change>
std::string refusal_of_drawing(Change change, bool is_watched = false) {
  return refusal_of_program([&](auto make, Observations& seen) {
    at::Generator generator = at::detail::createCPUGenerator(1);
    const auto draw = [&](const at::Tensor& x) { return x + at::rand({4}, generator); };
    CaptureOptions options;
    if (is_watched) options.watch.emplace_back("generator", generator);
    auto step = make(draw, std::move(options));
    for (int i = 0; i < 14; ++i) {
      change(generator, i);
      seen.push_back(step(numbers_of(i)));
    }
  });
}

TEST(CapturedGenerators, AnotherOneInTheVariableIsNoticed) {
  EXPECT_EQ(refusal_of_drawing([](at::Generator& generator, int i) {
              if (i == 5 || i == 9) generator = at::detail::createCPUGenerator(uint64_t(i));
            }),
            "");
  std::vector<at::Generator> all = {at::detail::createCPUGenerator(2), at::detail::createCPUGenerator(3)};
  EXPECT_EQ(refusal_of_drawing([&](at::Generator& generator, int i) {
              if (i == 0) all[0].set_current_seed(2), all[1].set_current_seed(3);
              if (i % 5 == 0) generator = all[size_t(i / 5) % 2];
            }),
            "");
}

TEST(CapturedGenerators, AWatchedOneMayBeReplacedWhileTheOldOneIsKept) {
  EXPECT_EQ(refusal_of_program([](auto make, Observations& seen) {
              at::Generator generator = at::detail::createCPUGenerator(1);
              std::vector<at::Generator> kept;
              auto step = make([&](const at::Tensor& x) { return x + at::rand({4}, generator); },
                               CaptureOptions{.watch = {{"generator", generator}}});
              for (int i = 0; i < 14; ++i) {
                if (i == 5 || i == 9) {
                  kept.push_back(generator);
                  generator = at::detail::createCPUGenerator(uint64_t(i));
                }
                seen.push_back(step(numbers_of(i)));
              }
            }),
            "");
}

TEST(CapturedGenerators, AnotherOneAtEachCallIsRefused) {
  EXPECT_EQ(refusal_of_drawing(
                [](at::Generator& generator, int i) { generator = at::detail::createCPUGenerator(uint64_t(i) + 5); }),
            "[capture] changing scalar: a generator that the function draws from is another one in each call; a replay "
            "would draw from the last one\n"
            "  fix: keep one generator, and seed it before the call of the captured function");
}

TEST(CapturedGenerators, OneThatStaysIsReplayed) {
  at::Generator generator = at::detail::createCPUGenerator(1), same = at::detail::createCPUGenerator(1);
  auto step = capture([&](const at::Tensor& x) { return x + at::rand({4}, generator) + torch::rand({1}).sum() * 0; });
  for (int i = 0; i < 10; ++i) {
    if (i == 6) generator.set_current_seed(4), same.set_current_seed(4);
    EXPECT_TRUE(at::equal(step(numbers_of(i)), numbers_of(i) + at::rand({4}, same))) << i;
  }
  EXPECT_EQ(step.captures(), 1);
  EXPECT_GE(step.replays(), 6);
  EXPECT_NE(step.graph().to_string().find("generator=generator"), std::string::npos);
}

}  // namespace
}  // namespace serried
