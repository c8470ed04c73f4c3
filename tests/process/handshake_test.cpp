// What launchers have to prove, and what strangers can do about it: nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <optional>
#include <random>
#include <vector>

#include "serried/launch/handshake.h"
#include "serried/launch/socket.h"
#include "tests/process/command.h"

namespace serried::testing {
namespace {

using launch::Fd;
using launch::Handshake;
using Side = Handshake::Side;
using State = Handshake::State;

const std::string kToken(64, 'a');

struct Ends {
  Ends() {
    int both[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, both), 0);
    leader.reset(both[0]);
    member.reset(both[1]);
  }
  Fd leader, member;
};

struct Outcome {
  State leader = State::open;
  State member = State::open;
};

// Both ends in turn; one that refuses closes.
Outcome meet(Ends& ends, const std::string& token, const std::string& other) {
  Handshake leader(Side::leader, token), member(Side::member, other);
  Outcome outcome;
  for (int i = 0; i < 4; ++i) {
    if (outcome.leader == State::open) outcome.leader = leader.advance(ends.leader);
    if (outcome.leader > State::agreed) ends.leader.reset();
    if (outcome.member == State::open) outcome.member = member.advance(ends.member);
  }
  return outcome;
}

std::string read_all(const Fd& socket) {
  char bytes[4096];
  const ssize_t size = ::recv(socket.get(), bytes, sizeof bytes, 0);
  return size > 0 ? std::string(bytes, size_t(size)) : "";
}

void write_all(const Fd& socket, const std::string& bytes) {
  EXPECT_EQ(::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
}

TEST(LaunchHandshake, EndsWithTheSameTokenAgreeAndReadNoFurther) {
  for (const std::string& token : {kToken, std::string()}) {
    Ends ends;
    const Outcome outcome = meet(ends, token, token);
    EXPECT_EQ(outcome.leader, State::agreed);
    EXPECT_EQ(outcome.member, State::agreed);
    write_all(ends.member, "what comes next");
    EXPECT_EQ(read_all(ends.leader), "what comes next");
  }
}

TEST(LaunchHandshake, OtherTokensAreRefusedByBothEnds) {
  for (const auto& [a, b] : {std::pair(kToken, std::string(64, 'b')), std::pair(kToken, std::string()),
                             std::pair(std::string(), kToken), std::pair(kToken, kToken.substr(1))}) {
    Ends ends;
    const Outcome outcome = meet(ends, a, b);
    EXPECT_EQ(outcome.leader, State::other_token);
    EXPECT_EQ(outcome.member, State::other_token);
  }
}

TEST(LaunchHandshake, AnotherProgramIsNotTakenForALauncher) {
  for (const char* words : {"GET / HTTP/1.1\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n", "x"}) {
    for (const Side side : {Side::leader, Side::member}) {
      Ends ends;
      Handshake handshake(side, kToken);
      EXPECT_EQ(handshake.advance(ends.leader), State::open);
      write_all(ends.member, words);
      EXPECT_EQ(handshake.advance(ends.leader), State::no_launcher) << words;
    }
  }
  Ends ends;
  Handshake handshake(Side::leader, kToken);
  EXPECT_EQ(handshake.advance(ends.leader), State::open);
  ends.member.reset();
  EXPECT_EQ(handshake.advance(ends.leader), State::closed_early);
}

TEST(LaunchHandshake, ALauncherThatSpeaksOtherwiseIsToldFromAnotherProgram) {
  for (const Side side : {Side::leader, Side::member}) {
    Ends ends;
    Handshake handshake(side, kToken);
    EXPECT_EQ(handshake.advance(ends.leader), State::open);
    write_all(ends.member, "serried launcher 7\n");
    EXPECT_EQ(handshake.advance(ends.leader), State::other_protocol);
  }
}

// Sent back, cut, changed by a bit, or as somebody else has sent it before.
TEST(LaunchHandshake, WhatWasHeardBeforeIsOfNoUse) {
  Ends old;
  Handshake leader(Side::leader, kToken), member(Side::member, kToken);
  EXPECT_EQ(leader.advance(old.leader), State::open);
  EXPECT_EQ(member.advance(old.member), State::open);
  const std::string answer = read_all(old.leader);
  ASSERT_GT(answer.size(), 64u);

  Ends replayed;
  Handshake second(Side::leader, kToken);
  EXPECT_EQ(second.advance(replayed.leader), State::open);
  const std::string greeting = read_all(replayed.member);
  write_all(replayed.member, answer);
  EXPECT_EQ(second.advance(replayed.leader), State::other_token);

  // A leader's own greeting as the answer of a member, whose proof is then that of a member.
  Ends mirrored;
  Handshake third(Side::leader, kToken);
  EXPECT_EQ(third.advance(mirrored.leader), State::open);
  const std::string own = read_all(mirrored.member);
  write_all(mirrored.member, own + std::string(32, '\0'));
  EXPECT_EQ(third.advance(mirrored.leader), State::other_token);
  EXPECT_NE(own, greeting);
}

/// What goes between two ends that agree, as somebody hears it who can read all packets.
struct Heard {
  Heard() {
    Ends to_leader, to_member;
    Handshake leader(Side::leader, kToken), member(Side::member, kToken);
    EXPECT_EQ(leader.advance(to_leader.leader), State::open);
    greeting = read_all(to_leader.member);
    write_all(to_member.leader, greeting);
    EXPECT_EQ(member.advance(to_member.member), State::open);
    answer = read_all(to_member.leader);
    write_all(to_leader.member, answer);
    EXPECT_EQ(leader.advance(to_leader.leader), State::agreed);
    proof = read_all(to_leader.member);
  }

  std::string greeting, answer, proof;
};

TEST(LaunchHandshake, HundredThousandBadOnesAreNotAccepted) {
  const Heard heard;
  std::mt19937 random(7);
  int accepted = 0;
  for (int i = 0; i < 100000; ++i) {
    Ends ends;
    Handshake leader(Side::leader, kToken);
    leader.advance(ends.leader);
    Handshake member(Side::member, kToken);
    member.advance(ends.member);
    std::string answer = read_all(ends.leader);
    const int kind = i % 4;
    if (kind == 0) answer[random() % answer.size()] ^= char(1 << random() % 8);
    if (kind == 1) answer.resize(random() % answer.size());
    if (kind == 2) {
      for (char& byte : answer) byte = char(random());
    }
    if (kind == 3) answer = heard.answer;
    write_all(ends.member, answer);
    if (kind == 1) ends.member.reset();
    accepted += leader.advance(ends.leader) == State::agreed;
  }
  EXPECT_EQ(accepted, 0);
}

TEST(LaunchHandshake, HundredThousandBadLeadersAreNotAccepted) {
  const Heard heard;
  std::mt19937 random(8);
  int accepted = 0;
  for (int i = 0; i < 100000; ++i) {
    Ends ends, to_leader;
    Handshake member(Side::member, kToken), leader(Side::leader, kToken);
    leader.advance(to_leader.leader);
    const int kind = i % 5;
    write_all(ends.leader, kind == 0 ? heard.greeting : read_all(to_leader.member));
    member.advance(ends.member);
    const std::string answer = read_all(ends.leader);
    write_all(to_leader.member, answer);
    leader.advance(to_leader.leader);
    std::string proof = kind == 0 || kind == 1 ? heard.proof : read_all(to_leader.member);
    if (kind == 2) proof[random() % proof.size()] ^= char(1 << random() % 8);
    if (kind == 3) proof.resize(random() % proof.size());
    if (kind == 4) proof = answer.substr(answer.size() - proof.size());  // the member's own
    write_all(ends.leader, proof);
    if (kind == 3) ends.leader.reset();
    accepted += member.advance(ends.member) == State::agreed;
  }
  EXPECT_EQ(accepted, 0);
}

/// What comes within `seconds`; nothing if the other end closes, or says nothing.
std::string read_within(const Fd& socket, double seconds) {
  pollfd fd{.fd = socket.get(), .events = POLLIN, .revents = 0};
  return ::poll(&fd, 1, int(seconds * 1000)) == 1 ? read_all(socket) : "";
}

TEST(LaunchHandshake, SixtyFourStrangersMaySayNothingForFiveSeconds) {
  const int port = free_port();
  const auto node = [&](int rank) {
    return Command(shell({"--nnodes", "2", "--node-rank", std::to_string(rank), "--rendezvous",
                          "127.0.0.1:" + std::to_string(port)},
                         "echo ok"),
                   {"SERRIED_TOKEN=" + kToken});
  };
  Command first = node(0);
  first.wait_for("waiting at");
  const auto begin = std::chrono::steady_clock::now();
  std::vector<Fd> silent;
  for (int i = 0; i < 64; ++i) {
    silent.push_back(std::move(launch::start_connecting({"127.0.0.1", port}).socket));
    EXPECT_EQ(read_within(silent.back(), 10).substr(0, 17), "serried launcher ");
  }
  const launch::Connecting one_more = launch::start_connecting({"127.0.0.1", port});
  EXPECT_EQ(read_within(one_more.socket, 10), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(4));
  Command second = node(1);  // tries until there is room
  for (const Fd& socket : silent) EXPECT_EQ(read_within(socket, 10), "");
  EXPECT_GT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(4500));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(9));
  const Result result = first.finish();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(count_of(result.err, "refused a connection from 127.0.0.1:"), 1) << result.err;  // one line a minute
  EXPECT_THAT(result.err, ::testing::HasSubstr(": it says nothing\n"));
  EXPECT_EQ(second.finish().exit_code, 0);
}

}  // namespace
}  // namespace serried::testing
