// Calls of hosts.sh, and the pipe that tells it when this process is gone.
#include "tests/hosts/hosts.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <stdexcept>

namespace serried::testing {
namespace {

std::vector<std::string> environment_of(pid_t keeper) {
  return {"SERRIED_HOSTS=" + std::to_string(keeper)};
}

}  // namespace

Hosts::Hosts(int count, const HostsOptions& options) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
  held_.reset(ends[1]);
  // Inherited once, by the keeper.
  const launch::Fd read_end(::fcntl(ends[0], F_DUPFD, 10));
  ::close(ends[0]);
  std::vector<std::string> words = {"up", std::to_string(count), "--while", std::to_string(read_end.get())};
  if (options.trap) words.emplace_back("--trap");
  const std::string answer = tell(words);
  if (answer.empty()) throw std::runtime_error("no hosts");
  keeper_ = std::stoi(answer);
}

Hosts::~Hosts() {
  down();
}

std::string Hosts::name(int host) const {
  return "h" + std::to_string(host);
}

std::string Hosts::address(int host) const {
  return "10.77.0." + std::to_string(host + 1);
}

Command Hosts::serried(int host, std::vector<std::string> arguments,
                       const std::vector<std::string>& environment) const {
  std::vector<std::string> all = environment_of(keeper_);
  all.insert(all.end(), environment.begin(), environment.end());
  return Command(std::move(arguments), all, {SERRIED_HOSTS_SCRIPT, "run", std::to_string(host), SERRIED_BINARY});
}

Command Hosts::start(int host, std::vector<std::string> words) const {
  return Command(std::move(words), environment_of(keeper_), {SERRIED_HOSTS_SCRIPT, "run", std::to_string(host)});
}

Result Hosts::run(int host, std::vector<std::string> words) const {
  return start(host, std::move(words)).finish();
}

void Hosts::make_bad(const BadLink& link) const {
  tell({"bad", SERRIED_BAD_WIRE, std::to_string(link.loss_percent), std::to_string(link.reorder_percent),
        std::to_string(link.delay_ms), std::to_string(link.megabits)});
}

std::string Hosts::tell(std::vector<std::string> words) const {
  const std::string word = words.front();
  const Result result = Command(std::move(words), environment_of(keeper_), {SERRIED_HOSTS_SCRIPT}).finish();
  EXPECT_EQ(result.exit_code, 0) << "hosts.sh " << word << ": " << result.out << result.err;
  return result.out;
}

std::string why_no_hosts() {
  const Result result = Command({"can"}, {}, {SERRIED_HOSTS_SCRIPT}).finish();
  return result.exit_code == 0 ? "" : result.out + result.err;
}

}  // namespace serried::testing
