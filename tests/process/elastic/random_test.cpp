// Ranks are killed at random places, one after the other, and newcomers take their places; `make soak` does it for as
// long as one likes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <sstream>

#include "tests/process/command.h"
#include "tests/support/random_programs.h"

namespace serried::testing {
namespace {

using ::testing::SizeIs;

constexpr int kDeaths = 6;  // of a job
constexpr const char* kWays[] = {"copies", "replicated_shards", "zero_of_pairs", "tensor_parallel"};

/// What follows `word` in each line.
std::set<std::string> words_behind(const std::string& text, const std::string& word) {
  std::set<std::string> found;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    found.insert(text.substr(at + word.size(), text.find_first_of(" \n", at + word.size()) - at - word.size()));
  }
  return found;
}

/// A step may be done once more for each loss, and no loss takes back more than the one that was under way.
void expect_at_most_one_step_lost(const std::string& log) {
  int64_t last = -1;
  for (const std::string& line : lines_of(log)) {
    if (line.rfind("step ", 0) != 0) continue;
    const int64_t step = std::stoll(line.substr(5));
    EXPECT_GE(step, last) << log;
    last = step;
  }
}

TEST(RandomElastic, RanksThatAreKilledAtRandomCostAStepAtMost) {
  std::map<std::string, int> by_place;
  int num_deaths = 0;
  for_random_programs(4, [&](uint64_t seed) {
    const std::string way = kWays[seed % std::size(kWays)];
    SCOPED_TRACE(way + ", seed " + std::to_string(seed));
    const TemporaryFolder folder;
    Command command({"run", "-n", "4", "--keep-going", "--max-restarts", "1000", SERRIED_ELASTIC_RANDOM_WORKER, way,
                     std::to_string(seed), std::to_string(kDeaths), folder.path()});
    for (int death = 1; death <= kDeaths && !::testing::Test::HasFailure(); ++death) {
      command.wait_for("was killed by signal 9 (SIGKILL)", death);
    }
    command.wait_for("; bits ", 4);
    const Result result = command.finish();
    const std::string log = read_file(folder.path() + "/log");
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err << log;
    EXPECT_EQ(count_of(result.out, "equals one process; bits "), 4) << result.out << result.err << log;
    EXPECT_THAT(words_behind(result.out, "; bits "), SizeIs(1)) << result.out;
    EXPECT_EQ(count_of(log, "death "), kDeaths) << log;
    expect_at_most_one_step_lost(log);
    num_deaths += kDeaths;
    for (const std::string& line : lines_of(log)) {
      if (line.rfind("death ", 0) == 0) ++by_place[line.substr(6, line.find(' ', 6) - 6)];
    }
  });
  std::ostringstream places;
  for (const auto& [place, count] : by_place) places << "  " << place << " " << count;
  std::cout << "deaths: " << num_deaths << ", at" << places.str() << std::endl;
}

}  // namespace
}  // namespace serried::testing
