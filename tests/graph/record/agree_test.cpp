// Ranks replay only what all of them recorded alike, and never wait for ever.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/graph/record/agree.h"
#include "serried/graph/record/notice.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using graph::CaptureError;
using graph::CaptureErrorKind;
using ::testing::HasSubstr;

class CaptureAgrees : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CaptureAgrees, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

at::Tensor reduce_two(const at::Tensor& x, const Group& group) {
  return all_reduce(x, group) + all_reduce(x * 2, group);
}

TEST(CaptureNotice, ComesBackFromItsText) {
  for (const graph::Notice& notice :
       {graph::Notice{"3", "settled", {"all_reduce op=sum", "barrier"}}, graph::Notice{"4", "eager", {}}}) {
    EXPECT_EQ(graph::parse_notice(1, notice.text()), notice);
  }
}

TEST(CaptureNotice, AnyOtherTextIsRefused) {
  EXPECT_EQ(serried::testing::error_text<c10::DistBackendError>([] { graph::parse_notice(2, "hello"); }),
            "[capture] rank 2 left \"hello\" in the store, which is no notice\n"
            "  fix: find out who else writes to the store of this job");
  for (const char* text : {"", "\n", "3\n", "3\nsettled\n"}) {
    EXPECT_THROW(graph::parse_notice(0, text), c10::DistBackendError) << text;
  }
}

TEST_P(CaptureAgrees, SameCollectivesReplay) {
  on_ranks([](const Group& group) {
    const at::NoGradGuard no_grad;
    auto step = capture([&](const at::Tensor& x) { return reduce_two(x, group); });
    for (int i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::equal(step(torch::full({5}, i)), torch::full({5}, 3 * i * group->getSize())));
    }
    EXPECT_EQ(step.replays(), 3);
  });
}

// if (rank == 0) evaluate = capture(...): its number is nobody else's business.
TEST_P(CaptureAgrees, OneFunctionMoreOnOneRankIsNoMatter) {
  on_ranks([](const Group& group) {
    const at::NoGradGuard no_grad;
    auto first = capture([&](const at::Tensor& x) { return reduce_two(x, group); });
    const auto twice = [](const at::Tensor& x) { return x * 2; };
    std::optional<Captured<std::decay_t<decltype(twice)>>> more;
    if (group->getRank() == 0) more.emplace(twice, CaptureOptions());
    auto second = capture([&](const at::Tensor& x) { return all_reduce(x, group) * 2; });
    for (int i = 0; i < 6; ++i) {
      if (more) EXPECT_TRUE(at::equal((*more)(torch::full({5}, i)), torch::full({5}, 2 * i)));
      EXPECT_TRUE(at::equal(first(torch::full({5}, i)), torch::full({5}, 3 * i * group->getSize())));
      EXPECT_TRUE(at::equal(second(torch::full({5}, i)), torch::full({5}, 2 * i * group->getSize())));
    }
    EXPECT_EQ(first.replays(), 3);
    EXPECT_EQ(second.replays(), 3);
  });
}

TEST_P(CaptureAgrees, ADifferenceIsRaisedOnAllRanks) {
  on_ranks([](const Group& group) {
    const at::NoGradGuard no_grad;
    CaptureOptions options{.passes = {}};
    if (group->getRank() == 1) options.passes = {passes::bucket_collectives()};
    auto step = capture([&](const at::Tensor& x) { return reduce_two(x, group); }, options);
    const at::Tensor x = torch::ones({5});
    step(x);
    step(x);
    try {
      step(x);
      ADD_FAILURE() << "rank " << group->getRank() << " agreed";
    } catch (const CaptureError& error) {
      EXPECT_EQ(error.report().kind, CaptureErrorKind::different_ranks);
      const std::string text = error.report().explanation;
      EXPECT_THAT(text, HasSubstr("collective 0 on the group"));
      EXPECT_THAT(text, HasSubstr("f32 20 bytes\" on rank"));
      EXPECT_THAT(text, HasSubstr("f32 40 bytes\" on rank"));
      EXPECT_THAT(text, HasSubstr("on rank " + std::to_string(group->getRank())));
      EXPECT_THAT(text, HasSubstr("on rank 1"));
    }
  });
}

TEST_P(CaptureAgrees, ARefusedGraphMayRunEagerly) {
  on_ranks([](const Group& group) {
    const at::NoGradGuard no_grad;
    CaptureOptions options{.passes = {}, .when_refused = WhenRefused::run_eager};
    if (group->getRank() == 0) options.passes = {passes::bucket_collectives()};
    auto step = capture([&](const at::Tensor& x) { return reduce_two(x, group); }, options);
    for (int i = 0; i < 6; ++i) {
      EXPECT_TRUE(at::equal(step(torch::full({5}, i)), torch::full({5}, 3 * i * group->getSize())));
    }
    EXPECT_EQ(step.replays(), 0);
  });
}

// The last batch of one rank is often smaller.
TEST_P(CaptureAgrees, OneRankMayRecordWhileTheOthersReplay) {
  on_ranks([](const Group& group) {
    const bool is_last = group->getRank() == group->getSize() - 1;
    torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(5, 3); });
    DistributedDataParallel ddp(net, {.process_group = group});
    auto step = capture([&](const at::Tensor& x) {
      net->zero_grad();
      ddp(x).sum().backward();
    });
    for (int i = 0; i < 7; ++i) step(torch::ones({4, 5}));
    const int64_t captures = step.captures();
    for (int i = 0; i < 5; ++i) {
      step(torch::ones({is_last ? 2 : 4, 5}));
      const double mean = (4.0 * (group->getSize() - 1) + 2) / group->getSize();
      EXPECT_TRUE(torch::allclose(net->weight.grad(), torch::full({3, 5}, mean)));
    }
    EXPECT_EQ(step.captures() - captures, is_last ? 1 : 0) << step.last_recapture_reason();
  });
}

TEST_P(CaptureAgrees, ARankThatIsNotAsFarHoldsTheOthersBack) {
  for (const bool buckets : {false, true}) {
    on_ranks([&](const Group& group) {
      const at::NoGradGuard no_grad;
      CaptureOptions options{.passes = passes::defaults()};
      if (buckets) options.passes = {passes::bucket_collectives()};
      int calls = 0;
      auto step = capture(
          [&](const at::Tensor& x) {
            at::Tensor y = reduce_two(x, group);
            // Rank 0 logs something while it is recorded for the second time.
            if (++calls == 3 && group->getRank() == 0) y.norm();
            return y;
          },
          options);
      for (int i = 0; i < 8; ++i) {
        EXPECT_TRUE(at::equal(step(torch::full({5}, 1.f * i)), torch::full({5}, 3.f * i * group->getSize())));
      }
      EXPECT_EQ(step.replays(), 3);
      EXPECT_EQ(step.captures(), 1);
    });
  }
}

// A rank in one row and one column of a grid; buckets do not meet what they were made of.
TEST(CaptureAgreesOnAGrid, ARankThatIsNotAsFarHoldsBackThoseThatShareNoGroupWithIt) {
  for (const int slow : {0, 3}) {
    run_ranks(6, [&](const Group& world) {
      const at::NoGradGuard no_grad;
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 3}, {"a", "b"}, {.group = world});
      const Group a = mesh.get_group("a"), b = mesh.get_group("b");
      int calls = 0;
      auto step = capture(
          [&](const at::Tensor& x) {
            at::Tensor y = reduce_two(x, a) + reduce_two(x, b);
            if (++calls == 3 && world->getRank() == slow) y.norm();
            return y;
          },
          {.passes = {passes::bucket_collectives()}});
      for (int i = 0; i < 8; ++i) {
        EXPECT_TRUE(at::equal(step(torch::full({5}, 1.f * i)), torch::full({5}, 3.f * i * (2 + 3))));
      }
      EXPECT_EQ(step.replays(), 3);
      EXPECT_EQ(step.captures(), 1);
    });
  }
}

TEST_P(CaptureAgrees, ARefusalOfOneRankIsRaisedOnAll) {
  on_ranks([](const Group& group) {
    const at::NoGradGuard no_grad;
    double scale = 1;
    auto step = capture([&](const at::Tensor& x) {
      if (group->getRank() == 0) scale += 1;
      return all_reduce(x * scale, group);
    });
    step(torch::ones({5}));
    step(torch::ones({5}));
    try {
      step(torch::ones({5}));
      ADD_FAILURE() << "rank " << group->getRank() << " went on";
    } catch (const CaptureError& error) {
      const bool is_cause = group->getRank() == 0;
      EXPECT_EQ(error.report().kind, is_cause ? CaptureErrorKind::changing_scalar : CaptureErrorKind::different_ranks);
      if (!is_cause) EXPECT_THAT(error.report().explanation, HasSubstr("cannot capture the function, and rank"));
    }
  });
}

TEST_P(CaptureAgrees, ARankThatStaysEagerKeepsTheOthersEager) {
  on_ranks([](const Group& group) {
    const at::NoGradGuard no_grad;
    int calls = 0;
    double scale = 1;
    auto step = capture(
        [&](const at::Tensor& x) {
          // Rank 0 is refused in call 3, where the others have to record once more.
          at::Tensor y = all_reduce(x, group);
          if (++calls == 3 && group->getRank() != 0) y.norm();
          if (group->getRank() == 0) scale += 1;
          return y * scale;
        },
        {.when_refused = WhenRefused::run_eager});
    for (int i = 0; i < 8; ++i) step(torch::full({5}, 1.f * i));
    EXPECT_EQ(step.replays(), 0);
  });
}

TEST(CaptureAgreesInTime, ARankThatNeverRecordsIsNamed) {
  const auto run = [](const Group& group) {
    const at::NoGradGuard no_grad;
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group); });
    for (int i = 0; i < 2; ++i) step(torch::ones({3}));
    // The other rank runs the same collective by itself.
    if (group->getRank() == 1) {
      all_reduce(torch::ones({3}), group);
      return;
    }
    try {
      step(torch::ones({3}));
      ADD_FAILURE() << "rank 0 agreed with nobody";
    } catch (const CaptureError& error) {
      EXPECT_EQ(error.report().kind, CaptureErrorKind::different_ranks);
      EXPECT_THAT(error.report().explanation, HasSubstr("rank 0 waited 700 ms for rank 1 to record"));
    }
  };
  run_ranks(2, run, {.timeout = std::chrono::milliseconds(700)});
}

TEST(CaptureAgreesInTime, AFakeGroupHasNobodyToAsk) {
  const Group group = new_group("fake", {.rank = 3, .world_size = 8});
  const at::NoGradGuard no_grad;
  auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group); });
  for (int i = 0; i < 5; ++i) step(torch::ones({3}));
  EXPECT_EQ(step.replays(), 2);
}

}  // namespace
}  // namespace serried
