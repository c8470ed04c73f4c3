// Which rank is bound to which cores, and that it is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "serried/launch/error.h"
#include "serried/launch/numa.h"
#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(LaunchNuma, ListsOfCoresAreRead) {
  EXPECT_THAT(launch::parse_cores("0-2,8"), ElementsAre(0, 1, 2, 8));
  EXPECT_THAT(launch::parse_cores("5"), ElementsAre(5));
  EXPECT_THAT(launch::parse_cores(""), IsEmpty());
  for (const char* list : {"x", "3-1", "1-", "-1", "1,,2", "99999999"}) {
    EXPECT_THROW(launch::parse_cores(list), launch::LaunchError) << list;
  }
}

TEST(LaunchNuma, NodesComeInOrderWithTheCoresThatAreAllowed) {
  const TemporaryFolder folder;
  for (const auto& [node, list] : std::map<std::string, std::string>{
           {"node10", "8-11"}, {"node2", "0-3"}, {"node3", ""}, {"node4", "4-7"}, {"nodes", "1"}, {"power", "1"}}) {
    std::filesystem::create_directory(folder.path() + "/" + node);
    write_file(folder.path() + "/" + node + "/cpulist", list + "\n");
  }
  EXPECT_THAT(launch::numa_nodes({1, 2, 8, 9, 20}, folder.path()), ElementsAre(ElementsAre(1, 2), ElementsAre(8, 9)));
  EXPECT_THAT(launch::numa_nodes({1}, folder.path() + "/none"), IsEmpty());
}

TEST(LaunchNuma, RanksAreSpreadOverNodes) {
  const std::vector<std::vector<int>> nodes = {{0, 1}, {2, 3}};
  const auto first_cores = [&](int num_local) {
    std::vector<int> cores;
    for (int rank = 0; rank < num_local; ++rank) cores.push_back(launch::cores_of_rank(nodes, rank, num_local)[0]);
    return cores;
  };
  EXPECT_THAT(first_cores(1), ElementsAre(0));
  EXPECT_THAT(first_cores(2), ElementsAre(0, 2));
  EXPECT_THAT(first_cores(3), ElementsAre(0, 0, 2));
  EXPECT_THAT(first_cores(4), ElementsAre(0, 0, 2, 2));
  EXPECT_THROW(launch::cores_of_rank({}, 0, 1), launch::LaunchError);
}

TEST(LaunchNuma, ARankMayRunOnTheCoresOfItsNodeOnly) {
  const std::vector<std::vector<int>> nodes = launch::numa_nodes(launch::allowed_cores());
  ASSERT_FALSE(nodes.empty());
  const Result result = serried(shell({"-n", "2", "--numa"}, "grep Cpus_allowed_list /proc/self/status | cut -f2"));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (int rank = 0; rank < 2; ++rank) {
    const std::string head = "[rank " + std::to_string(rank) + "] ";
    const size_t at = result.out.find(head);
    ASSERT_NE(at, std::string::npos) << result.out;
    const std::string list = result.out.substr(at + head.size(), result.out.find('\n', at) - at - head.size());
    EXPECT_EQ(launch::parse_cores(list), launch::cores_of_rank(nodes, rank, 2));
  }
}

}  // namespace
}  // namespace serried::testing
