// A store that strangers can write to, but not speak in: values are signed with the job's secret, which shows that a
// rank, and no stranger, wrote them.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace serried::detail {

using Bytes = std::vector<uint8_t>;

/// Signs values for the key they are stored under. Immutable; any thread.
class Signer {
 public:
  /// `job` tells attempts of one job apart: a value of an earlier attempt is a stranger's.
  Signer(std::string secret, std::string job);

  /// `value` with a nonce and a signature in front. Never the same twice.
  Bytes seal(const std::string& key, const Bytes& value) const;

  /// The value in `sealed`; nothing if no rank of the job wrote it under `key`.
  std::optional<Bytes> open(const std::string& key, const Bytes& sealed) const;

 private:
  Bytes signature(const std::string& key, const uint8_t* nonce, const uint8_t* value, size_t size) const;

  std::string secret_;
  std::string job_;
};

/// The signer of this job: SERRIED_JOB_SECRET, which the launcher sets. Null where there is none: then nothing is
/// signed. ValueError for a secret that can be guessed.
std::shared_ptr<const Signer> job_signer();

/// Signs all that is written to `store` and takes nothing from it that no rank of the job signed for its key:
/// DistStoreError that names the key. Counters and appended values are signed too; each is read, changed and put back
/// if nobody came in between, so they need a store with compareSet. Whether a key exists (check, wait, getNumKeys,
/// listKeys, queueLen) is what the store says: strangers may add and delete keys.
class SignedStore final : public c10d::Store {
 public:
  SignedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Signer> signer);

  const c10::intrusive_ptr<c10d::Store>& underlying() const { return store_; }

  c10::intrusive_ptr<c10d::Store> clone() override;

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override { return store_->deleteKey(key); }
  bool check(const std::vector<std::string>& keys) override { return store_->check(keys); }
  int64_t getNumKeys() override { return store_->getNumKeys(); }
  void wait(const std::vector<std::string>& keys) override { store_->wait(keys); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    store_->wait(keys, timeout);
  }
  const std::chrono::milliseconds& getTimeout() const noexcept override { return store_->getTimeout(); }
  void setTimeout(const std::chrono::milliseconds& timeout) override { store_->setTimeout(timeout); }

  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return store_->hasExtendedApi(); }

  void queuePush(const std::string& key, const Bytes& value) override;
  Bytes queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override { return store_->queueLen(key); }
  std::vector<std::string> listKeys() override { return store_->listKeys(); }

 private:
  Bytes open(const std::string& key, const Bytes& sealed) const;
  template <class Change>
  Bytes update(const std::string& key, const Change& change);

  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<const Signer> signer_;
};

/// `store`, signed if this job has a secret.
c10::intrusive_ptr<c10d::Store> signed_for_job(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace serried::detail
