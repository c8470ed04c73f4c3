// Placements as text, back again, and the checks of a list of them.
#include "serried/mesh/placement.h"

#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;

std::vector<Placement> all_placements() {
  std::vector<Placement> all = {Replicate()};
  for (int64_t dim = -4; dim <= 12; ++dim) {
    all.push_back(Shard(dim));
    all.push_back(BalancedShard(dim));
    for (int64_t split : {2, 3, 16, 100000}) all.push_back(StridedShard(dim, split));
  }
  for (int kind = 0; kind < 8; ++kind) all.push_back(Partial(ReduceKind(kind)));
  return all;
}

TEST(Placement, HasOneText) {
  EXPECT_EQ(to_string(Replicate()), "R");
  EXPECT_EQ(to_string(Shard(0)), "S0");
  EXPECT_EQ(to_string(Shard(-1)), "S-1");
  EXPECT_EQ(to_string(StridedShard(1, 4)), "S1/4");
  EXPECT_EQ(to_string(StridedShard(1, 1)), "S1");
  EXPECT_EQ(to_string(BalancedShard(2)), "S2~");
  EXPECT_EQ(to_string(Partial()), "P");
  EXPECT_EQ(to_string(Partial("max")), "P(max)");
  EXPECT_EQ(to_string({Partial(), Partial("max"), Shard(1)}), "P P(max) S1");
  EXPECT_EQ(to_string(Placements{}), "");
}

TEST(Placement, StreamsItsText) {
  std::ostringstream out;
  out << Shard(2) << " / " << Placements{Shard(0), Replicate()};
  EXPECT_EQ(out.str(), "S2 / S0 R");
}

TEST(Placement, EveryTextComesBack) {
  const std::vector<Placement> all = all_placements();
  for (const Placement& one : all) EXPECT_EQ(parse_placements(to_string(one)), Placements{one}) << one;
  EXPECT_EQ(parse_placements(to_string(all)), all);
  EXPECT_EQ(parse_placements(""), Placements{});
}

TEST(Placement, BitsDifferWhereContentDoes) {
  std::set<uint64_t> seen;
  for (const Placement& one : all_placements()) EXPECT_TRUE(seen.insert(one.bits()).second) << one;
}

TEST(Placement, KnowsItsKind) {
  EXPECT_TRUE(Shard(1).is_shard(1));
  EXPECT_FALSE(Shard(1).is_shard(0));
  EXPECT_FALSE(Shard(1).is_strided());
  EXPECT_TRUE(StridedShard(1, 2).is_strided());
  EXPECT_TRUE(StridedShard(1, 2).is_shard(1));
  EXPECT_NE(StridedShard(1, 2), Shard(1));
  EXPECT_FALSE(StridedShard(1, 2).is_balanced());
  EXPECT_TRUE(BalancedShard(1).is_balanced());
  EXPECT_TRUE(BalancedShard(1).is_strided());
  EXPECT_TRUE(BalancedShard(1).is_shard(1));
  EXPECT_NE(BalancedShard(1), Shard(1));
  EXPECT_NE(BalancedShard(1), StridedShard(1, -1));
  EXPECT_EQ(BalancedShard(1).along(3), BalancedShard(3));
  EXPECT_EQ(StridedShard(1, 2).along(0), StridedShard(0, 2));
  EXPECT_TRUE(Partial("max").is_partial(ReduceKind::max));
  EXPECT_FALSE(Partial("max").is_partial(ReduceKind::sum));
  EXPECT_EQ(Replicate().dim(), -1);
}

TEST(Placement, PartialOfAnUnknownNameIsAnError) {
  EXPECT_EQ(error_text<c10::ValueError>([] { Partial("mean"); }),
            "[Partial] unknown reduction \"mean\"\n"
            "  fix: pass one of sum avg min max product band bor bxor");
}

constexpr const char* kParseFix =
    "\n  fix: separate by one space: R, S0 (cut along dim 0), S0/2 (strided), S0~ (balanced), P (sum), P(max); in the "
    "brackets "
    "one of avg min max product band bor bxor";

TEST(Placement, ParsingMarksTheWordItDoesNotKnow) {
  EXPECT_EQ(error_text<c10::ValueError>([] { parse_placements("S0 Shard R"); }),
            std::string("[parse_placements] placement 2 is \"Shard\", which is none\n"
                        "  S0 Shard R\n"
                        "     ^^^^^") +
                kParseFix);
  EXPECT_EQ(error_text<c10::ValueError>([] { parse_placements("S0  R"); }),
            std::string("[parse_placements] placement 2 is empty\n"
                        "  S0  R\n"
                        "     ^") +
                kParseFix);
}

TEST(Placement, ParsingRefusesEveryOtherSpelling) {
  for (const char* text : {"S",
                           "s0",
                           "S00",
                           "S+1",
                           "S0/",
                           "S0/1",
                           "S0/0",
                           "S0/-2",
                           "S0/2x",
                           "S0/-1",
                           "S0~~",
                           "S0~2",
                           "S0/2~",
                           "S~",
                           "S0x",
                           "S(0)",
                           "S40000",
                           "P()",
                           "P(sum)",
                           "P(mean)",
                           "P(",
                           "P(max",
                           "Pmax",
                           "r",
                           "RR",
                           "R ",
                           " R",
                           " ",
                           "R,R",
                           "R\tR",
                           "_S(0,2)",
                           "S99999999999999999999",
                           "S0/4294967298"}) {
    EXPECT_THROW(parse_placements(text), c10::ValueError) << text;
  }
}

TEST(CheckedPlacements, CountNegativeDimsFromTheFront) {
  EXPECT_EQ(checked_placements("here", parse_placements("S-1 S0 S-3/2 P"), 3, 4), parse_placements("S2 S0 S0/2 P"));
  EXPECT_EQ(checked_placements("here", {BalancedShard(-2)}, 3, 1), Placements{BalancedShard(1)});
  EXPECT_EQ(checked_placements("here", {Replicate()}, 0, 1), Placements{Replicate()});
}

TEST(CheckedPlacements, NeedOnePerAxis) {
  EXPECT_EQ(error_text<c10::ValueError>([] { checked_placements("distribute_tensor", {Shard(0)}, 2, 2); }),
            "[distribute_tensor] placements \"S0\" are 1, but the mesh has 2 axes\n"
            "  fix: pass one placement per mesh axis, R for those that hold the whole");
  EXPECT_EQ(error_text<c10::ValueError>([] { checked_placements("zeros", parse_placements("S0 R"), 2, 1); }),
            "[zeros] placements \"S0 R\" are 2, but the mesh has 1 axis\n"
            "  fix: pass one placement per mesh axis, R for those that hold the whole");
}

TEST(CheckedPlacements, RefuseADimTheTensorDoesNotHave) {
  EXPECT_EQ(error_text<c10::IndexError>([] { checked_placements("zeros", parse_placements("S-1 S2"), 2, 2); }),
            "[zeros] placements \"S-1 S2\" cut dim 2, but the tensor has 2 dims\n"
            "  fix: cut a dim in -2..1");
  EXPECT_EQ(error_text<c10::IndexError>([] { checked_placements("zeros", {Shard(-2)}, 1, 1); }),
            "[zeros] placements \"S-2\" cut dim -2, but the tensor has 1 dim\n"
            "  fix: cut a dim in -1..0");
  EXPECT_EQ(error_text<c10::IndexError>([] { checked_placements("zeros", {Shard(0)}, 0, 1); }),
            "[zeros] placements \"S0\" cut dim 0, but the tensor has 0 dims\n"
            "  fix: use R or P for a tensor without dims");
}

TEST(CheckedPlacements, RefuseASplitBelowOne) {
  EXPECT_EQ(error_text<c10::ValueError>([] { checked_placements("zeros", {StridedShard(0, 0)}, 1, 1); }),
            "[zeros] StridedShard(0, 0) cuts in less than one piece\n"
            "  fix: pass a split factor of 1 or more");
}

TEST(CheckedPlacements, MixOnlySumAndAvg) {
  EXPECT_EQ(checked_placements("here", parse_placements("P P(avg) P"), 1, 3), parse_placements("P P(avg) P"));
  EXPECT_EQ(checked_placements("here", parse_placements("P(max) S0 P(max)"), 1, 3),
            parse_placements("P(max) S0 P(max)"));
  EXPECT_EQ(
      error_text<c10::ValueError>([] { checked_placements("from_local", parse_placements("P R P(max)"), 1, 3); }),
      "[from_local] placements \"P R P(max)\" mix the reductions sum and max, whose order would change the value\n"
      "  fix: redistribute one of them to R first; only sum and avg mix");
}

}  // namespace
}  // namespace serried
