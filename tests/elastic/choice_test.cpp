// Whose state counts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/elastic/choice.h"

namespace serried::detail {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr auto kFresh = Condition::fresh;
constexpr auto kWhole = Condition::whole;
constexpr auto kTorn = Condition::torn;

TEST(ElasticChoice, AtTheStartTheFirstRankGives) {
  const Choice choice = choose({{0, kFresh, 1, 7}, {0, kFresh, 2, 7}, {0, kFresh, 1, 8}});
  EXPECT_TRUE(choice.is_start);
  EXPECT_THAT(choice.sources, ElementsAre(0));
  EXPECT_THAT(choice.receivers, ElementsAre(1));
  EXPECT_THAT(choice.buffer_receivers, ElementsAre(2));
}

TEST(ElasticChoice, FreshRanksThatWentOnBehindACheckpointGive) {
  const Choice choice = choose({{0, kFresh, 1, 7}, {100, kFresh, 2, 7}});
  EXPECT_EQ(choice.step, 100);
  EXPECT_THAT(choice.sources, ElementsAre(1));
  EXPECT_THAT(choice.receivers, ElementsAre(0));
}

TEST(ElasticChoice, AllOfTheHighestStepGive) {
  const Choice choice = choose({{4, kWhole, 1, 7}, {5, kWhole, 2, 7}, {4, kWhole, 1, 7}, {5, kWhole, 2, 7}});
  EXPECT_FALSE(choice.is_start);
  EXPECT_EQ(choice.step, 5);
  EXPECT_THAT(choice.sources, ElementsAre(1, 3));
  EXPECT_THAT(choice.receivers, ElementsAre(0, 2));
  EXPECT_THAT(choice.buffer_receivers, IsEmpty());
}

TEST(ElasticChoice, AFreshRankNeverGivesWhereAnotherHasStepped) {
  const Choice choice = choose({{900, kFresh, 1, 7}, {5, kWhole, 2, 7}});
  EXPECT_EQ(choice.step, 5);
  EXPECT_THAT(choice.sources, ElementsAre(1));
  EXPECT_THAT(choice.receivers, ElementsAre(0));
}

TEST(ElasticChoice, ATornRankTakesEvenWhatLooksTheSame) {
  const Choice choice = choose({{5, kTorn, 2, 7}, {5, kWhole, 2, 7}});
  EXPECT_THAT(choice.sources, ElementsAre(1));
  EXPECT_THAT(choice.receivers, ElementsAre(0));
  EXPECT_THAT(choice.buffer_receivers, ElementsAre(0));
}

TEST(ElasticChoice, BuffersAreTheFirstSourcesOnOtherSourcesToo) {
  const Choice choice = choose({{5, kWhole, 2, 7}, {5, kWhole, 2, 8}});
  EXPECT_THAT(choice.sources, ElementsAre(0, 1));
  EXPECT_THAT(choice.receivers, IsEmpty());
  EXPECT_THAT(choice.buffer_receivers, ElementsAre(1));
}

TEST(ElasticChoice, WhereAllThatSteppedAreTornNobodyGives) {
  EXPECT_THAT(choose({{5, kTorn, 2, 7}, {0, kFresh, 1, 7}}).sources, IsEmpty());
}

}  // namespace
}  // namespace serried::detail
