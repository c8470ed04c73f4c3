// Where messages meet the receives that want them: the half of a wire that an engine without tags lacks.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "serried/comm/net/wire.h"

namespace serried::net {

/// Threads of an engine bring what happened, in order and at any time; the wire's owner takes it in `progress`, the
/// only place besides its own calls where a Transfer ends. Any thread may call.
class Mailroom {
 public:
  Mailroom();
  ~Mailroom();
  Mailroom(const Mailroom&) = delete;
  Mailroom& operator=(const Mailroom&) = delete;

  // For the owner: as the functions of Wire.
  void connect(const std::vector<std::string>& addresses);
  void receive(Transfer& transfer, int peer, uint64_t tag, void* data, size_t bytes);
  bool progress();
  int descriptor() const { return descriptor_; }
  bool arm();
  void cancel(Transfer& transfer);
  void give_up(int peer, const std::string& why);

  /// Counts a send among what is under way and returns its number; 0 where it has failed already.
  uint64_t begin_send(Transfer& transfer, int peer, uint64_t tag, size_t bytes);

  /// The destructor of a wire: what is under way fails.
  void close(const std::string& why);

  // For the engine.
  void bring(int peer, uint64_t tag, std::string bytes);
  void sent(uint64_t number);

  /// After what was brought of that peer before.
  void lose(int peer, std::string why);

 private:
  struct Event {
    enum class Kind : uint8_t { message, sent, lost, wake } kind;
    int peer = -1;
    uint64_t number = 0;  // the tag, or that of the send
    std::string text = {};
  };
  struct Posted {
    Transfer* transfer;
    void* data;
    size_t bytes;
  };
  using Key = std::pair<int, uint64_t>;  // peer and tag

  void add(Event event);
  void take(Event& event);
  void match(const Key& key, std::string bytes);
  bool fail_if_lost(Transfer& transfer, int peer);
  void fail_all(int peer, const std::string& why);

  std::mutex mutex_;  // guards all below
  std::vector<Event> events_;
  std::map<Key, std::deque<Posted>> posted_;
  std::map<Key, std::deque<std::string>> waiting_;
  std::map<uint64_t, Transfer*> sends_;
  int num_peers_ = 0;
  std::map<int, std::string> lost_;
  std::set<int> given_up_;  // of these nothing is taken any more
  uint64_t last_number_ = 0;
  int descriptor_ = -1;
};

}  // namespace serried::net
