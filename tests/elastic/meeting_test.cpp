// Ranks that are at different steps become one, by pieces from all that are ahead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/failure.h"
#include "serried/comm/groups/ranks.h"
#include "serried/elastic/meeting.h"
#include "serried/elastic/move_state.h"
#include "tests/support/close.h"

namespace serried::detail {
namespace {

using serried::testing::expect_equal;
using ::testing::HasSubstr;

std::string failure_text(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const checkpoint::detail::Failure& failure) {
    return failure.text + "\n  fix: " + failure.fix;
  }
  return "no failure";
}

// Bytes 0, 1, 2, ... along the stream, whatever it is cut into.
std::vector<at::Tensor> counted(const std::vector<int64_t>& sizes, bool zeros) {
  std::vector<at::Tensor> all;
  int64_t at = 0;
  for (const int64_t size : sizes) {
    all.push_back(zeros ? at::zeros({size}, at::kByte) : at::arange(at, at + size).remainder(251).to(at::kByte));
    at += size;
  }
  return all;
}

TEST(ElasticMove, PiecesOfAllSourcesMakeOneStream) {
  for (const int64_t piece : {1, 3, 7, 100}) {
    run_ranks(4, [&](const Group& group) {
      const std::vector<int64_t> sizes = {5, 0, 1, 13, 2};
      const bool is_source = group->getRank() % 2 == 1;
      const std::vector<at::Tensor> mine = counted(sizes, !is_source);
      move_state(mine, {{1, 3}, {0, 2}}, group, piece);
      const std::vector<at::Tensor> expected = counted(sizes, false);
      for (size_t i = 0; i < sizes.size(); ++i) expect_equal(mine[i], expected[i]);
    });
  }
}

TEST(ElasticMove, RanksThatAreNeitherDoNothing) {
  run_ranks(3, [](const Group& group) {
    const std::vector<at::Tensor> mine = counted({9}, group->getRank() != 2);
    move_state(mine, {{2}, {0}}, group, 4);
    expect_equal(mine[0], counted({9}, group->getRank() == 1)[0]);
  });
}

struct State {
  torch::nn::Linear net = torch::nn::Linear(3, 2);
  torch::optim::AdamW optimizer = torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.1));
  int64_t seen = 0;

  checkpoint::Contents kept() {
    return {{"model", checkpoint::state_of(net)}, {"optimizer", checkpoint::state_of(optimizer)}, {"seen", &seen}};
  }
  void step(double gradient) {
    for (at::Tensor& each : net->parameters()) each.mutable_grad() = at::full_like(each, gradient);
    optimizer.step();
    ++seen;
  }
};

// Ranks share torch's generator: whoever draws from it keeps the others out.
State other_state() {
  return seeded(9, [] { return State(); });
}

// A state after `steps` steps, the same wherever it is made.
State state_after(int steps) {
  State state = seeded(3, [] { return State(); });
  for (int i = 0; i < steps; ++i) state.step(0.5 + i);
  return state;
}

void expect_state(State& state, int steps) {
  State expected = state_after(steps);
  EXPECT_EQ(state.seen, steps);
  for (int more = 0; more < 2; ++more) {  // the second shows the optimizer's state
    for (size_t i = 0; i < 2; ++i) {
      expect_equal(state.net->parameters()[i].detach(), expected.net->parameters()[i].detach());
    }
    state.step(2.0);
    expected.step(2.0);
  }
}

TEST(ElasticMeeting, RanksThatAreOneStepBehindTakeIt) {
  for (int ahead = 0; ahead < 4; ++ahead) {
    run_ranks(4, [&](const Group& group) {
      const int steps = group->getRank() == ahead ? 5 : 4;
      State state = state_after(steps);
      Standing standing{steps, Condition::whole};
      bring_to_one_state(group, state.kept(), standing);
      EXPECT_EQ(standing.step, 5);
      expect_state(state, 5);
    });
  }
}

TEST(ElasticMeeting, FreshAndTornRanksTakeTheStateOfAllWhoHaveIt) {
  run_ranks(4, [](const Group& group) {
    const int rank = group->getRank();
    State state = rank == 0 ? other_state() : state_after(rank == 1 ? 6 : 4);
    if (rank == 1) torch::NoGradGuard(), state.net->weight.data().fill_(7);
    Standing standing{rank == 0 ? 0 : 4, rank == 0 ? Condition::fresh : rank == 1 ? Condition::torn : Condition::whole};
    bring_to_one_state(group, state.kept(), standing);
    EXPECT_EQ(standing.step, 4);
    EXPECT_EQ(standing.condition, Condition::whole);
    expect_state(state, 4);
  });
}

TEST(ElasticMeeting, TransposedParametersAndEmptyOnesCome) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Module net("net");
    const bool gives = group->getRank() == 1;
    const at::Tensor values = at::arange(12).reshape({3, 4}).to(at::kDouble);
    const at::Tensor turned =
        net.register_parameter("turned", gives ? values.clone().t() : at::zeros({3, 4}, at::kDouble).t());
    net.register_parameter("empty", at::empty({0, 3}));
    const at::Tensor flag = net.register_buffer("flag", at::full({}, gives, at::kBool));
    Standing standing{3, gives ? Condition::whole : Condition::fresh};
    bring_to_one_state(group, {{"model", checkpoint::state_of(net)}}, standing);
    expect_equal(turned.detach().contiguous(), values.t().contiguous());
    EXPECT_TRUE(flag.item<bool>());
  });
}

TEST(ElasticMeeting, SourcesWhoseValuesDifferAreNamed) {
  run_ranks(3, [](const Group& group) {
    State state = state_after(4);
    if (group->getRank() == 1) state.seen = 17;
    Standing standing{4, Condition::whole};
    EXPECT_THAT(
        failure_text([&] { bring_to_one_state(group, state.kept(), standing); }),
        HasSubstr("ranks have done the same steps and hold different values: rank 0 has seen 4, rank 1 has seen "
                  "17\n  fix: do nothing to what is kept that differs between ranks"));
  });
}

TEST(ElasticMeeting, PiecesOfSourcesThatDifferAreNotTaken) {
  run_ranks(3, [](const Group& group) {
    const int rank = group->getRank();
    State state = rank == 2 ? other_state() : state_after(4);
    if (rank == 1) state.net->bias.data().fill_(7);
    const at::Tensor before = state.net->weight.detach().clone();
    Standing standing{4, rank == 2 ? Condition::fresh : Condition::whole};
    // Everything is in one piece, which comes from rank 0, so that only the last comparison can see it.
    EXPECT_THAT(failure_text([&] { bring_to_one_state(group, state.kept(), standing); }),
                HasSubstr("hold different values: rank 0 has model.bias f32[2] with hash "));
  });
}

TEST(ElasticMeeting, RanksThatKeepOtherThingsAreNamed) {
  run_ranks(2, [](const Group& group) {
    State state = other_state();
    checkpoint::Contents kept = state.kept();
    if (group->getRank() == 1) kept.pop_back();
    Standing standing;
    EXPECT_THAT(failure_text([&] { bring_to_one_state(group, kept, standing); }),
                HasSubstr("rank 0 keeps \"model\", \"optimizer\", \"seen\", and rank 1 keeps \"model\", \"optimizer\"\n"
                          "  fix: call keep() with the same names"));
  });
}

TEST(ElasticMeeting, ModelsThatDifferAreNamed) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net(3, group->getRank() == 0 ? 2 : 4);
    Standing standing;
    EXPECT_THAT(
        failure_text([&] {
          bring_to_one_state(group, {{"model", checkpoint::state_of(net)}}, standing);
        }),
        HasSubstr("rank 1: \"model.weight\" is f32[4,3] here and Float of sizes [2, 3] on rank 0\n  fix: build"));
  });
}

TEST(ElasticMeeting, WithoutAWholeStateTheJobCannotGoOn) {
  run_ranks(2, [](const Group& group) {
    State state = other_state();
    Standing standing{4, group->getRank() == 0 ? Condition::torn : Condition::fresh};
    EXPECT_THAT(failure_text([&] { bring_to_one_state(group, state.kept(), standing); }),
                HasSubstr("the last rank with the state of a whole step is lost"));
  });
}

}  // namespace
}  // namespace serried::detail
