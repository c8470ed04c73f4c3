// What ranks publish, read as `serried top` reads it: from the files that this process has open.
#include "serried/base/call_text.h"
#include "serried/base/watch_page.h"

#include <unistd.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/on_ranks.h"
#include "tools/serried/top/pages.h"

namespace serried::detail {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

watch_page::Call published(const watch::Record& record) {
  watch_page::Call call;
  static_assert(sizeof call == sizeof record);
  std::memcpy(&call, &record, sizeof call);
  return call;
}

TEST(WatchPage, CallsReadTheSameWithAndWithoutLibTorch) {
  int compared = 0;
  for (int kind = 0; kind <= int(watch::Kind::recv); ++kind) {
    for (int dtype = -1; dtype <= int(at::kUInt64); ++dtype) {
      for (const int root : {-1, 3}) {
        watch::Record record = watch::make_record(watch::Kind(kind), at::Tensor(), root, c10d::ReduceOp::MAX);
        record.sequence = 183;
        record.dtype = int8_t(dtype);
        record.num_dims = uint8_t(dtype + 1) % 8;
        record.num_elements = 6;
        record.sizes = {1, 2, 3, 1, 1};
        EXPECT_EQ(watch_page::call_text(published(record)), watch::describe(record));
        ++compared;
      }
    }
  }
  EXPECT_EQ(compared, 12 * 31 * 2);
}

TEST(WatchPage, BytesAreThoseOfLibTorch) {
  for (int dtype = 0; dtype <= int(at::kUInt64); ++dtype) {
    EXPECT_EQ(watch_page::dtype_of(dtype).bytes, int64_t(c10::elementSize(at::ScalarType(dtype)))) << dtype;
  }
  EXPECT_EQ(watch_page::dtype_of(-1).bytes, 0);
  EXPECT_EQ(watch_page::dtype_of(127).bytes, 0);
}

// The memory of `group` in this process. Threads of tests before this one may still hold that of others.
std::vector<top::Page> pages_of(const std::string& group) {
  const std::string name = group.substr(0, group.find('@'));
  const top::Proc proc;
  std::vector<top::Page> pages;
  for (const top::MemoryFile& file : proc.memory_files(getpid())) {
    if (file.name.starts_with(watch_page::kMeetingPrefix)) continue;
    top::Page page = top::read_page(proc, getpid(), file.fd);
    if (page.group == name) pages.push_back(std::move(page));
  }
  return pages;
}

class PublishedByGroups : public serried::testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(Backends, PublishedByGroups, ::testing::ValuesIn(serried::testing::settings({3})),
                         serried::testing::name_of);

TEST_P(PublishedByGroups, SayWhatEachRankCalledLast) {
  on_ranks([&](const Group& group) {
    at::Tensor x = at::ones({7});
    all_reduce_(x, group);
    barrier(group);
    barrier(group);
    if (group->getRank() == 0) {
      const std::vector<top::Page> pages = pages_of(group->getGroupName());
      ASSERT_FALSE(pages.empty());
      for (const top::Page& page : pages) {
        EXPECT_EQ(page.problem, "");
        ASSERT_EQ(page.ranks.size(), 3u);
        if (page.ranks[0].pid == 0) continue;  // of another host, which may not have heard of all calls
        EXPECT_THAT(page.group, StartsWith(GetParam().backend + "/"));
        EXPECT_THAT(page.group, ::testing::Not(HasSubstr("@")));
        EXPECT_EQ(page.failure, "");
        for (int rank = 0; rank < 3; ++rank) {
          if (!is_hierarchical() || page.ranks[rank].pid != 0) EXPECT_EQ(page.ranks[rank].pid, getpid());
          EXPECT_EQ(page.ranks[rank].rank, rank);
          EXPECT_FALSE(page.ranks[rank].has_left);
          EXPECT_GE(page.ranks[rank].newest, 3u);
        }
        EXPECT_THAT(watch_page::call_text(page.ranks[0].call), HasSubstr(" barrier"));
      }
    }
    barrier(group);
  });
}

TEST(PublishedByGroups, IsGoneWithThem) {
  std::string name;
  run_ranks(2,
            [&](const Group& group) {
              barrier(group);
              EXPECT_FALSE(pages_of(group->getGroupName()).empty());
              if (group->getRank() == 0) name = group->getGroupName();
              barrier(group);
            },
            {.backend = "shm"});
  EXPECT_TRUE(pages_of(name).empty());
}

TEST(PublishedByGroups, StepsAreCounted) {
  run_ranks(2, [](const Group& group) {
    for (int step = 0; step < 3 + group->getRank(); ++step) count_step(group);
    EXPECT_EQ(as_own(*group->getDefaultBackend())->page()->num_steps, 3u + uint64_t(group->getRank()));
  });
}

TEST(PublishedByGroups, GroupsOfOthersCountNoSteps) {
  EXPECT_NO_THROW(count_step(new_group("fake", {.rank = 0, .world_size = 2})));
}

}  // namespace
}  // namespace serried::detail
