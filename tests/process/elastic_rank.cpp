// A rank that uses its line to the launcher by hand: `elastic_rank [silent]`. Says what it is told, until it is killed,
// or gets SIGUSR2, by which it ends with 0. Without LibTorch, so that tests of tables take no time.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "serried/base/channel/message.h"
#include "serried/base/channel/rank_line.h"

namespace {

using serried::channel::Message;

void say(int line, const Message& message) {
  const std::string bytes = serried::channel::encode(message);
  if (::send(line, bytes.data(), bytes.size(), MSG_NOSIGNAL) != ssize_t(bytes.size())) ::_exit(9);
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

int main(int argc, char**) {
  ::alarm(60);
  ::signal(SIGUSR2, [](int) { ::_exit(0); });
  const int line = std::atoi(variable(serried::channel::kLineVariable).c_str());
  say(line, {"begin"});
  if (argc == 1) say(line, {"elastic"});
  std::printf("pid %d began in generation %s as %s of %s, count %s\n", ::getpid(),
              variable("SERRIED_GENERATION").c_str(), variable("RANK").c_str(), variable("WORLD_SIZE").c_str(),
              variable("TORCHELASTIC_RESTART_COUNT").c_str());
  std::fflush(stdout);
  std::string bytes;
  for (pollfd ready{.fd = line, .events = POLLIN, .revents = 0}; ::poll(&ready, 1, -1) > 0;) {
    char buffer[4096];
    const ssize_t count = ::recv(line, buffer, sizeof buffer, MSG_DONTWAIT);
    if (count <= 0) return 8;
    bytes.append(buffer, size_t(count));
    for (Message message; !(message = serried::channel::decode(bytes)).empty();) {
      for (const std::string& field : message) std::printf("%s ", field.c_str());
      std::printf("for %d\n", ::getpid());
      std::fflush(stdout);
    }
  }
  return 7;
}
