// Messages between two hosts, and what is left of them when one is lost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/hosts/hosts.h"

namespace serried::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class WireOverHosts : public ::testing::TestWithParam<const char*> {
 protected:
  std::string engine() const { return GetParam() == std::string("gloo") ? "gloo" : "auto"; }

  Command start(int rank, const std::string& mode, const std::string& plugins = "") const {
    return hosts_.start(rank, {"env", "SERRIED_PLUGIN_PATH=" + plugins, "SERRIED_LOG=comm", SERRIED_WIRE_WORKER, mode,
                               std::to_string(rank), engine(), folder_.path()});
  }
  void tell(const std::string& word) const { write_file(folder_.path() + "/" + word, ""); }

  /// Rank 0's output after rank 1 was lost in this way.
  Result lose(void (Hosts::*fault)(int) const) {
    Command lost = start(1, "lose");
    Command survivor = start(0, "lose");
    survivor.wait_for("ready");
    lost.wait_for("ready");
    (hosts_.*fault)(1);
    tell("go");
    const Result result = survivor.finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("\nall ended\n"));
    EXPECT_THAT(result.out, EndsWith("\ndestroyed in time\n"));
    return result;
  }

  const Hosts hosts_{2};
  const TemporaryFolder folder_;
};

TEST_P(WireOverHosts, CarriesMessagesByTheOneAddressOfEachHost) {
  Command other = start(1, "echo");
  Command first = start(0, "echo");
  for (Command* command : {&first, &other}) command->wait_for(std::string("echo by ") + GetParam());
  for (int host = 0; host < 2; ++host) {
    const std::vector<std::string> sockets = lines_of(hosts_.run(host, {"ss", "-Hltn"}).out);
    EXPECT_FALSE(sockets.empty());
    for (const std::string& line : sockets) EXPECT_THAT(line, HasSubstr(" " + hosts_.address(host) + ":"));
  }
  tell("go");
  for (Command* command : {&first, &other}) {
    const Result result = command->finish();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, EndsWith("destroyed in time\n"));
  }
}

TEST_P(WireOverHosts, NoticesThatAPeerWasKilled) {
  const Result result = lose(&Hosts::kill);
  EXPECT_THAT(result.out, HasSubstr("receive: rank 1 is lost: "));
  EXPECT_THAT(result.out, HasSubstr("last send: rank 1 is lost: "));
  for (const std::string& line : lines_of(result.err)) EXPECT_THAT(line, StartsWith("[serried "));
}

TEST_P(WireOverHosts, GivesUpAFrozenPeer) {
  tell("freeze");
  const Result result = lose(&Hosts::freeze);
  EXPECT_THAT(result.out, HasSubstr("\nsilence\ngiven up in time\n"));
  EXPECT_THAT(result.out, HasSubstr("receive: rank 1 is lost: the launcher says so\n"));
  EXPECT_THAT(result.out, HasSubstr("last send: rank 1 is lost: the launcher says so\n"));
  for (const std::string& line : lines_of(result.err)) EXPECT_THAT(line, StartsWith("[serried "));
}

INSTANTIATE_TEST_SUITE_P(Gloo, WireOverHosts, ::testing::Values("gloo"));
#ifdef SERRIED_WITH_UCX
INSTANTIATE_TEST_SUITE_P(Ucx, WireOverHosts, ::testing::Values("ucx"));

class MixedWires : public WireOverHosts {};

TEST_P(MixedWires, TakeGlooOnAllHostsIfOneHasAnotherVersion) {
  tell("go");
  Command other = start(1, "echo", SERRIED_OLD_PLUGINS);
  Command first = start(0, "echo");
  for (Command* command : {&first, &other}) {
    const Result result = command->finish();
    EXPECT_THAT(result.out, HasSubstr("echo by gloo\n")) << result.err;
    EXPECT_THAT(result.err, HasSubstr("wire: gloo, since rank 1 has no ucx: "));
    EXPECT_THAT(result.err, HasSubstr("was built with serried 0.0.1, LibTorch 1.0, this library is serried "));
  }
}

INSTANTIATE_TEST_SUITE_P(Ucx, MixedWires, ::testing::Values("ucx"));
#endif

}  // namespace
}  // namespace serried::testing
