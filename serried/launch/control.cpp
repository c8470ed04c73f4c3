// Reading stdin, and one message with a launcher's options.
#include "serried/launch/control.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace serried::launch {
namespace {

// So that the same number comes back.
std::string exact(Seconds seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.17g", seconds.count());
  return text;
}

Seconds seconds_in(const std::string& field) {
  return Seconds(std::strtod(field.c_str(), nullptr));
}

constexpr size_t kFixedFields = 22;

}  // namespace

void Control::read_some() {
  char buffer[4096];
  const ssize_t count = ::read(fd_, buffer, sizeof buffer);
  if (count < 0 && (errno == EINTR || errno == EAGAIN)) return;
  ended_ = count <= 0;
  if (count > 0) in_.append(buffer, static_cast<size_t>(count));
}

std::vector<Message> Control::take() {
  read_some();
  return rest();
}

std::vector<Message> Control::rest() {
  std::vector<Message> messages;
  for (Message message; !(message = decode(in_)).empty();) messages.push_back(std::move(message));
  return messages;
}

Message Control::wait(Time deadline) {
  for (;;) {
    if (Message message = decode(in_); !message.empty()) return message;
    if (ended_ || Clock::now() >= deadline) return {};
    poll_once({{fd_, POLLIN, [&] { read_some(); }}}, deadline);
  }
}

Message to_message(const NodeSetup& setup) {
  const Options& o = setup.options;
  Message message = {"node",
                     o.token,
                     o.rendezvous,
                     std::to_string(o.min_nodes),
                     std::to_string(o.max_nodes),
                     std::to_string(o.node_rank),
                     std::to_string(o.num_ranks),
                     std::to_string(o.max_restarts),
                     std::to_string(o.master_port),
                     exact(o.grace),
                     exact(o.join_timeout),
                     exact(o.last_call),
                     exact(o.lost_after),
                     o.log_dir,
                     std::to_string(static_cast<int>(o.says_who_is_late)),
                     std::to_string(static_cast<int>(o.reports)),
                     exact(o.slow_after),
                     std::to_string(static_cast<int>(o.keep_going)),
                     std::to_string(static_cast<int>(o.numa)),
                     exact(o.sit_out),
                     std::to_string(setup.environment.size()),
                     std::to_string(o.command.size())};
  message.insert(message.end(), setup.environment.begin(), setup.environment.end());
  message.insert(message.end(), o.command.begin(), o.command.end());
  for (const int rank : o.only_ranks) message.push_back(std::to_string(rank));
  return message;
}

NodeSetup node_setup_from(const Message& message) {
  if (message.size() < kFixedFields || message[0] != "node") throw std::runtime_error("no setup of a node");
  const auto number = [&](size_t i) { return number_in(message[i]); };
  const int num_variables = number(20);
  const int num_words = number(21);
  const size_t num_fixed = kFixedFields + size_t(std::max(num_variables, 0)) + size_t(std::max(num_words, 0));
  if (num_variables < 0 || num_words < 1 || num_fixed > message.size()) {
    throw std::runtime_error("a setup of a node with a wrong number of fields");
  }
  const auto words = message.begin() + static_cast<std::ptrdiff_t>(kFixedFields) + num_variables;
  std::vector<int> only_ranks;
  for (size_t i = num_fixed; i < message.size(); ++i) only_ranks.push_back(number(i));
  return {.options = {.command = {words, words + num_words},
                      .num_ranks = number(6),
                      .min_nodes = number(3),
                      .max_nodes = number(4),
                      .node_rank = number(5),
                      .rendezvous = message[2],
                      .master_port = number(8),
                      .max_restarts = number(7),
                      .grace = seconds_in(message[9]),
                      .join_timeout = seconds_in(message[10]),
                      .log_dir = message[13],
                      .says_who_is_late = number(14) != 0,
                      .slow_after = seconds_in(message[16]),
                      .token = message[1],
                      .lost_after = seconds_in(message[12]),
                      .last_call = seconds_in(message[11]),
                      .reports = number(15) != 0,
                      .only_ranks = only_ranks,
                      .numa = number(18) != 0,
                      .keep_going = number(17) != 0,
                      .sit_out = seconds_in(message[19])},
          .environment = {message.begin() + kFixedFields, words}};
}

}  // namespace serried::launch
