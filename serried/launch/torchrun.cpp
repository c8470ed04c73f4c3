// Options and words of torchrun: what they mean here, or what to do without them.
#include "serried/launch/torchrun.h"

#include <algorithm>

#include "serried/base/cores.h"
#include "serried/launch/error.h"

namespace serried::launch {
namespace {

struct Answer {
  std::string_view option;
  std::string_view instead;
};

constexpr Answer kAnswers[] = {
    {"-m", "leave it out: the program is an executable"},
    {"-r", "pass --log-dir, which keeps each rank's output in files of its own"},
    {"-t", "pass --log-dir: output is shown and kept"},
    {"--duplicate-stderr-filters", "leave it out: every line of output is shown once, with its rank"},
    {"--duplicate-stdout-filters", "leave it out: every line of output is shown once, with its rank"},
    {"--event-log-handler", "leave it out; SERRIED_LOG=launch tells what the launcher does"},
    {"--local-addr", "leave it out; --rendezvous host:port names node 0 as the others reach it"},
    {"--local-ranks-filter", "pass --only-ranks, with the ranks of the job to show"},
    {"--logs-specs", "pass --log-dir, which keeps each rank's output in files of its own"},
    {"--master-addr", "pass --rendezvous host:port, where host is node 0; one node needs none"},
    {"--module", "leave it out: the program is an executable"},
    {"--monitor-interval", "leave it out: a rank that ends is noticed at once"},
    {"--no-python", "leave it out: the program is an executable"},
    {"--numa-binding", "start the command under numactl"},
    {"--rdzv-backend", "leave it out: node 0's launcher is the rendezvous, at --rendezvous host:port"},
    {"--rdzv-conf", "leave it out; --join-timeout says how long nodes wait for each other"},
    {"--rdzv-id", "leave it out: each --rendezvous host:port is one job"},
    {"--redirects", "pass --log-dir, which keeps each rank's output in files of its own"},
    {"--role", "leave it out: all ranks are alike"},
    {"--run-path", "leave it out: the program is an executable"},
    {"--signals-to-handle", "leave it out: signals that end a launcher are passed on to the ranks"},
    {"--standalone", "leave it out: one node needs no rendezvous"},
    {"--start-method", "leave it out: ranks are processes of their own"},
    {"--tee", "pass --log-dir: output is shown and kept"},
    {"--use-agent-store", "leave it out: ranks find their store by themselves"},
    {"--virtual-local-rank", "leave it out; LOCAL_RANK is the rank on its node"},
};

}  // namespace

std::string instead_of_torchrun(std::string_view option) {
  std::string name(option.substr(0, option.find('=')));
  std::replace(name.begin(), name.end(), '_', '-');
  for (const Answer& answer : kAnswers) {
    if (name == answer.option) return std::string(answer.instead);
  }
  return "";
}

std::string number_of_ranks(const std::string& text) {
  if (text == "gpu") {
    throw LaunchError(kExitUsage, "-n is gpu, and the launcher counts no devices",
                      "pass their number, for example -n 4");
  }
  if (text == "auto" || text == "cpu") return std::to_string(num_usable_cores());
  const bool is_number = text.find_first_not_of("0123456789", text[0] == '-' ? 1 : 0) == text.npos;
  if (is_number) return text;
  throw LaunchError(kExitUsage, "-n is " + text + ", which is no number of ranks",
                    "pass one, for example -n 4, or auto");
}

}  // namespace serried::launch
