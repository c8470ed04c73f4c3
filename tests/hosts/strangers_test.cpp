// Whoever knocks at the ports of a job between hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

/// The ports that something listens at, of a host.
std::set<int> ports_of(const Hosts& hosts, int host) {
  std::set<int> ports;
  for (const std::string& line : lines_of(hosts.run(host, {"ss", "-Hltn"}).out)) {
    const size_t at = line.find(hosts.address(host) + ":");
    EXPECT_NE(at, std::string::npos) << line << " is not of the address that leads to the others";
    if (at != std::string::npos) ports.insert(std::stoi(line.substr(at + hosts.address(host).size() + 1)));
  }
  return ports;
}

using Commands = std::vector<std::unique_ptr<Command>>;

/// From `from`: garbage at once, and one who says nothing and one with another token, who stay for a while.
void knock(const Hosts& hosts, int from, int at, int port, Commands& staying) {
  const std::string place = "/dev/tcp/" + hosts.address(at) + "/" + std::to_string(port);
  for (const char* bytes :
       {"head -c 300 /dev/urandom", "head -c 100000 /dev/zero", "printf 'GET / HTTP/1.0\\r\\n\\r\\n'"}) {
    EXPECT_EQ(hosts.run(from, {"bash", "-c", "exec 3<>" + place + " && " + bytes + " >&3; true"}).exit_code, 0);
  }
  staying.emplace_back(new Command(hosts.start(from, {"bash", "-c", "exec 3<>" + place + " && exec sleep 30"})));
  staying.emplace_back(new Command(
      hosts.serried(from,
                    {"run", "--nnodes", "2", "--node-rank", "1", "--rendezvous",
                     hosts.address(at) + ":" + std::to_string(port), "--join-timeout", "1", "echo", "never"},
                    {"SERRIED_TOKEN=" + std::string(64, 'b')})));
}

TEST(StrangersBetweenHosts, HarmNoTrainingAtAnyPort) {
  const Hosts hosts(2);
  const TemporaryFolder folder;
  const auto start = [&](int host) {
    return hosts.serried(host,
                         {"run", "--nnodes", "2", "--node-rank", std::to_string(host), "--rendezvous", "h0:29500", "-n",
                          "2", SERRIED_HOSTS_WORKER, "ddp", "auto"},
                         {"SERRIED_TOKEN=" + std::string(64, 'a'), "FOLDER=" + folder.path()});
  };
  Command second = start(1), first = start(0);
  for (Command* command : {&first, &second}) command->wait_for("waits", 2);
  Commands staying;
  for (int host = 0; host < 2; ++host) {
    const std::set<int> ports = ports_of(hosts, host);
    EXPECT_EQ(ports.count(29500), host == 0 ? 1u : 0u);
    EXPECT_GE(ports.size(), host == 0 ? 3u : 2u);  // each rank has one for the others
    for (const int port : ports) knock(hosts, 1 - host, host, port, staying);
  }
  write_file(folder.path() + "/go", "");
  const Result a = first.finish(), b = second.finish();
  for (const Result& result : {a, b}) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(count_of(result.out, "trained alike"), 2) << result.out << result.err;
  }
  EXPECT_THAT(a.err, HasSubstr("[run] refused a connection from " + hosts.address(1)));
}

}  // namespace
}  // namespace serried::testing
