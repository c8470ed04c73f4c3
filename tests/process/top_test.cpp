// `serried top` without ranks: texts, discovery in a made-up /proc, memory with nonsense in it, the table.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "serried/base/call_text.h"
#include "serried/launch/fd.h"
#include "tests/process/command.h"
#include "tools/serried/top/error.h"
#include "tools/serried/top/jobs.h"
#include "tools/serried/top/notes.h"
#include "tools/serried/top/pages.h"
#include "tools/serried/top/table.h"
#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

using serried::testing::TemporaryFolder;
using serried::testing::write_file;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using watch_page::Call;
using watch_page::Header;
using watch_page::RankPage;

TEST(TopText, NamesAreMadePrintable) {
  EXPECT_EQ(printable("a\x1b[2Jb\n\xc3\xa4\x7f"), "a?[2Jb????");
}

TEST(TopText, RanksAreListedInRuns) {
  EXPECT_EQ(list_text({}), "");
  EXPECT_EQ(ranks_text({3}), "rank 3");
  EXPECT_EQ(ranks_text({1, 2}), "ranks 1, 2");
  EXPECT_EQ(ranks_text({0, 1, 2, 3, 5, 9, 10}), "ranks 0-3, 5, 9, 10");
}

TEST(TopText, DurationsAndRatesStayShort) {
  EXPECT_EQ(duration_text(0.44), "0.4 s");
  EXPECT_EQ(duration_text(12.4), "12 s");
  EXPECT_EQ(duration_text(600), "10 min");
  EXPECT_EQ(duration_text(9000), "2.5 h");
  EXPECT_EQ(duration_text(1e6), "12 d");
  EXPECT_EQ(duration_text(-1), "0.0 s");
  EXPECT_EQ(rate_text(-1), "-");
  EXPECT_EQ(rate_text(12.34), "12.3");
  EXPECT_EQ(rate_text(123456), "123456");
  EXPECT_EQ(rate_text(0.0 / 0.0), "-");
  EXPECT_EQ(short_bytes(512), "512B");
  EXPECT_EQ(short_bytes(1536), "1.5K");
  EXPECT_EQ(short_bytes(int64_t(300) << 20), "300M");
  EXPECT_EQ(short_bytes(int64_t(1) << 30), "1.0G");
  EXPECT_EQ(short_bytes(INT64_MAX), "8388608T");
}

/// A made-up /proc.
class FakeProc {
 public:
  FakeProc() { write_file(folder_.path() + "/uptime", "1000.00 1.0\n"); }

  void add(pid_t pid, pid_t parent, char state, const std::vector<std::string>& environment = {}) {
    const std::string of_process = folder_.path() + "/" + std::to_string(pid);
    std::filesystem::create_directories(of_process + "/fd");
    write_file(of_process + "/stat", std::to_string(pid) + " (a ) name) " + state + " " + std::to_string(parent) +
                                         " 1 1 0 -1 0 0 0 0 0 70 30 0 0 20 0 1 0 90000 0 0\n");
    write_file(of_process + "/status", "Name:\ttrain\nVmRSS:\t  2048 kB\nRssShmem:\t 1024 kB\n");
    std::string text;
    for (const std::string& entry : environment) text += entry + '\0';
    write_file(of_process + "/environ", text);
    write_file(of_process + "/cmdline", std::string("./train\0--name\0\x1b[2J\0", 20));
  }

  void add_rank(pid_t pid, pid_t parent, const std::string& id, int rank, int world_size = 2) {
    add(pid, parent, 'S',
        {"SERRIED_LAUNCHER=1", "TORCHELASTIC_RUN_ID=" + id, "RANK=" + std::to_string(rank),
         "LOCAL_RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(world_size),
         "LOCAL_WORLD_SIZE=" + std::to_string(world_size)});
  }

  Proc proc() const { return Proc(folder_.path()); }

 private:
  TemporaryFolder folder_;
};

std::string choice(Proc proc, const std::string& word) {
  try {
    return choose_job(proc, word).id;
  } catch (const TopError& error) {
    return error.what();
  }
}

TEST(TopJobs, ReadsWhatTheKernelSaysOfAProcess) {
  FakeProc fake;
  fake.add(7, 5, 'T');
  const std::optional<Process> process = fake.proc().process(7);
  ASSERT_TRUE(process);
  EXPECT_EQ(process->pid, 7);
  EXPECT_EQ(process->parent, 5);
  EXPECT_TRUE(process->is_stopped());
  EXPECT_EQ(process->cpu_ticks, 100u);
  EXPECT_EQ(process->start_ticks, 90000u);
  EXPECT_EQ(process->resident_bytes, 2048 * 1024);
  EXPECT_EQ(process->shared_bytes, 1024 * 1024);
  EXPECT_FALSE(fake.proc().process(8));
  EXPECT_EQ(fake.proc().command(7), "./train --name ?[2J");
}

TEST(TopJobs, LinesThatAreNoProcessAreNone) {
  for (const char* line : {"", "7", "7 (train", "7 (train) S", "7 (train) S 1 2 3"}) {
    EXPECT_FALSE(parse_process(line, "")) << line;
  }
}

TEST(TopJobs, TheOnlyJobIsChosen) {
  FakeProc fake;
  fake.add(50, 1, 'S');
  fake.add_rank(101, 50, "ab12", 0);
  fake.add_rank(102, 50, "ab12", 1);
  fake.add_rank(103, 102, "ab12", 1);  // what rank 1 started
  Proc proc = fake.proc();
  const Job job = choose_job(proc, "");
  EXPECT_EQ(job.id, "ab12");
  EXPECT_EQ(job.launcher, 50);
  EXPECT_EQ(job.world_size, 2);
  EXPECT_THAT(job.ranks, ElementsAre(std::pair(0, 101), std::pair(1, 102)));
  EXPECT_THAT(job.gone, IsEmpty());
  EXPECT_EQ(job.command, "./train --name ?[2J");
}

TEST(TopJobs, AJobIsNamedByItsIdOrAnyOfItsProcesses) {
  FakeProc fake;
  fake.add_rank(101, 50, "ab12", 0, 1);
  fake.add_rank(201, 60, "cd34", 0, 1);
  fake.add_rank(202, 201, "cd34", 0, 1);
  for (const char* word : {"cd34", "c", "60", "201", "202"}) EXPECT_EQ(choice(fake.proc(), word), "cd34") << word;
}

TEST(TopJobs, AProcessGoesBeforeAnIdThatBeginsLikeIt) {
  FakeProc fake;
  fake.add_rank(201, 60, "cd34", 0, 1);
  fake.add_rank(101, 50, "60ab", 0, 1);
  EXPECT_EQ(choice(fake.proc(), "60"), "cd34");
  EXPECT_EQ(choice(fake.proc(), "60a"), "60ab");
}

TEST(TopJobs, OfSeveralJobsOneHasToBeNamed) {
  FakeProc fake;
  fake.add_rank(101, 50, "ab12", 0, 1);
  fake.add_rank(201, 60, "cd34", 0, 1);
  EXPECT_EQ(choice(fake.proc(), ""),
            "[top] 2 jobs run here:\n"
            "  ab12  launcher 50, 1 rank, 2 min, ./train --name ?[2J\n"
            "  cd34  launcher 60, 1 rank, 2 min, ./train --name ?[2J\n"
            "  fix: name one: serried top ab12");
}

TEST(TopJobs, WithoutAJobItSaysSo) {
  FakeProc fake;
  fake.add(7, 5, 'S', {"RANK=0"});
  EXPECT_EQ(choice(fake.proc(), ""),
            "[top] no job of this user runs on this host\n"
            "  fix: start one with serried run -n 4 ./train, or look as the user and on the host that runs it");
  EXPECT_EQ(choice(fake.proc(), "zz"),
            "[top] no job here is called \"zz\", and none of this user's runs\n"
            "  fix: start one with serried run -n 4 ./train");
  EXPECT_EQ(choice(fake.proc(), "7"),
            "[top] process 7 is no rank of a job that serried run started, and none of this user's runs\n"
            "  fix: start one with serried run -n 4 ./train");
}

TEST(TopJobs, EnvironmentsThatMakeNoSenseAreNoRanks) {
  FakeProc fake;
  fake.add_rank(101, 50, "ab12", 5, 2);
  fake.add_rank(102, 50, "", 0);
  fake.add(103, 50, 'S', {"SERRIED_LAUNCHER=1", "TORCHELASTIC_RUN_ID=x", "RANK=99999999999999999999"});
  Proc proc = fake.proc();
  EXPECT_THAT(find_jobs(proc), IsEmpty());
}

TEST(TopJobs, ARankWithoutAProcessIsGoneAndAJobWithoutAny) {
  FakeProc fake;
  fake.add(50, 1, 'S');
  fake.add_rank(101, 50, "ab12", 1, 3);
  Proc proc = fake.proc();
  const Job job = choose_job(proc, "");
  EXPECT_THAT(job.gone, ElementsAre(0, 2));
  fake.add(101, 50, 'Z');
  const Job rest = look_again(proc, job);
  EXPECT_THAT(rest.gone, ElementsAre(0, 1, 2));
  EXPECT_FALSE(rest.has_ended);  // the launcher is there
  fake.add(50, 1, 'Z');
  EXPECT_TRUE(look_again(proc, job).has_ended);
}

/// Memory as ranks make it, for the test to spoil.
class FakePage {
 public:
  static constexpr int kRanks = 3;
  struct Rank {
    RankPage page;
    Call calls[2];
  };
  struct Memory {
    Header header;
    char failure[64];
    Rank ranks[kRanks];
    uint32_t phases[kRanks];
  };

  FakePage() : file_(::memfd_create("serried", MFD_CLOEXEC)) {
    EXPECT_EQ(::ftruncate(file_.get(), sizeof(Memory)), 0);
    void* mapped = ::mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    memory_ = static_cast<Memory*>(mapped);
    Header& header = memory_->header;
    header.magic = Header::kMagic;
    header.version = Header::kVersion;
    header.is_shared = 1;
    header.world_size = kRanks;
    header.rank_stride = sizeof(Rank);
    header.ranks = offsetof(Memory, ranks);
    header.calls = offsetof(Rank, calls);
    header.call_stride = sizeof(Call);
    header.num_calls = 2;
    header.phases = offsetof(Memory, phases);
    header.phase_stride = sizeof(uint32_t);
    header.failure = offsetof(Memory, failure);
    header.failure_room = sizeof(Memory::failure);
    header.set_group("shm/1");
  }
  ~FakePage() { ::munmap(memory_, sizeof(Memory)); }

  Memory& memory() { return *memory_; }
  Page read() const { return read_page(file_.get(), ::geteuid()); }

 private:
  launch::Fd file_;
  Memory* memory_;
};

TEST(TopPages, AreReadAsRanksWriteThem) {
  FakePage fake;
  FakePage::Rank& rank = fake.memory().ranks[1];
  rank.page.pid = 4711;
  rank.page.rank = 5;
  rank.page.newest = 7;
  rank.page.num_steps = 3;
  rank.calls[1] = {.sequence = 7,
                   .kind = 1,
                   .dtype = 6,
                   .reduce_op = 0,
                   .num_dims = 1,
                   .root = -1,
                   .num_elements = 512,
                   .sizes = {512},
                   .part_of = "item()"};
  fake.memory().phases[1] = 9;
  const Page page = fake.read();
  EXPECT_EQ(page.problem, "");
  EXPECT_EQ(page.group, "shm/1");
  ASSERT_THAT(page.ranks, SizeIs(3));
  EXPECT_EQ(page.ranks[0].pid, 0);
  EXPECT_EQ(page.ranks[1].pid, 4711);
  EXPECT_EQ(page.ranks[1].rank, 5);
  EXPECT_EQ(page.ranks[1].num_steps, 3u);
  EXPECT_EQ(page.ranks[1].phase, 9u);
  EXPECT_EQ(call_text(page.ranks[1].call), "#7 all_reduce f32[512] sum");
  EXPECT_EQ(part_of_text(page.ranks[1].call), "item()");
  EXPECT_EQ(bytes_of(page.ranks[1].call), 2048);
}

TEST(TopPages, ACallThatIsBeingRewrittenIsNotShown) {
  FakePage fake;
  fake.memory().ranks[0].page.newest = 7;
  fake.memory().ranks[0].calls[1] = {.sequence = 9, .kind = 1};
  EXPECT_EQ(call_text(fake.read().ranks[0].call), "nothing yet");
}

TEST(TopPages, TextsOfOthersAreMadePrintable) {
  FakePage fake;
  std::memset(fake.memory().header.group, 0x1b, sizeof(Header::group));
  std::memset(fake.memory().failure, 0x07, sizeof(FakePage::Memory::failure));
  fake.memory().header.failed = 1;
  const Page page = fake.read();
  EXPECT_EQ(page.group, std::string(sizeof(Header::group), '?'));
  EXPECT_EQ(page.failure, std::string(sizeof(FakePage::Memory::failure), '?'));
  Call call{.sequence = 1, .kind = 200, .dtype = 100, .num_dims = 255};
  std::memset(call.part_of, 0x9b, sizeof call.part_of);
  EXPECT_EQ(call_text(call), "#1 call of kind 200 ?[0,0,0,0,0,...]");
  EXPECT_EQ(part_of_text(call), std::string(24, '?'));
  EXPECT_EQ(bytes_of(call), -1);
}

TEST(TopPages, OtherVersionsAreNamed) {
  FakePage fake;
  fake.memory().header.version = 7;
  EXPECT_EQ(fake.read().problem, "its layout has version 7, and this serried reads version 2");
  fake.memory().header.magic = 0;
  EXPECT_EQ(fake.read().problem, "another version of serried made it, or it is not yet made");
}

TEST(TopPages, NumbersThatLeadOutOfTheFileAreRefused) {
  const std::vector<std::function<void(Header&)>> spoil = {
      [](Header& h) { h.world_size = -1; },
      [](Header& h) { h.world_size = 0; },
      [](Header& h) { h.world_size = 4; },
      [](Header& h) { h.world_size = INT32_MAX; },
      [](Header& h) { h.rank_stride = 8; },
      [](Header& h) { h.rank_stride = UINT32_MAX; },
      [](Header& h) { h.ranks = UINT64_MAX; },
      [](Header& h) { h.ranks = sizeof(FakePage::Memory); },
      [](Header& h) { h.calls = UINT64_MAX; },
      [](Header& h) { h.call_stride = 0; },
      [](Header& h) { h.call_stride = UINT32_MAX; },
      [](Header& h) { h.num_calls = 0; },
      [](Header& h) { h.num_calls = 3; },
      [](Header& h) { h.num_calls = UINT32_MAX; },
      [](Header& h) { h.phases = UINT64_MAX; },
      [](Header& h) { h.phase_stride = UINT32_MAX; },
      [](Header& h) { h.failure = UINT64_MAX; },
      [](Header& h) { h.failure_room = UINT32_MAX; },
  };
  for (size_t i = 0; i < spoil.size(); ++i) {
    FakePage fake;
    spoil[i](fake.memory().header);
    EXPECT_EQ(fake.read().problem, "its layout makes no sense") << i;
  }
}

TEST(TopPages, WhateverIsInMemoryIsReadAndDrawn) {
  std::mt19937 random(20);
  int drawn = 0;
  for (int round = 0; round < 2000; ++round) {
    FakePage fake;
    char* bytes = reinterpret_cast<char*>(&fake.memory());
    // Behind the layout all is nonsense; of the layout, now and then a byte.
    for (size_t i = offsetof(Header, group); i < sizeof(FakePage::Memory); ++i) bytes[i] = char(random());
    if (round % 2 == 0) bytes[16 + random() % (offsetof(Header, group) - 16)] = char(random());
    const Page page = fake.read();
    if (!page.problem.empty()) continue;
    Snapshot snapshot;
    for (const PageRank& rank : page.ranks) {
      snapshot.rows.push_back(
          {.rank = rank.rank,
           .pid = rank.pid,
           .state = State::waiting,
           .place = {page.group, call_text(rank.call), part_of_text(rank.call), bytes_of(rank.call), rank.newest},
           .waits_seconds = double(rank.waits_since),
           .waits_on = {rank.rank}});
    }
    snapshot.notes = notes_of(snapshot, {{page.group, page.failure}}, {});
    for (const std::string& line : table_of(snapshot, {.width = 80})) {
      ASSERT_LE(line.size(), 80u);
      ASSERT_EQ(line, printable(line));
    }
    ++drawn;
  }
  EXPECT_GT(drawn, 900);
}

TEST(TopPages, FilesThatAreNoMemoryAreRefused) {
  const TemporaryFolder folder;
  write_file(folder.path() + "/file", std::string(4096, 'x'));
  const launch::Fd file(::open((folder.path() + "/file").c_str(), O_RDONLY));
  EXPECT_EQ(read_page(file.get(), ::geteuid()).problem, "it is no memory");
  const launch::Fd memory(::memfd_create("serried", MFD_CLOEXEC));
  EXPECT_EQ(read_page(memory.get(), ::geteuid()).problem, "it is too short");
  EXPECT_EQ(read_page(memory.get(), ::geteuid() + 1).problem, "it belongs to user " + std::to_string(::geteuid()));
}

/// Three ranks wait for a fourth, which is stopped.
Snapshot hung_job() {
  Snapshot snapshot;
  snapshot.job = {
      .id = "3f2a9c1d", .launcher = 4710, .world_size = 4, .command = "./train --steps 100", .seconds = 750};
  for (int rank = 0; rank < 4; ++rank) {
    Row row{.rank = rank, .pid = 4711 + rank, .state = rank == 2 ? State::stopped : State::waiting};
    row.place = {"shm/1", rank == 2 ? "#182 barrier" : "#183 all_reduce f32[512] sum", "",
                 rank == 2 ? int64_t(-1) : 2048, uint64_t(rank == 2 ? 182 : 183)};
    if (rank != 2) {
      row.waits_seconds = 12;
      row.waits_on = {2};
    }
    row.counts[1] = {182, 0};
    row.calls_per_second = 0;
    row.cpu_percent = 0;
    row.resident_bytes = int64_t(300) << 20;
    row.shared_bytes = int64_t(4) << 20;
    snapshot.rows.push_back(row);
  }
  snapshot.notes = notes_of(snapshot, {}, {});
  return snapshot;
}

TEST(TopTable, SaysWhoWaitsForWhom) {
  EXPECT_THAT(hung_job().notes,
              ElementsAre("ranks 0, 1, 3 wait in #183 all_reduce f32[512] sum (2.0 KiB) of group shm/1 for rank 2, 12 "
                          "s; rank 2 is stopped: kill -CONT 4713 lets it go on"));
}

TEST(TopTable, FitsEightyColumns) {
  EXPECT_THAT(table_of(hung_job(), {.width = 80}),
              ElementsAre("serried top  job 3f2a9c1d  4 ranks  12 min  ./train --steps 100",
                          "rank  pid state   call/s  cpu  mem   for waits on last call",
                          "   0 4711 waiting    0.0   0% 300M  12 s 2        #183 all_reduce f32[512] sum",
                          "   1 4712 waiting    0.0   0% 300M  12 s 2        #183 all_reduce f32[512] sum",
                          "   2 4713 stopped    0.0   0% 300M                #182 barrier",
                          "   3 4714 waiting    0.0   0% 300M  12 s 2        #183 all_reduce f32[512] sum", "",
                          "ranks 0, 1, 3 wait in #183 all_reduce f32[512] sum (2.0 KiB) of group shm/1 for",
                          "  rank 2, 12 s; rank 2 is stopped: kill -CONT 4713 lets it go on"));
}

TEST(TopTable, AWideWindowShowsGroupBytesAndSharedMemory) {
  const std::vector<std::string> lines = table_of(hung_job(), {.width = 200});
  EXPECT_THAT(lines[1], AllOf(HasSubstr("shm"), HasSubstr("bytes"), HasSubstr("group")));
  EXPECT_THAT(lines[2], AllOf(HasSubstr("#183 all_reduce f32[512] sum"), HasSubstr("2.0 KiB"), HasSubstr("shm/1")));
}

TEST(TopTable, NoWindowIsTooSmall) {
  for (size_t width = 1; width < 130; ++width) {
    for (size_t height = 1; height < 12; ++height) {
      const std::vector<std::string> lines = table_of(hung_job(), {.width = width, .height = height});
      ASSERT_LE(lines.size(), height);
      for (const std::string& line : lines) ASSERT_LE(line.size(), width) << line;
    }
  }
}

TEST(TopTable, ALowWindowKeepsTheRanksThatAreWaitedFor) {
  Snapshot snapshot = hung_job();
  for (int rank = 4; rank < 100; ++rank) snapshot.rows.push_back({.rank = rank, .pid = 5000 + rank});
  const std::vector<std::string> lines = table_of(snapshot, {.width = 80, .height = 10});
  EXPECT_THAT(lines, SizeIs(10));
  EXPECT_THAT(lines[2], HasSubstr("stopped"));
  EXPECT_THAT(lines, ::testing::Contains("... 95 more ranks: enlarge the window, or use --once"));
}

TEST(TopTable, ColoursOnlyWhereAskedFor) {
  EXPECT_THAT(table_of(hung_job(), {.width = 80}), Each(Not(HasSubstr("\x1b"))));
  EXPECT_THAT(table_of(hung_job(), {.width = 80, .coloured = true}), ::testing::Contains(HasSubstr("\x1b[31mstopped")));
}

TEST(TopTable, StepsAreShownAndNamedWhereTheyAreKnown) {
  Snapshot snapshot = hung_job();
  for (Row& row : snapshot.rows) row.has_steps = true;
  snapshot.rows[0].steps_per_second = 8.25;
  const std::vector<std::string> lines = table_of(snapshot, {.width = 80});
  EXPECT_THAT(lines[1], AllOf(HasSubstr("step/s"), Not(HasSubstr("call/s"))));
  EXPECT_THAT(lines[2], HasSubstr(" 8.2 "));
  EXPECT_EQ(lines.back(), "a step is a backward pass that DistributedDataParallel averaged");
}

TEST(TopTable, WhatIsNotKnownIsSaid) {
  Snapshot snapshot;
  snapshot.job.world_size = 4;
  snapshot.rows = {{.rank = 0,
                    .pid = 1,
                    .state = State::waiting,
                    .place = {.call = "new_group"},
                    .waits_seconds = 3,
                    .waits_on = {1}},
                   {.rank = 1, .pid = 2}};
  EXPECT_THAT(
      notes_of(snapshot, {{"gloo/1", "rank 3 died"}}, {{1, "it is too short"}}),
      ElementsAre("group gloo/1 has failed: rank 3 died",
                  "rank 0 waits in new_group for rank 1, 3.0 s; rank 1 shows no group yet",
                  "the memory of rank 1 cannot be read: it is too short",
                  "rank 1 shows no group: none is made yet, or its backend or an older serried publishes nothing",
                  "2 of 4 ranks run on other hosts: look there with serried top"));
}

TEST(TopTable, JsonHasNullForWhatIsNotKnown) {
  const std::string text = json_of(hung_job());
  EXPECT_THAT(text,
              AllOf(HasSubstr("\"job\": \"3f2a9c1d\""), HasSubstr("\"steps_per_second\": null"),
                    HasSubstr("\"call\": \"#183 all_reduce f32[512] sum\""), HasSubstr("\"state\": \"stopped\"")));
}

}  // namespace
}  // namespace serried::top
