// The fake backend: any size, no peers, every call done at once.
#include "serried/comm/backends/factories.h"

#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;

Group fake(int rank, int world_size, BackendOptions options = {}) {
  return new_group("fake", {.rank = rank, .world_size = world_size, .backend_options = std::move(options)});
}

TEST(Fake, FourThousandRanksNeedNoPeers) {
  const Group group = fake(17, 4096);
  EXPECT_EQ(group->getRank(), 17);
  EXPECT_EQ(group->getSize(), 4096);
  EXPECT_EQ(group->getBackendName(), "fake");
  at::Tensor out = at::empty({4096, 3});
  at::Tensor in = at::arange(3, at::kFloat);
  EXPECT_TRUE(group->all_gather_single(out, in)->wait());
  EXPECT_TRUE(out.equal(in.expand({4096, 3})));
}

TEST(Fake, WorkIsDoneAndHoldsItsOutputs) {
  const Group group = fake(0, 8);
  std::vector<at::Tensor> tensors{at::ones({2})};
  const auto work = group->allreduce(tensors);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_TRUE(work->isSuccess());
  EXPECT_TRUE(work->getFuture()->completed());
  EXPECT_TRUE(work->getFuture()->value().toTensorVector()[0].is_same(tensors[0]));
  EXPECT_TRUE(tensors[0].equal(at::ones({2})));
}

TEST(Fake, EveryCallSucceeds) {
  const Group group = fake(1, 3);
  std::vector<at::Tensor> one{at::ones({6})};
  at::Tensor whole = at::arange(6, at::kFloat);
  at::Tensor piece = at::empty({2});
  at::Tensor same = at::empty({6});
  std::vector<at::Tensor> three(3);
  for (at::Tensor& t : three) t = at::empty({6});
  std::vector<std::vector<at::Tensor>> lists{three};
  std::vector<std::vector<at::Tensor>> none;
  std::vector<int64_t> even;
  EXPECT_TRUE(group->broadcast(one)->wait());
  EXPECT_TRUE(group->reduce(one)->wait());
  EXPECT_TRUE(group->allreduce_coalesced(one)->wait());
  EXPECT_TRUE(group->allgather(lists, one)->wait());
  EXPECT_TRUE(lists[0][2].equal(one[0]));
  EXPECT_TRUE(group->gather(none, one)->wait());
  EXPECT_TRUE(group->gather(lists, one, {.rootRank = 1})->wait());
  EXPECT_TRUE(group->scatter(one, lists, {.rootRank = 1})->wait());
  EXPECT_TRUE(group->reduce_scatter(one, lists)->wait());
  EXPECT_TRUE(group->reduce_scatter_single(piece, whole)->wait());
  EXPECT_TRUE(piece.equal(at::tensor({2.F, 3.F})));
  EXPECT_TRUE(group->all_to_all_single(same, whole, even, even)->wait());
  EXPECT_TRUE(group->alltoall(three, three)->wait());
  EXPECT_TRUE(group->send(one, 2, 0)->wait());
  EXPECT_TRUE(group->recv(one, 2, 0)->wait());
  EXPECT_TRUE(group->recvAnysource(one, 0)->wait());
  EXPECT_TRUE(group->barrier()->wait());
  group->monitoredBarrier({});
  group->setTimeout(std::chrono::seconds(1));
}

TEST(Fake, ShapesAreChecked) {
  const Group group = fake(0, 4);
  at::Tensor out = at::empty({7});
  at::Tensor in = at::empty({2});
  EXPECT_EQ(error_text<c10::ValueError>([&] { group->all_gather_single(out, in); }),
            "[all_gather] the output has 7 elements, not 8\n"
            "  fix: pass what the same call takes on a group of this size");
  std::vector<at::Tensor> tensors{in};
  EXPECT_EQ(error_text<c10::ValueError>([&] { group->broadcast(tensors, {.rootRank = 4}); }),
            "[broadcast] rank 4 is not in 0..3\n"
            "  fix: pass what the same call takes on a group of this size");
}

TEST(Fake, ErrorOnCollectiveMakesEveryCallRaise) {
  const Group group = fake(0, 2, {{"error_on_collective", true}});
  std::vector<at::Tensor> tensors{at::ones({1})};
  EXPECT_EQ(error_text<c10::DistBackendError>([&] { group->allreduce(tensors); }),
            "[all_reduce] the fake group was made with error_on_collective = true\n"
            "  fix: make it without that option where collectives must pass");
  EXPECT_THROW(group->barrier(), c10::DistBackendError);
  EXPECT_THROW(group->send(tensors, 1, 0), c10::DistBackendError);
}

TEST(Fake, UnknownOptionIsNamed) {
  EXPECT_EQ(error_text<c10::ValueError>([] {
              fake(0, 2, {{"speed", 9}});
            }),
            "[new_group] unknown backend option \"speed\"; known: error_on_collective\n"
            "  fix: leave the option out, or correct its name");
}

TEST(Fake, SplitsWithoutPeers) {
  const Group group = fake(5, 8);
  const Group part = split_group(group, {{0, 1, 2, 3}, {7, 6, 5, 4}});
  EXPECT_EQ(part->getSize(), 4);
  EXPECT_EQ(part->getRank(), 2);
  EXPECT_EQ(part->getBackendName(), "fake");
}

}  // namespace
}  // namespace serried
