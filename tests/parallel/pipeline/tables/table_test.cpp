// Tables of pipelines as values: text both ways, and every way in which one can be wrong.
#include "serried/parallel/pipeline/table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include <c10/util/Exception.h>

#include "serried/parallel/pipeline/schedule.h"

namespace serried {
namespace {

using ::testing::ElementsAre;
using Kind = PipelineAction::Kind;

constexpr const char* kTwoByTwo = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";

std::string refusal_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no ValueError";
}

std::string refusal_of_csv(std::string_view text) {
  return refusal_of([&] { PipelineTable::from_csv(text); });
}

TEST(PipelineTable, ComesBackFromCsv) {
  const PipelineTable table = PipelineTable::from_csv(kTwoByTwo);
  EXPECT_EQ(table.ranks(), 2);
  EXPECT_EQ(table.stages(), 2);
  EXPECT_EQ(table.microbatches(), 2);
  EXPECT_EQ(table.rows()[1][1], (PipelineAction{Kind::B, 1, 0}));
  EXPECT_EQ(table.to_csv(), kTwoByTwo);
}

TEST(PipelineTable, ComesBackFromText) {
  const PipelineTable table = PipelineTable::from_csv(kTwoByTwo);
  EXPECT_EQ(table.to_text(), "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n");
  EXPECT_EQ(PipelineTable::from_text(table.to_text()), table);
  EXPECT_EQ(PipelineTable::from_text("\n  rank 0:  0F0\t0F1 0B0 0B1\r\n\nrank 1: 1F0 1B0 1F1 1B1"), table);
}

TEST(PipelineTable, EmptyCellsBlanksAndLineEndsOfOtherSystemsMeanNothing) {
  EXPECT_EQ(PipelineTable::from_csv(" 0F0, 0F1 ,,,0B0,,0B1,\r\n,1F0,1B0,1F1,,1B1"), PipelineTable::from_csv(kTwoByTwo));
}

TEST(PipelineTable, BackwardsMayBeSplitForSomeMicrobatches) {
  const std::string text = "0F0,0F1,0B0,0I1,0W1\n1F0,1I0,1F1,1W0,1B1\n";
  EXPECT_EQ(PipelineTable::from_csv(text).to_csv(), text);
}

TEST(PipelineTable, ShardingActionsAreOfAStage) {
  const std::string text = "0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD\n";
  const PipelineTable table = PipelineTable::from_csv(text);
  EXPECT_EQ(table.to_csv(), text);
  EXPECT_EQ(table.rows()[0][0], (PipelineAction{.kind = Kind::unshard, .stage = 0}));
  EXPECT_EQ(to_string(table.rows()[0][0]), "unshard s0");
}

TEST(PipelineTable, ARankHasTheStagesOfItsRow) {
  const PipelineTable blocks = PipelineTable::from_csv("0F0,1F0,1B0,0B0\n2F0,3F0,3B0,2B0\n");
  EXPECT_THAT(blocks.stages_of(0), ElementsAre(0, 1));
  EXPECT_THAT(blocks.stages_of(1), ElementsAre(2, 3));
  EXPECT_EQ(blocks.rank_of(2), 1);
  EXPECT_THROW(blocks.rank_of(4), c10::IndexError);
  EXPECT_THROW(blocks.rank_of(-1), c10::IndexError);
  EXPECT_THROW(blocks.stages_of(2), c10::IndexError);
}

TEST(PipelineTable, AMissingActionIsNamed) {
  const std::string fix = "\n  fix: each stage needs F, and B or both I and W, for each micro-batch";
  EXPECT_EQ(refusal_of_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n"), "[PipelineTable] 1B1 is missing" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0B0,0B1\n1F0,1B0,1F1,1B1\n"), "[PipelineTable] 0F1 is missing" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0I0\n"), "[PipelineTable] 0W0 is missing" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0W0\n"), "[PipelineTable] 0I0 is missing" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0F1,0B0,0B1\n1F0,1B0\n"), "[PipelineTable] 1F1 is missing" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0B0\n2F0,2B0\n"), "[PipelineTable] 1F0 is missing" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0B0,0F2147483647,0B2147483647\n"), "[PipelineTable] 0F1 is missing" + fix);
}

TEST(PipelineTable, AnActionTwiceIsNamedWithBothPlaces) {
  EXPECT_EQ(refusal_of_csv("0F0,0F1,0B0,0B1,0F1\n"),
            "[PipelineTable] 0F1 is there twice: on rank 0 (its action 1) and on rank 0 (its action 4)\n"
            "  fix: leave one of them out");
  EXPECT_EQ(refusal_of_csv("0F0,0B0\n0F0,0B0\n"),
            "[PipelineTable] 0F0 is there twice: on rank 0 (its action 0) and on rank 1 (its action 0)\n"
            "  fix: leave one of them out");
}

TEST(PipelineTable, AWholeBackwardAndItsPartsDoNotGoTogether) {
  const std::string fix = "\n  fix: B is I and W in one: leave either out";
  EXPECT_EQ(refusal_of_csv("0F0,0B0,0I0,0W0\n"), "[PipelineTable] 0B0 and 0I0 are both there" + fix);
  EXPECT_EQ(refusal_of_csv("0F0,0B0,0W0\n"), "[PipelineTable] 0B0 and 0W0 are both there" + fix);
}

TEST(PipelineTable, AnActionOnTheWrongRankIsNamed) {
  EXPECT_EQ(refusal_of_csv("0F0,0F1,0B0,1B1,0B1\n1F0,1B0,1F1\n"),
            "[PipelineTable] 1B1 on rank 0 is on the wrong rank: 1F1 on rank 1\n"
            "  fix: put all actions of stage 1 into one row");
}

TEST(PipelineTable, AnActionOutOfRangeIsNamed) {
  const std::string fix = "\n  fix: stages and micro-batches are counted from 0, up to 2147483647";
  const auto of = [](PipelineAction action) {
    return refusal_of([&] { PipelineTable(std::vector<PipelineTable::Row>{{action}}); });
  };
  EXPECT_EQ(of({Kind::F, -1, 0}), "[PipelineTable] -1F0 on rank 0 is out of range" + fix);
  EXPECT_EQ(of({Kind::F, 0, -2}), "[PipelineTable] 0F-2 on rank 0 is out of range" + fix);
  EXPECT_EQ(refusal_of_csv("0F2147483648"), "[PipelineTable] 0F2147483648 on rank 0 is out of range" + fix);
  EXPECT_EQ(refusal_of_csv("9223372036854775807UNSHARD"),
            "[PipelineTable] 9223372036854775807UNSHARD on rank 0 is out of range" + fix);
}

TEST(PipelineTable, ARankWithoutActionsIsNamed) {
  EXPECT_EQ(refusal_of_csv("0F0,0B0\n\n1F0,1B0\n"),
            "[PipelineTable] rank 1 has nothing to do\n  fix: give every rank a stage, or leave the rank out");
  EXPECT_EQ(refusal_of_csv(""), "[PipelineTable] there are no rows\n  fix: give a row of actions for each rank");
  EXPECT_EQ(refusal_of_csv("0UNSHARD"),
            "[PipelineTable] no action is F, B, I or W\n  fix: a table says what is computed, and where");
}

TEST(PipelineTable, ACellThatIsNoActionIsShown) {
  const std::string fix = "\n  fix: write stage, F B I or W, micro-batch: 0F3; or 0UNSHARD, 0RESHARD, 0REDUCE_GRAD";
  for (const char* cell : {"F0", "0", "0F", "0X1", "0f1", "-1F0", "0F-1", "0F1x", "0 F1", "0UNSHARD1",
                           "0F99999999999999999999", "99999999999999999999F0", "(0F8;7B0)OVERLAP_F_B"}) {
    EXPECT_EQ(refusal_of_csv("0F0,0B0\n1F0," + std::string(cell)),
              "[PipelineTable] \"" + std::string(cell) + "\" in line 2 is no action" + fix);
  }
  EXPECT_EQ(refusal_of_csv("0F0,\x1b[31m"), "[PipelineTable] \"?[31m\" in line 1 is no action" + fix);
  EXPECT_EQ(refusal_of_csv(std::string(100, 'x')),
            "[PipelineTable] \"" + std::string(40, 'x') + "...\" in line 1 is no action" + fix);
}

TEST(PipelineTable, MessagesOfOtherTablesAreRefusedWithTheReason) {
  EXPECT_EQ(refusal_of_csv("0F0,0SEND_F0,0B0"),
            "[PipelineTable] \"0SEND_F0\" in line 1 is no action\n"
            "  fix: leave messages out: they follow from the actions");
}

TEST(PipelineTable, TextNamesItsRanksInOrder) {
  EXPECT_EQ(refusal_of([] { PipelineTable::from_text("rank 0: 0F0 0B0\nrank 2: 1F0 1B0\n"); }),
            "[PipelineTable] line 2 begins with \"rank 2: 1F0 \"\n"
            "  fix: begin it with \"rank 1:\": ranks stand in order, one in a line");
}

TEST(PipelineTable, ShardingActionsThatMakeNoSenseAreNamed) {
  const auto of = [](const std::string& first_row) { return refusal_of_csv(first_row + "\n1F0,1B0\n"); };
  EXPECT_EQ(of("0UNSHARD,0UNSHARD,0F0,0B0"),
            "[PipelineTable] 0UNSHARD on rank 0 finds the stage unsharded already\n  fix: leave it out");
  EXPECT_EQ(of("0RESHARD,0F0,0B0"),
            "[PipelineTable] 0RESHARD on rank 0 has no UNSHARD before it\n  fix: leave it out, or add that");
  EXPECT_EQ(of("0UNSHARD,0F0,0RESHARD,0B0"),
            "[PipelineTable] 0B0 on rank 0 comes while the stage is not unsharded\n  fix: put 0UNSHARD before it");
  EXPECT_EQ(of("0F0,0REDUCE_GRAD,0B0"),
            "[PipelineTable] 0B0 on rank 0 adds to gradients that are reduced already\n"
            "  fix: put 0REDUCE_GRAD after it");
  EXPECT_EQ(of("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD"),
            "[PipelineTable] 0REDUCE_GRAD on rank 0 is there twice\n  fix: leave one of them out");
  EXPECT_EQ(of("0F0,0B0,1REDUCE_GRAD"),
            "[PipelineTable] 1REDUCE_GRAD on rank 0 is on the wrong rank: the stage is on rank 1\n"
            "  fix: move it to that row");
  EXPECT_EQ(of("0F0,0B0,5RESHARD"),
            "[PipelineTable] 5RESHARD on rank 0 is out of range: no action computes in this stage\n"
            "  fix: stages are 0 to 1");
}

TEST(PipelineTable, SizesOtherThanThePipelinesAreNamed) {
  const PipelineTable table = PipelineTable::from_csv(kTwoByTwo);
  EXPECT_NO_THROW(table.check({.ranks = 2, .stages_per_rank = 1, .microbatches = 2}));
  const auto of = [&](TableOptions sizes) { return refusal_of([&] { table.check(sizes); }); };
  const std::string fix = "\n  fix: make a table for the pipeline's sizes";
  EXPECT_EQ(of({.ranks = 4, .microbatches = 2}),
            "[PipelineTable] the number of ranks is 2 in the table, but 4 in the pipeline" + fix);
  EXPECT_EQ(of({.ranks = 2, .microbatches = 3}),
            "[PipelineTable] the number of micro-batches is 2 in the table, but 3 in the pipeline" + fix);
  EXPECT_EQ(of({.ranks = 2, .stages_per_rank = 2, .microbatches = 2}),
            "[PipelineTable] the number of stages on rank 0 is 1 in the table, but 2 in the pipeline" + fix);
}

}  // namespace
}  // namespace serried
