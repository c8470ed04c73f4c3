// A rank whose peer writes nonsense into the memory they share: it raises and names the peer, it never follows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include "serried/comm/backends/shm/engine.h"
#include "serried/comm/backends/shm/mailbox.h"
#include "serried/comm/backends/shm/ops.h"
#include "tests/support/errors.h"
#include "tests/support/wild_peer.h"

namespace serried::shm {
namespace {

using namespace std::chrono_literals;
using serried::testing::error_text;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

using serried::testing::kHeap;
using serried::testing::kHeapBytes;
using serried::testing::Victim;

using Tensors = serried::testing::VictimTensors;

const char* const kRefusal = "rank 1 offers memory that it does not share in ";

TEST(ShmWildPeer, OffersWithinItsHeapAreTaken) {
  const Tensors t;
  Victim victim;
  std::memset(victim.shared().heap(1), 0, kHeapBytes);
  EXPECT_EQ(victim.say(t.all_gather(), {.flags = kInPlace, .address = kHeap | 64, .extent = uint64_t(t.bytes)}),
            "no error");
  EXPECT_TRUE(t.pieces[1].eq(0).all().item<bool>());
  const uint64_t last = kHeap | uint64_t(kHeapBytes - t.bytes);
  EXPECT_EQ(Victim().say(t.all_gather(), {.flags = kInPlace, .address = last, .extent = uint64_t(t.bytes)}),
            "no error");
}

TEST(ShmWildPeer, TheWholeMessage) {
  const Tensors t;
  EXPECT_EQ(Victim().say(t.all_gather(), {.flags = kInPlace, .address = 4096, .extent = uint64_t(t.bytes)}),
            "[all_gather] rank 1 offers memory that it does not share in #1 all_gather f32[50000]\n"
            "  fix: look at that rank: its memory is overwritten, or another program writes to the group's");
}

TEST(ShmWildPeer, AddressesOfProcessesAreNeverFollowed) {
  Tensors t;
  std::vector<char> mine(size_t(t.bytes), 'x');
  const uint64_t address = reinterpret_cast<uint64_t>(mine.data());
  const Offer offer{.flags = kInPlace, .address = address, .extent = uint64_t(t.bytes)};
  EXPECT_THAT(Victim().say(t.all_gather(), offer), HasSubstr(kRefusal));
  const Piece entry{.data = mine.data(), .bytes = t.bytes};
  EXPECT_THAT(Victim().say(t.all_gather(), {.flags = kInPlace | kInTable}, entry), HasSubstr(kRefusal));
  EXPECT_THAT(Victim().say(t.reduce_scatter(), {.flags = kInPlace | kInTable}, entry), HasSubstr(kRefusal));
  // With an output that is no heap's the ranks stage; the input must still be one.
  EXPECT_THAT(Victim().say(t.all_reduce(), {.flags = kInPlace, .address = address, .extent = address}),
              HasSubstr(kRefusal));
}

TEST(ShmWildPeer, HeapOffsetsEndWithTheHeap) {
  const Tensors t;
  for (const uint64_t offset : {uint64_t(kHeapBytes - t.bytes + 1), uint64_t(kHeapBytes), uint64_t(kHeapBytes + 1),
                                (uint64_t(1) << 62) - 64, (uint64_t(1) << 61)}) {
    const Offer offer{.flags = kInPlace, .address = kHeap | offset, .extent = uint64_t(t.bytes)};
    EXPECT_THAT(Victim().say(t.all_gather(), offer), HasSubstr(kRefusal)) << offset;
    Offer one_each = offer;
    one_each.flags |= kOnePerPeer;
    EXPECT_THAT(Victim().say(t.reduce_scatter(), one_each), HasSubstr(kRefusal)) << offset;
  }
}

TEST(ShmWildPeer, OutputsOfAnAllReduceAreWrittenInHeapsOnly) {
  Tensors t;
  Victim victim;
  // Rank 0's own tensors lie in its heap, so that it would reduce in place and write to its peer's output.
  t.input = at::from_blob(victim.engine().segment().heap(0), {50'000});
  t.output = t.input;
  const Offer offer{.flags = kInPlace, .address = kHeap, .extent = kHeap | uint64_t(kHeapBytes - 64)};
  EXPECT_THAT(victim.say(t.all_reduce(), offer), HasSubstr(kRefusal));
}

TEST(ShmWildPeer, SlotOffsetsEndWithTheSlot) {
  const at::Tensor input = at::ones({100});
  const at::Tensor outputs = at::zeros({2, 100});
  const at::Tensor output = at::zeros({100});
  const Place place{.rank = 0, .world_size = 2};
  for (const int64_t offset :
       {SegmentShape::kSlotBytes - 399, SegmentShape::kSlotBytes, int64_t(-1), int64_t(1) << 40}) {
    const Piece entry{.data = reinterpret_cast<char*>(offset), .bytes = 400};
    EXPECT_THAT(Victim().say(all_gather_flat_op(outputs, input), {.flags = kInSlot | kInTable}, entry),
                HasSubstr(kRefusal))
        << offset;
    EXPECT_THAT(Victim().say(reduce_scatter_flat_op(output, outputs, c10d::ReduceOp::SUM, place),
                             {.flags = kInSlot | kInTable}, entry),
                HasSubstr(kRefusal))
        << offset;
  }
}

TEST(ShmWildPeer, StagesNeedASizeAndFlags) {
  const Tensors t;
  EXPECT_THAT(Victim().say(t.all_gather(), {.flags = kInStage, .extent = ~uint64_t(0)}),
              HasSubstr("rank 1 gives -1 bytes"));
  EXPECT_THAT(Victim().say(t.all_gather(), {.flags = kInStage | kInTable, .extent = ~uint64_t(0)},
                           {.data = nullptr, .bytes = t.bytes}),
              HasSubstr(kRefusal));
  EXPECT_THAT(Victim().say(t.reduce_scatter(), {.flags = 0, .extent = uint64_t(t.bytes)}), HasSubstr(kRefusal));
}

std::shared_ptr<Transfer> transfer(Transfer::Direction direction, std::vector<char>& data) {
  auto result = std::make_shared<Transfer>();
  result->direction = direction;
  result->data = data.data();
  result->bytes = int64_t(data.size());
  result->peer = 1;
  result->dtype = int(at::kByte);
  result->timeout = 5s;
  result->what = direction == Transfer::Direction::send ? "send u8[4] to rank 1" : "recv u8[4] from rank 1";
  result->finished = [](std::exception_ptr) {};
  return result;
}

struct WildHeader {
  int64_t bytes;
  int32_t tag;
  int32_t dtype;
};

// What rank 0's transfer of four bytes says if rank 1's side of the streams is as `set` leaves it.
std::string transfer_error(Transfer::Direction direction, const std::function<void(Ring&)>& set) {
  Victim victim;
  const bool sends = direction == Transfer::Direction::send;
  set(sends ? victim.shared().ring(0, 1) : victim.shared().ring(1, 0));
  std::vector<char> data(4);
  return victim.say(transfer(direction, data), 5s);
}

TEST(ShmWildPeer, StreamsHoldNoMoreThanTheirBuffer) {
  const std::string from_1 = transfer_error(Transfer::Direction::receive, [](Ring& ring) { ring.written = 1 << 20; });
  EXPECT_EQ(from_1,
            "[point to point] recv u8[4] from rank 1 failed: the group is unusable since: the stream from rank 1 to "
            "rank 0 claims 1048576 bytes in a buffer of 131072\n  fix: make a new group; the failure above came first");
  const std::string to_1 = transfer_error(Transfer::Direction::send, [](Ring& ring) { ring.read = 1; });
  EXPECT_THAT(to_1,
              HasSubstr("the stream from rank 0 to rank 1 claims 18446744073709551615 bytes in a buffer of 131072"));
}

TEST(ShmWildPeer, MessagesHaveASize) {
  const auto announce = [](WildHeader header) {
    return [header](Ring& ring) {
      std::memcpy(ring.data, &header, sizeof header);
      ring.written = sizeof header;
    };
  };
  EXPECT_THAT(transfer_error(Transfer::Direction::receive, announce({.bytes = -5, .tag = 0, .dtype = 0})),
              HasSubstr("rank 1 sends rank 0 a message of -5 bytes"));
  // Larger than any memory: said at once, not reserved.
  EXPECT_THAT(
      transfer_error(Transfer::Direction::receive, announce({.bytes = int64_t(1) << 60, .tag = 0, .dtype = 77})),
      HasSubstr("rank 1 sent 1152921504606846976 bytes of "));
}

TEST(ShmWildPeer, AReasonWithoutAnEndIsCut) {
  Victim victim;
  Header& header = victim.shared().header();
  std::memset(header.reason, 'x', sizeof header.reason);
  header.reason_ready = 1;
  header.aborted = 1;
  EXPECT_EQ(victim.engine().sync().abort_reason(), std::string(sizeof header.reason, 'x'));
}

TEST(ShmMeet, ATimeoutSaysWhoIsMissingWhereAndForHowLong) {
  const SegmentShape shape{.world_size = 3};
  Engine engine(Segment::create(shape), 1, WaitPolicy::for_ranks(3), /*one_process=*/true);
  EXPECT_THAT(error_text<c10::DistBackendError>([&] { engine.meet(100ms, "127.0.0.1:29500"); }),
              MatchesRegex("\\[new_group\\] timed out after [0-9]+ ms while the ranks met in shared memory, after they "
                           "had met at 127.0.0.1:29500: ranks 0, 2 of 3 did not come\n"
                           "  fix: look at what those ranks are doing: they may be stopped or slow; pass a longer "
                           "timeout if they are slow"));
}

TEST(ShmMeet, ADeathMeanwhileIsSaid) {
  const SegmentShape shape{.world_size = 2};
  Segment segment = Segment::create(shape);
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  segment.info(1).page.pid = child;
  Engine engine(std::move(segment), 0, WaitPolicy::for_ranks(2), /*one_process=*/false);
  EXPECT_EQ(error_text<c10::DistBackendError>([&] { engine.meet(10s, "127.0.0.1:29500"); }),
            c10::str("[new_group] rank 1 (pid ", child,
                     ") died while rank 0 was in new_group\n"
                     "  fix: make a new group with the ranks that are left"));
}

}  // namespace
}  // namespace serried::shm
