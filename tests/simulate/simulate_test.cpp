// Simulated time: closed forms, classes beside all ranks one by one, and what more bytes or slower links must do.
#include "tools/serried/simulate/simulate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/simulate/machines.h"
#include "tools/serried/simulate/demand.h"

namespace serried::simulation {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr double kHeadUs = 0.128;  // of the arrival of one rank, at 1 ns per byte

Job one_call(Machine machine, int64_t ranks, Call call) {
  return {
      .machine = std::move(machine), .axes = {{"dp", ranks}}, .programs = {{Action::issue(0, call), Action::wait(0)}}};
}

double us(const Job& job) {
  return to_us(simulate(job).step);
}

TEST(Simulate, ComputingTakesItsTime) {
  const Job job{.machine = plain_machine(2), .axes = {{"dp", 4}}, .programs = {{Action::compute(time_of_us(7))}}};
  const Simulation simulation = simulate(job);
  EXPECT_EQ(simulation.step, time_of_us(7));
  EXPECT_EQ(simulation.exposed(), 0);
  EXPECT_EQ(simulation.places.ranks.size(), 1u);
}

TEST(Simulate, MoreRanksThanCoresTakeTurns) {
  Job job{.machine = plain_machine(4), .axes = {{"dp", 6}}, .programs = {{Action::compute(time_of_us(10))}}};
  job.machine.cores_per_host = 1;
  EXPECT_DOUBLE_EQ(us(job), 40);  // the other host has 2 ranks
  EXPECT_EQ(simulate(job).places.ranks.size(), 2u);
}

// Two hosts of one rank: each sends half of its numbers, and then its half of the sums.
TEST(Simulate, OneLinkTakesBytesTimesBeta) {
  const double bytes = 4.0 * kMiB;
  EXPECT_NEAR(us(one_call(plain_machine(1), 2, {Kind::all_reduce, 4 * kMiB})),
              (10 + kHeadUs) + 2 * (10 + bytes / 2 / 1000), 0.01);
}

TEST(Simulate, ExchangeTakesTwiceAllButOneShare) {
  const double bytes = 4.0 * kMiB;
  EXPECT_NEAR(us(one_call(plain_machine(1), 8, {Kind::all_reduce, 4 * kMiB})),
              (10 + 7 * kHeadUs) + 2 * (10 + bytes * 7 / 8 / 1000), 0.01);
}

// Part by part, hop by hop: an oracle of its own, where a link carries one thing at a time and results come before
// what follows them, as in hierarchical/chain.cpp.
double chain_by_hand(int hosts, int lanes, double bytes) {
  const double alpha = 10, part = 131.072;
  const int count = int(bytes / 1000 / part), ahead = 4 * lanes;
  std::vector<double> up(size_t(hosts), 0), down(size_t(hosts), 0), back;
  for (int i = 0; i < count; ++i) {
    // No more than four chunks are on their way, of a part per lane.
    double time = i >= ahead ? back[size_t(i / lanes * lanes - ahead + lanes - 1)] : 0;
    for (int host = 0; host + 1 < hosts; ++host) {
      time = up[size_t(host)] = std::max(time, up[size_t(host)]) + part;
      time += alpha;
    }
    for (int host = hosts - 1; host > 0; --host) {
      time = down[size_t(host)] = std::max(time, down[size_t(host)]) + part;
      time += alpha;
    }
    back.push_back(time);
  }
  return back.back();
}

TEST(Simulate, ChainOfTwoHostsTakesOnePartMoreThanItsBytes) {
  for (const int lanes : {2, 4}) {
    const double simulated = us(one_call(plain_machine(lanes), 2 * lanes, {Kind::all_reduce, 4 * kMiB}));
    const double arrival = 10 + lanes * kHeadUs;
    EXPECT_NEAR(simulated - arrival, chain_by_hand(2, lanes, 4.0 * kMiB), 30) << lanes;
    EXPECT_NEAR(simulated - arrival, 4.0 * kMiB / 1000 + 131.072 + 20, 30) << lanes;
  }
}

TEST(Simulate, LongChainsWaitForChunksToComeBack) {
  for (const int hosts : {8, 16, 64}) {
    const double simulated = us(one_call(plain_machine(2), 2 * hosts, {Kind::all_reduce, 16 * kMiB, 4, Order::ranks}));
    const double by_hand = chain_by_hand(hosts, 2, 16.0 * kMiB);
    EXPECT_NEAR(simulated / by_hand, 1, 0.1) << hosts;
  }
}

TEST(Simulate, CollectivesHideBehindWhatIsComputed) {
  const Call call{Kind::all_gather, kMiB};
  const double alone = us(one_call(plain_machine(1), 2, call));
  Job job = one_call(plain_machine(1), 2, call);
  job.programs = {{Action::issue(0, call), Action::compute(time_of_us(5000)), Action::wait(0)}};
  EXPECT_EQ(simulate(job).exposed(), 0);
  job.programs = {{Action::issue(0, call), Action::compute(time_of_us(500)), Action::wait(0)}};
  const Simulation simulation = simulate(job);
  EXPECT_NEAR(to_us(simulation.step), alone, 1e-9);
  EXPECT_NEAR(to_us(simulation.exposed()), alone - 500, 1e-9);
  ASSERT_EQ(simulation.calls.size(), 1u);
  EXPECT_NEAR(to_us(simulation.calls[0].waited), alone - 500, 1e-9);
  EXPECT_NEAR(to_us(simulation.calls[0].alone), alone, 1e-9);
}

TEST(Simulate, CallsOfAGroupFollowEachOther) {
  const Call call{Kind::all_gather, kMiB};
  Job job = one_call(plain_machine(1), 2, call);
  job.programs = {{Action::issue(0, call), Action::issue(0, call), Action::wait(1), Action::wait(0)}};
  EXPECT_NEAR(us(job), 2 * us(one_call(plain_machine(1), 2, call)), 1e-9);
}

// Of each host two ranks, in two groups: their bytes go through one interface.
TEST(Simulate, GroupsOfAHostShareItsInterface) {
  Job job = one_call(plain_machine(2), 4, {Kind::all_gather, kMiB});
  job.axes = {{"dp", 2}, {"tp", 2}};
  EXPECT_NEAR(us(job), (10 + 2 * kHeadUs) + (10 + 2.0 * kMiB / 1000), 0.01);
}

TEST(Simulate, UplinksCarryWhatTheirHostsSendOverEachOther) {
  Machine machine = plain_machine(1);
  machine.uplink = Uplink{.hosts = 2, .oversubscription = 8};
  // Each host sends 3 pieces, two of them up: 4 pieces of 2 hosts through a link of a quarter of one interface.
  EXPECT_NEAR(us(one_call(machine, 4, {Kind::all_gather, kMiB})), (10 + 4 * 4 * kHeadUs) + (10 + 4 * 4.0 * kMiB / 1000),
              0.01);
  machine.uplink->oversubscription = 1;
  EXPECT_NEAR(us(one_call(machine, 4, {Kind::all_gather, kMiB})),
              us(one_call(plain_machine(1), 4, {Kind::all_gather, kMiB})), 0.01);
}

TEST(Simulate, AllWaitForTheSlowestRank) {
  Job job = one_call(plain_machine(1), 4, {Kind::barrier, 0});
  job.programs.push_back({Action::compute(time_of_us(1000)), Action::issue(0, {Kind::barrier, 0}), Action::wait(0)});
  job.program_of_rank = {0, 0, 1, 0};
  const Simulation simulation = simulate(job);
  EXPECT_NEAR(to_us(simulation.step), 1000 + 10 + 3 * kHeadUs, 1e-9);
  EXPECT_EQ(simulation.places.ranks.size(), 2u);
}

// Meshes with hosts that are cut unevenly by groups, and programs at random.
Job random_job(std::mt19937& random) {
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  static const std::vector<std::vector<Axis>> kMeshes = {{{"dp", 6}},
                                                         {{"dp", 4}, {"tp", 2}},
                                                         {{"dp", 3}, {"tp", 5}},
                                                         {{"dp", 8}, {"tp", 8}},
                                                         {{"dp", 2}, {"fsdp", 3}, {"tp", 4}},
                                                         {{"dp", 4}, {"fsdp", 4}, {"tp", 4}}};
  Job job{.machine = full_machine(draw(1, 6)),
          .axes = kMeshes[size_t(draw(0, int64_t(kMeshes.size()) - 1))],
          .programs = {{}}};
  if (draw(0, 2) == 0) job.machine.uplink.reset();
  job.machine.cores_per_host = draw(1, 6);
  Program& program = job.programs[0];
  std::vector<size_t> open;
  for (int64_t i = 0, issued = 0; i < 30; ++i) {
    if (draw(0, 2) == 0) program.push_back(Action::compute(time_of_us(double(draw(0, 300)))));
    if (!open.empty() && draw(0, 1) == 0) {
      program.push_back(Action::wait(open.back()));
      open.pop_back();
      continue;
    }
    const Kind kind = Kind(draw(0, int64_t(Kind::barrier)));
    const int64_t bytes = kind == Kind::barrier ? 0 : 960 * (draw(0, 1) == 0 ? draw(0, 20) : draw(100, 9000));
    program.push_back(Action::issue(size_t(draw(0, int64_t(job.axes.size()) - 1)), {kind, bytes}));
    open.push_back(size_t(issued++));
  }
  for (const size_t issued : open) program.push_back(Action::wait(issued));
  if (draw(0, 1) == 0) return job;
  job.programs.push_back(program);
  job.programs[1].insert(job.programs[1].begin(), Action::compute(time_of_us(77)));
  for (int64_t rank = 0; rank < job.num_ranks(); ++rank) job.program_of_rank.push_back(int32_t(draw(0, 3) == 0));
  return job;
}

TEST(Simulate, ClassesEndWhenTheirRanksEndOneByOne) {
  for (unsigned seed = 0; seed < 80; ++seed) {
    std::mt19937 random(seed);
    const Job job = random_job(random);
    const Simulation classes = simulate(job), one_by_one = simulate(job, {.one_by_one = true});
    ASSERT_EQ(int64_t(one_by_one.ends.size()), job.num_ranks());
    ASSERT_EQ(classes.step, one_by_one.step) << "seed " << seed;
    ASSERT_EQ(classes.compute, one_by_one.compute) << "seed " << seed;
    for (size_t i = 0; i < classes.ends.size(); ++i) {
      EXPECT_EQ(classes.ends[i], one_by_one.ends[size_t(classes.places.ranks[i].first)]) << "seed " << seed;
    }
    ASSERT_EQ(classes.calls.size(), one_by_one.calls.size());
    for (size_t i = 0; i < classes.calls.size(); ++i) {
      EXPECT_EQ(classes.calls[i].waited, one_by_one.calls[i].waited) << "seed " << seed;
      EXPECT_EQ(classes.calls[i].taken, one_by_one.calls[i].taken) << "seed " << seed;
    }
  }
}

TEST(Simulate, RanksThatNothingTellsApartAreOneClass) {
  Job job = one_call(full_machine(8), 4096, {Kind::all_reduce, 4 * kMiB});
  job.axes = {{"dp", 512}, {"tp", 8}};
  EXPECT_EQ(simulate(job).places.ranks.size(), 1u);
  job.machine.uplink.reset();
  EXPECT_EQ(simulate(job).places.ranks.size(), 1u);
}

TEST(Simulate, EachRunGivesTheSameNumbers) {
  std::mt19937 random(7);
  const Job job = random_job(random);
  const Simulation first = simulate(job), second = simulate(job);
  EXPECT_EQ(first.ends, second.ends);
  EXPECT_EQ(first.spans.size(), second.spans.size());
}

TEST(Simulate, MoreBytesSlowerLinksAndMoreDelayNeverHelp) {
  for (const Kind kind :
       {Kind::all_reduce, Kind::reduce_scatter, Kind::all_gather, Kind::broadcast, Kind::all_to_all}) {
    for (const int64_t per_host : {1, 2, 4}) {
      const auto time = [&](int64_t bytes, double beta, double alpha) {
        Machine machine = full_machine(per_host);
        machine.nic_out.beta_ns_per_byte = machine.nic_in.beta_ns_per_byte = Fitted::exactly(beta);
        machine.nic_out.alpha_us = Fitted::exactly(alpha);
        return simulate(one_call(machine, 8, {kind, bytes})).step;
      };
      Time before = 0;
      for (const int64_t bytes : {64 << 10, 256 << 10, 1 << 20, 8 << 20}) {
        const Time now = time(bytes, 1, 10);
        EXPECT_GT(now, before) << name_of(kind) << " " << bytes;
        EXPECT_GT(time(bytes, 2, 10), now) << name_of(kind) << " " << bytes;
        EXPECT_GT(time(bytes, 1, 20), now) << name_of(kind) << " " << bytes;
        before = now;
      }
    }
  }
}

// Published values of expected normal order statistics.
TEST(Simulate, SlowestOfManyIsAsLateAsTablesSay) {
  EXPECT_DOUBLE_EQ(expected_maximum(1), 0);
  EXPECT_NEAR(expected_maximum(2), 0.56419, 1e-4);
  EXPECT_NEAR(expected_maximum(3), 0.84628, 1e-4);
  EXPECT_NEAR(expected_maximum(10), 1.53875, 1e-4);
  EXPECT_NEAR(expected_maximum(100), 2.50759, 1e-4);
  EXPECT_NEAR(expected_maximum(1000), 3.24144, 1e-3);
}

TEST(Simulate, JitterIsThatOfTheSlowestRank) {
  Job job{.machine = plain_machine(1), .axes = {{"dp", 2}}, .programs = {{Action::compute(time_of_us(1000))}}};
  job.machine.jitter_sigma = 0.1;
  EXPECT_NEAR(to_us(jitter_of(job, simulate(job))), 56.419, 0.01);
}

TEST(SimulateErrors, RanksThatDoNotFitAreNamed) {
  Job job = one_call(plain_machine(4), 16, {Kind::barrier, 0});
  job.machine.hosts = 3;
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "16 ranks do not fit on the machine: it has 3 hosts of 4 ranks\n"
            "  fix: pass up to 12 ranks, or leave out \"hosts\" in the machine");
}

TEST(SimulateErrors, ProgramsThatCannotBeAreNamed) {
  Job job = one_call(plain_machine(1), 2, {Kind::barrier, 0});
  job.programs[0].push_back(Action::wait(1));
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "program 0 waits for collective 1, and has issued 1\n"
            "  fix: let it issue a collective before it waits for that");
  job.programs = {{Action::issue(2, {})}};
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "program 0 issues a collective on axis 2 of 1\n  fix: number the axes of the mesh from 0");
  job.programs = {{Action::compute(-1)}};
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "program 0 has an action of a negative size\n  fix: pass sizes of 0 and more");
  job.programs = {};
  EXPECT_EQ(error_of([&] { simulate(job); }), "not every rank has a program\n  fix: give each of the 2 ranks one");
  job.programs = {{}};
  job.program_of_rank = {0, 1};
  EXPECT_EQ(error_of([&] { simulate(job); }), "there is no program 1\n  fix: number the programs from 0");
}

TEST(SimulateErrors, RanksThatCallDifferentCollectivesAreNamed) {
  Job job = one_call(plain_machine(1), 2, {Kind::barrier, 0});
  job.programs.push_back({Action::issue(0, {Kind::all_gather, 4}), Action::wait(0)});
  job.program_of_rank = {0, 1};
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "ranks of a group along \"dp\" call different collectives: all_gather of 4 bytes and barrier of 0 bytes\n"
            "  fix: let the programs of a group's ranks issue the same calls in the same order");
  job.programs[1] = {};
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "rank 0 waits for ever for barrier of 0 bytes along \"dp\", which not all ranks of its group issue\n"
            "  fix: let the programs of a group's ranks issue the same calls in the same order");
}

TEST(SimulateErrors, StepsLongerThanTheClockAreNamed) {
  Job job = one_call(plain_machine(1), 2, {Kind::all_gather, int64_t(1) << 58});
  job.machine.nic_out.beta_ns_per_byte = Fitted::exactly(1e6);
  EXPECT_EQ(error_of([&] { simulate(job); }),
            "the step takes longer than 100 days\n  fix: make the model or the numbers of the machine smaller");
}

}  // namespace
}  // namespace serried::simulation
