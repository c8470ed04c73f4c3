// Checks of the launcher's options: every mistake is told before a process starts.
#include "serried/launch/options.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "serried/launch/error.h"
#include "serried/launch/torchrun.h"

namespace serried::launch {
namespace {

[[noreturn]] void usage(const std::string& what, const std::string& fix) {
  throw LaunchError(kExitUsage, what, fix);
}

constexpr int kMostNodes = 1 << 16;

// By the address itself: 127.example.org is a name, and may be any machine's.
bool is_on_this_machine(const std::string& host) {
  in6_addr v6{};
  in_addr v4{};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  return host == "localhost" || (::inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6));
}

void check_token(const Options& options, const Address& address) {
  if (!options.token.empty() || options.insecure || is_on_this_machine(address.host)) return;
  usage("--nnodes is " + range_text(options.min_nodes, options.max_nodes) + " and there is no token: whoever reaches " +
            options.rendezvous + " could join the job",
        "serried token > FILE, chmod 600 FILE, copy it to every node and set SERRIED_TOKEN_FILE=FILE there; or pass "
        "--insecure on all of them");
}

void check_range(const Options& options) {
  const std::string nodes = range_text(options.min_nodes, options.max_nodes);
  if (options.min_nodes < 1) usage("--nnodes is " + nodes, "pass 1 or more");
  if (options.max_nodes > kMostNodes) usage("--nnodes is " + nodes, "pass " + std::to_string(kMostNodes) + " or less");
  if (options.max_nodes < options.min_nodes) {
    usage("--nnodes is " + nodes,
          "pass min:max, the smaller number first: " + range_text(options.max_nodes, options.min_nodes));
  }
}

void check_nodes(const Options& options) {
  check_range(options);
  const std::string nodes = range_text(options.min_nodes, options.max_nodes);
  if (options.node_rank < -1 || options.node_rank >= options.max_nodes) {
    usage("--node-rank is " + std::to_string(options.node_rank) + " of --nnodes " + nodes,
          "pass 0 to " + std::to_string(options.max_nodes - 1) + ", or leave it out");
  }
  if (options.max_nodes == 1 && !options.rendezvous.empty()) {
    usage("--rendezvous " + options.rendezvous + " is given, but --nnodes is 1",
          "pass --nnodes too, or leave --rendezvous out");
  }
  if (options.max_nodes == 1) return;
  if (options.rendezvous.empty()) {
    usage("--nnodes is " + nodes + ", but --rendezvous is missing",
          "pass --rendezvous host:port, the same on every node, where host is node 0");
  }
  const Address address = parse_address(options.rendezvous);
  if (options.node_rank < 0 && (address.host == "0.0.0.0" || address.host == "::")) {
    usage("--rendezvous is " + options.rendezvous + ", where every node could listen: each would be node 0",
          "pass the address of one node, or --node-rank on every node");
  }
  check_token(options, address);
}

void check_restarts(const Options& options) {
  if (options.max_restarts >= 0) return;
  usage("--max-restarts is " + std::to_string(options.max_restarts), "pass 0 or more");
}

void check_times(const Options& options) {
  if (!(options.grace.count() >= 0 && options.grace.count() < 1e6)) {
    usage("--grace is " + to_text(options.grace), "pass a number of seconds, 0 or more");
  }
  if (!(options.join_timeout.count() > 0 && options.join_timeout.count() < 1e8)) {
    usage("--join-timeout is " + to_text(options.join_timeout), "pass a number of seconds above 0");
  }
  if (!(options.lost_after.count() >= 2 && options.lost_after.count() < 1e6)) {
    usage("--lost-after is " + to_text(options.lost_after), "pass a number of seconds, 2 or more");
  }
  if (!(options.slow_after.count() >= 0 && options.slow_after.count() < 1e6)) {
    usage("--slow-after is " + to_text(options.slow_after),
          "pass a number of seconds, or 0 for no word of ranks that wait");
  }
  if (!(options.sit_out.count() >= 0 && options.sit_out.count() < 1e8)) {
    usage("--sit-out is " + to_text(options.sit_out), "pass a number of seconds, or 0 for nodes that never sit out");
  }
  if (!(options.rejoin_timeout.count() >= 0 && options.rejoin_timeout.count() < 1e8)) {
    usage("--rejoin-timeout is " + to_text(options.rejoin_timeout),
          "pass a number of seconds, or 0 for ranks that end with the launcher that leads them");
  }
  if (!(options.last_call.count() >= 0 && options.last_call.count() < 1e6)) {
    usage("--last-call is " + to_text(options.last_call), "pass a number of seconds, 0 or more");
  }
}

}  // namespace

std::string to_text(Seconds seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", seconds.count());
  return text;
}

void check_one_node(const Options& options) {
  if (options.command.empty() || options.command[0].empty()) {
    usage("no program to run", "serried run -n 4 ./train --steps 100");
  }
  if (options.command[0][0] == '-') {
    if (const std::string instead = instead_of_torchrun(options.command[0]); !instead.empty()) {
      usage(options.command[0] + " is an option of torchrun", instead);
    }
    usage("unknown option \"" + options.command[0] + "\"",
          "serried run --help lists the options; those of the program come after the program");
  }
  if (options.num_ranks < 1) usage("-n is " + std::to_string(options.num_ranks), "pass 1 or more ranks");
  check_restarts(options);
  if (options.keep_going && options.num_ranks == 1 && options.max_nodes == 1) {
    usage("--keep-going with one rank: nobody is left when it is lost", "pass -n 2 or more, or --max-restarts alone");
  }
  if (options.keep_going && options.master_port != 0) {
    usage(
        "--keep-going and --master-port do not go together: that port is for programs that do not use serried, and "
        "only ranks that use serried::Elastic are kept",
        "leave one of them out");
  }
  check_times(options);
  if (options.master_port < 0 || options.master_port > 65535) {
    usage("--master-port is " + std::to_string(options.master_port),
          "pass 1 to 65535, or leave it out for a free port");
  }
}

void check_leader(const Options& options) {
  if (options.rendezvous.empty()) usage("--listen is missing", "pass --listen host:port, where host is this machine");
  const Address address = parse_address(options.rendezvous, 1, "--listen");
  check_range(options);
  if (options.max_nodes == 1) {
    usage("--nnodes is 1, and one node needs no leader", "pass the --nnodes of the job, for example 2 or 2:4");
  }
  check_restarts(options);
  check_times(options);
  check_token(options, address);
}

void check(const Options& options) {
  check_one_node(options);
  check_nodes(options);
}

NodeRange parse_nodes(const std::string& text) {
  const size_t colon = text.find(':');
  const auto number = [&](const std::string& part) {
    int value = 0;
    const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error == std::errc() && stop == part.data() + part.size()) return value;
    usage("--nnodes is " + text + ", which is no number of nodes",
          "pass one, for example 2, or min:max, for example 2:4");
  };
  const int least = number(text.substr(0, colon));
  return {.min = least, .max = colon == text.npos ? least : number(text.substr(colon + 1))};
}

std::string range_text(int min_nodes, int max_nodes) {
  return std::to_string(min_nodes) + (min_nodes == max_nodes ? "" : ":" + std::to_string(max_nodes));
}

std::vector<int> parse_ranks(const std::string& text) {
  constexpr int kMostRanks = 1 << 20;
  const auto refuse = [&] {
    usage("--only-ranks is \"" + text + "\", which is no list of ranks", "pass numbers and ranges, for example 0,4-6");
  };
  const auto number = [&](const std::string& part) {
    int value = -1;
    const auto [stop, error] = std::from_chars(part.data(), part.data() + part.size(), value);
    if (error != std::errc() || stop != part.data() + part.size() || value < 0 || value >= kMostRanks) refuse();
    return value;
  };
  std::vector<int> ranks;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, end - at);
    const size_t dash = part.find('-');
    const int first = number(part.substr(0, dash));
    const int last = dash == part.npos ? first : number(part.substr(dash + 1));
    if (last < first) refuse();
    for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
    at = end + 1;
  }
  return ranks;
}

std::string to_text(const Address& address) {
  const bool is_v6 = address.host.find(':') != address.host.npos;
  return (is_v6 ? "[" + address.host + "]" : address.host) + ":" + std::to_string(address.port);
}

Address parse_address(const std::string& text, int least_port, const std::string& option) {
  const size_t colon = text.rfind(':');
  const auto bad = [&] {
    usage(option + " \"" + text + "\" is not host:port", "for example " + option + " node0:29500");
  };
  if (colon == std::string::npos || colon == 0) bad();
  Address address{.host = text.substr(0, colon)};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + colon + 1, end, address.port);
  if (error != std::errc() || stop != end || address.port < least_port || address.port > 65535) bad();
  if (address.host.front() == '[' && address.host.back() == ']') {
    address.host = address.host.substr(1, address.host.size() - 2);
  }
  if (address.host.empty()) bad();
  return address;
}

}  // namespace serried::launch
