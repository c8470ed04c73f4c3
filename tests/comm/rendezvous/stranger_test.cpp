// Every kind of key that ranks publish, with a stranger's value under it: refused by name, on every rank, in time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <memory>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/agree/group_status.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/group.h"
#include "serried/comm/rendezvous/signed_store.h"
#include "tests/support/each_rank.h"
#include "tests/support/errors.h"
#include "tests/support/meddling_store.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using ::testing::Each;
using testing::each_rank;
using testing::error_text;
using ::testing::HasSubstr;
using testing::MeddlingStore;

// Where a stranger writes, and the call that reads it.
struct Attack {
  std::string name;
  std::string part;  // of the key
  std::string backend;
  bool splits = false;
};

void PrintTo(const Attack& attack, std::ostream* out) {
  *out << attack.name;
}

class Strangers : public ::testing::TestWithParam<Attack> {};

// What each of two ranks says when a stranger writes `forged`.
std::vector<std::string> errors_after(const Attack& attack, const std::string& forged) {
  const auto exposed = c10::make_intrusive<MeddlingStore>(attack.part, forged);
  const auto signer = std::make_shared<const detail::Signer>(std::string(32, 's'), "job/0");
  std::vector<std::string> errors(2);
  each_rank(2, [&](int rank) {
    const auto store = c10::make_intrusive<detail::SignedStore>(exposed, signer);
    errors[size_t(rank)] = error_text<c10::Error>([&] {
      const GroupOptions options{.timeout = 20s, .store = store, .rank = rank, .world_size = 2};
      barrier(new_group(attack.backend, options));
      const Group group = new_group(attack.backend, options);
      if (!attack.splits) return;
      for (int i = 0; i < 2; ++i) barrier(split_group(group, {{0, 1}}));
      for (int i = 0; i < 2; ++i) {
        barrier(group->splitGroup({0, 1}, std::nullopt, std::nullopt, std::nullopt, std::nullopt, std::nullopt));
      }
    });
  });
  return errors;
}

TEST_P(Strangers, AreRefusedByTheNameOfTheKey) {
  const auto begin = std::chrono::steady_clock::now();
  for (const std::string& forged : {std::string("1"), std::string(64, 'x')}) {
    int named = 0;
    for (const std::string& error : errors_after(GetParam(), forged)) {
      EXPECT_NE(error, "no error");
      const bool by_name = error.find("holds what no rank of this job wrote") != std::string::npos &&
                           error.find(GetParam().part) != std::string::npos;
      // A rank that does not read that key misses the one that gave up, each backend in its words.
      named += by_name ? 1 : 0;
    }
    EXPECT_GE(named, 1);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 60s);
}

INSTANTIATE_TEST_SUITE_P(
    Write, Strangers,
    ::testing::Values(Attack{"GroupCounter", "/groups/", "shm", true}, Attack{"Identity", "/id", "shm"},
                      Attack{"Backend", "/backend", "shm"}, Attack{"Hosts", "auto/host", "auto"},
                      Attack{"SharedMemory", "shm/greeting", "shm"}, Attack{"Failures", "shm/failure", "shm"},
                      Attack{"WatchHosts", "watch/host", "gloo"}, Attack{"WatchPage", "watch/page", "gloo"},
                      Attack{"GlooAddresses", "gloo/", "gloo"}, Attack{"SplitCounter", "serried/splits", "shm", true},
                      Attack{"Split", "serried/split/", "shm", true}, Attack{"SubsetCounter", "/calls/", "shm", true}),
    [](const auto& info) { return info.param.name; });

TEST(Strangers, AreHeardWhereTheJobHasNoSecret) {
  // As before: without a launcher nothing is signed, and wrong values are found by what they say, where they can be.
  const auto exposed = c10::make_intrusive<MeddlingStore>("shm/greeting", "1 2 3");
  each_rank(2, [&](int rank) {
    EXPECT_EQ(error_text<c10::DistBackendError>(
                  [&] { new_group("shm", {.timeout = 20s, .store = exposed, .rank = rank, .world_size = 2}); }),
              c10::str("[shm] rank 0 says \"1 2 3\" where its process and memory should be\n"
                       "  fix: find out who else writes to the store of this job\n"
                       "  at:  rank ",
                       rank, "/2"));
  });
}

// Makes rank 1 look as if it ran on another host, below the signature.
class OtherHost : public c10d::PrefixStore {
 public:
  explicit OtherHost(const c10::intrusive_ptr<c10d::Store>& store) : PrefixStore("watch", store) {}
  using PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    PrefixStore::set(key, key == "host/1" ? std::vector<uint8_t>{'x'} : value);
  }
};

TEST(Strangers, AreNamedByATimeoutThatReadsTheirReport) {
  const auto exposed = c10::make_intrusive<MeddlingStore>("at/1", "forged");
  const auto signer = std::make_shared<const detail::Signer>(std::string(32, 's'), "job/0");
  const auto store = c10::make_intrusive<OtherHost>(c10::make_intrusive<detail::SignedStore>(exposed, signer));
  std::array<std::unique_ptr<detail::GroupStatus>, 2> statuses;
  each_rank(2, [&](int rank) { statuses[size_t(rank)] = std::make_unique<detail::GroupStatus>(store, rank, 2, 10s); });
  ASSERT_FALSE(statuses[0]->one_host());
  exposed->set("watch/at/1", std::vector<uint8_t>{'1'});
  watch::Record record = watch::make_record(watch::Kind::barrier, {});
  record.sequence = 3;
  EXPECT_EQ(statuses[0]->missing_text(record, 50),
            "timed out after 50 ms in #3 barrier: where the other ranks are is not known; [store] the key "
            "\"watch/at/1\" holds what no rank of this job wrote: its signature is missing or wrong, so a stranger "
            "wrote it");
}

TEST(Strangers, CannotNameAShapeThatMakesNoSense) {
  const auto says = [](const char* greeting) {
    const auto exposed = c10::make_intrusive<MeddlingStore>("shm/greeting", greeting + detail::host_identity());
    std::array<std::string, 2> errors;
    each_rank(2, [&](int rank) {
      errors[size_t(rank)] = error_text<c10::DistBackendError>(
          [&] { new_group("shm", {.timeout = 20s, .store = exposed, .rank = rank, .world_size = 2}); });
    });
    return errors;
  };
  for (const char* greeting : {"1 3 -5 65536 ", "1 3 99999999999999999 65536 ", "1 3 0 0 "}) {
    EXPECT_THAT(says(greeting), Each(HasSubstr("where its process and memory should be"))) << greeting;
  }
  for (const char* greeting : {"1 3 0 100 ", "1 -1 0 65536 "}) {
    EXPECT_THAT(says(greeting), Each(HasSubstr("rank 1 cannot share memory: [shm] rank 0 offers "))) << greeting;
  }
}

}  // namespace
}  // namespace serried
