// What strangers write to a job's store is never taken for a rank's word.
#include "serried/comm/rendezvous/signed_store.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/rendezvous/rendezvous.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"

namespace serried::detail {
namespace {

using namespace std::chrono_literals;
using serried::testing::error_text;
using serried::testing::ScopedEnv;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

const std::string kSecret = "0123456789abcdef0123456789abcdef";

Bytes bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::shared_ptr<const Signer> signer(const std::string& job = "job/0", const std::string& secret = kSecret) {
  return std::make_shared<const Signer>(secret, job);
}

std::string stranger_text(const std::string& key) {
  return c10::str("[store] the key \"", key,
                  "\" holds what no rank of this job wrote: its signature is missing or wrong, so a stranger wrote it\n"
                  "  fix: find out who else reaches that store: another job with the same port or file, or somebody on "
                  "this host or network; start the job anew");
}

// A store that the job signs, and the same one as everybody on the network sees it.
struct Exposed {
  StorePtr open = c10::make_intrusive<c10d::HashStore>();
  StorePtr ranks = c10::make_intrusive<SignedStore>(open, signer());

  std::string refusal(const std::string& key, const std::function<void()>& call) const {
    const std::string text = error_text<c10::DistStoreError>(call);
    return text == stranger_text(key) ? "refused" : text;
  }
};

TEST(SignedStore, ARankMayPutItsOwnInThePlaceOfAStrangersWord) {
  const Exposed store;
  store.open->set("card", bytes("of a stranger"));
  std::thread reader([&] { EXPECT_EQ(store.ranks->get("card"), bytes("mine")); });
  store.ranks->set("card", bytes("mine"));
  reader.join();
}

TEST(Signer, OpensWhatItSealed) {
  for (const std::string& value : {std::string(), std::string("v"), std::string(100000, 'x'), std::string("\0\1", 2)}) {
    EXPECT_EQ(signer()->open("key", signer()->seal("key", bytes(value))), bytes(value));
  }
}

TEST(Signer, NoTwoSealsAreAlike) {
  std::set<Bytes> seen;
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(seen.insert(signer()->seal("key", bytes("1"))).second);
}

TEST(Signer, RefusesAnotherKeyJobAttemptOrSecret) {
  const Bytes sealed = signer()->seal("key", bytes("value"));
  EXPECT_FALSE(signer()->open("other", sealed));
  EXPECT_FALSE(signer()->open("ke", sealed));
  EXPECT_FALSE(signer("job/1")->open("key", sealed));
  EXPECT_FALSE(signer("bob/0")->open("key", sealed));
  EXPECT_FALSE(signer("job/0", std::string(32, 'x'))->open("key", sealed));
  // The border between key and value is part of what is signed.
  EXPECT_FALSE(signer()->open("keyv", signer()->seal("key", bytes("value"))));
}

TEST(Signer, RefusesEveryChangedBitAndEveryLength) {
  const Bytes sealed = signer()->seal("key", bytes("value"));
  for (size_t bit = 0; bit < sealed.size() * 8; ++bit) {
    Bytes changed = sealed;
    changed[bit / 8] ^= uint8_t(1 << bit % 8);
    EXPECT_FALSE(signer()->open("key", changed)) << bit;
  }
  for (size_t size = 0; size < sealed.size(); ++size) {
    EXPECT_FALSE(signer()->open("key", Bytes(sealed.begin(), sealed.begin() + int64_t(size)))) << size;
  }
  Bytes longer = sealed;
  longer.push_back(0);
  EXPECT_FALSE(signer()->open("key", longer));
}

TEST(JobSigner, IsThereExactlyWhereTheJobHasASecret) {
  {
    const ScopedEnv env{{"SERRIED_JOB_SECRET", ""}};
    EXPECT_EQ(job_signer(), nullptr);
  }
  const ScopedEnv env{
      {"SERRIED_JOB_SECRET", kSecret}, {"TORCHELASTIC_RUN_ID", "run"}, {"TORCHELASTIC_RESTART_COUNT", "2"}};
  EXPECT_EQ(Signer(kSecret, "run/2").open("key", job_signer()->seal("key", bytes("v"))), bytes("v"));
}

TEST(JobSigner, RefusesASecretThatCanBeGuessed) {
  const ScopedEnv env{{"SERRIED_JOB_SECRET", "letmein"}};
  EXPECT_EQ(error_text<c10::ValueError>([] { job_signer(); }),
            "[environment] SERRIED_JOB_SECRET has 7 characters, at least 32 cannot be guessed\n"
            "  fix: set it to what openssl rand -hex 32 prints, the same on all ranks, or unset it");
}

TEST(SignedStore, AnOverwrittenValueIsRefusedByName) {
  const Exposed store;
  store.ranks->set("key", bytes("true"));
  EXPECT_EQ(store.ranks->get_to_str("key"), "true");
  for (const std::string& forged : {std::string(), std::string("true"), std::string(200, 'x')}) {
    store.open->set("key", forged);
    EXPECT_EQ(store.refusal("key", [&] { store.ranks->get("key"); }), "refused");
    EXPECT_EQ(store.refusal("key", [&] { store.ranks->multiGet({"key"}); }), "refused");
    EXPECT_EQ(store.refusal("key", [&] { store.ranks->compareSet("key", "true", "new"); }), "refused");
    EXPECT_EQ(store.refusal("key", [&] { store.ranks->compareSet("key", "", "new"); }), "refused");
    EXPECT_EQ(store.refusal("key", [&] { store.ranks->append("key", bytes("more")); }), "refused");
  }
  store.ranks->set("key", bytes("again"));
  EXPECT_EQ(store.ranks->get_to_str("key"), "again");
}

TEST(SignedStore, AValueOfAnotherKeyIsRefused) {
  const Exposed store;
  store.ranks->set("a", bytes("1"));
  store.open->set("b", store.open->get("a"));
  EXPECT_EQ(store.refusal("b", [&] { store.ranks->get("b"); }), "refused");
}

TEST(SignedStore, PrefixesAreSignedToo) {
  const Exposed store;
  const auto first = c10::make_intrusive<c10d::PrefixStore>("first", store.ranks);
  const auto second = c10::make_intrusive<c10d::PrefixStore>("second", store.ranks);
  first->set("key", bytes("1"));
  store.open->set("second/key", store.open->get("first/key"));
  EXPECT_EQ(first->get_to_str("key"), "1");
  EXPECT_EQ(store.refusal("second/key", [&] { second->get("key"); }), "refused");
}

TEST(SignedStore, AForgedCounterIsRefused) {
  const Exposed store;
  EXPECT_EQ(store.ranks->add("n", 2), 2);
  store.open->set("n", std::string("7"));
  EXPECT_EQ(store.refusal("n", [&] { store.ranks->add("n", 1); }), "refused");
  store.open->deleteKey("n");
  store.open->add("n", 7);
  EXPECT_EQ(store.refusal("n", [&] { store.ranks->add("n", 1); }), "refused");
}

TEST(SignedStore, AForgedQueueEntryIsRefused) {
  const Exposed store;
  store.ranks->queuePush("q", bytes("first"));
  store.open->queuePush("q", bytes("forged"));
  EXPECT_EQ(store.ranks->queuePop("q", false), bytes("first"));
  EXPECT_EQ(store.refusal("q", [&] { store.ranks->queuePop("q", false); }), "refused");
}

TEST(SignedStore, CountersOfManyRanksMissNothing) {
  const Exposed store;
  std::vector<std::thread> ranks;
  std::vector<std::set<int64_t>> seen(4);
  for (auto& mine : seen) {
    ranks.emplace_back([&] {
      for (int i = 0; i < 100; ++i) mine.insert(store.ranks->add("n", 1));
    });
  }
  for (auto& rank : ranks) rank.join();
  std::set<int64_t> all;
  for (const auto& mine : seen) all.insert(mine.begin(), mine.end());
  EXPECT_EQ(all.size(), 400);
  EXPECT_EQ(*all.rbegin(), 400);
}

TEST(SignedStore, OneOfManyRanksIsTheFirst) {
  const Exposed store;
  std::vector<std::thread> ranks;
  std::vector<std::string> winners(4);
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] { winners[size_t(rank)] = store.ranks->compareSet("id", "", std::to_string(rank)); });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_EQ(std::set<std::string>(winners.begin(), winners.end()).size(), 1);
}

TEST(SignedStore, WhatHoldsNoNumberCannotBeAddedTo) {
  const Exposed store;
  store.ranks->set("text", bytes("ten"));
  EXPECT_EQ(error_text<c10::DistStoreError>([&] { store.ranks->add("text", 1); }),
            "[store] the key \"text\" holds no number to add 1 to\n  fix: count under a key of its own");
}

TEST(SignedStore, TimeoutsAndClonesAreTheStores) {
  const Exposed store;
  store.ranks->setTimeout(1234ms);
  EXPECT_EQ(store.open->getTimeout(), 1234ms);
  EXPECT_EQ(store.ranks->getTimeout(), 1234ms);
}

TEST(SignedStore, RendezvousSignsWhereTheJobHasASecret) {
  const std::string path = c10::str(::testing::TempDir(), "serried_signed_", ::getpid());
  const std::string url = c10::str("file://", path, "?rank=0&world_size=1");
  StorePtr plain;
  {
    const ScopedEnv env{{"SERRIED_JOB_SECRET", ""}};
    plain = rendezvous(url, {.timeout = 5s}).store;
  }
  const ScopedEnv env{{"SERRIED_JOB_SECRET", kSecret}};
  const StorePtr ranks = rendezvous(url, {.timeout = 5s}).store;
  plain->set("key", bytes("forged"));
  EXPECT_EQ(error_text<c10::DistStoreError>([&] { ranks->get("key"); }),
            c10::str("[store] the key \"key\" holds what no rank of this job wrote: its signature is missing or wrong, "
                     "so a stranger wrote it to the store at file://",
                     path,
                     "\n  fix: find out who else reaches that store: another job with the same port or file, or "
                     "somebody on this host or network; start the job anew"));
  ranks->set("key", bytes("true"));
  EXPECT_NE(plain->get_to_str("key"), "true");
  EXPECT_EQ(ranks->get_to_str("key"), "true");
}

}  // namespace
}  // namespace serried::detail
