// What is spread over ranks outlives them where others have copies, however it is cut anew, and is named where not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <random>

#include "serried/comm/collectives/observe.h"
#include "serried/comm/groups/ranks.h"
#include "serried/elastic/elastic.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/spread_training.h"
#include "tests/support/thread_job.h"

namespace serried::testing {
namespace {

using namespace std::chrono_literals;
using spread::Way;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

enum class At { building, meeting, forward, backward, commit, before_step, in_step, behind_step };
constexpr int kNumPlaces = 8;

/// A rank dies at the `nth` collective of a place, or where that begins if `nth` is 0; of rank `id`, or whoever comes.
struct Death {
  int64_t step = 0;
  At at = At::forward;
  int nth = 0;
  int id = -1;
};

struct SpreadJob {
  Way way = Way::replicated_shards;
  int num_ranks = 4;
  int64_t num_steps = 6;
  std::vector<Death> deaths = {};
  std::multiset<int64_t> joins = {};  // steps in which a rank is added
  bool joins_at_loss = false;         // one for each that dies
  int most_deaths_at_once = 1;        // until the next step counts
};

/// Runs a job whose ranks are threads, and expects what one process gets.
class SpreadTraining {
 public:
  explicit SpreadTraining(SpreadJob options)
      : options_(std::move(options)),
        job_([this](ThreadJob::Rank& rank) { train(rank); }),
        deaths_(options_.deaths),
        joins_(options_.joins) {}

  void run() {
    job_.start(options_.num_ranks);
    job_.wait();
  }

  void expect_trained() {
    EXPECT_THAT(job_.failures(), IsEmpty());
    ASSERT_FALSE(results_.empty()) << "no rank was left";
    const auto alone = spread::trained_alone(options_.num_steps);
    for (const auto& [id, result] : results_) {
      EXPECT_EQ(spread::difference(result, alone, 1e-10), "") << "rank " << id;
      EXPECT_EQ(spread::difference(result, results_.begin()->second, 0), "") << "rank " << id << " and the first one";
    }
  }

  int num_kills() const { return num_kills_; }
  std::vector<std::string> failures() const { return job_.failures(); }
  size_t num_survivors() const { return results_.size(); }
  /// Ranks that took part in each step that counts.
  std::vector<int> members() const {
    std::vector<int> members;
    for (const auto& [step, size] : sizes_) members.push_back(size);
    return members;
  }

 private:
  void train(ThreadJob::Rank& rank) {
    Elastic elastic({.backend = "threads", .timeout = 20s, .generations = rank.generations()});
    std::optional<spread::Trainer> trainer;
    At place = At::meeting;
    int nth = 0;
    const auto enter = [&](At next) {
      place = next;
      nth = 0;
      if (dies(next, elastic.step(), nth++, rank.id())) throw Killed();
    };
    const observe::Observer observer([&](const observe::Call&) {
      if (dies(place, elastic.step(), nth++, rank.id())) throw Killed();
    });
    int64_t sum = 0;
    int kills_before_world = 0;
    elastic.keep("sum", &sum);
    elastic.rebuild([&](const Group& world) {
      kills_before_world = kills_so_far();
      enter(At::building);
      trainer.emplace(options_.way, world);
      enter(At::meeting);
      return trainer->contents();
    });
    while (elastic.step() < options_.num_steps) {
      elastic.run([&] {
        enter(At::forward);
        join_at(elastic.step());
        trainer->optimizer().zero_grad();
        const at::Tensor loss = trainer->loss(elastic.step());
        enter(At::backward);
        loss.backward();
        enter(At::commit);
        if (!elastic.commit()) return;
        enter(At::before_step);
        note_step(elastic.step(), elastic.world()->getSize(), kills_before_world);
        enter(At::in_step);
        trainer->optimizer().step();
        sum += elastic.step();
        enter(At::behind_step);
      });
      place = At::meeting;
      nth = 1;
    }
    EXPECT_EQ(sum, options_.num_steps * (options_.num_steps - 1) / 2);
    const auto values = trainer->values();
    const std::lock_guard<std::mutex> lock(mutex_);
    results_[rank.id()] = values;
  }

  bool dies(At place, int64_t step, int nth, int id) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto death = std::find_if(deaths_.begin(), deaths_.end(), [&](const Death& each) {
      return each.at == place && step >= each.step && nth >= each.nth && (each.id < 0 || each.id == id);
    });
    // In the last step there is nobody to tell the end.
    if (death == deaths_.end() || step + 1 >= options_.num_steps ||
        num_kills_ - kills_at_step_ >= options_.most_deaths_at_once) {
      return false;
    }
    deaths_.erase(death);
    ++num_kills_;
    lock.unlock();
    if (options_.joins_at_loss) job_.add();
    return true;
  }

  void join_at(int64_t step) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = joins_.find(step);
      if (found == joins_.end()) return;
      joins_.erase(found);
    }
    job_.add();
  }

  int kills_so_far() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return num_kills_;
  }

  void note_step(int64_t step, int world_size, int kills_before_world) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // All have met since the last death: as many as now, too, are there when one has come for each that is gone.
    if (world_size == job_.num_living() && kills_before_world == num_kills_) kills_at_step_ = num_kills_;
    sizes_[step] = world_size;
  }

  const SpreadJob options_;
  ThreadJob job_;
  std::mutex mutex_;
  std::vector<Death> deaths_;
  std::multiset<int64_t> joins_;
  int num_kills_ = 0, kills_at_step_ = 0;
  std::map<int64_t, int> sizes_;
  std::map<int, std::vector<at::Tensor>> results_;  // by id
};

constexpr Way kWaysWithCopies[] = {Way::replicated_shards, Way::zero_of_pairs, Way::tensor_parallel};

TEST(ElasticSpreadRanks, WithoutADeathAllTrainAsOneProcessDoes) {
  for (const Way way : {Way::replicated_shards, Way::shards, Way::zero_of_pairs, Way::zero, Way::tensor_parallel}) {
    for (const int num_ranks : {1, 2, 3, 4}) {
      SCOPED_TRACE(c10::str("way ", int(way), ", ", num_ranks, " ranks"));
      SpreadTraining training({.way = way, .num_ranks = num_ranks, .num_steps = 4});
      training.run();
      training.expect_trained();
      EXPECT_THAT(training.members(), Each(num_ranks));
    }
  }
}

TEST(ElasticSpreadRanks, ARankThatDiesBeforeCommitCostsTheStepOnce) {
  for (const Way way : kWaysWithCopies) {
    for (const At at : {At::forward, At::backward, At::commit}) {
      for (int id = 0; id < 4; ++id) {
        SCOPED_TRACE(c10::str("way ", int(way), ", place ", int(at), ", rank ", id));
        SpreadTraining training({.way = way, .deaths = {{.step = 2, .at = at, .nth = 1, .id = id}}});
        training.run();
        training.expect_trained();
        if (training.num_kills() == 0) continue;  // fewer collectives there
        EXPECT_THAT(training.members(), ElementsAre(4, 4, 3, 3, 3, 3));
      }
    }
  }
}

TEST(ElasticSpreadRanks, ARankThatDiesBehindCommitCostsNoMoreThanThatStep) {
  for (const Way way : kWaysWithCopies) {
    for (const At at : {At::before_step, At::in_step, At::behind_step}) {
      for (const int nth : {0, 1}) {
        SCOPED_TRACE(c10::str("way ", int(way), ", place ", int(at), ", collective ", nth));
        SpreadTraining training({.way = way, .deaths = {{.step = 2, .at = at, .nth = nth, .id = 3}}});
        training.run();
        training.expect_trained();
        // Of all optimizers ZeRO alone communicates.
        const bool comes_by = nth == 0 || (at == At::in_step && way == Way::zero_of_pairs);
        EXPECT_EQ(training.num_kills(), int(comes_by));
      }
    }
  }
}

TEST(ElasticSpreadRanks, ARankDiesWhileTheOthersBuildOrMeet) {
  for (const Way way : kWaysWithCopies) {
    for (const At at : {At::building, At::meeting}) {
      for (int nth = 0; nth < 8; ++nth) {
        SCOPED_TRACE(c10::str("way ", int(way), ", place ", int(at), ", collective ", nth));
        SpreadTraining training(
            {.way = way,
             .num_ranks = 4,
             .deaths = {{.step = 2, .at = At::forward, .id = 1}, {.step = 2, .at = at, .nth = nth, .id = 4}},
             .joins_at_loss = true,
             .most_deaths_at_once = 2});
        training.run();
        training.expect_trained();
      }
    }
  }
}

TEST(ElasticSpreadRanks, AWholeReplicaIsLostAndBuiltAgainFromTheOther) {
  SpreadTraining training({.way = Way::replicated_shards,
                           .num_ranks = 4,
                           .num_steps = 8,
                           .deaths = {{.step = 2, .at = At::forward, .id = 2}, {.step = 2, .at = At::forward, .id = 3}},
                           .joins = {4, 4},
                           .most_deaths_at_once = 2});
  training.run();
  training.expect_trained();
  EXPECT_EQ(training.num_kills(), 2);
  EXPECT_THAT(training.members(), ElementsAre(4, 4, 2, 2, 2, 4, 4, 4));
}

TEST(ElasticSpreadRanks, NewcomersTakeTheirPartsAndAllAreCutAnew) {
  for (const Way way : {Way::replicated_shards, Way::shards, Way::zero_of_pairs, Way::zero, Way::tensor_parallel}) {
    SCOPED_TRACE(c10::str("way ", int(way)));
    SpreadTraining training({.way = way, .num_ranks = 2, .num_steps = 7, .joins = {1, 3}});
    training.run();
    training.expect_trained();
    EXPECT_THAT(training.members(), ElementsAre(2, 2, 3, 3, 4, 4, 4));
  }
}

TEST(ElasticSpreadRanks, APartWhoseOnlyCopyIsLostIsNamed) {
  const auto failures_of = [](Way way) {
    SpreadTraining training({.way = way, .num_ranks = 3, .deaths = {{.step = 2, .at = At::forward, .id = 1}}});
    training.run();
    EXPECT_THAT(training.failures(), SizeIs(2));
    return training.failures();
  };
  EXPECT_THAT(failures_of(Way::shards),
              Each(AllOf(HasSubstr("[Elastic] no rank that is left has elements "), HasSubstr(" at step 2\n"),
                         HasSubstr("fix: start the job again from its last checkpoint; to outlive a loss cut inside of "
                                   "replicas: fully_shard on a (replicate, shard) mesh"))));
  EXPECT_THAT(failures_of(Way::zero), Each(HasSubstr("[Elastic] no rank that is left has the state of \"")));
}

// Nobody has a state of an optimizer yet, and still its owner is known.
TEST(ElasticSpreadRanks, AnOwnerOfZeroIsMissedBeforeItHasAnyState) {
  SpreadTraining training({.way = Way::zero, .num_ranks = 3, .deaths = {{.step = 1, .at = At::forward, .id = 1}}});
  training.run();
  EXPECT_THAT(training.failures(), Each(HasSubstr("[Elastic] no rank that is left has the state of \"")));
  EXPECT_THAT(training.failures(), SizeIs(2));
}

TEST(ElasticSpreadRanks, OneHundredDeathsAtRandom) {
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  const auto below = [&](int end) { return int(random() % unsigned(end)); };
  int num_kills = 0;
  for (int run = 0; num_kills < 100 && run < 400 && !HasFailure(); ++run) {
    SCOPED_TRACE(c10::str("run ", run, " of seed ", seed));
    SpreadJob options{.way = kWaysWithCopies[below(3)], .num_ranks = 4, .num_steps = 8, .joins_at_loss = true};
    for (int i = 1 + below(3); i > 0; --i) {
      options.deaths.push_back({.step = below(7), .at = At(below(kNumPlaces)), .nth = below(4)});
    }
    SpreadTraining training(options);
    training.run();
    training.expect_trained();
    num_kills += training.num_kills();
  }
  EXPECT_GE(num_kills, 100) << "seed " << seed;
}

// What the first run says to what `build` returns; after it there is no other meeting.
std::string refused_contents(const std::function<checkpoint::Contents()>& build) {
  std::string text;
  ThreadJob job([&](ThreadJob::Rank& rank) {
    Elastic elastic({.backend = "threads", .generations = rank.generations()});
    elastic.rebuild([&](const Group&) { return build(); });
    text = error_text<c10::ValueError>([&] { elastic.run([&] { elastic.commit(); }); });
  });
  job.start(1);
  job.wait();
  EXPECT_THAT(job.failures(), IsEmpty());
  return text;
}

TEST(ElasticSpreadRanks, WhatIsMisusedIsRefused) {
  const auto nothing = [](const Group&) { return checkpoint::Contents(); };
  ThreadJob job([&](ThreadJob::Rank& rank) {
    const auto refused = [](auto&& fn) { return error_text<c10::ValueError>(fn); };
    Elastic elastic({.backend = "threads", .generations = rank.generations()});
    EXPECT_THAT(refused([&] { elastic.rebuild(nullptr); }), HasSubstr("[Elastic::rebuild] the function is empty"));
    elastic.rebuild(nothing);
    EXPECT_THAT(refused([&] { elastic.rebuild(nothing); }),
                HasSubstr("[Elastic::rebuild] called a second time\n  fix: build everything in one function"));
    elastic.run([&] { elastic.commit(); });
    EXPECT_THAT(refused([&] { elastic.rebuild(nothing); }),
                HasSubstr("[Elastic::rebuild] the first run has begun\n  fix: call it before"));
  });
  job.start(1);
  job.wait();
  EXPECT_THAT(job.failures(), IsEmpty());
  int64_t value = 0;
  EXPECT_THAT(refused_contents([&] {
                return checkpoint::Contents{{"a", &value}, {"a", &value}};
              }),
              HasSubstr("the name \"a\" is there twice"));
  EXPECT_THAT(refused_contents([] {
                return checkpoint::Contents{{"random", checkpoint::random_state()}};
              }),
              HasSubstr("\"random\" differs from rank to rank"));
}

TEST(ElasticSpreadRanks, OtherNamesThanBeforeAreRefused) {
  const auto failures_with = [](const std::string& renamed) {
    ThreadJob job([&](ThreadJob::Rank& rank) {
      Elastic elastic({.backend = "threads", .generations = rank.generations()});
      int64_t value = 0;
      elastic.rebuild([&](const Group& world) {
        return checkpoint::Contents{{world->getSize() == 2 ? "value" : renamed, &value}};
      });
      while (elastic.step() < 4) {
        elastic.run([&] {
          if (rank.id() == 1 && elastic.step() == 2) throw Killed();
          elastic.commit();
        });
      }
    });
    job.start(2);
    job.wait();
    return job.failures();
  };
  EXPECT_THAT(failures_with("value"), IsEmpty());
  EXPECT_THAT(failures_with("other"), ElementsAre(HasSubstr("[Elastic] \"other\" is new: no rank has a state of it\n"
                                                            "  fix: return the same names from rebuild()")));
}

}  // namespace
}  // namespace serried::testing
