// All ranks take one engine.
#include "serried/comm/net/make_wire.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using net::WireOptions;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

detail::StoreRanks ranks_on(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size) {
  return {.store = store, .rank = rank, .world_size = world_size, .timeout = 20s};
}

TEST(MakeWire, TakesGlooOnAllRanksIfOneAsksForIt) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [&](int rank, const char* engine) {
    return net::make_wire(ranks_on(store, rank, 2), {.address = "127.0.0.1", .engine = engine});
  };
  auto other = std::async(std::launch::async, make, 1, "gloo");
  EXPECT_STREQ(make(0, "auto")->name(), "gloo");
  EXPECT_STREQ(other.get()->name(), "gloo");
}

TEST(MakeWire, FindsAnAddressByItself) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto wire = net::make_wire(ranks_on(store, 0, 1));
  EXPECT_THAT(std::string(wire->name()), ::testing::AnyOf("ucx", "gloo"));
}

TEST(MakeWire, NamesTheRanksThatDoNotCome) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const std::string text = error_text<c10::DistBackendError>([&] {
    auto ranks = ranks_on(store, 0, 3);
    ranks.timeout = 50ms;
    net::make_wire(ranks, {.address = "127.0.0.1"});
  });
  EXPECT_THAT(text, HasSubstr("[new_group] ranks 1, 2 of 3 did not come within 50 ms"));
}

TEST(MakeWire, KnowsNoOtherEngines) {
  const std::string text = error_text<c10::ValueError>([] { net::make_wire({}, {.engine = "udp"}); });
  EXPECT_THAT(text, HasSubstr("[new_group] the engine of a wire is \"udp\"\n  fix: pass auto or gloo"));
}

}  // namespace
}  // namespace serried::testing
