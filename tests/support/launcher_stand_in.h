// A launcher that only keeps the store, in a thread of the test: for the rank's side of a line.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "serried/launch/keys.h"
#include "serried/launch/lines.h"

namespace serried::testing {

class LauncherStandIn {
 public:
  explicit LauncherStandIn(int num_ranks) {
    for (int rank = 0; rank < num_ranks; ++rank) ends_.push_back(lines_.open(rank).rank_end);
    thread_ = std::thread([this] { serve(); });
  }
  ~LauncherStandIn() { end(); }

  /// The rank's end; the caller closes it.
  int take_end(int rank) { return ::dup(ends_.at(size_t(rank)).get()); }

  /// As if the launcher had ended.
  void end() {
    if (!thread_.joinable()) return;
    stop_.write.reset();
    thread_.join();
    for (int line = 0; line < int(ends_.size()); ++line) lines_.close(line);
  }

 private:
  struct Pipe {
    Pipe() {
      int ends[2];
      if (::pipe2(ends, O_CLOEXEC) != 0) std::abort();
      read.reset(ends[0]);
      write.reset(ends[1]);
    }
    launch::Fd read, write;
  };

  void serve() {
    for (bool stopped = false; !stopped;) {
      std::vector<launch::Watch> watches;
      watches.push_back({stop_.read.get(), POLLIN, [&] { stopped = true; }});
      lines_.watch(watches);
      launch::poll_once(watches, launch::kNever);
      for (const launch::Asked& asked : lines_.take_asked()) {
        const launch::Keys::Asker who{0, asked.number};
        asked.question.empty() ? keys_.forget(who) : keys_.ask(who, asked.question);
      }
      for (const auto& [who, answer] : keys_.take_answers()) lines_.answer(who.number, answer);
    }
  }

  launch::Fd nowhere_{::open("/dev/null", O_WRONLY | O_CLOEXEC)};
  launch::Screen screen_{nowhere_.get(), nowhere_.get()};
  launch::Lines lines_{screen_};
  launch::Keys keys_;
  std::vector<launch::Fd> ends_;
  Pipe stop_;
  std::thread thread_;
};

}  // namespace serried::testing
