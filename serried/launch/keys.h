// The store of a job in its leader: keys with values, and who waits for them. Pure: no sockets, no clock.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "serried/base/channel/message.h"
#include "serried/base/channel/rank_line.h"

namespace serried::launch {

struct KeyLimits {
  size_t most_bytes_of_a_value = channel::kMostBytesOfAValue;
  size_t most_bytes = channel::kMostBytesOfAStore;
};

/// What c10d's stores do, by questions and answers. A question is {space, op, arguments...}; keys of two spaces have
/// nothing to do with each other. An answer is {"ok", fields...}, {"none"} from an empty queue, {"full", why},
/// {"bad", why}, or {"over"} for keys of a generation that has ended, "generation/<n>/...".
///     set key value | get key | multi_get keys... | multi_set key value ... | wait keys... | check keys... | delete
///     key add key number | compare_set key expected desired | append key value | count | list push key value | pop key
///     block | length key                                        of queues, block: "0" or "1"
/// get, multi_get, wait and pop are answered when the keys are there.
class Keys {
 public:
  using Message = channel::Message;

  /// Who asks: a node, and its number for the question.
  struct Asker {
    int node;
    uint64_t number;
    auto operator<=>(const Asker&) const = default;
  };
  using Answer = std::pair<Asker, Message>;

  explicit Keys(KeyLimits limits = {}) : limits_(limits) {}

  void ask(Asker who, const Message& question);
  /// Nobody waits for the answer any more. Nothing where it has been given.
  void forget(Asker who);
  void forget_node(int node);

  /// Another job begins, as it were: all that was said is gone.
  void clear();
  /// What older generations than `generation` said is gone; who waits for more of it is told.
  void end_generations_before(int generation);

  std::vector<Answer> take_answers() { return std::exchange(answers_, {}); }
  size_t num_bytes() const { return num_bytes_; }
  size_t num_waiting() const { return waiting_.size(); }

 private:
  // Keys as one text: the space, a slash, the key.
  struct Waiting {
    std::string op;
    std::vector<std::string> keys;
    size_t next = 0;  // is not there; those before it were
  };

  void answer(Asker who, Message message) { answers_.emplace_back(who, std::move(message)); }
  void ask_for_later(Asker who, Waiting question);
  void try_again(Asker who);
  bool find_missing(Waiting& question) const;
  void give(Asker who, const Waiting& question);
  void change(Asker who, const std::string& op, const std::string& key, const Message& question);
  void look(Asker who, const std::string& op, const Message& question);
  void add(Asker who, const std::string& key, const std::string& number);
  void compare_set(Asker who, const std::string& key, const std::string& expected, const std::string& desired);
  void set_all(Asker who, const std::string& space, const Message& question);
  void put(Asker who, const std::string& key, std::string value, Message reply);
  std::string why_no_room(const std::string& key, size_t old_bytes, size_t new_bytes) const;
  void push(Asker who, const std::string& key, const std::string& value);
  bool erase(const std::string& key);
  bool has(const std::string& key) const { return values_.contains(key) || queues_.contains(key); }
  bool is_over(const std::string& key) const;
  void wake(const std::string& key);

  KeyLimits limits_;
  std::map<std::string, std::string> values_;
  std::map<std::string, std::deque<std::string>> queues_;  // none is empty
  std::map<Asker, Waiting> waiting_;
  std::map<std::string, std::vector<Asker>> waiting_for_;  // by the key that is not there, first come first
  std::vector<Answer> answers_;
  size_t num_bytes_ = 0;
  int first_generation_ = 0;
};

}  // namespace serried::launch
