// A node's way to the store that the leader keeps: questions of its ranks under numbers of its own, equal waits once.
// Pure: no sockets.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "serried/launch/wire.h"

namespace serried::launch {

class Relay {
 public:
  using Answer = std::pair<uint64_t, Message>;

  /// A question of a rank (see Keys) under a number that is used once.
  void ask(uint64_t number, const Message& question);
  void forget(uint64_t number);

  /// What to tell the leader: {"ask", number, question...}, {"forget", number}.
  std::vector<Message> take_messages() { return std::exchange(messages_, {}); }

  /// What the leader says: {"answer", number, fields...}; std::runtime_error if it makes no sense.
  void hear(const Message& message);
  std::vector<Answer> take_answers() { return std::exchange(answers_, {}); }

  /// Another leader is there, which was asked nothing: what has no answer is to be asked again.
  void ask_again();

  /// The ranks have ended: nobody waits any more.
  void clear();

 private:
  struct Asked {
    Message question;
    std::vector<uint64_t> numbers = {};  // of the ranks' questions
  };

  void send(uint64_t ours, const Message& question);
  void forget_wait(uint64_t ours, const Message& question);

  std::map<uint64_t, Asked> asked_;          // by our number
  std::map<uint64_t, uint64_t> our_number_;  // by that of a rank
  std::map<Message, uint64_t> waits_;        // our number of a wait, which are merged
  std::vector<Message> messages_;
  std::vector<Answer> answers_;
  uint64_t next_ = 1;
};

/// {"ask", number, ...} and its kin: the number. std::runtime_error if there is none.
uint64_t question_number(const Message& message);

}  // namespace serried::launch
