// Records, fingerprints and the sentences of the watch.
#include "serried/comm/collectives/watch.h"

namespace serried::watch {
namespace {

using at::ScalarType;
using c10d::ReduceOp;

Record at_sequence(uint64_t sequence, Record record) {
  record.sequence = sequence;
  return record;
}

Record sum_of(uint64_t sequence, at::IntArrayRef sizes, ScalarType dtype = at::kFloat) {
  return at_sequence(sequence, make_record(Kind::all_reduce, torch::zeros(sizes, dtype), -1, ReduceOp::SUM));
}

TEST(Watch, DescribesEachKindOfCall) {
  const auto i64 = torch::zeros({3}, at::kLong);
  EXPECT_EQ(describe(sum_of(183, {512, 4})), "#183 all_reduce f32[512,4] sum");
  EXPECT_EQ(describe(at_sequence(7, make_record(Kind::broadcast, i64, 0))), "#7 broadcast i64[3] from rank 0");
  EXPECT_EQ(describe(at_sequence(8, make_record(Kind::reduce, i64, 2, ReduceOp::MAX))),
            "#8 reduce i64[3] max to rank 2");
  EXPECT_EQ(describe(at_sequence(9, make_record(Kind::barrier, {}))), "#9 barrier");
  EXPECT_EQ(describe(make_record(Kind::send, i64, 1)), "send i64[3] to rank 1");
  EXPECT_EQ(describe(make_record(Kind::recv, i64)), "recv i64[3] from any rank");
  EXPECT_EQ(describe(Record()), "nothing yet");
}

TEST(Watch, DescribesScalarsEmptyAndDeepTensors) {
  EXPECT_EQ(describe(sum_of(1, {})), "#1 all_reduce f32[] sum");
  EXPECT_EQ(describe(sum_of(1, {0, 5})), "#1 all_reduce f32[0,5] sum");
  EXPECT_EQ(describe(sum_of(1, {1, 2, 1, 2, 1, 2, 1})), "#1 all_reduce f32[1,2,1,2,1,...] sum");
}

TEST(Watch, SaysHowManyElementsACallOverSeveralTensorsHas) {
  Record record = sum_of(2, {3});
  record.num_elements = 10;
  EXPECT_EQ(describe(record), "#2 all_reduce f32[3] of 10 elements in all sum");
}

TEST(Watch, DescribesRecordsThatNoRankMade) {
  Record record = sum_of(2, {3, 5});
  record.sizes[1] = int64_t(1) << 62;
  EXPECT_EQ(describe(record), "#2 all_reduce f32[3,4611686018427387904] of 15 elements in all sum");
  record.kind = Kind(200);
  record.dtype = 100;
  record.reduce_op = 77;
  record.num_dims = 250;
  EXPECT_THAT(describe(record), ::testing::StartsWith("#2 ? "));
}

TEST(Watch, NamesDtypesShortly) {
  EXPECT_EQ(dtype_name(at::kBFloat16), "bf16");
  EXPECT_EQ(dtype_name(at::kComplexFloat), "c64");
  EXPECT_EQ(dtype_name(at::kBool), "bool");
  EXPECT_EQ(describe_tensor(torch::zeros({2, 5}, at::kHalf)), "f16[2,5]");
  EXPECT_EQ(describe_tensor({}), "no tensor");
}

TEST(Watch, FingerprintHoldsAllThatMustAgree) {
  const uint64_t print = fingerprint(sum_of(5, {3, 4}));
  EXPECT_EQ(print, fingerprint(sum_of(6, {3, 4})));
  EXPECT_NE(print, fingerprint(sum_of(5, {4, 3})));
  EXPECT_NE(print, fingerprint(sum_of(5, {12})));
  EXPECT_NE(print, fingerprint(sum_of(5, {3, 4, 1})));
  EXPECT_NE(print, fingerprint(sum_of(5, {3, 4}, at::kDouble)));
  const auto x = torch::zeros({3, 4});
  EXPECT_NE(print, fingerprint(make_record(Kind::all_reduce, x, -1, ReduceOp::MAX)));
  EXPECT_NE(print, fingerprint(make_record(Kind::reduce_scatter, x, -1, ReduceOp::SUM)));
  EXPECT_NE(fingerprint(make_record(Kind::broadcast, x, 0)), fingerprint(make_record(Kind::broadcast, x, 1)));
  EXPECT_NE(fingerprint(Record()), 0u);
}

TEST(Watch, FingerprintLeavesOutSizesThatMayDiffer) {
  for (Kind kind : {Kind::all_gather, Kind::gather, Kind::scatter, Kind::all_to_all}) {
    const auto print = [&](at::IntArrayRef sizes, ScalarType dtype) {
      return fingerprint(make_record(kind, torch::zeros(sizes, dtype), 0));
    };
    EXPECT_EQ(print({3, 4}, at::kFloat), print({7}, at::kFloat));
    EXPECT_NE(print({3, 4}, at::kFloat), print({3, 4}, at::kLong));
  }
}

TEST(Watch, FingerprintHoldsWhatIsKnownOfTheSizesOfAll) {
  const auto gather_of = [](int64_t mine, uint32_t sizes_of_all) {
    const SizesOfAll scope(sizes_of_all);
    return make_record(Kind::gather, torch::zeros({mine}), 0);
  };
  const uint32_t small = hash_sizes({at::IntArrayRef({3, 5})}), large = hash_sizes({at::IntArrayRef({3, 7})});
  EXPECT_EQ(fingerprint(gather_of(3, small)), fingerprint(gather_of(5, small)));
  EXPECT_NE(fingerprint(gather_of(3, small)), fingerprint(gather_of(3, large)));
  EXPECT_FALSE(differ_in_knowledge(gather_of(3, small), gather_of(7, large)));
  EXPECT_TRUE(differ_in_knowledge(gather_of(3, 0), gather_of(5, small))) << "c10d's call knows nothing";
  EXPECT_TRUE(differ_in_knowledge(gather_of(3, small), gather_of(5, 0)));
  EXPECT_FALSE(differ_in_knowledge(gather_of(3, 0), gather_of(5, 0)));
  EXPECT_FALSE(differ_in_knowledge(gather_of(3, 0), sum_of(5, {3}))) << "another call";
  EXPECT_EQ(make_record(Kind::barrier, {}).sizes_of_all, 0u) << "only while the scope lives";
}

TEST(Watch, HashesOfSizesTellListsApart) {
  const std::vector<int64_t> one{3, 5}, two{5, 3}, front{3}, back{5}, none;
  EXPECT_EQ(hash_sizes({one}), hash_sizes({one}));
  const std::vector<uint32_t> all = {hash_sizes({one}),  hash_sizes({two}),        hash_sizes({front, back}),
                                     hash_sizes({none}), hash_sizes({none, none}), hash_sizes({one, none})};
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_NE(all[i], 0u);
    for (size_t k = 0; k < i; ++k) EXPECT_NE(all[i], all[k]) << i << " and " << k;
  }
}

TEST(Watch, SizesThatMustAgreeAreInTheFingerprint) {
  Record three = make_record(Kind::all_gather, torch::zeros({3})),
         five = make_record(Kind::all_gather, torch::zeros({5}));
  EXPECT_EQ(fingerprint(three), fingerprint(five));
  three.same_size = five.same_size = 1;
  EXPECT_NE(fingerprint(three), fingerprint(five));
}

TEST(Watch, MismatchesSayWhoReplaysAndThatGraphsCountOnTheSizesOfOthers) {
  const auto gather_of = [](const std::vector<int64_t>& sizes) {
    const SizesOfAll scope(hash_sizes({sizes}));
    Record record = make_record(Kind::gather, torch::zeros({3}), 0);
    record.sequence = 7;
    return record;
  };
  const auto replayed = [&](const std::vector<int64_t>& sizes) {
    const Replaying scope;
    return gather_of(sizes);
  };
  EXPECT_EQ(mismatch_text(0, gather_of({3, 5}), 1, gather_of({3, 7})),
            "ranks called different collectives: rank 0 #7 gather f32[3] to rank 0, rank 1 #7 gather f32[3] to rank 0; "
            "they count on different sizes of all ranks");
  EXPECT_EQ(mismatch_fix(gather_of({3, 5}), gather_of({3, 7})),
            "pass tensors of the same shape on every rank, or look for a call that only some ranks make");
  EXPECT_EQ(mismatch_text(1, replayed({3, 5}), 0, gather_of({3, 7})),
            "ranks called different collectives: rank 0 #7 gather f32[3] to rank 0, rank 1 #7 gather f32[3] to rank 0; "
            "they count on different sizes of all ranks; rank 0 is in no captured function, rank 1 replays a captured "
            "function");
  EXPECT_EQ(mismatch_fix(replayed({3, 5}), gather_of({3, 7})),
            "change the shapes that a captured function is called with on all ranks at once: its graph counts on what "
            "the other ranks hold, and a rank sees only its own; or leave such calls (gather, scatter, all_gather, "
            "all_to_all) outside of it");
  EXPECT_EQ(make_record(Kind::barrier, {}).captured, Captured::no) << "only while the scope lives";
}

TEST(Watch, MismatchNamesBothRanksAndBothCallsLowerRankFirst) {
  const Record mine = sum_of(5, {3});
  const Record theirs = sum_of(5, {5});
  const std::string text =
      "ranks called different collectives: rank 0 #5 all_reduce f32[3] sum, rank 2 #5 all_reduce f32[5] sum";
  EXPECT_EQ(mismatch_text(0, mine, 2, theirs), text);
  EXPECT_EQ(mismatch_text(2, theirs, 0, mine), text);
}

TEST(Watch, MismatchNamesWhatTheUserCalledFirst) {
  Record item;
  {
    const PartOf outer("item()");
    const PartOf inner("something inside of it");
    item = sum_of(5, {});
  }
  const Record other = sum_of(5, {5});
  EXPECT_EQ(
      mismatch_text(0, item, 2, other),
      "ranks called different collectives: rank 0 item(): #5 all_reduce f32[] sum, rank 2 #5 all_reduce f32[5] sum");
  const Record plain = sum_of(5, {});
  EXPECT_EQ(fingerprint(item), fingerprint(plain)) << "ranks may come to one collective in two ways";
  item.part_of.fill('\x01');
  EXPECT_EQ(mismatch_text(0, item, 2, other), mismatch_text(0, plain, 2, other)) << "bytes that no rank wrote";
  const PartOf too_long("a name that is longer than a record has room for");
  EXPECT_THAT(mismatch_text(0, sum_of(5, {}), 2, other),
              ::testing::HasSubstr("rank 0 a name that is longer th: #5 all_reduce"));
}

TEST(Watch, MismatchTellsTheRankThatIsOneCallBehind) {
  const Record before = sum_of(1002, {4});
  const std::string text = mismatch_text(0, sum_of(1003, {7}), 2, sum_of(1003, {4}), before);
  EXPECT_EQ(
      text,
      "ranks called different collectives: rank 0 #1003 all_reduce f32[7] sum, rank 2 #1003 all_reduce f32[4] sum; "
      "rank 2 repeats #1002: it may be one call behind since #1003");
  EXPECT_EQ(mismatch_text(2, sum_of(1003, {4}), 0, sum_of(1003, {7}), before), text);
  EXPECT_EQ(
      mismatch_text(0, sum_of(1003, {7}), 2, sum_of(1003, {9}), before),
      "ranks called different collectives: rank 0 #1003 all_reduce f32[7] sum, rank 2 #1003 all_reduce f32[9] sum");
}

TEST(Watch, WhoHasMadeNoCallIsInTheRendezvous) {
  EXPECT_EQ(missing_text(Record(), 30, {}),
            "timed out after 30 ms in the rendezvous of the group, before its first collective: where the other ranks "
            "are is not known");
}

TEST(Watch, MismatchFixSaysWhatDiffers) {
  const Record sum = sum_of(5, {3});
  EXPECT_EQ(mismatch_fix(sum, at_sequence(5, make_record(Kind::barrier, {}))),
            "make every rank call the same collectives in the same order");
  EXPECT_EQ(mismatch_fix(sum, sum_of(5, {3}, at::kDouble)), "pass tensors of the same dtype on every rank");
  const auto part_of_save = [] {
    const PartOf scope("checkpoint");
    return sum_of(5, {3}, at::kLong);
  }();
  const std::string fix =
      "make every rank call the same functions in the same order: checkpoint is called by all ranks or none";
  EXPECT_EQ(mismatch_fix(sum, part_of_save), fix);
  EXPECT_EQ(mismatch_fix(part_of_save, sum), fix);
  EXPECT_EQ(mismatch_fix(sum, sum_of(5, {4})),
            "pass tensors of the same shape on every rank, or look for a call that only some ranks make");
}

TEST(Watch, MissingNamesTheRankBehind) {
  const Record waiting = sum_of(183, {512});
  EXPECT_EQ(missing_text(waiting, 5000, {waiting, waiting, waiting, sum_of(182, {512})}),
            "timed out after 5000 ms in #183 all_reduce f32[512] sum: rank 3 is at #182 all_reduce f32[512] sum, "
            "the others at #183");
}

TEST(Watch, MissingGroupsRanksAtTheSamePlace) {
  const Record waiting = sum_of(9, {2});
  const Record behind = sum_of(7, {2});
  EXPECT_EQ(missing_text(waiting, 30, {waiting, behind, behind, Record()}),
            "timed out after 30 ms in #9 all_reduce f32[2] sum: rank 3 has not made any call, "
            "ranks 1, 2 are at #7 all_reduce f32[2] sum, rank 0 at #9");
  EXPECT_EQ(missing_text(waiting, 30, {waiting, sum_of(10, {2}), Record(), Record(), Record(), Record()}),
            "timed out after 30 ms in #9 all_reduce f32[2] sum: ranks 2-5 have not made any call, "
            "the others at #9 or later");
}

TEST(Watch, MissingSaysWhenNobodyIs) {
  const Record waiting = sum_of(9, {2});
  EXPECT_EQ(missing_text(waiting, 30, {waiting, waiting}),
            "timed out after 30 ms in #9 all_reduce f32[2] sum: every rank has made this call, "
            "but not every rank has finished it");
  EXPECT_EQ(missing_text(waiting, 30, {}),
            "timed out after 30 ms in #9 all_reduce f32[2] sum: where the other ranks are is not known");
}

TEST(Watch, MissingPeerOfAReceiveIsNamedWithItsPlace) {
  const Record waiting = make_record(Kind::recv, torch::zeros({3}), 1);
  EXPECT_EQ(missing_text(waiting, 40, {sum_of(4, {2}), sum_of(5, {2}), Record()}),
            "timed out after 40 ms in recv f32[3] from rank 1: rank 1 is at #5 all_reduce f32[2] sum");
}

TEST(Watch, MissingStaysShortWithManyRanksAtManyPlaces) {
  std::vector<Record> last;
  for (int i = 0; i < 1000; ++i) last.push_back(sum_of(1 + i, {2}));
  const std::string text = missing_text(last.back(), 30, last);
  EXPECT_THAT(text, ::testing::HasSubstr("and 991 more places, rank 999 at #1000"));
  EXPECT_LT(text.size(), 800u);
}

}  // namespace
}  // namespace serried::watch
