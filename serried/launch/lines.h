// The launcher's ends of the sockets to its ranks: what they ask, under numbers, and what they are told.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serried/launch/fd.h"
#include "serried/launch/loop.h"
#include "serried/launch/output.h"
#include "serried/launch/wire.h"

namespace serried::launch {

/// A rank's question to the store (see Keys), or that it no longer wants the answer.
struct Asked {
  uint64_t number;
  Message question;  // empty: forget it
};

class Lines {
 public:
  explicit Lines(Screen& screen) : screen_(screen) {}

  struct Opened {
    int line;
    Fd rank_end;  // is closed by exec until someone says otherwise
  };
  /// LaunchError if there is no socket to be had.
  Opened open(int rank);

  /// The rank has ended. What it said before still counts; what it asked is forgotten.
  void close(int line);

  void watch(std::vector<Watch>& watches);

  std::vector<Asked> take_asked() { return std::exchange(asked_, {}); }
  void answer(uint64_t number, const Message& answer);

  /// To all ranks: that the leader, of this address, is away; "": it is there.
  void tell_of_leader(const std::string& away);
  /// To the rank, without being asked.
  void tell(int line, const Message& message);
  /// Another table has another number for it.
  void rename(int line, int rank);
  /// The lines whose ranks have said that they use Elastic, each once.
  std::vector<int> take_elastic() { return std::exchange(elastic_, {}); }

 private:
  struct Line {
    int number;
    int rank;
    Connection connection;
    bool elastic = false;
    int program = -1;  // of the rank, one after the other: each has keys of its own
    std::map<std::string, uint64_t> open_questions = {};
  };

  void hear(Line& line);
  void take(Line& line, const Message& message);
  void forget(Line& line, const std::string& id);
  Line* find(int number);
  void hang_up(Line& line);
  void refuse(Line& line, const std::string& why);

  Screen& screen_;
  std::vector<std::unique_ptr<Line>> lines_;
  std::map<uint64_t, std::pair<Line*, std::string>> askers_;
  std::vector<Asked> asked_;
  std::vector<int> elastic_;
  uint64_t next_ = 1;
  int next_line_ = 0;
};

}  // namespace serried::launch
