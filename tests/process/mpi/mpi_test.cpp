// The mpi backend among ranks that mpirun has started: what the conformance suite, which runs there too, does not do.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Values;

Result mpirun(int ranks, std::vector<std::string> program, std::vector<std::string> environment = {}) {
  std::vector<std::string> words{"--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n",
                                 std::to_string(ranks)};
  words.insert(words.end(), program.begin(), program.end());
  Command command(words, std::move(environment), {SERRIED_MPIRUN});
  Result result = command.finish();
  EXPECT_TRUE(command.nothing_left());
  return result;
}

Result worker(int ranks, const std::string& mode, std::vector<std::string> environment = {}) {
  return mpirun(ranks, {SERRIED_MPI_WORKER, mode}, std::move(environment));
}

/// The worker as a process of its own, without mpirun.
Result lone_worker(const std::string& mode, std::vector<std::string> environment = {}) {
  Command command({mode}, std::move(environment), {SERRIED_MPI_WORKER});
  return command.finish();
}

void expect_right(const Result& result, int times) {
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "right\n"), times) << result.out << result.err;
}

TEST(Mpi, GroupsOfSomeRanksAreMadeByTheirMembersAlone) {
  expect_right(worker(4, "split"), 4);
}

TEST(Mpi, LongMessagesGoInPieces) {
  const Result result = worker(3, "pieces");
  expect_right(result, 3);
  EXPECT_EQ(count_of(result.out,
                     "[new_group] backend option \"piece_bytes\" of mpi is 1|  fix: pass a whole number from 64 to "
                     "1073741824"),
            3)
      << result.out;
}

TEST(Mpi, AnybodysMessageNamesItsSender) {
  const Result result = worker(3, "anybody");
  expect_right(result, 3);
  EXPECT_EQ(count_of(result.out, "[send] the tag is -1; this MPI takes 0.."), 3) << result.out;
}

TEST(Mpi, CallbacksMayWaitForCollectives) {
  expect_right(worker(2, "callback"), 2);
}

TEST(Mpi, TrainsAsOneProcessDoes) {
  expect_right(worker(2, "ddp"), 2);
}

TEST(Mpi, CallsThatDifferAreNamedOnAllRanks) {
  const Result result = worker(3, "mismatch");
  EXPECT_EQ(count_of(result.out, "rank 1 #1 all_reduce f32[7] sum"), 6) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "first: [all_reduce] "), 3) << result.out;
  EXPECT_EQ(count_of(result.out, "then: [all_reduce] this group is unusable since: "), 3) << result.out;
}

TEST(Mpi, RanksOfSeveralHostsCompareTheirCalls) {
  const Result result = worker(3, "two_hosts");
  EXPECT_EQ(count_of(result.out, "right\n"), 6) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "first: [all_reduce] ranks called different collectives: rank 0 #"), 3) << result.out;
  EXPECT_EQ(count_of(result.out, "all_reduce f32[5] sum, rank 1 #"), 3) << result.out;
}

TEST(Mpi, SizesThatDifferAreNotMixedUp) {
  const Result result = worker(2, "sizes");
  EXPECT_EQ(count_of(result.out, "first: [all_to_all] sizes differ in all_to_all f32[1]"), 2)
      << result.out << result.err;
  EXPECT_EQ(count_of(result.out, ": rank 0 sends 8 bytes to rank 1, which takes 4|"), 2) << result.out << result.err;
}

TEST(Mpi, RanksThatDoNotComeAreNamed) {
  const Result result = worker(3, "timeout");
  EXPECT_EQ(count_of(result.out, "raised: [all_reduce] timed out after 1"), 2) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "in #2 all_reduce f32[5] sum: rank 1 is at #1 all_reduce f32[3] sum"), 4)
      << result.out;
  EXPECT_EQ(count_of(result.out, "receive: [recv] this group is unusable since: timed out after 1"), 2) << result.out;
}

TEST(Mpi, MessagesOfAnotherSizeAreRefused) {
  const Result little = worker(2, "receive_too_little");
  EXPECT_THAT(little.out, HasSubstr("raised: [recv] recv f32[5] from rank 0 takes 20 bytes, but rank 0 sent 12|"))
      << little.err;
  const Result much = worker(2, "receive_too_much");
  EXPECT_THAT(much.out, HasSubstr("raised: [recv] recv f32[3] from rank 0 failed: MPI_ERR_TRUNCATE")) << much.err;
}

TEST(Mpi, IsLeftToAProgramThatBeganIt) {
  const Result result = worker(2, "own_mpi");
  expect_right(result, 2);
  EXPECT_EQ(count_of(result.out, "left to the program"), 2) << result.out;
  EXPECT_EQ(count_of(result.out, "after: MPI has been finalised in this process, and cannot begin again"), 2)
      << result.out;
}

TEST(Mpi, BegunForOneThreadIsRefused) {
  const Result result = worker(1, "own_mpi_for_one_thread");
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("why: MPI was begun for one thread only (level 0, MPI_THREAD_SERIALIZED is 2): "
                                    "call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to serried"));
}

TEST(Mpi, BeginsWithAllRanksOfTheJobOrNone) {
  const Result some = worker(2, "refused");
  EXPECT_EQ(some.exit_code, 0) << some.out << some.err;
  EXPECT_EQ(count_of(some.out, "why: \n"), 2) << some.out;
  EXPECT_EQ(count_of(some.out,
                     "alone: [new_group] rank 0: MPI begins with all ranks of the job, and the group has 1 of "
                     "2: make a group of all of them before|  fix: start all ranks with one mpirun"),
            2)
      << some.out;
}

TEST(Mpi, WithoutMpirunSaysSo) {
  const Result result = lone_worker("refused");
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  const std::string why = "this process was not started by mpirun: start all ranks with mpirun -n 4 ./train";
  EXPECT_THAT(result.out, HasSubstr("why: " + why + "\n"));
  EXPECT_THAT(result.out, HasSubstr("alone: [new_group] \"mpi\" does not work here: " + why));
}

TEST(Mpi, OfAnotherVersionIsRefused) {
  const Result result = lone_worker("refused", {"LD_PRELOAD=" SERRIED_OTHER_MPI});
  EXPECT_THAT(result.out, HasSubstr("why: libserried_mpi.so was built for Open MPI v"));
  EXPECT_THAT(result.out, HasSubstr(", but the MPI library here is Open MPI v9.9.9: build serried with this MPI\n"));
}

TEST(Mpi, PluginOfAnotherVersionIsRefused) {
  const Result result = lone_worker("refused", {"SERRIED_PLUGIN_PATH=" SERRIED_OLD_MPI_PLUGINS});
  EXPECT_THAT(result.out, HasSubstr("why: " SERRIED_OLD_MPI_PLUGINS "/libserried_mpi.so was built with serried 0.0.1, "
                                    "LibTorch 1.0, this library is serried "));
}

TEST(Mpi, NeedsTheLaunchersRanksToBeMpis) {
  // As under the mpirun of another MPI: each process is a job of its own to this one.
  const Result result = lone_worker(
      "meet_all", {"RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=0", "PMI_RANK=0", "PMI_SIZE=2"});
  EXPECT_THAT(result.out, HasSubstr("raised: [new_group] rank 0: MPI begins with all ranks of the job")) << result.err;
}

TEST(Mpi, RanksOfSeveralJobsAreToldApart) {
  // The launcher's ranks are no ranks of MPI: each of them is a job of its own.
  const std::vector<std::string> run{"run", "-n", "2", SERRIED_MPI_WORKER, "meet_all"};
  const Result jobs = serried(run, {"PMI_RANK=0", "PMI_SIZE=2"});
  EXPECT_EQ(count_of(jobs.out, "raised: [new_group] ranks 0 and 1 are of different MPI jobs: 1 ranks of job "), 2)
      << jobs.out << jobs.err;
  const Result twice = serried(run, {"PMI_RANK=0", "PMI_SIZE=2", "PMI_JOBID=7"});
  EXPECT_EQ(
      count_of(twice.out, "raised: [new_group] ranks 0 and 1 of the group are both rank 0 of 1 in MPI_COMM_WORLD|"), 2)
      << twice.out << twice.err;
}

class MpiForks : public ::testing::TestWithParam<const char*> {};

TEST_P(MpiForks, LeaveTheGroupToTheParent) {
  const Result result = mpirun(2, {SERRIED_BACKEND_WORKER, "fork", "mpi", GetParam()});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "parent: 4, child 7"), 2) << result.out << result.err;
  EXPECT_THAT(result.out, Not(HasSubstr("wrong")));
}

INSTANTIATE_TEST_SUITE_P(On, MpiForks, Values("return", "exit", "_exit", "use"),
                         [](const auto& info) { return std::string(info.param); });

TEST(MpiExits, MayComeBeforeTheGroupIsDropped) {
  const Result result = mpirun(2, {SERRIED_BACKEND_WORKER, "leave_open", "mpi"});
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "left"), 2) << result.out << result.err;
}

}  // namespace
}  // namespace serried::testing
