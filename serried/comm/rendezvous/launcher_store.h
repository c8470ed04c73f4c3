// The store that the launcher keeps: it outlives every rank, and only ranks of the job reach it.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serried/comm/rendezvous/launcher_line.h"

namespace serried::detail {

/// What c10d::TCPStore does, asked of the launcher. Any thread. DistStoreError where keys do not come in time, or
/// values are too long; DistNetworkError where the launcher is gone.
class LauncherStore final : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;

  /// `towards` is where node 0 is, for `address_towards_store`.
  LauncherStore(std::shared_ptr<LauncherLine> line, std::string towards);

  const std::string& towards() const { return towards_; }

  /// All that waits in this store, and its clones, raises; so does what is asked of them from now on. For ranks that
  /// are others by now.
  void end_waits();

  c10::intrusive_ptr<c10d::Store> clone() override;

  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const Bytes& value) override;
  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  Bytes get(const std::string& key) override;
  int64_t add(const std::string& key, int64_t value) override;
  bool deleteKey(const std::string& key) override;
  bool check(const std::vector<std::string>& keys) override;
  int64_t getNumKeys() override;
  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override;

  void append(const std::string& key, const Bytes& value) override;
  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override;
  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override;
  bool hasExtendedApi() const override { return true; }

  void queuePush(const std::string& key, const Bytes& value) override;
  Bytes queuePop(const std::string& key, bool block) override;
  int64_t queueLen(const std::string& key) override;
  std::vector<std::string> listKeys() override;

 private:
  using Message = channel::Message;
  using milliseconds = std::chrono::milliseconds;

  Message ask(const Message& question, milliseconds timeout) const;
  Message ask(const Message& question) const { return ask(question, timeout_); }

  const std::shared_ptr<LauncherLine> line_;
  const std::string towards_;
  std::shared_ptr<std::atomic<bool>> ended_;  // also whose questions they are
};

}  // namespace serried::detail
