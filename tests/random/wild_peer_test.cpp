// Ranks whose peer offers random memory: they raise and name it, or take what it shares; they never crash.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "serried/comm/backends/shm/mailbox.h"
#include "tests/support/random_programs.h"
#include "tests/support/wild_peer.h"

namespace serried {
namespace {

using testing::kHeap;
using testing::kHeapBytes;

// Numbers that lie at borders, and some that lie anywhere.
class WildNumbers {
 public:
  explicit WildNumbers(uint64_t seed) : random_(seed) {}

  uint64_t pick(std::initializer_list<uint64_t> values) { return *(values.begin() + random_() % values.size()); }

  uint64_t number(int64_t bytes) {
    const uint64_t base = pick({0, 64, 400, uint64_t(bytes), uint64_t(kHeapBytes - bytes), uint64_t(kHeapBytes),
                                random_() >> 44, random_(), ~uint64_t(0), uint64_t(1) << 63});
    return base + pick({0, 0, 1, 64});
  }

  // A large size that is one takes long; the borders of what is one do not.
  uint64_t extent(int64_t bytes) {
    const uint64_t value = number(bytes);
    return value > (1 << 26) && value <= (uint64_t(1) << 42) ? uint64_t(1) << 20 : value;
  }

 private:
  std::mt19937_64 random_;
};

TEST(RandomWildPeer, NoOfferMakesItsVictimCrash) {
  const testing::VictimTensors tensors;
  testing::for_random_programs(3000, [&](uint64_t seed) {
    WildNumbers wild(seed);
    const shm::Offer offer{.flags = uint32_t(wild.pick({0, 1, 2, 4}) | wild.pick({0, 8, 16, 24})),
                           .address = wild.pick({0, kHeap}) | wild.number(tensors.bytes),
                           .extent = wild.pick({0, kHeap}) | wild.extent(tensors.bytes)};
    const shm::Piece entry{.data = reinterpret_cast<char*>(wild.pick({0, kHeap}) | wild.number(tensors.bytes)),
                           .bytes = int64_t(wild.number(tensors.bytes))};
    const uint64_t kind = wild.pick({0, 1, 2});
    const std::string said = testing::Victim().say(kind == 0   ? tensors.all_reduce()
                                                   : kind == 1 ? tensors.all_gather()
                                                               : tensors.reduce_scatter(),
                                                   offer, entry);
    if (said != "no error") EXPECT_THAT(said, ::testing::HasSubstr("rank 1"));
  });
}

TEST(RandomWildPeer, NoStreamMakesItsVictimCrash) {
  testing::for_random_programs(60, [](uint64_t seed) {
    WildNumbers wild(seed);
    testing::Victim victim;
    const uint64_t direction = wild.pick({0, 1});
    shm::Ring& ring = direction == 0 ? victim.shared().ring(1, 0) : victim.shared().ring(0, 1);
    for (uint64_t i = 0; i < 64; ++i) ring.data[i] = char(wild.pick({0, 0, 0, 4, 255}));
    ring.written = wild.number(shm::Ring::kCapacity);
    ring.read = wild.pick({0, uint64_t(ring.written), wild.number(shm::Ring::kCapacity)});
    std::vector<char> data(4);
    auto transfer = std::make_shared<shm::Transfer>();
    transfer->direction = direction == 0 ? shm::Transfer::Direction::receive : shm::Transfer::Direction::send;
    transfer->data = data.data();
    transfer->bytes = 4;
    transfer->peer = 1;
    transfer->finished = [](std::exception_ptr) {};
    const std::string said = victim.say(transfer, std::chrono::milliseconds(1));
    EXPECT_THAT(said, ::testing::AnyOf("no error", ::testing::HasSubstr("[point to point]")));
  });
}

}  // namespace
}  // namespace serried
