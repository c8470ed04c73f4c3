// What active ranks announce and joined ranks follow, on joinables that do nothing else.
#include "serried/parallel/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using ::testing::AllOf;
using testing::error_text;
using ::testing::HasSubstr;
using testing::OnRanks;

/// Adds up what all ranks give, and keeps a record of what it was told.
class Total : public Joinable {
 public:
  explicit Total(Group group) : group_(std::move(group)) {}

  void add(double amount, int64_t message = 0) {
    const auto notice = notify_join(message);
    if (notice) num_active_.push_back(int(notice->active_ranks.size()));
    share(amount);
  }

  void main_hook(const JoinNotice& notice) override {
    messages_.push_back(notice.message);
    num_active_.push_back(int(notice.active_ranks.size()));
    EXPECT_FALSE(notify_join().has_value()) << "a joined rank announces nothing";
    share(0);
  }
  void post_hook(int last_joiner) override {
    last_joiner_ = last_joiner;
    broadcast_(value_, group_, {.src = last_joiner});
  }
  Group join_group() const override { return group_; }
  at::Device join_device() const override { return at::kCPU; }
  void join_begins(const JoinOptions&) override { ++num_begun_; }
  void join_ends() override { ++num_ended_; }

  double value() const { return value_.item<double>(); }
  std::vector<int64_t> messages_;
  std::vector<int> num_active_;
  int last_joiner_ = -1;
  int num_begun_ = 0, num_ended_ = 0;

 private:
  void share(double amount) {
    at::Tensor sum = at::full({1}, amount);
    all_reduce_(sum, group_);
    value_ += sum;
  }

  Group group_;
  at::Tensor value_ = at::zeros({1});
};

class Joining : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, Joining, ::testing::ValuesIn(testing::settings({2, 3, 4})), testing::name_of);

TEST_P(Joining, JoinedRanksFollowUntilAllHaveJoined) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    const std::vector<int> lengths = {2, 0, 5, 1};
    Total total(group);
    join({&total}, [&] {
      for (int i = 0; i < lengths[rank]; ++i) total.add(i + 1, 7);
    });
    double expected = 0;
    int longest = 0, last = 0;
    for (int r = 0; r < world_size(); ++r) {
      for (int i = 0; i < lengths[r]; ++i) expected += i + 1;
      if (lengths[r] >= longest) last = r, longest = lengths[r];
    }
    EXPECT_EQ(total.value(), expected);
    EXPECT_EQ(total.last_joiner_, last);
    EXPECT_EQ(total.messages_, std::vector<int64_t>(size_t(longest - lengths[rank]), 7));
    ASSERT_EQ(int(total.num_active_.size()), longest);
    for (int i = 0; i < longest; ++i) {
      const auto has_more = [&](int length) { return length > i; };
      EXPECT_EQ(total.num_active_[i], std::count_if(lengths.begin(), lengths.begin() + world_size(), has_more));
    }
  });
}

TEST_P(Joining, TheHighestOfThoseThatJoinLastCounts) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank(), world = world_size();
    Total total(group);
    // All but the last rank end together.
    join({&total}, [&] {
      for (int i = 0; i < (rank == world - 1 ? 1 : 2); ++i) total.add(1);
    });
    EXPECT_EQ(total.last_joiner_, world - 2);
  });
}

TEST_P(Joining, NobodyNeedsToHaveInput) {
  on_ranks([&](const Group& group) {
    Total total(group);
    join({&total}, [] {});
    EXPECT_EQ(total.value(), 0);
    EXPECT_EQ(total.last_joiner_, world_size() - 1);
  });
}

TEST_P(Joining, SeveralJoinablesMayBeCalledUnequallyOften) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    Total often(group), seldom(group);
    join({&often, &seldom}, [&] {
      for (int i = 0; i < 4 * rank; ++i) {
        often.add(1);
        if (i % 2 == 1) seldom.add(1, 3);
      }
    });
    const int num_ranks = world_size();
    EXPECT_EQ(often.value(), 2 * num_ranks * (num_ranks - 1));
    EXPECT_EQ(seldom.value(), num_ranks * (num_ranks - 1));
    EXPECT_EQ(seldom.last_joiner_, num_ranks - 1);
  });
}

TEST_P(Joining, ADisabledJoinOnlyRunsTheBody) {
  on_ranks([&](const Group& group) {
    Total total(group);
    join({&total}, [&] { total.add(1); }, {.enable = false});
    EXPECT_EQ(total.value(), world_size());
    EXPECT_EQ(total.last_joiner_, -1);
    EXPECT_EQ(total.num_begun_, 0);
    EXPECT_TRUE(total.num_active_.empty());
  });
}

TEST_P(Joining, DifferentAnnouncementsAreAnError) {
  on_ranks([&](const Group& group) {
    Total total(group), other(group);
    const std::string text = error_text<c10::ValueError>([&] {
      join({&total, &other}, [&] {
        if (group->getRank() == 0) return;
        group->getRank() == 1 ? total.add(1, 5) : other.add(1, 6);
      });
    });
    if (world_size() == 2) {
      EXPECT_EQ(text, "no error");
      return;
    }
    EXPECT_THAT(text, AllOf(HasSubstr("[join] the ranks do different things: rank 1 announces message 5 of joinable 0, "
                                      "rank 2 announces message 6 of joinable 1"),
                            HasSubstr("fix: make the same calls in the same order in each iteration")));
    EXPECT_EQ(total.num_ended_, 1);
  });
}

TEST_P(Joining, EarlyTerminationIsSeenByTheNextAnnouncement) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    Total total(group);
    const std::string text = error_text<c10::Error>([&] {
      join({&total},
           [&] {
             for (int i = 0; i < (rank == 0 ? 1 : 3); ++i) total.add(1);
           },
           {.throw_on_early_termination = true});
    });
    EXPECT_THAT(text, HasSubstr("[join] no more input on rank 0"));
    EXPECT_EQ(total.value(), world_size());
    EXPECT_EQ(total.last_joiner_, -1);
    EXPECT_EQ(total.num_ended_, 1);
  });
}

TEST(Join, AnExceptionInTheBodyEndsItAndTheOthersDoNotHang) {
  using std::chrono::milliseconds;
  const auto run = [](const Group& group) {
    Total total(group);
    const auto start = std::chrono::steady_clock::now();
    const std::string text = error_text<c10::Error>([&] {
      join({&total}, [&] {
        total.add(1);
        if (group->getRank() == 1) raise<c10::ValueError>({"step", "out of cheese", "buy some"});
        total.add(1);
      });
    });
    const auto waited = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(total.num_ended_, 1);
    EXPECT_EQ(total.last_joiner_, -1);
    EXPECT_LT(waited, milliseconds(5000));
    if (group->getRank() == 1) {
      EXPECT_THAT(text, HasSubstr("[step] out of cheese"));
      EXPECT_TRUE(total.messages_.empty());
    } else {
      EXPECT_NE(text, "no error");
    }
  };
  run_ranks(3, run, {.backend = "threads", .timeout = milliseconds(500)});
}

TEST(Join, AListWithoutJoinablesIsAnError) {
  EXPECT_THAT(error_text<c10::ValueError>([] { join({}, [] {}); }),
              AllOf(HasSubstr("[join] the list of joinables is empty"), HasSubstr("fix: pass what communicates")));
  EXPECT_THAT(error_text<c10::ValueError>([] { join({nullptr}, [] {}); }), HasSubstr("[join] joinable 0 is null"));
}

TEST(Join, JoinablesOfDifferentGroupsAreAnError) {
  run_ranks(2, [](const Group& group) {
    Total total(group), other(testing::sibling(group, "threads"));
    EXPECT_THAT(
        error_text<c10::ValueError>([&] {
          join({&total, &other}, [] {});
        }),
        AllOf(HasSubstr("[join] joinables 0 and 1 have different groups"), HasSubstr("fix: make them on one group")));
  });
}

TEST(Join, AJoinableIsInOneJoinAtATime) {
  run_ranks(2, [](const Group& group) {
    Total total(group);
    const std::string twice = error_text<c10::ValueError>([&] { join({&total, &total}, [] {}); });
    EXPECT_THAT(twice, AllOf(HasSubstr("[join] joinable 1 is in a join already"), HasSubstr("fix: name each object")));
    EXPECT_EQ(total.num_ended_, 1);
    const std::string nested = error_text<c10::ValueError>([&] { join({&total}, [&] { join({&total}, [] {}); }); });
    EXPECT_THAT(nested, HasSubstr("[join] joinable 0 is in a join already"));
    EXPECT_EQ(total.num_begun_, total.num_ended_);
  });
}

TEST(Join, ManyIterationsWithoutInputAreWarnedAbout) {
  const auto stderr_of = [](int num_iterations) {
    ::testing::internal::CaptureStderr();
    run_ranks(2, [&](const Group& group) {
      Total total(group);
      join({&total}, [&] {
        for (int i = 0; group->getRank() == 1 && i < num_iterations; ++i) total.add(1);
      });
    });
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(stderr_of(1000), "");
  EXPECT_THAT(stderr_of(1001), HasSubstr("[join] rank 0 has been without input for 1000 iterations of the others"));
}

}  // namespace
}  // namespace serried
