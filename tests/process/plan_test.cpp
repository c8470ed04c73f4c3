// The pure parts: options, addresses, environments, lines, messages.
#include "serried/launch/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/launch/error.h"
#include "serried/launch/options.h"
#include "serried/launch/order.h"
#include "serried/launch/output.h"
#include "serried/launch/version.h"
#include "serried/launch/wire.h"

namespace serried::launch {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

std::string error_of(const Options& options) {
  try {
    check(options);
  } catch (const LaunchError& error) {
    EXPECT_EQ(error.exit_code(), kExitUsage);
    return error.what();
  }
  return "";
}

TEST(LaunchPlan, EachRankGetsTorchrunsVariables) {
  const Assignment assignment{.attempt = 1,
                              .max_restarts = 3,
                              .num_local = 2,
                              .first_rank = 3,
                              .world_size = 5,
                              .node_rank = 1,
                              .num_nodes = 2,
                              .master_host = "node0",
                              .master_port = 4321,
                              .run_id = "abc"};
  EXPECT_THAT(rank_environment(assignment, 1, {"HOME=/root", "RANK=77"}),
              ElementsAre("HOME=/root", "GROUP_RANK=1", "GROUP_WORLD_SIZE=2", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
                          "MASTER_ADDR=node0", "MASTER_PORT=4321", "OMP_NUM_THREADS=1", "RANK=4", "SERRIED_LAUNCHER=1",
                          "TORCHELASTIC_MAX_RESTARTS=3", "TORCHELASTIC_RESTART_COUNT=1", "TORCHELASTIC_RUN_ID=abc",
                          "WORLD_SIZE=5"));
}

TEST(LaunchPlan, OnlyRankZeroIsToldOfTheListeningSocket) {
  const Assignment assignment{.num_local = 2, .world_size = 2, .listen_fd = 9};
  const std::vector<std::string> outer = {"SERRIED_MASTER_LISTEN_FD=5"};
  EXPECT_THAT(rank_environment(assignment, 0, outer), Contains("SERRIED_MASTER_LISTEN_FD=9"));
  EXPECT_THAT(rank_environment(assignment, 1, outer), Not(Contains(StartsWith("SERRIED_MASTER_LISTEN_FD"))));
}

TEST(LaunchPlan, ALineOfALauncherOutsideIsNotHandedOn) {
  const std::vector<std::string> outer = {"SERRIED_LAUNCHER_FD=5"};
  EXPECT_THAT(rank_environment({}, 0, outer, 7), Contains("SERRIED_LAUNCHER_FD=7"));
  EXPECT_THAT(rank_environment({}, 0, outer), Not(Contains(StartsWith("SERRIED_LAUNCHER_FD"))));
}

TEST(LaunchPlan, RanksGetTheJobsSecretAndNoOtherJobs) {
  const std::vector<std::string> outer = {"SERRIED_JOB_SECRET=of the launcher outside"};
  EXPECT_THAT(rank_environment({.job_secret = "s3cret"}, 0, outer),
              AllOf(Contains("SERRIED_JOB_SECRET=s3cret"), Not(Contains(outer[0]))));
  EXPECT_THAT(rank_environment({}, 0, outer), Not(Contains(StartsWith("SERRIED_JOB_SECRET"))));
}

TEST(LaunchPlan, ThreadsStayAsChosenAndFreeForOneRank) {
  EXPECT_THAT(rank_environment({.num_local = 2}, 0, {"OMP_NUM_THREADS=7"}), Contains("OMP_NUM_THREADS=7"));
  EXPECT_THAT(rank_environment({.num_local = 1}, 0, {}), Not(Contains(StartsWith("OMP_NUM_THREADS"))));
}

TEST(LaunchOptions, EachMistakeNamesTheOptionAndTheFix) {
  const std::vector<std::string> command = {"./train"};
  EXPECT_EQ(error_of({.command = {}}), "[run] no program to run\n  fix: serried run -n 4 ./train --steps 100");
  EXPECT_EQ(error_of({.command = command, .num_ranks = 0}), "[run] -n is 0\n  fix: pass 1 or more ranks");
  EXPECT_EQ(error_of({.command = command, .min_nodes = 0, .max_nodes = 0}),
            "[run] --nnodes is 0\n  fix: pass 1 or more");
  EXPECT_EQ(error_of({.command = command, .min_nodes = 2, .max_nodes = 2, .node_rank = 2, .rendezvous = "a:1"}),
            "[run] --node-rank is 2 of --nnodes 2\n  fix: pass 0 to 1, or leave it out");
  EXPECT_EQ(error_of({.command = command, .min_nodes = 2, .max_nodes = 2}),
            "[run] --nnodes is 2, but --rendezvous is missing\n"
            "  fix: pass --rendezvous host:port, the same on every node, where host is node 0");
  EXPECT_EQ(error_of({.command = command, .min_nodes = 2, .max_nodes = 2, .rendezvous = "node0"}),
            "[run] --rendezvous \"node0\" is not host:port\n  fix: for example --rendezvous node0:29500");
  for (const char* elsewhere : {"127.example.org:1", "10.0.0.1:1", "[::2]:1"}) {
    EXPECT_THAT(error_of({.command = command, .min_nodes = 2, .max_nodes = 2, .rendezvous = elsewhere}),
                HasSubstr("there is no token"));
  }
  for (const char* here : {"localhost:1", "127.0.0.2:1", "[::1]:1"}) {
    EXPECT_EQ(error_of({.command = command, .min_nodes = 2, .max_nodes = 2, .rendezvous = here}), "");
  }
  EXPECT_EQ(error_of({.command = command, .max_restarts = -1}), "[run] --max-restarts is -1\n  fix: pass 0 or more");
  EXPECT_THAT(error_of({.command = command, .grace = Seconds(-1)}), HasSubstr("--grace"));
  EXPECT_THAT(error_of({.command = command, .join_timeout = Seconds(0)}), HasSubstr("--join-timeout"));
  EXPECT_THAT(error_of({.command = command, .master_port = 70000}), HasSubstr("--master-port is 70000"));
  EXPECT_THAT(error_of({.command = command, .rendezvous = "a:1"}), HasSubstr("--nnodes is 1"));
  EXPECT_THAT(error_of({.command = command, .lost_after = Seconds(1)}), HasSubstr("--lost-after is 1 s"));
  EXPECT_THAT(error_of({.command = command, .last_call = Seconds(-1)}), HasSubstr("--last-call is -1 s"));
  EXPECT_EQ(error_of({.command = command, .rejoin_timeout = Seconds(-1)}),
            "[run] --rejoin-timeout is -1 s\n"
            "  fix: pass a number of seconds, or 0 for ranks that end with the launcher that leads them");
  EXPECT_EQ(error_of({.command = command, .min_nodes = 4, .max_nodes = 2, .rendezvous = "a:1"}),
            "[run] --nnodes is 4:2\n  fix: pass min:max, the smaller number first: 2:4");
  EXPECT_EQ(error_of({.command = command, .min_nodes = 2, .max_nodes = 2, .rendezvous = "0.0.0.0:1"}),
            "[run] --rendezvous is 0.0.0.0:1, where every node could listen: each would be node 0\n"
            "  fix: pass the address of one node, or --node-rank on every node");
  EXPECT_EQ(error_of({.command = command}), "");
}

TEST(LaunchOptions, NodesAreANumberOrARange) {
  EXPECT_EQ(parse_nodes("2").min, 2);
  EXPECT_EQ(parse_nodes("2").max, 2);
  EXPECT_EQ(parse_nodes("2:4").min, 2);
  EXPECT_EQ(parse_nodes("2:4").max, 4);
  for (const char* bad : {"", "two", "2:", ":4", "2:4:6", "2,4", " 2"})
    EXPECT_THROW(parse_nodes(bad), LaunchError) << bad;
}

TEST(LaunchOptions, AddressesMayBeIPv6) {
  EXPECT_EQ(parse_address("[::1]:29500").host, "::1");
  EXPECT_EQ(parse_address("node7:29500").port, 29500);
  for (const char* bad : {"", ":1", "a:", "a:0", "a:65536", "a:1x"})
    EXPECT_THROW(parse_address(bad), LaunchError) << bad;
}

TEST(LaunchOutput, LinesAreCutWhereverThePiecesEnd) {
  const std::string text = "one\n\ntwo three\nlast";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    LineSplitter splitter;
    std::vector<std::string> lines;
    const auto emit = [&](std::string_view line) { lines.emplace_back(line); };
    for (size_t at = 0; at < text.size(); at += piece) splitter.feed(text.substr(at, piece), emit);
    splitter.finish(emit);
    EXPECT_THAT(lines, ElementsAre("one", "", "two three", "last")) << "pieces of " << piece;
  }
}

TEST(LaunchWire, MessagesSurviveAnyCutAndAnyBytes) {
  const Message message = {"stop", "", std::string("\0\n\xff", 3), std::string(5000, 'x')};
  const std::string bytes = encode(message) + encode({"exit", "3"});
  std::string received;
  std::vector<Message> messages;
  for (char byte : bytes) {
    received.push_back(byte);
    for (Message m; !(m = decode(received)).empty();) messages.push_back(m);
  }
  EXPECT_THAT(messages, ElementsAre(message, Message{"exit", "3"}));
}

TEST(LaunchWire, OtherProtocolsAreRefused) {
  std::string http = "GET / HTTP/1.1\r\n\r\n";
  EXPECT_THROW(decode(http), std::runtime_error);
  std::string huge = std::string("SRD1\xff\xff\xff\xff", 8);
  EXPECT_THROW(decode(huge), std::runtime_error);
  std::string field = encode({"abc"});
  field[8] = 1;
  EXPECT_THROW(decode(field), std::runtime_error);
  EXPECT_THROW(order_from({"sing"}), std::runtime_error);
  EXPECT_THROW(order_from({"start", "1"}), std::runtime_error);
}

TEST(LaunchWire, NumbersAreWholeFields) {
  EXPECT_EQ(number_in("-7"), -7);
  for (const char* field : {"", "7 ", " 7", "+7", "7x", "99999999999"}) {
    EXPECT_THROW(number_in(field), std::runtime_error) << field;
    EXPECT_THROW(order_from({"exit", field}), std::runtime_error) << field;
    EXPECT_THROW(hello_from({"hello", version_text(), "host", "id", "nonce", "1", "2", field, "1"}), std::runtime_error)
        << field;
  }
}

TEST(LaunchWire, FailuresOfNoKindAndSignalsOfNoNameAreRefused) {
  const auto stop = [](const char* kind, const char* signal) {
    return Message{"stop", kind, "1", "host", "3", "4711", "0", signal, "", "0", ""};
  };
  EXPECT_EQ(order_from(stop("3", "64")).cause.signal, 64);
  for (const char* kind : {"-1", "5", "100"}) EXPECT_THROW(order_from(stop(kind, "9")), std::runtime_error) << kind;
  for (const char* signal : {"-1", "65", "2147483647"}) {
    EXPECT_THROW(order_from(stop("0", signal)), std::runtime_error) << signal;
  }
}

TEST(LaunchWire, OrdersComeBackAsTheyWere) {
  const Order start{.kind = Order::Kind::start,
                    .assignment = {.attempt = 1,
                                   .num_local = 3,
                                   .first_rank = 4,
                                   .world_size = 9,
                                   .master_port = 77,
                                   .run_id = "id",
                                   .job_secret = "s",
                                   .restarts = 3,
                                   .next_seat = 12,
                                   .num_with_leader = 2}};
  const Assignment back = order_from(to_message(start)).assignment;
  EXPECT_EQ(back.attempt, 1);
  EXPECT_EQ(back.num_local, 3);
  EXPECT_EQ(back.first_rank, 4);
  EXPECT_EQ(back.world_size, 9);
  EXPECT_EQ(back.master_port, 77);
  EXPECT_EQ(back.run_id, "id");
  EXPECT_EQ(back.job_secret, "s");
  EXPECT_EQ(back.restarts, 3);
  EXPECT_EQ(back.next_seat, 12);
  EXPECT_EQ(back.num_with_leader, 2);
  Hello hello{.version = version_text(),
              .host = "h",
              .machine = "id",
              .nonce = "n",
              .max_nodes = 4,
              .num_local = 3,
              .command = mark_of_command({"train", "--lr", "2"})};
  EXPECT_EQ(to_message(hello_from(to_message(hello))), to_message(hello));
  EXPECT_FALSE(hello_from(to_message(hello)).claim);
  hello.claim = Claim{.run_id = "id", .generation = 3, .world_size = 2, .next_seat = 5, .seats = {{4, 1, true, true}}};
  EXPECT_EQ(hello_from(to_message(hello)).claim, hello.claim);
  const Cause cause{.node = 1, .host = "h", .rank = 5, .pid = 6, .signal = 9, .tail = {"a", "b"}};
  const Cause same = order_from(to_message({.kind = Order::Kind::stop, .cause = cause})).cause;
  EXPECT_EQ(describe(same, 8, 2), describe(cause, 8, 2));
}

}  // namespace
}  // namespace serried::launch
