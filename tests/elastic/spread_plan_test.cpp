// Which state counts where ranks hold parts of it, and which bytes go where.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/checkpoint/failure.h"
#include "serried/elastic/spread_plan.h"

namespace serried::detail {
namespace {

using checkpoint::detail::Region;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// Rows [begin, end) of float "m.w" with 6 rows of 2.
SpreadPart rows(int64_t begin, int64_t end) {
  SpreadPart part{.entry = "m", .name = "w", .dtype = at::kFloat, .region = Region::whole({6, 2})};
  part.region.spans[0] = begin < end ? std::vector<Span>{{begin, end - begin}} : std::vector<Span>{};
  return part;
}

/// Columns of the same.
SpreadPart columns(int64_t begin, int64_t end) {
  SpreadPart part = rows(0, 6);
  part.region.spans[1] = {{begin, end - begin}};
  return part;
}

SpreadOffer offer(int rank, int64_t step, std::vector<SpreadPart> parts) {
  return {rank, step, {.parts = std::move(parts), .values = {{"m", nullptr}}}};
}

SpreadTold told(Condition condition, int64_t step, std::vector<SpreadOffer> offers) {
  return {condition, step, std::move(offers)};
}

std::vector<int> ranks_of(const SpreadChoice& choice) {
  std::vector<int> ranks;
  for (const SpreadOffer& each : choice.offers) ranks.push_back(each.rank);
  return ranks;
}

std::string failure_of(const std::vector<SpreadTold>& ranks) {
  try {
    choose_spread(ranks);
  } catch (const checkpoint::detail::Failure& failure) {
    return failure.text + "\n  fix: " + failure.fix;
  }
  return "no failure";
}

TEST(ElasticSpread, TheHighestStepThatAllRanksTogetherHaveCounts) {
  // Rank 0 has stepped, and rank 1 was cut off in commit().
  const SpreadTold ahead = told(Condition::whole, 6, {offer(0, 6, {rows(0, 3)}), offer(0, 5, {rows(0, 3)})});
  const SpreadTold behind = told(Condition::whole, 5, {offer(1, 5, {rows(3, 6)}), offer(1, 4, {rows(3, 6)})});
  EXPECT_EQ(choose_spread({ahead, behind}).step, 5);
  EXPECT_THAT(ranks_of(choose_spread({ahead, behind})), ElementsAre(0, 1));
  // A replica of it that has stepped, too.
  const SpreadTold replica = told(Condition::whole, 6, {offer(2, 6, {rows(3, 6)}), offer(2, 5, {rows(3, 6)})});
  EXPECT_EQ(choose_spread({ahead, behind, replica}).step, 6);
  EXPECT_THAT(ranks_of(choose_spread({ahead, behind, replica})), ElementsAre(0, 2));
}

TEST(ElasticSpread, TornRanksGiveTheirCopyAndFreshOnesNothing) {
  const SpreadTold torn = told(Condition::torn, 5, {offer(0, 5, {rows(0, 3)})});
  const SpreadTold whole = told(Condition::whole, 6, {offer(1, 6, {rows(3, 6)}), offer(1, 5, {rows(3, 6)})});
  const SpreadTold fresh = told(Condition::fresh, 0, {offer(2, 0, {rows(0, 6)})});
  const SpreadChoice choice = choose_spread({torn, whole, fresh});
  EXPECT_EQ(choice.step, 5);
  EXPECT_FALSE(choice.is_start);
  EXPECT_THAT(ranks_of(choice), ElementsAre(0, 1));
}

TEST(ElasticSpread, APartThatNobodyHasIsNamed) {
  const SpreadTold one = told(Condition::whole, 5, {offer(0, 5, {rows(0, 2)})}),
                   other = told(Condition::whole, 5, {offer(1, 5, {rows(4, 6)})});
  EXPECT_EQ(
      failure_of({one, other}),
      "no rank that is left has elements 4 to 7 of \"m.w\", which has the sizes [6, 2], at step 5\n"
      "  fix: start the job again from its last checkpoint; to outlive a loss cut inside of replicas: fully_shard "
      "on a (replicate, shard) mesh, ZeroRedundancyOptimizer over some of the ranks");
}

TEST(ElasticSpread, ANameThatOnlyTheLostHadIsNamed) {
  SpreadTold one = told(Condition::whole, 5, {offer(0, 5, {rows(0, 6)})});
  one.names = {"m.w", "m.stage1.w"};
  EXPECT_THAT(failure_of({one}), HasSubstr("no rank that is left has \"m.stage1.w\" at step 5\n  fix: start"));
}

TEST(ElasticSpread, AnOwnerThatIsLostIsNamed) {
  SpreadTold one = told(Condition::whole, 5, {offer(0, 5, {})});
  one.offers[0].state.values["opt"] = {{"groups", {{{"params", {"a", "b"}}}}}};
  one.offers[0].state.owners["opt"] = {"a"};
  EXPECT_THAT(failure_of({one}), HasSubstr("no rank that is left has the state of \"b\" in \"opt\" at step 5"));
  one.offers[0].state.owners["opt"] = {"a", "b"};
  EXPECT_EQ(choose_spread({one}).step, 5);
}

TEST(ElasticSpread, WithoutAnyWholeStepThatIsSaid) {
  EXPECT_THAT(failure_of({told(Condition::torn, 5, {}), told(Condition::fresh, 0, {})}),
              HasSubstr("no rank that is left has the state of a whole step"));
}

/// Source, and runs as {in source, in target, bytes}.
std::vector<std::pair<int, std::vector<std::vector<int64_t>>>> shown(const std::vector<SpreadTransfer>& transfers) {
  std::vector<std::pair<int, std::vector<std::vector<int64_t>>>> all;
  for (const SpreadTransfer& each : transfers) {
    auto& runs = all.emplace_back(each.source, std::vector<std::vector<int64_t>>()).second;
    for (const CopiedRun& run : each.runs) runs.push_back({run.in_source, run.in_target, run.num_bytes});
  }
  return all;
}

using Runs = std::vector<std::vector<int64_t>>;

TEST(ElasticSpread, EachPlaceIsFilledOnceFromItsOwnRankFirst) {
  // Halves become thirds; a row has 8 bytes.
  const SpreadChoice choice{.step = 5, .offers = {offer(0, 5, {rows(0, 3)}), offer(1, 5, {rows(3, 6)})}};
  const auto transfers = transfers_of(choice, {{rows(0, 2)}, {rows(2, 4)}, {rows(4, 6)}});
  EXPECT_THAT(shown(transfers), ElementsAre(std::pair(0, Runs{{0, 0, 16}}), std::pair(1, Runs{{0, 8, 8}}),
                                            std::pair(0, Runs{{16, 0, 8}}), std::pair(1, Runs{{8, 0, 16}})));
}

TEST(ElasticSpread, RowsBecomeColumns) {
  const SpreadChoice choice{.step = 5, .offers = {offer(0, 5, {rows(0, 3)}), offer(1, 5, {rows(3, 6)})}};
  const auto transfers = transfers_of(choice, {{columns(1, 2)}});
  EXPECT_THAT(shown(transfers), ElementsAre(std::pair(0, Runs{{4, 0, 4}, {12, 4, 4}, {20, 8, 4}}),
                                            std::pair(1, Runs{{4, 12, 4}, {12, 16, 4}, {20, 20, 4}})));
}

TEST(ElasticSpread, AtTheStartAndOfBuffersTheFirstRankCounts) {
  SpreadChoice choice{.step = 0, .is_start = true, .offers = {offer(0, 0, {rows(0, 6)}), offer(1, 0, {rows(0, 6)})}};
  EXPECT_THAT(shown(transfers_of(choice, {{}, {rows(3, 6)}})), ElementsAre(std::pair(0, Runs{{24, 0, 24}})));
  choice.is_start = false;
  EXPECT_THAT(shown(transfers_of(choice, {{}, {rows(3, 6)}})), ElementsAre(std::pair(1, Runs{{24, 0, 24}})));
  SpreadPart buffer = rows(3, 6);
  buffer.is_buffer = true;
  EXPECT_THAT(shown(transfers_of(choice, {{}, {buffer}})), ElementsAre(std::pair(0, Runs{{24, 0, 24}})));
}

TEST(ElasticSpread, EmptyPartsNeedNothing) {
  const SpreadChoice choice{.step = 5, .offers = {offer(0, 5, {rows(0, 6)})}};
  EXPECT_THAT(shown(transfers_of(choice, {{}, {rows(6, 6)}})), IsEmpty());
}

TEST(ElasticSpread, PartsAreToldAndReadAgain) {
  const SpreadState state = offer(0, 5, {rows(2, 4), columns(0, 1), rows(3, 3)}).state;
  const SpreadState again = described(nlohmann::json::parse(description_of(state).dump()));
  ASSERT_EQ(again.parts.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(again.parts[i].full_name(), "m.w");
    EXPECT_EQ(again.parts[i].dtype, at::kFloat);
    EXPECT_EQ(again.parts[i].region.sizes, state.parts[i].region.sizes);
    EXPECT_EQ(again.parts[i].region.spans, state.parts[i].region.spans);
  }
}

}  // namespace
}  // namespace serried::detail
