// Lines are only dropped between turns, because watches point at them.
#include "serried/launch/lines.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "serried/base/channel/rank_line.h"
#include "serried/launch/error.h"

namespace serried::launch {
namespace {

// Answers that a rank does not read.
constexpr size_t kMostUnsent = 64 << 20;

}  // namespace

Lines::Opened Lines::open(int rank) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) {
    throw LaunchError(kExitFailure, std::string("no socket for a rank: ") + std::strerror(errno),
                      errno == EMFILE || errno == ENFILE ? "raise the limit of open files: ulimit -n"
                                                         : "free memory on this machine");
  }
  const int number = next_line_++;
  lines_.push_back(std::make_unique<Line>(
      Line{.number = number, .rank = rank, .connection = Connection(Fd(ends[0]), channel::kMostBytes)}));
  return {number, Fd(ends[1])};
}

void Lines::watch(std::vector<Watch>& watches) {
  std::erase_if(lines_, [](const auto& line) { return line->connection.closed(); });
  for (const auto& line : lines_) {
    watches.push_back({line->connection.fd(), line->connection.events(), [this, l = line.get()] { hear(*l); }});
  }
}

void Lines::hear(Line& line) {
  line.connection.flush();
  for (const Message& message : line.connection.receive()) {
    try {
      take(line, message);
    } catch (const std::runtime_error&) {
      return refuse(line, "says what makes no sense");
    }
  }
  if (line.connection.closed()) hang_up(line);
}

void Lines::take(Line& line, const Message& message) {
  if (message[0] == "begin") {
    ++line.program;
    return;
  }
  if (message[0] == "elastic") {
    if (!std::exchange(line.elastic, true)) elastic_.push_back(line.number);
    return;
  }
  if (message.size() < 2 || line.program < 0) throw std::runtime_error("no question");
  if (message[0] == "forget") return forget(line, message[1]);
  if (message[0] != "ask" || message.size() < 3) throw std::runtime_error("no question");
  if (line.open_questions.size() >= channel::kMostOpenQuestions) {
    return refuse(line, "has more than " + std::to_string(channel::kMostOpenQuestions) + " questions open");
  }
  const uint64_t number = next_++;
  if (!line.open_questions.emplace(message[1], number).second) throw std::runtime_error("asked twice");
  askers_[number] = {&line, message[1]};
  Message question = {std::to_string(line.program)};
  question.insert(question.end(), message.begin() + 2, message.end());
  asked_.push_back({number, std::move(question)});
}

void Lines::forget(Line& line, const std::string& id) {
  const auto found = line.open_questions.find(id);
  if (found == line.open_questions.end()) return;  // answered meanwhile
  asked_.push_back({found->second, {}});
  askers_.erase(found->second);
  line.open_questions.erase(found);
}

void Lines::answer(uint64_t number, const Message& answer) {
  const auto found = askers_.find(number);
  if (found == askers_.end()) return;
  auto& [line, id] = found->second;
  Message message = {"answer", id};
  message.insert(message.end(), answer.begin(), answer.end());
  line->open_questions.erase(id);
  line->connection.send(message);
  Line& to = *line;
  askers_.erase(found);
  if (to.connection.num_unsent() > kMostUnsent) refuse(to, "does not read the answers it asks for");
}

void Lines::hang_up(Line& line) {
  line.connection.close();
  while (!line.open_questions.empty()) forget(line, line.open_questions.begin()->first);
}

void Lines::refuse(Line& line, const std::string& why) {
  screen_.write(Stream::err, "[run] rank " + std::to_string(line.rank) + " " + why + ": its line is closed\n");
  hang_up(line);
}

Lines::Line* Lines::find(int number) {
  const auto found = std::find_if(lines_.begin(), lines_.end(), [&](const auto& line) {
    return line->number == number && !line->connection.closed();
  });
  return found == lines_.end() ? nullptr : found->get();
}

void Lines::close(int number) {
  Line* line = find(number);
  if (line == nullptr) return;
  hear(*line);
  hang_up(*line);
}

void Lines::tell(int number, const Message& message) {
  if (Line* line = find(number)) line->connection.send(message);
}

void Lines::tell_of_leader(const std::string& away) {
  for (const auto& line : lines_) line->connection.send({"leader", away});
}

void Lines::rename(int number, int rank) {
  if (Line* line = find(number)) line->rank = rank;
}

}  // namespace serried::launch
