// The interface that every c10d::Store promises, on the stores that rendezvous hands out.
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <thread>

#include "serried/comm/rendezvous/launcher_store.h"
#include "serried/comm/rendezvous/signed_store.h"
#include "tests/support/launcher_stand_in.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

StorePtr make_store(const std::string& kind) {
  if (kind.starts_with("signed_")) {
    const auto signer = std::make_shared<const detail::Signer>(std::string(32, 's'), "job/0");
    return c10::make_intrusive<detail::SignedStore>(make_store(kind.substr(7)), signer);
  }
  if (kind == "launcher") {
    static auto* launcher = new testing::LauncherStandIn(1);
    // Each is a program of its own, with keys of its own.
    return c10::make_intrusive<detail::LauncherStore>(std::make_shared<detail::LauncherLine>(launcher->take_end(0)),
                                                      "127.0.0.1");
  }
  if (kind == "hash") return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  const StorePtr store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  if (kind == "tcp") return store;
  return c10::make_intrusive<c10d::PrefixStore>("job", store);
}

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

class Stores : public ::testing::TestWithParam<std::string> {
 protected:
  const StorePtr store_ = make_store(GetParam());
};

INSTANTIATE_TEST_SUITE_P(On, Stores,
                         ::testing::Values("hash", "tcp", "prefix", "launcher", "signed_hash", "signed_tcp",
                                           "signed_prefix", "signed_launcher"),
                         [](const auto& info) { return info.param; });

TEST_P(Stores, KeepValuesAndCount) {
  store_->set("a", "1");
  EXPECT_EQ(store_->get_to_str("a"), "1");
  EXPECT_EQ(store_->add("n", 3), 3);
  EXPECT_EQ(store_->add("n", -1), 2);
  EXPECT_EQ(store_->compareSet("a", "1", "2"), "2");
  EXPECT_EQ(store_->compareSet("a", "1", "3"), "2");
  EXPECT_TRUE(store_->check({"a", "n"}));
  EXPECT_FALSE(store_->check({"a", "missing"}));
  EXPECT_GE(store_->getNumKeys(), 2);
  EXPECT_TRUE(store_->deleteKey("a"));
  EXPECT_FALSE(store_->check({"a"}));
}

TEST_P(Stores, TakeManyKeysAtOnceAndAppend) {
  ASSERT_TRUE(store_->hasExtendedApi());
  store_->multiSet({"x", "y"}, {bytes("1"), bytes("2")});
  EXPECT_EQ(store_->multiGet({"y", "x"}), (std::vector<std::vector<uint8_t>>{bytes("2"), bytes("1")}));
  store_->append("x", bytes("23"));
  EXPECT_EQ(store_->get_to_str("x"), "123");
}

TEST_P(Stores, QueuesKeepTheirOrder) {
  store_->queuePush("q", bytes("first"));
  store_->queuePush("q", bytes("second"));
  EXPECT_EQ(store_->queueLen("q"), 2);
  EXPECT_EQ(store_->queuePop("q", true), bytes("first"));
  EXPECT_EQ(store_->queuePop("q", false), bytes("second"));
}

TEST_P(Stores, WaitForKeysUpToATimeout) {
  const StorePtr other = store_->clone();
  std::thread setter([&] { other->set("late", "here"); });
  EXPECT_EQ(store_->get_to_str("late"), "here");
  setter.join();
  EXPECT_THROW(store_->wait({"never"}, 50ms), c10::DistStoreError);
  store_->setTimeout(50ms);
  EXPECT_EQ(store_->getTimeout(), 50ms);
  EXPECT_THROW(store_->get("never"), c10::DistStoreError);
}

}  // namespace
}  // namespace serried
